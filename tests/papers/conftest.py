import pytest
from fake_experiments import fake

from experiments.papers import cells, run
from experiments.papers.experiment import Column, Row
from experiments.papers.registry import experiments


@pytest.fixture
def results(tmp_path, monkeypatch):
    """An empty folder of finished cells, in place of the repository's."""
    monkeypatch.setattr(cells, "RESULTS", tmp_path / "results")
    run._options.cache_clear()  # options depend on finished cells
    yield tmp_path / "results"
    run._options.cache_clear()


@pytest.fixture
def known(monkeypatch):
    """The fake, and another that shows its cells under other names."""
    borrower = fake(
        name="fake.table2",
        rows={"best": Row("best", "accuracy_best", "ours", "fake.table1", "b")},
        columns={"x": Column("X")},
        cells={},
    )
    for one in (fake(), borrower):
        monkeypatch.setitem(experiments(), one.name, one)
    return borrower
