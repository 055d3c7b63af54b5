"""A search: its checks, its trials, its report, and the final run of the best trial."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dpfl_lightning.build import build_population
from dpfl_lightning.config.options import FREE, Options, TrackingOptions, named
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.server.results import FORMAT, RunResult
from dpfl_lightning.loop import so_far
from dpfl_lightning.papers.distilled_data import load_distilled
from dpfl_lightning.papers.sets.distilled_set import CARD, DistilledSet
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.runtime.text import shown, without_credentials
from dpfl_lightning.runtime.threads import cores
from dpfl_lightning.search import report
from dpfl_lightning.search.budget import DescribedBy, SharedBudget
from dpfl_lightning.search.costs import Cost, chosen_if, costs_of, details, headline, set_text, stored, summary, table
from dpfl_lightning.search.final import final_so_far, with_the_set, with_the_trials
from dpfl_lightning.search.objectives import FederatedObjective, Objective, check_public, objective
from dpfl_lightning.search.options import SweepOptions, check
from dpfl_lightning.search.samplers import INDEPENDENT, pruner, sampler
from dpfl_lightning.search.scores import directions, measured, reported
from dpfl_lightning.search.space import changes_releases, check_trials_with, options_of, parse, probes
from dpfl_lightning.search.storage import study_names
from dpfl_lightning.search.study import Running, Study, Trial

Train = Callable[..., RunResult]  # `fit`, which is above this room

#: options that change how and how long a search runs, but not the meaning of its trials
_FREE = ("name", "trials", "pruner", "storage", "heartbeat_seconds", "distilled")
#: options that MLflow shows also where they are the default
_COMPARED = ("name", "objective", "space", "scores", "trials", "sampler")


class Search:
    """One search. All checks are made on construction, before anything is charged; then the set of `set_share` is made.

    `options.output_dir` is the folder of the search, and `train` is `fit`. `workers` processes on this machine run
    trials and share its cores; `helping` is True for all but the first of them.

    **Privacy** The cost depends on the objective. Trials on a distilled set or on public records cost nothing. What a
    private trial can release is stored in the study before the trial begins, and composed at the end.
    """

    def __init__(
        self, sweep: SweepOptions, options: Options, train: Train, workers: int = 1, helping: bool = False
    ) -> None:
        check(sweep)
        self.directions = directions(sweep.scores, options)
        self.folder = Path(options.output_dir or f"runs/{sweep.name}")
        self.sweep, self.options, self._train = sweep, dataclasses.replace(options, output_dir=None), train
        self.dimensions = parse(sweep.space, sweep.objective)
        check_trials_with(self.options, sweep.trials_with, sweep.objective)
        sampler(sweep, self.dimensions, None, 0), pruner(sweep)  # raises before anything is charged or written
        self._of_trials = self._divided_cores(workers)
        if not (url := sweep.storage):
            plain, advice = not set("?#%") & set(str(self.folder)), "Choose another folder, or set sweep.storage."
            must = "have no ?, # or % in its name if it holds the database"
            require(plain, "output_dir", must, str(self.folder), advice)
            url = f"sqlite:///{self.folder / 'study.db'}"
            others = study_names(self.folder / "study.db") - {str(sweep.name)}
            got, advice = f"{self.folder}, which has study {min(others, default='')}", "Choose another --output_dir."
            advice = f"Its best.yaml would be lost. {advice}"
            require(not others, "output_dir", "be the folder of one study", got, advice)
        self._url = without_credentials(url)
        self.budget: SharedBudget | None = None
        if sweep.set_share is not None:
            must = "be left out with sweep.set_share: releases of the final run must be known before the set is made"
            for key in sweep.space:
                known = not changes_releases([key], self.options.strategies)
                require(known, f"sweep.space.{key}", must, sweep.space[key])
            self._source: str | None = str(self.folder / "set")
            if not helping:
                self.budget = SharedBudget(sweep, self.options, Path(self._source))
                self._check_builds(self._objective(self.budget.stand_in()))
                self._make_the_set(self.budget)
        else:
            self._source = sweep.distilled
        self.objective = self._objective(self._distilled())
        own = self.options.data.class_path is not None
        if own and sweep.objective == "public" and isinstance(self.objective, FederatedObjective):
            check_public(self.objective.population, build_population(self.options))
        self._check_builds(self.objective)
        self.folder.mkdir(parents=True, exist_ok=True)
        # Check the folder before opening the study, because another worker may start a trial in between.
        made = any((self.folder / "trials" / str(sweep.name)).glob("*"))
        self.study = Study(
            sweep, self.dimensions, url, self._identity(), self.directions, options.seed, first=not helping
        )
        must = f"be the folder of study {sweep.name} in {self._url}, which has no trial yet"
        advice = "It contains trials of another study: set another output_dir or sweep.name, or the storage of these."
        require(not made or bool(self.study.begun()), "output_dir", must, str(self.folder), advice)
        self.parent: str | None = None
        if self.options.tracking is not None:
            self._track(self.options.tracking)

    # -- before the first trial

    def _objective(self, distilled: DistilledSet | None) -> Objective:
        return objective(self.sweep, self._in_trials({}), distilled)

    def _distilled(self) -> DistilledSet | None:
        uri = None if self.options.tracking is None else self.options.tracking.uri
        return None if self._source is None else load_distilled(self._source, uri)

    def _make_the_set(self, budget: SharedBudget) -> None:
        """Make the set of `set_share`, or resume its run; a finished one is only read."""
        made = named(budget.set_options, f"{self.sweep.name}: set", {})
        begun, result = so_far(made)
        print(shown(budget.words()), flush=True)
        if result is None or not (Path(str(made.output_dir)) / CARD).is_file():
            print(f"Making the distilled set in {made.output_dir}:", flush=True)
            self._train(made, resume=begun, more=[DescribedBy(budget.words())])

    def _in_trials(self, values: Mapping[str, Any]) -> Options:
        """Return the options of a trial that drew `values`."""
        return options_of(self.options, self.dimensions, values, {**self._of_trials, **self.sweep.trials_with})

    def _check_builds(self, objective: Objective) -> None:
        """Raise UserError if no value of some key can be built. Combinations that cannot be built fail as trials."""
        for dimension, candidates in probes(self.dimensions):
            errors = []
            for trial in map(self._in_trials, candidates):  # raises if a value is none of its key
                try:
                    objective.check(trial)
                except UserError as error:
                    errors.append(error)
            if len(errors) == len(candidates):
                objective.check(self._in_trials({}))  # raises if the values are not what is wrong
                raise UserError(f"`sweep.space.{dimension.key}` must be values that a run can have: {errors[0]}")

    def _identity(self) -> dict[str, Any]:
        """Return everything that determines the meaning of a trial, by key."""
        search_options = dataclasses.asdict(self.sweep)
        return {
            **{f"sweep.{key}": value for key, value in search_options.items() if key not in _FREE},
            **self.objective.identity,
            **{key: value for key, value in dataclasses.asdict(self.options).items() if key not in FREE},
        }

    def _track(self, options: TrackingOptions) -> None:
        """Begin or resume the MLflow run of the search."""
        from dpfl_lightning.reporting.mlflow import StudyTracking

        tags = {**options.tags, "output_dir": str(self.folder.resolve())}
        self.tracking = StudyTracking(options.experiment, options.uri, tags)
        sweep, usual = dataclasses.asdict(self.sweep), dataclasses.asdict(SweepOptions())
        record = {**dataclasses.asdict(self.options), "sweep": sweep}
        used = {key: value for key, value in sweep.items() if key in _COMPARED or value != usual[key]}
        name = options.run_name or str(used.pop("name"))
        self.parent = self.study.mlflow_run = self.tracking.begin(name, record, used, self.study.mlflow_run)

    def _divided_cores(self, workers: int) -> dict[str, int]:
        """Return engine options that divide the cores among workers; only trials have these options."""
        each = max(1, cores() // workers)
        if self.sweep.objective == "set":
            torch.set_num_threads(min(each, torch.get_num_threads()))
            return {}
        shared = workers > 1 and self.options.engine.workers is None
        return {"engine.workers": each} if shared else {}

    def introduce(self) -> None:
        """Print what is searched, on which records, and where the study is stored."""
        sweep, trials = self.sweep, self.study.trials()
        print(f"Study {sweep.name}: {self.study.wanted} trials, {', '.join(self.dimensions)}")
        print(f"{self.objective.words[0].upper()}{self.objective.words[1:]}.")
        pruner = "" if sweep.pruner["name"] == "none" else f", pruner {sweep.pruner['name']}"
        scores = ", ".join(f"{name} ({'highest' if up else 'lowest'})" for name, up in self.directions.items())
        print(f"Judged by {scores}; sampler {sweep.sampler['name']}{pruner}.")
        print(f"Storage: {self._url}")
        if trials:
            print(f"Resuming a study that has {report.counted(trials)}.")
        if sweep.objective == "private":
            how = "Every run of a trial is a separate release with the whole budget; at the end, all are composed. "
            how += self.objective.choice
            if self._chosen_by_sampler:
                how += (
                    f" Results choose the releases of later trials with sampler {sweep.sampler['name']}: their budgets "
                    f"are added instead. Sampler {', '.join(INDEPENDENT)} avoids this."
                )
            print(shown(how))
        print(flush=True)

    # -- trials

    @property
    def _chosen_by_sampler(self) -> bool:
        """Whether results of earlier trials can change what later trials release."""
        return self.sweep.sampler["name"] not in INDEPENDENT and self._changes_releases

    @property
    def _changes_releases(self) -> bool:
        return changes_releases(self.dimensions, self.options.strategies)

    def work(self) -> None:
        """Run trials until the study has all of them, together with any other workers."""
        self._begun, self._done_before = time.monotonic(), sum(not one.again for one in self.study.trials())
        self.study.work(self._trial, self._on_end)

    def _trial(self, running: Running) -> tuple[float, ...]:
        running.set_user_attr("host", socket.gethostname())

        def charge(costs: Sequence[Cost]) -> None:
            costs = [chosen_if(self._chosen_by_sampler, cost) for cost in costs]
            running.set_user_attr("costs", list(map(stored, costs)))

        # Several studies may share a folder, and each of them numbers its trials from 0.
        folder = self.folder / "trials" / str(self.sweep.name) / str(running.number)
        outcome = self.objective(self._in_trials(running.params), folder, self.study.report, charge)
        for name, value in outcome.notes().items():
            running.set_user_attr(name, value)
        return tuple(map(outcome.mean, self.sweep.scores))

    def _on_end(self, trial: Trial) -> None:
        trials, best = self.study.trials(), self.study.best()
        done, wanted = sum(not one.again for one in trials), self.study.wanted
        each = (time.monotonic() - self._begun) / max(1, done - self._done_before)  # trials of all workers
        left = max(0, wanted - done) * each
        print(shown(report.line(trial, done, wanted, best[0] if best else None, left)), flush=True)
        if self.parent is None:
            return
        tags = {"trial": str(trial.number), "state": trial.state, "status": trial.reason or trial.state}
        self.tracking.trial(
            self.parent,
            f"trial {trial.number}",
            trial.found,
            {**{name: value for name, value in trial.facts.items() if isinstance(value, int | float)}, **trial.scores},
            {step: {f"{self.sweep.scores[0]}_so_far": value} for step, value in trial.steps.items()},
            {**tags, **{name: str(trial.facts[name]) for name in ("host", "error") if name in trial.facts}},
            (trial.begun, trial.ended),
            "FAILED" if trial.state == "failed" else "FINISHED",
        )

    # -- after the last trial

    def finish(self, final: bool = False) -> int:
        """Print and write the report (table, result.json, best.yaml). Return 1 if no trial is complete, else 0.

        With `final`, also train the configuration of the best trial on the clients.
        """
        lines, result = self._results()
        print(shown("\n" + "\n".join(lines)))
        if not (front := self.study.best()):
            print("No trial is complete, so there is no best trial.", file=sys.stderr)
            return 1
        best, words = self._best(front[0]), "; ".join(filter(None, (self.objective.words, self.objective.caution)))
        complete = sum(one.state == "complete" for one in self.study.trials())
        self._write("best.yaml", report.best_yaml(best, front[0], str(self.sweep.name), complete, words))
        print(f"Where to look next:\n  {self.folder}/best.yaml: configuration of the best trial, for fit")
        print(f"  {self.folder}/result.json: results of every trial")
        self._track_end(front[0], lines)
        if final:
            result["final"] = self._final(best)
            added = [words for words in (result["final"][f"with_the_{part}"] for part in ("set", "trials")) if words]
            result["guarantee"] += added
            self._write("result.json", json.dumps(result, indent=2) + "\n")
            self._track_end(front[0], [*lines, *added])
        return 0

    def stopped(self) -> None:
        """Print what the trials so far cost, and write result.json."""
        print(shown(self._results()[0][0]), flush=True)
        if self.parent is not None:
            self.tracking.stopped(self.parent)

    def _results(self) -> tuple[list[str], dict[str, Any]]:
        """Return the lines of the report, and the content of result.json, which is written."""
        trials, front = self.study.trials(), self.study.best()
        cost = summary(costs_of(self.study.begun()))
        private = [] if cost is None else [headline(cost), details(cost, self.objective.choice)]
        lines = [" ".join([f"{self.sweep.name}: {report.counted(trials)}.", *private[:1]]), *report.reasons(trials)]
        lines += [self.study.table(), *report.ties(trials)] if front else []
        of_set = [set_text(self.objective.card)] if self.objective.card else []
        of_set += [self.budget.words()] if self.budget is not None else []
        lines += [*private[1:], *([] if cost is None else table(cost)), *of_set]
        result: dict[str, Any] = {
            "format": FORMAT,
            "study": self.sweep.name,
            "objective": self.sweep.objective,
            "best": [one.number for one in front],
            "cost": cost,
            "guarantee": [*([" ".join(private)] if private else []), *of_set],
            "trials": [report.as_dict(one) for one in trials],
        }
        self._write("result.json", json.dumps(result, indent=2) + "\n")
        return lines, result

    def _best(self, trial: Trial) -> Options:
        """Return the configuration of the best trial for a run on the clients, with the budget that is left for it."""
        best = reported(self.sweep.scores, options_of(self.options, self.dimensions, trial.found))
        if self.budget is None:
            return best
        best = self.budget.rest.of(best)
        self.budget.rest.check(best)
        return best

    def _track_end(self, best: Trial, lines: list[str]) -> None:
        if self.parent is not None:
            files = [self.folder / name for name in ("result.json", "best.yaml")]
            self.tracking.end(self.parent, best.found, best.scores, "\n".join(lines), files)
            print(f"  {self.tracking.how_to_open}", flush=True)

    def _write(self, name: str, text: str) -> None:
        write_text(self.folder / name, text, private=True)  # arguments of a user's data may hold credentials

    def _final(self, best: Options) -> dict[str, Any]:
        """Train the best trial's configuration with `fit`, or resume that run; a finished run is only reported."""
        folder = self.folder / "final"
        final = dataclasses.replace(best, output_dir=str(folder))
        final = named(final, "final", {} if self.parent is None else {"mlflow.parentRunId": self.parent})
        begun, result = final_so_far(final)
        print(f"\nTraining the best trial's configuration on the clients, in {folder}:", flush=True)
        if result is None:
            more = [] if self.budget is None else [DescribedBy(self.budget.words())]
            result = self._train(final, resume=begun, more=more)
        scores = measured(result.test_accuracy, result.test_loss, result.test_metrics)
        of_run = [report.score_text(name, value) for name in self.directions if (value := scores.get(name)) is not None]
        on = "the test set" if result.test_set else "held-out records (mean over clients)"
        caution = self.objective.caution or None
        on += "" if caution is None else f": {caution}"
        print(shown(f"Final {', '.join(of_run) or 'run'} on {on}. {result.guarantee.words()}"))
        chosen = self._changes_releases
        of_set = with_the_set(self._source, self.objective.card, final, chosen)
        of_trials = with_the_trials(self.study.begun(), self._in_trials({}), final, chosen)
        for words in filter(None, (of_set, of_trials)):
            print(shown(words))
        said = result.as_dict()
        summary = {name: said[name] for name in ("test_accuracy", "test_loss", "test_metrics", "guarantee")}
        return {**summary, "caution": caution, "with_the_set": of_set, "with_the_trials": of_trials}
