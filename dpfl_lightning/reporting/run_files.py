"""Reads finished and unfinished runs, searches and tables of experiments from their files, for reports."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from dpfl_lightning.config.reading import read_json, read_text
from dpfl_lightning.config.yaml_text import parse_yaml
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.server.results import ClientEmbedding, RunResult
from dpfl_lightning.privacy.accounting.guarantee import RunGuarantee
from dpfl_lightning.reporting import curves
from dpfl_lightning.reporting.curves import Round

# of a result and of its clients; those that have a default may be missing
_KEYS = [one.name for one in fields(RunResult) if one.default is MISSING and one.default_factory is MISSING]
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
)


@dataclass(frozen=True)
class RunFiles:
    """A run: its options, its rounds so far, and its result (None while it is unfinished)."""

    folder: Path
    options: Mapping[str, Any]
    rounds: list[Round]
    result: Mapping[str, Any] | None
    guarantee: RunGuarantee | None


@dataclass(frozen=True)
class RunGroup:
    """One run, or the same run for several seeds. `guarantee` is that of all seeds together, None while unfinished.

    `missing` is the number of seeds whose folders are gone.
    """

    name: str
    runs: tuple[RunFiles, ...]
    guarantee: RunGuarantee | None
    missing: int = 0


@dataclass(frozen=True)
class Search:
    """The result of a search: scores of its trials, the best of them, and its report in lines."""

    name: str
    result: Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A table of an experiment, as `python -m experiments.papers NAME --json` prints it."""

    name: str
    content: Mapping[str, Any]


def read(path: Path) -> list[RunGroup | Search | Table]:
    """Read what lies at `path`: the folder of a run, of seeds or of a search, or a JSON file with one table or several.

    Raises UserError if it is none of them, or a file cannot be read.
    """
    if path.is_file():
        tables = read_json(path, object)
        tables = tables if isinstance(tables, list) else [tables]
        fits = all(isinstance(table, dict) and "numbers" in table for table in tables)
        require(fits, "RUN", "be a folder, or JSON tables of experiments.papers", str(path))
        return [Table(str(table.get("name", path.stem)), table) for table in tables]
    if (path / "options.yaml").is_file():
        run = read_run(path)
        return [RunGroup(path.resolve().name, (run,), run.guarantee)]
    summary = read_json(path / "result.json") if (path / "result.json").is_file() else {}
    if "trials" in summary:
        return [Search(str(summary.get("study", path.name)), summary)]
    seeds = [one for one in path.glob("seed_*") if (one / "options.yaml").is_file()]
    if seeds:
        runs = tuple(map(read_run, sorted(seeds, key=lambda one: (len(one.name), one.name))))
        missing = max(0, len(summary.get("seeds", ())) - len(runs))
        return [RunGroup(path.resolve().name, runs, _guarantee(summary, path / "result.json"), missing)]
    must = "be the folder of a run, of seeds or of a finished search"
    raise UserError(f"`RUN` must {must}, got {str(path)!r}. Runs are listed under runs/.")


def read_run(folder: Path) -> RunFiles:
    """Read a run's options, rounds and result. Raises UserError if a file cannot be read."""
    path = folder / "options.yaml"
    options = parse_yaml(read_text(path), str(path)) or {}
    require(isinstance(options, dict), str(path), "hold the options of a run", type(options).__name__)
    path = folder / "result.json"
    result = read_json(path) if path.is_file() else None
    if result is not None:
        _require_keys(result, _KEYS, path)
        must = "hold one mapping for each client"
        listed = isinstance(result["clients"], list) and all(isinstance(row, dict) for row in result["clients"])
        require(listed, str(path), must, type(result["clients"]).__name__)
        for row in result["clients"]:
            _require_keys(row, _KEYS_OF_CLIENT, path)
        if result.get("client_embedding") is not None:
            _require_keys(result["client_embedding"], [one.name for one in fields(ClientEmbedding)], path)
    return RunFiles(folder, options, curves.read(folder / curves.FILE), result, _guarantee(result or {}, path))


def _guarantee(content: Mapping[str, Any], path: Path) -> RunGuarantee | None:
    """Return the guarantee in a result. Raises UserError if it is damaged."""
    if "guarantee" not in content:
        return None
    try:
        found = RunGuarantee.of(content["guarantee"])
        found.words()
    except (TypeError, ValueError, KeyError, AttributeError):
        must = "hold the guarantee of a run"
        raise UserError(f"`{path}` must {must}, got {content.get('guarantee')!r}. Restore it.") from None
    return found


def ledger_run(folder: Path) -> str:
    """Return the random name of the run whose ledger lies in a folder; empty if none can be read."""
    try:
        return str(read_json(folder / "ledger.head").get("run", ""))
    except UserError:
        return ""


def _require_keys(content: Mapping[str, Any], keys: Sequence[str], path: Path) -> None:
    for key in keys:
        require(key in content, str(path), f"be the result of a run with the key {key}", sorted(content))
