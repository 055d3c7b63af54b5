"""A declared table whose cells are never made."""

import dataclasses

from experiments.papers.cells import Cell
from experiments.papers.experiment import Column, Computation, Experiment, Row, Training

CELL = Cell("fake.table1", "ours", "a", "small", 0)


def fake(**changed) -> Experiment:
    """Two trained rows, and one that is computed."""
    plain = Experiment(
        name="fake.table1",
        title="A fake",
        shows="accuracy, %",
        rows={"ours": Row("ours"), "theirs": Row("theirs"), "formula": Row("formula", "noise", "formulas")},
        columns={"a": Column("A"), "b": Column("B")},
        cells={
            **dict.fromkeys(("ours", "theirs"), Training(lambda row, column, scale: {})),
            "formulas": Computation(lambda column: {"noise": 1.0}),
        },
        scales={"small": "few", "paper": "many"},
    )
    return dataclasses.replace(plain, **changed)


def held(**values) -> dict:
    return {"values": values, "seconds": 1.0}
