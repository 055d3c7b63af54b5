"""`python -m dpfl_lightning.sweep --config sweeps/nas_digits.yaml`: search for hyperparameters and architectures.

The file is a configuration of `fit` with a section `sweep`. The same command goes on with a search that was stopped;
on another machine, with a storage that both reach, it joins in.
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
from dpfl_lightning.config.options import FREE, Options, to_dict
from dpfl_lightning.errors import UserError, command, require
from dpfl_lightning.runtime.launcher import launched
from dpfl_lightning.runtime.stopping import passed_on
from dpfl_lightning.search.options import SCORES, SweepOptions, check, study_name
from dpfl_lightning.search.space import check_trials_with, check_values, options_of, parse, probes

if TYPE_CHECKING:
    from dpfl_lightning.search.objectives import Cost, Outcome
    from dpfl_lightning.search.study import Running
    from dpfl_lightning.search.trial import Trial

#: what decides how and how long a search is made, not what its trials mean
_FREE = ("name", "trials", "sampler", "pruner", "storage", "heartbeat_seconds", "distilled")


@command
def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    options, flags = load(
        words,
        _flags,
        prog="python -m dpfl_lightning.sweep",
        description="Search over keys of a run, on distilled or public records.",
        section=("sweep", SweepOptions),
    )
    require(launched().size == 1, "sweep", "be one process", launched().size, "--workers makes several trials at once.")
    for key in ("workers", "helping"):
        require(getattr(flags, key) >= 1, f"--{key}", "be >= 1", getattr(flags, key))
    sweep = dataclasses.replace(flags.sweep, name=study_name(flags.sweep, flags.config))
    search = Search(sweep, options, workers=max(flags.workers, flags.helping), helping=flags.helping > 1)
    if flags.helping > 1:
        search.work()
        return 0
    try:
        search.introduce()
        with _helpers(words, flags.workers):
            search.work()
    except KeyboardInterrupt:
        search.leave()
        raise
    return search.finish(flags.final)


class Search:
    """One search: checked when it is made, before the first trial.

    Args:
        sweep: its options, with a name.
        options: of the run that is searched for; `output_dir` is the search's folder.
        workers: processes that make trials on this machine, which share its cores.
        helping: this is not the first of them.

    **Privacy** As its objective: trials on a distilled set or on public records cost nothing; what private trials cost
    is kept in the study before each begins, and added up at the end.

    Raises:
        UserError: whatever could be wrong before a trial.
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
        url = sweep.storage or self._own_storage()
        self.folder.mkdir(parents=True, exist_ok=True)
        made = any((self.folder / "trials" / str(sweep.name)).glob("*"))  # asked first: another worker may begin now
        self.study = Study(sweep, self.dimensions, url, self._identity(), options.seed, first=not helping)
        must = f"be the folder of study {sweep.name} in {without_password(url)}, which has no trial yet"
        advice = "It has trials of another study: give another output_dir or sweep.name, or the storage that has them."
        require(not made or bool(self.study.begun()), "output_dir", must, str(self.folder), advice)
        self._track()

    # -- before the first trial

    def _own_storage(self) -> str:
        """A file in the search's folder."""
        plain = not set("?#%") & set(str(self.folder))
        advice = "Give another folder, or sweep.storage."
        require(plain, "output_dir", "have no ?, # or % in its name for a database in it", str(self.folder), advice)
        return f"sqlite:///{self.folder / 'study.db'}"

    def _in_trials(self, found: Mapping[str, Any]) -> Options:
        """The run's options with what a trial drew, as trials have them."""
        return options_of(self.options, self.dimensions, found, {**self._share, **self.sweep.trials_with})

    def _check_builds(self) -> None:
        """Refuse a key none of whose values can be built; what fails only together with others fails as a trial."""
        for own, found in probes(self.dimensions):
            errors = []
            for one in found:
                try:
                    self.objective.check(self._in_trials(one))
                except UserError as error:
                    errors.append(error)
            if len(errors) == len(found):
                raise UserError(f"`sweep.space.{own.key}` must be values that a run can have: {errors[0]}")

    def _identity(self) -> dict[str, Any]:
        """All that decides what a trial means, by the key that sets it."""
        run = {key: value for key, value in to_dict(self.options).items() if key not in FREE}
        own = {key: value for key, value in dataclasses.asdict(self.sweep).items() if key not in _FREE}
        return {
            **{f"sweep.{key}": value for key, value in own.items()},
            "sweep.distilled": self.objective.digest,
            **run,
        }

    def _track(self) -> None:
        self.tracking, self.parent = None, None
        if self.options.tracking is None:
            return
        from dpfl_lightning.reporting.mlflow import StudyTracking

        own = self.options.tracking
        self.tracking = StudyTracking(own.experiment, own.uri, {**own.tags, "output_dir": str(self.folder.resolve())})
        record = {**to_dict(self.options), "sweep": dataclasses.asdict(self.sweep)}
        name = own.run_name or str(self.sweep.name)
        self.parent = self.study.mlflow_run = self.tracking.begin(name, record, self.study.mlflow_run)

    def _share_cores(self, workers: int) -> dict[str, int]:
        """What trials have in place of the run's own, so that several can be made at once; the run found has it not."""
        import torch

        from dpfl_lightning.runtime.threads import cores

        each = max(1, cores() // workers)
        if self.sweep.objective == "set":
            torch.set_num_threads(min(each, torch.get_num_threads()))
            return {}
        shared = workers > 1 and self.options.engine.workers is None
        return {"engine.workers": each} if shared else {}

    def introduce(self) -> None:
        """Say what is searched, on what, and where it is kept."""
        from dpfl_lightning.search.report import counted
        from dpfl_lightning.search.storage import without_password

        sweep, trials = self.sweep, self.study.trials()
        print(f"Study {sweep.name}: {self.study.wanted} trials, {', '.join(self.dimensions)}")
        print(f"{self.objective.words[0].upper()}{self.objective.words[1:]}.")
        pruner = "" if sweep.pruner["name"] == "none" else f", pruner {sweep.pruner['name']}"
        print(f"Judged by {', '.join(sweep.scores)}; sampler {sweep.sampler['name']}{pruner}.")
        print(f"Storage: {without_password(self.study.url)}")
        if trials:
            print(f"Going on with a study that has {counted(trials)}.")
        if self.sweep.objective == "private":
            print("Every trial costs each client its whole budget again; on public or distilled records none would.")
        print(flush=True)

    # -- trials

    def work(self) -> None:
        """Make trials until the study has all, beside whoever else does."""
        self._begun, self._done_before = time.monotonic(), self._done(self.study.trials())
        self.study.work(self._trial, self._on_end)

    @staticmethod
    def _done(trials: Sequence[Trial]) -> int:
        return sum(not one.again for one in trials)

    def _trial(self, running: Running) -> tuple[float, ...]:
        running.note("host", socket.gethostname())

        def charge(cost: Cost) -> None:
            running.note("cost", {name: list(value) for name, value in vars(cost).items()})

        # several studies may share a folder, and each numbers its trials from 0
        folder = self.folder / "trials" / str(self.sweep.name) / str(running.number)
        outcome: Outcome = self.objective(self._in_trials(running.found), folder, running.report, charge)
        for name, value in dataclasses.asdict(outcome).items():
            running.note(name, value)
        return tuple(getattr(outcome, score) for score in self.sweep.scores)

    def _on_end(self, trial: Trial) -> None:
        from dpfl_lightning.search.report import line

        trials, best = self.study.trials(), self.study.best()
        done, wanted = self._done(trials), self.study.wanted
        each = (time.monotonic() - self._begun) / max(1, done - self._done_before)  # whoever made them
        left = max(0, wanted - done) * each
        print(line(trial, done, wanted, best[0] if best else None, left), flush=True)
        if self.tracking is not None and self.parent is not None:
            values = {**{key: trial.facts[key] for key in SCORES if key in trial.facts}, **trial.scores}
            tags = {"trial": str(trial.number), "state": trial.state, "status": trial.reason or trial.state}
            status = "FAILED" if trial.state == "failed" else "FINISHED"
            self.tracking.trial(
                self.parent,
                f"{self.sweep.name}_{trial.number}",
                trial.found,
                values,
                trial.steps,
                {**tags, **{name: str(trial.facts[name]) for name in ("host", "error") if name in trial.facts}},
                (trial.begun, trial.ended),
                status,
            )

    def leave(self) -> None:
        """Say how to go on with a search that is stopped, also to MLflow."""
        if self.tracking is not None and self.parent is not None:
            self.tracking.stopped(self.parent)
        print("Trials that have ended are kept, and the same command goes on with the search.", file=sys.stderr)

    # -- after the last one

    def finish(self, final: bool = False) -> int:
        """The report: table, result.json, best.yaml, and if `final` the best trial's run; returns the exit status."""
        from dpfl_lightning.search import report

        trials, front = self.study.trials(), self.study.best()
        told = [f"{self.sweep.name}: {report.counted(trials)}.", *report.reasons(trials)]
        if front:
            told.append(report.table(trials, front, {score: SCORES[score] for score in self.sweep.scores}))
        cost = report.total_cost(self.study.begun())
        told += [] if cost is None else [report.cost_text(cost, len(trials))]
        told += [report.set_text(self.objective.card)] if self.objective.card else []
        result: dict[str, Any] = {
            "study": self.sweep.name,
            "objective": self.sweep.objective,
            "best": [one.number for one in front],
            "cost": cost,
            "told": told,
            "trials": [report.as_dict(one) for one in trials],
        }
        print("\n" + "\n".join(told))
        files = [self._write("result.json", json.dumps(result, indent=2) + "\n")]
        if not front:
            print("No trial is complete, so there is no best one.", file=sys.stderr)
            return 1
        best = options_of(self.options, self.dimensions, front[0].found)
        complete = sum(one.state == "complete" for one in trials)
        text = report.best_yaml(best, front[0], str(self.sweep.name), complete, self.objective.words)
        files.append(self._write("best.yaml", text))
        if self.tracking is not None and self.parent is not None:
            self.tracking.end(self.parent, front[0].scores, "\n".join(told), files)
        self._say_where_to_look()
        if final:
            self._write("result.json", json.dumps({**result, "final": self._final(best, cost)}, indent=2) + "\n")
        return 0

    def _write(self, name: str, text: str) -> Path:
        (self.folder / name).write_text(text, encoding="utf-8")
        return self.folder / name

    def _say_where_to_look(self) -> None:
        print(f"Where to look next:\n  {self.folder}/best.yaml: the best trial's configuration, for fit")
        print(f"  {self.folder}/result.json: every trial")
        if self.tracking is not None:
            print(f"  {self.tracking.how_to_open}", flush=True)

    def _final(self, best: Options, cost: Mapping[str, Any] | None) -> dict[str, Any]:
        """The best trial's run on the clients, by `fit`; one that was begun goes on, one that is finished is told."""
        from dpfl_lightning.fit import fit

        folder = self.folder / "final"
        own = dataclasses.replace(best, output_dir=str(folder))
        if own.tracking is not None and self.parent is not None:
            tags = {**own.tracking.tags, "mlflow.parentRunId": self.parent}
            own = dataclasses.replace(own, tracking=dataclasses.replace(own.tracking, tags=tags))
        begun, result = self._begun_final(own)
        print(f"\nThe best trial's run on the clients, in {folder}:", flush=True)
        result = fit(own, resume=begun).as_dict() if result is None else result
        if result["test_accuracy"] is not None:
            print(f"Final test accuracy {result['test_accuracy']:.2%}. {result['guarantee']}")
        together = with_the_set(self.sweep.distilled, self.objective.card, own)
        added = None if cost is None else self._with_trials(own, cost, result)
        for words in filter(None, (together, added)):
            print(words)
        told = {name: result[name] for name in ("test_accuracy", "guarantee")}
        return {**told, "with_the_set": together, "with_the_trials": added}

    @staticmethod
    def _begun_final(own: Options) -> tuple[bool, dict[str, Any] | None]:
        from dpfl_lightning.build import so_far

        try:
            return so_far(own)
        except UserError as error:
            folder = Path(str(own.output_dir))
            advice = (
                f"Move {folder} away (its ledger counts), or train the best by fit --config {folder.parent}/best.yaml"
            )
            raise UserError(f"{error} {folder} is the run of an earlier best trial. {advice}.") from None

    def _with_trials(self, final: Options, cost: Mapping[str, Any], result: Mapping[str, Any]) -> str:
        from dpfl_lightning.search.report import with_trials_text

        theirs = self._in_trials({})
        if (theirs.data, theirs.seed, theirs.clients.count) == (final.data, final.seed, final.clients.count):
            return with_trials_text(cost, result["clients"])
        return "Trials had other clients (data, seed or clients.count differ): a record's epsilons of both add up."


# ---- what clients have released in all


def with_the_set(source: str | None, card: Mapping[str, Any], final: Options) -> str | None:
    """The guarantee of a distilled set and of the run on the same clients that follows it, together, in words.

    The two ledgers are composed where both lie here and client 3 of one is client 3 of the other; else it is said why
    not, for then the reader has to add. None where there was no set, or one of public records alone.

    Args:
        source: what `sweep.distilled` names.
        card: of the set.
        final: options of the run, whose folder has its ledger.

    **Privacy** Arithmetic on public facts.
    """
    made = card.get("data") or {}
    if source is None or made.get("use_public"):
        return None
    same = (
        made == json.loads(json.dumps(dataclasses.asdict(final.data)))  # as the card has it
        and card.get("seed") == final.seed
        and card.get("clients") == final.clients.count
    )
    if not same:
        return _apart("its clients' records were dealt otherwise (data, seed or clients.count differ)")
    from dpfl_lightning.privacy.ledger.verify import ledger_of, read

    try:
        ledgers = [ledger_of(source), ledger_of(final.output_dir or "")]
        report = read(ledgers)
    except UserError as error:
        return _apart(str(error))
    if report.ledgers[0][1].end.run != (card.get("ledger") or {}).get("run"):
        return _apart(f"the ledger in {Path(source)} is another run's")
    return f"With the set, composed from both ledgers: {report.weakest.words()}"


def _apart(why: str) -> str:
    advice = "Add its epsilon and delta to the run's."
    return f"The set's cost and the run's are not composed here: {why.rstrip('.')}. {advice}"


# ---- command line


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="trials made at once on this machine (1)")
    parser.add_argument("--final", action="store_true", help="train the best trial's configuration on the clients")
    # what --workers starts: one of N workers, which makes trials and nothing else
    parser.add_argument("--helping", type=int, default=1, metavar="N", help=argparse.SUPPRESS)


@contextlib.contextmanager
def _helpers(words: Sequence[str], workers: int) -> Iterator[None]:
    """So many more workers as processes of this command, which end when the study has all its trials.

    Ctrl-C reaches them as it reaches this process, and SIGTERM is passed on. What one that is killed was at is made
    again by another.
    """
    own = [word for word in words if word != "--final"]
    line = [sys.executable, "-m", "dpfl_lightning.sweep", *own, "--workers", "1", "--helping", str(workers)]
    threads = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers))}
    helpers = [subprocess.Popen(line, env=threads) for _ in range(workers - 1)]
    try:
        with passed_on(helpers):
            yield
    finally:
        for helper in helpers:
            status = helper.wait()
            if status not in (0, 130, 143):
                print(f"A worker ended with status {status}; what it was at was made again.", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
