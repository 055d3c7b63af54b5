"""`dpfl sweep --config sweeps/nas_digits.yaml`: search hyperparameters and architectures.

The same command resumes a search that was stopped. On another machine that can reach the storage, it joins the search.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfl_lightning.config.load import load
from dpfl_lightning.config.options import FREE, Options, TrackingOptions
from dpfl_lightning.errors import UserError, command, require
from dpfl_lightning.runtime.launcher import launched
from dpfl_lightning.runtime.stopping import passed_on
from dpfl_lightning.runtime.text import shown
from dpfl_lightning.search.options import SCORES, SweepOptions, check
from dpfl_lightning.search.space import check_trials_with, check_values, options_of, parse, probes

if TYPE_CHECKING:
    from dpfl_lightning.search.objectives import Cost
    from dpfl_lightning.search.study import Running, Trial

#: options that change how and how long a search runs, but not the meaning of its trials
_FREE = ("name", "trials", "sampler", "pruner", "storage", "heartbeat_seconds", "distilled")
#: options that MLflow shows also where they are the default
_COMPARED = ("name", "objective", "space", "scores", "trials", "sampler")


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `sweep` with command-line arguments, and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    options, flags = load(
        words,
        _flags,
        name="sweep",
        description="Search the best values for keys of a run, on distilled, public or private records. The same "
        "command resumes a search that was stopped.",
        examples=("--config sweeps/nas_digits.yaml", "--config search.yaml --workers 4 --final"),
        section=("sweep", SweepOptions),
    )
    require(launched().size == 1, "sweep", "be one process", launched().size, "--workers runs several trials at once.")
    for key in ("workers", "helping"):
        require(getattr(flags, key) >= 1, f"--{key}", "be >= 1", getattr(flags, key))
    name = flags.sweep.name or (Path(flags.config[0]).stem if flags.config else "sweep")
    sweep = dataclasses.replace(flags.sweep, name=name)
    search = Search(sweep, options, workers=max(flags.workers, flags.helping), helping=flags.helping > 1)
    if flags.helping > 1:
        search.work()
        return 0
    try:
        search.introduce()
        with _helpers(words, flags.workers):
            search.work()
    except KeyboardInterrupt:
        if search.parent is not None:
            search.tracking.stopped(search.parent)
        print("Finished trials are kept. The same command resumes the search.", file=sys.stderr)
        raise
    return search.finish(flags.final)


class Search:
    """One search. All checks are made on construction, before the first trial.

    `options.output_dir` is the folder of the search. `workers` processes on this machine run trials and share its
    cores; `helping` is True for all but the first of them.

    **Privacy** The cost depends on the objective. Trials on a distilled set or on public records cost nothing. The cost
    of each private trial is stored in the study before the trial begins, and added up at the end.
    """

    def __init__(self, sweep: SweepOptions, options: Options, workers: int = 1, helping: bool = False) -> None:
        check(sweep)
        self.folder = Path(options.output_dir or f"runs/{sweep.name}")
        self.sweep, self.options = sweep, dataclasses.replace(options, output_dir=None)
        self.dimensions = parse(sweep.space, sweep.objective)
        check_values(self.options, self.dimensions, sweep.trials_with)
        check_trials_with(self.options, sweep.trials_with)
        self._share = self._share_cores(workers)
        from dpfl_lightning.search.objectives import objective
        from dpfl_lightning.search.storage import without_password
        from dpfl_lightning.search.study import Study

        self.objective = objective(sweep, self._in_trials({}))
        self._check_builds()
        if not (url := sweep.storage):
            plain, advice = not set("?#%") & set(str(self.folder)), "Choose another folder, or set sweep.storage."
            must = "have no ?, # or % in its name if it holds the database"
            require(plain, "output_dir", must, str(self.folder), advice)
            url = f"sqlite:///{self.folder / 'study.db'}"
        self.folder.mkdir(parents=True, exist_ok=True)
        # Check the folder before opening the study, because another worker may start a trial in between.
        made = any((self.folder / "trials" / str(sweep.name)).glob("*"))
        self.study = Study(sweep, self.dimensions, url, self._identity(), options.seed, first=not helping)
        self._url = without_password(url)
        must = f"be the folder of study {sweep.name} in {self._url}, which has no trial yet"
        advice = "It contains trials of another study: set another output_dir or sweep.name, or the storage of these."
        require(not made or bool(self.study.begun()), "output_dir", must, str(self.folder), advice)
        self.parent: str | None = None
        if self.options.tracking is not None:
            self._track(self.options.tracking)

    # -- before the first trial

    def _in_trials(self, values: Mapping[str, Any]) -> Options:
        """Return the options of a trial that drew `values`."""
        return options_of(self.options, self.dimensions, values, {**self._share, **self.sweep.trials_with})

    def _check_builds(self) -> None:
        """Raise UserError if no value of some key can be built. Combinations that cannot be built fail as trials."""
        for dimension, candidates in probes(self.dimensions):
            errors = []
            for one in candidates:
                try:
                    self.objective.check(self._in_trials(one))
                except UserError as error:
                    errors.append(error)
            if len(errors) == len(candidates):
                raise UserError(f"`sweep.space.{dimension.key}` must be values that a run can have: {errors[0]}")

    def _identity(self) -> dict[str, Any]:
        """Return everything that determines the meaning of a trial, by key."""
        search_options = dataclasses.asdict(self.sweep)
        return {
            **{f"sweep.{key}": value for key, value in search_options.items() if key not in _FREE},
            "sweep.distilled": self.objective.digest,
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

    def _share_cores(self, workers: int) -> dict[str, int]:
        """Return engine options that divide the cores among workers; only trials have these options."""
        import torch

        from dpfl_lightning.runtime.threads import cores

        each = max(1, cores() // workers)
        if self.sweep.objective == "set":
            torch.set_num_threads(min(each, torch.get_num_threads()))
            return {}
        shared = workers > 1 and self.options.engine.workers is None
        return {"engine.workers": each} if shared else {}

    def introduce(self) -> None:
        """Print what is searched, on which records, and where the study is stored."""
        from dpfl_lightning.search.report import counted

        sweep, trials = self.sweep, self.study.trials()
        print(f"Study {sweep.name}: {self.study.wanted} trials, {', '.join(self.dimensions)}")
        print(f"{self.objective.words[0].upper()}{self.objective.words[1:]}.")
        pruner = "" if sweep.pruner["name"] == "none" else f", pruner {sweep.pruner['name']}"
        print(f"Judged by {', '.join(sweep.scores)}; sampler {sweep.sampler['name']}{pruner}.")
        print(f"Storage: {self._url}")
        if trials:
            print(f"Resuming a study that has {counted(trials)}.")
        if sweep.objective == "private":
            print("Every trial costs each client its whole budget again. Trials on public or distilled records do not.")
        print(flush=True)

    # -- trials

    def work(self) -> None:
        """Run trials until the study has all of them, together with any other workers."""
        self._begun, self._done_before = time.monotonic(), sum(not one.again for one in self.study.trials())
        self.study.work(self._trial, self._on_end)

    def _trial(self, running: Running) -> tuple[float, ...]:
        running.note("host", socket.gethostname())

        def charge(cost: Cost) -> None:
            running.note("cost", {name: list(value) for name, value in vars(cost).items()})

        # Several studies may share a folder, and each of them numbers its trials from 0.
        folder = self.folder / "trials" / str(self.sweep.name) / str(running.number)
        outcome = self.objective(self._in_trials(running.found), folder, running.report, charge)
        for name, value in dataclasses.asdict(outcome).items():
            running.note(name, value)
        return tuple(getattr(outcome, score) for score in self.sweep.scores)

    def _on_end(self, trial: Trial) -> None:
        from dpfl_lightning.search.report import line

        trials, best = self.study.trials(), self.study.best()
        done, wanted = sum(not one.again for one in trials), self.study.wanted
        each = (time.monotonic() - self._begun) / max(1, done - self._done_before)  # trials of all workers
        left = max(0, wanted - done) * each
        print(shown(line(trial, done, wanted, best[0] if best else None, left)), flush=True)
        if self.parent is None:
            return
        tags = {"trial": str(trial.number), "state": trial.state, "status": trial.reason or trial.state}
        self.tracking.trial(
            self.parent,
            f"trial {trial.number}",
            trial.found,
            {**{key: trial.facts[key] for key in SCORES if key in trial.facts}, **trial.scores},
            trial.steps,
            {**tags, **{name: str(trial.facts[name]) for name in ("host", "error") if name in trial.facts}},
            (trial.begun, trial.ended),
            "FAILED" if trial.state == "failed" else "FINISHED",
        )

    # -- after the last trial

    def finish(self, final: bool = False) -> int:
        """Print and write the report (table, result.json, best.yaml). Return 1 if no trial is complete, else 0.

        With `final`, also train the configuration of the best trial on the clients.
        """
        from dpfl_lightning.search import report

        trials, front = self.study.trials(), self.study.best()
        lines = [f"{self.sweep.name}: {report.counted(trials)}.", *report.reasons(trials)]
        if front:
            lines.append(report.table(trials, front, {score: SCORES[score] for score in self.sweep.scores}))
        cost = report.total_cost(self.study.begun())
        of_set = [report.set_text(self.objective.card)] if self.objective.card else []
        guarantee = [*([] if cost is None else [report.cost_words(cost, len(trials))]), *of_set]
        lines += [] if cost is None else [report.cost_text(cost, len(trials))]
        lines += of_set
        result: dict[str, Any] = {
            "study": self.sweep.name,
            "objective": self.sweep.objective,
            "best": [one.number for one in front],
            "cost": cost,
            "guarantee": guarantee,
            "trials": [report.as_dict(one) for one in trials],
        }
        print(shown("\n" + "\n".join(lines)))
        files = [self._write("result.json", json.dumps(result, indent=2) + "\n")]
        if not front:
            print("No trial is complete, so there is no best trial.", file=sys.stderr)
            return 1
        best = options_of(self.options, self.dimensions, front[0].found)
        complete = sum(one.state == "complete" for one in trials)
        text = report.best_yaml(best, front[0], str(self.sweep.name), complete, self.objective.words)
        files.append(self._write("best.yaml", text))
        print(f"Where to look next:\n  {self.folder}/best.yaml: configuration of the best trial, for fit")
        print(f"  {self.folder}/result.json: results of every trial")
        if self.parent is not None:
            self.tracking.end(self.parent, front[0].found, front[0].scores, "\n".join(lines), files)
            print(f"  {self.tracking.how_to_open}", flush=True)
        if final:
            self._write("result.json", json.dumps({**result, "final": self._final(best, cost)}, indent=2) + "\n")
        return 0

    def _write(self, name: str, text: str) -> Path:
        (self.folder / name).write_text(text, encoding="utf-8")
        return self.folder / name

    def _final(self, best: Options, cost: Mapping[str, Any] | None) -> dict[str, Any]:
        """Train the best trial's configuration with `fit`, or resume that run; a finished run is only reported."""
        from dpfl_lightning.fit import fit
        from dpfl_lightning.search.report import with_trials_text

        folder = self.folder / "final"
        final = dataclasses.replace(best, output_dir=str(folder))
        if final.tracking is not None and self.parent is not None:
            tags = {**final.tracking.tags, "mlflow.parentRunId": self.parent}
            final = dataclasses.replace(
                final, tracking=dataclasses.replace(final.tracking, tags=tags, run_name="final")
            )
        begun, result = self._begun_final(final)
        print(f"\nTraining the best trial's configuration on the clients, in {folder}:", flush=True)
        result = fit(final, resume=begun).as_dict() if result is None else result
        if result["test_accuracy"] is not None:
            score = "test accuracy" if result["test_set"] else "mean accuracy over clients on held-out records"
            print(shown(f"Final {score} {result['test_accuracy']:.2%}. {result['guarantee']}"))
        together, added = with_the_set(self.sweep.distilled, self.objective.card, final), None
        if cost is not None:
            added = (
                "The trials had other clients (data, seed or clients.count differ): add a record's epsilons of both."
            )
            if _clients(self._in_trials({})) == _clients(final):
                added = with_trials_text(cost, result["clients"])
        for words in filter(None, (together, added)):
            print(shown(words))
        summary = {name: result[name] for name in ("test_accuracy", "guarantee")}
        return {**summary, "with_the_set": together, "with_the_trials": added}

    @staticmethod
    def _begun_final(final_options: Options) -> tuple[bool, dict[str, Any] | None]:
        from dpfl_lightning.build import so_far

        try:
            return so_far(final_options)
        except UserError as error:
            folder = Path(str(final_options.output_dir))
            advice = (
                f"Move {folder} away (its ledger still counts), or run fit --config {folder.parent}/best.yaml instead"
            )
            raise UserError(f"{error} {folder} contains the run of an earlier best trial. {advice}.") from None


def _clients(options: Options) -> dict[str, Any]:
    """Return the options that determine which records each client has."""
    return {"data": dataclasses.asdict(options.data), "seed": options.seed, "clients": options.clients.count}


def with_the_set(source: str | None, card: Mapping[str, Any], final: Options) -> str | None:
    """Describe the joint guarantee of a distilled set (`source`, `card`) and of a later run on the same clients.

    The two ledgers are composed if both are available and client k of one is client k of the other; otherwise the text
    states why not. None if there is no set or it was made of public records only.
    """
    if source is None or (card.get("data") or {}).get("use_public"):
        return None
    from dpfl_lightning.privacy.ledger.verify import ledger_of, read

    clients = json.loads(json.dumps(_clients(final)))  # as the card has them
    why = f"the ledger in {Path(source)} belongs to another run"
    if {key: card.get(key) for key in clients} != clients:
        why = "the records of its clients were distributed differently (data, seed or clients.count differ)"
    else:
        try:
            report = read([ledger_of(source), ledger_of(final.output_dir or "")])
            if report.ledgers[0].verified.end.run == (card.get("ledger") or {}).get("run"):
                return f"Together with the set, composed from both ledgers: {report.weakest.words()}"
        except UserError as error:
            why = str(error)
    advice = "Add the epsilon and delta of the set to those of the run."
    return f"The costs of the set and of the run are not composed: {why.rstrip('.')}. {advice}"


# ---- command line


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="number of parallel trials, >= 1 (1)")
    parser.add_argument("--final", action="store_true", help="train the best trial's configuration on the clients")
    # Internal flag of the processes that --workers starts: this is one of N workers and only runs trials.
    parser.add_argument("--helping", type=int, default=1, metavar="N", help=argparse.SUPPRESS)


@contextlib.contextmanager
def _helpers(words: Sequence[str], workers: int) -> Iterator[None]:
    """Run `workers - 1` more processes of this command, which end when the study has all its trials.

    Ctrl-C reaches them as it reaches this process, and SIGTERM is passed on to them. If a worker is killed, another
    worker repeats its trial.
    """
    arguments = [word for word in words if word != "--final"]
    line = [sys.executable, "-m", "dpfl_lightning.sweep", *arguments, "--workers", "1", "--helping", str(workers)]
    threads = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers))}
    helpers = [subprocess.Popen(line, env=threads) for _ in range(workers - 1)]
    try:
        with passed_on(helpers):
            yield
    finally:
        for helper in helpers:
            status = helper.wait()
            if status not in (0, 130, 143):
                print(f"A worker ended with status {status}; its trial was repeated.", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
