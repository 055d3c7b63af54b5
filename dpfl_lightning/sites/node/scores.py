"""The scores that a site keeps to itself: its final model on its held-out records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dpfl_lightning.federated.messages.evaluation import Score
from dpfl_lightning.models.tasks import Measure
from dpfl_lightning.runtime.text import counted
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.terms import read_message

FILE, PAGE, REPORT = "scores.json", "scores.html", "report.html"


@dataclass(frozen=True)
class KeptScores:
    """The scores of the model of `round` on the `records` that are held out, beside those of the best constant.

    `measures` say which values are better.
    """

    round: int
    records: int
    score: Score
    baseline: Mapping[str, float | None]
    measures: Mapping[str, Measure]

    def words(self) -> str:
        """Return the scores, beside those of the best constant prediction, and why others are undefined."""
        from dpfl_lightning.federated.server.scores import with_baseline

        result = {**vars(self), **{f"test_{name}": one for name, one in vars(self.score).items()}}
        why = "".join(f"; {name}: the records {words}" for name, words in self.score.undefined.items())
        where = f"{counted(self.records, 'held-out record')}, of the model that the server sent as that of round"
        return f"kept here: {with_baseline(result) or 'no score'} on {where} {self.round}{why}"


wire.register(KeptScores)


def read_scores(folder: Path) -> KeptScores | None:
    """Return the scores in the folder of a plan, if there are any."""
    file = folder / FILE
    return read_message(KeptScores, file, str(file), "hold scores of a site") if file.is_file() else None
