"""Reads finished and unfinished runs, and searches, from their files, for reports."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dpfl_lightning.config.reading import expecting, read_json, read_text
from dpfl_lightning.config.yaml_text import parse_yaml
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.server.history import FILE as HISTORY
from dpfl_lightning.federated.server.history import Round
from dpfl_lightning.federated.server.history import read as read_rounds
from dpfl_lightning.federated.server.results import FORMAT, RunResult
from dpfl_lightning.privacy.accounting.guarantee import RunGuarantee
from dpfl_lightning.reporting import description
from dpfl_lightning.reporting.curves import history, score_curves

# of a client in a result
_KEYS_OF_CLIENT = (
    "client",
    "name",
    "num_records",
    "batch_size",
    "noise_multiplier",
    "epsilon_spent",
    "epsilon_budget",
    "delta",
    "accuracy",
    "model",
)

Built = TypeVar("Built")


@dataclass(frozen=True)
class RunFiles:
    """A run: its options, its `run.json`, its rounds so far, and its result (None while it is unfinished)."""

    folder: Path
    options: Mapping[str, Any]
    about: Mapping[str, Any]
    rounds: list[Round]
    result: RunResult | None

    @property
    def score_curves(self) -> dict[str, str]:
        return score_curves(name for one in self.rounds for name, value in one.values.items() if value is not None)

    @property
    def scored(self) -> Mapping[str, Any]:
        """The result, or the latest scores if it is not finished."""
        if self.result is not None:
            return vars(self.result)
        curves = self.score_curves
        known = {score: [*history(self.rounds, curve).values()] for score, curve in curves.items()}
        latest = {score: values[-1] for score, values in known.items() if values}
        test_set = any(curve.startswith("test_") for curve in curves.values())
        loss = {"test_loss": latest.pop("loss", None)}
        return {**loss, "test_metrics": latest, "test_set": test_set, "clients": ()}


@dataclass(frozen=True)
class RunGroup:
    """One run, or the same run for several seeds. `guarantee` is that of all seeds together, None while unfinished.

    `missing` is the number of seeds whose folders are gone.
    """

    name: str
    runs: tuple[RunFiles, ...]
    guarantee: RunGuarantee | None
    missing: int = 0

    @property
    def results(self) -> list[Mapping[str, Any]]:
        """The content of the results of finished runs."""
        return [vars(run.result) for run in self.runs if run.result is not None]


@dataclass(frozen=True)
class Search:
    """The result of a search: scores of its trials, the best of them, and its report in lines."""

    name: str
    result: Mapping[str, Any]


def read(path: Path) -> RunGroup | Search:
    """Read what lies at `path`: the folder of a run, of seeds or of a search.

    Raises UserError if it is none of them, or a file cannot be read.
    """
    if (path / "options.yaml").is_file():
        run = read_run(path)
        return RunGroup(path.resolve().name, (run,), None if run.result is None else run.result.guarantee)
    summary = read_json(path / "result.json", format=FORMAT) if (path / "result.json").is_file() else {}
    if "trials" in summary:
        return Search(str(summary.get("study", path.name)), summary)
    seeds = [one for one in path.glob("seed_*") if (one / "options.yaml").is_file()]
    if seeds:
        runs = tuple(map(read_run, sorted(seeds, key=lambda one: (len(one.name), one.name))))
        missing = max(0, len(summary.get("seeds", ())) - len(runs))
        stated = summary.get("guarantee")
        together = None if stated is None else _built(RunGuarantee.of, stated, path / "result.json")
        return RunGroup(path.resolve().name, runs, together, missing)
    must = "be the folder of a run, of seeds or of a finished search"
    raise UserError(f"`RUN` must {must}, got {str(path)!r}. Runs are listed under runs/.")


def read_run(folder: Path) -> RunFiles:
    """Read a run's options, rounds and result. Raises UserError if a file cannot be read."""
    path = folder / "options.yaml"
    options = parse_yaml(read_text(path), str(path)) or {}
    require(isinstance(options, dict), str(path), "hold the options of a run", type(options).__name__)
    about = description.read(folder) if (folder / description.FILE).is_file() else {}
    return RunFiles(folder, options, about, read_rounds(folder / HISTORY), read_result(folder))


def read_result(folder: Path) -> RunResult | None:
    """Read the result of a run; None if it has not finished. Raises UserError if the file cannot be read."""
    path = folder / "result.json"
    return _built(_result, read_json(path, format=FORMAT), path) if path.is_file() else None


def _result(content: Mapping[str, Any]) -> RunResult:
    result = RunResult.of(content)
    result.guarantee.words()
    for row in result.clients:
        operator.itemgetter(*_KEYS_OF_CLIENT)(row)
    return result


def _built(build: Callable[[Any], Built], content: Any, path: Path) -> Built:
    """Return what `build` makes of a file's content. Raises UserError if it is damaged."""
    with expecting(path, "hold the result of a run"):
        return build(content)


def ledger_run(folder: Path) -> str:
    """Return the random name of the run whose ledger lies in a folder; empty if none can be read."""
    try:
        return str(read_json(folder / "ledger.head").get("run", ""))
    except UserError:
        return ""
