"""A run as everything shows it: the same object while it goes on, and from its files afterwards."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from dpfl_lightning.config.reading import expecting, read_json, read_text
from dpfl_lightning.config.yaml_text import parse_yaml
from dpfl_lightning.errors import require
from dpfl_lightning.federated.server import history
from dpfl_lightning.federated.server.curves import score_curves
from dpfl_lightning.federated.server.history import Round
from dpfl_lightning.federated.server.results import (
    FORMAT,
    GUARANTEES,
    RESULT,
    RoundReport,
    RunInfo,
    RunResult,
    read_guarantees,
)
from dpfl_lightning.federated.server.scores import headline, scores_of
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.accounting.guarantee import Guarantee
from dpfl_lightning.runtime.files import is_locked, write_json
from dpfl_lightning.runtime.text import at_most, span

FILE, FILE_FORMAT = "run.json", 1
LEDGER = "ledger.jsonl"

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


class State(Enum):
    """How a run stands: it goes on, was stopped by a user or a signal, lost its process, failed, or is complete."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    GONE = "gone"
    FAILED = "failed"
    FINISHED = "finished"


class ClientScore(NamedTuple):
    """A score of one client on its held-out records."""

    client: str
    score: str
    value: float


@dataclass(frozen=True)
class Run:
    """A run for terminal, pages, trackers and reports, each of which is a function of it.

    Args:
        info: what was fixed before the first round.
        done: number of finished rounds.
        last: the latest finished round, None before it.
        result: None while the run is unfinished.
        state: how it stands; see `ending`.
        reason: why a run ended that is unfinished.
        about: what `run.json` says besides; empty while the run goes on.
    """

    info: RunInfo
    done: int = 0
    last: Round | None = None
    result: RunResult | None = None
    state: State = State.RUNNING
    reason: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    stated: Sequence[Guarantee] = field(default=(), repr=False)

    @classmethod
    def begun(cls, view: View) -> Run:
        """The run before its next round."""
        return cls(view.run, view.state.round)

    @classmethod
    def after(cls, view: View, report: RoundReport) -> Run:
        """The run after a round."""
        return cls(view.run, report.round, report.curves)

    @classmethod
    def ended(cls, view: View, result: RunResult) -> Run:
        """The run when it has ended, finished or not."""
        if not result.finished:
            state = State.INTERRUPTED if result.interrupted else State.FAILED
            return cls(view.run, result.rounds, state=state, reason=result.reason)
        return cls(view.run, result.rounds, result=result, state=State.FINISHED, stated=view.guarantees())

    @classmethod
    def read(cls, folder: Path) -> Run:
        """The run in a folder. Raises UserError if it has not begun, or a file cannot be read."""
        require(folder.is_dir(), "RUN", "be the folder of a run", str(folder))
        path = folder / "options.yaml"
        options = (parse_yaml(read_text(path), str(path)) or {}) if path.is_file() else {}
        require(isinstance(options, dict), str(path), "hold the options of a run", type(options).__name__)
        about, result = read_about(folder), read_result(folder)
        with expecting(folder / FILE, "describe a run"):
            info = RunInfo.read(about["info"], folder, options)
        rounds = history.read(folder / history.FILE)
        ended = about["ended"] or {}
        run = cls(
            info,
            done=(rounds[-1].round if rounds else 0) if result is None else result.rounds,
            last=rounds[-1] if rounds else None,
            result=result,
            state=_state(folder, ended) if result is None else State.FINISHED,
            reason=str(ended.get("reason", "")) if result is None else "",
            about=about,
        )
        vars(run)["rounds"] = rounds  # the cached property: the file is read once
        return run

    @property
    def folder(self) -> Path:
        return self.info.output_dir

    @property
    def ending(self) -> str:
        """How the run stands, in words."""
        if self.result is not None:
            return self.result.reason
        if self.state is State.RUNNING:
            return "Running"
        why = "its process is gone" if self.state is State.GONE else self.reason
        return f"Stopped after round {self.done} of {self.info.rounds}: {why}"

    @property
    def score_curves(self) -> dict[str, str]:
        """Score -> its curve, of those that the run has measured, the one that stands for the run first."""
        known = [name for one in self.rounds for name, value in one.values.items() if value is not None]
        return score_curves(known, self.info.measures)

    @property
    def headline(self) -> str:
        """The score that stands for the run; empty if it has none."""
        return next(iter(self.score_curves), "") if self.result is None else headline([vars(self.result)])

    @property
    def worst_client(self) -> ClientScore | None:
        """The client of a finished run with the worst score on held-out records; None if none is known."""
        if self.result is None or self.result.headline_worst is None:
            return None
        name, worst = self.result.headline, self.result.headline_worst
        client = next(row for row in self.result.clients if scores_of(row).get(name) == worst)
        return ClientScore(str(client["name"]), name, worst)

    @cached_property
    def guarantees(self) -> Sequence[Guarantee]:
        """The guarantee of each client of a finished run; from its files, unless it has just ended."""
        return self.stated or _guarantees(self.folder)

    @cached_property
    def rounds(self) -> list[Round]:
        """All finished rounds, read from the folder of the run."""
        return history.read(self.folder / history.FILE)


def assumptions(view: View) -> dict[str, str]:
    """Return what every epsilon of the run assumes, by name; without a bound on what is released `guarantee` alone."""
    guarantee = view.expected_guarantee()
    if guarantee.unprotected or not view.schedule.has_noise:
        return {"guarantee": replace(guarantee, epsilon=math.inf).words()}
    return {
        "unit": guarantee.unit,
        "adjacency": guarantee.adjacency,
        "sampling": guarantee.sampling,
        "accountant": guarantee.accountant,
        "delta": span((schedule.delta for schedule in view.schedule.clients), at_most),
        "noise": view.run.noise,
        **({"caveats": "; ".join(guarantee.caveats)} if guarantee.caveats else {}),
    }


def write_about(info: RunInfo, content: Mapping[str, Any]) -> None:
    """Write `run.json`: the description of a run, and `content`."""
    write_json(info.output_dir / FILE, {"format": FILE_FORMAT, **content, "info": info.as_dict()})


def read_about(folder: Path) -> dict[str, Any]:
    """Return the content of the `run.json` of a folder. Raises UserError if it cannot be read."""
    return read_json(folder / FILE, format=FILE_FORMAT)


def change_about(folder: Path, **changed: Any) -> None:
    """Replace entries of the `run.json` of a folder."""
    write_json(folder / FILE, {"format": FILE_FORMAT, **read_about(folder), **changed})


def read_result(folder: Path) -> RunResult | None:
    """Read the result of a run; None if it has not finished. Raises UserError if the file cannot be read."""
    path = folder / RESULT
    if not path.is_file():
        return None
    content = read_json(path, format=FORMAT)
    with expecting(path, "hold the result of a run"):
        result = RunResult.of(content)
        result.guarantee.words()
        for row in result.clients:
            operator.itemgetter(*_KEYS_OF_CLIENT)(row)
        return result


def _state(folder: Path, ended: Mapping[str, Any]) -> State:
    """Return how an unfinished run stands: as it has written, or else by the lock that it holds on its ledger."""
    if "state" in ended:
        return State(ended["state"])
    return State.RUNNING if is_locked(folder / LEDGER) else State.GONE


def _guarantees(folder: Path) -> tuple[Guarantee, ...]:
    rows = read_guarantees(folder)
    with expecting(folder / GUARANTEES, "hold the guarantees of a run's clients"):
        made = {id(row): Guarantee.of(row) for row in rows}  # equal ones are one object
        return tuple(made[id(row)] for row in rows)
