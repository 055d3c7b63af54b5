"""Reads finished and unfinished runs, seeds and searches from their folders, for reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfl_lightning.config.reading import expecting, read_json
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.server.results import FORMAT, RESULT
from dpfl_lightning.federated.server.run import FILE, Run
from dpfl_lightning.privacy.accounting.guarantee import RunGuarantee
from dpfl_lightning.reporting.curves import history


@dataclass(frozen=True)
class RunGroup:
    """One run, or the same run for several seeds. `guarantee` is that of all seeds together, None while unfinished.

    `missing` is the number of seeds whose folders are gone.
    """

    name: str
    runs: tuple[Run, ...]
    guarantee: RunGuarantee | None
    missing: int = 0

    @property
    def results(self) -> list[Mapping[str, Any]]:
        """The content of the results of finished runs."""
        return [vars(run.result) for run in self.runs if run.result is not None]


def scored(run: Run) -> Mapping[str, Any]:
    """Return the result of a run, or its latest scores if it is not finished."""
    if run.result is not None:
        return vars(run.result)
    curves = run.score_curves
    known = {score: [*history(run.rounds, curve).values()] for score, curve in curves.items()}
    latest = {score: values[-1] for score, values in known.items() if values}
    test_set = any(curve.startswith("test_") for curve in curves.values())
    loss = {"test_loss": latest.pop("loss", None)}
    return {**loss, "test_metrics": latest, "test_set": test_set, "clients": ()}


@dataclass(frozen=True)
class Search:
    """The result of a search: scores of its trials, the best of them, and its report in lines."""

    name: str
    result: Mapping[str, Any]


def read(path: Path) -> RunGroup | Search:
    """Read what lies at `path`: the folder of a run, of seeds or of a search.

    Raises UserError if it is none of them, or a file cannot be read.
    """
    if (path / FILE).is_file():
        run = Run.read(path)
        return RunGroup(path.resolve().name, (run,), None if run.result is None else run.result.guarantee)
    summary = read_json(path / RESULT, format=FORMAT) if (path / RESULT).is_file() else {}
    if "trials" in summary:
        return Search(str(summary.get("study", path.name)), summary)
    seeds = [one for one in path.glob("seed_*") if (one / FILE).is_file()]
    if seeds:
        runs = tuple(map(Run.read, sorted(seeds, key=lambda one: (len(one.name), one.name))))
        missing = max(0, len(summary.get("seeds", ())) - len(runs))
        stated = summary.get("guarantee")
        with expecting(path / RESULT, "hold the result of a run"):
            together = None if stated is None else RunGuarantee.of(stated)
        return RunGroup(path.resolve().name, runs, together, missing)
    must = "be the folder of a run, of seeds or of a finished search"
    raise UserError(f"`RUN` must {must}, got {str(path)!r}. Runs are listed under runs/.")


def ledger_run(folder: Path) -> str:
    """Return the random name of the run whose ledger lies in a folder; empty if none can be read."""
    try:
        return str(read_json(folder / "ledger.head").get("run", ""))
    except UserError:
        return ""
