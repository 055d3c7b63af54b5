"""The demonstration that single records are reconstructed, and the numbers of it on the page."""

import itertools
from pathlib import Path
from statistics import fmean

import pytest
import torch

from experiments.papers.cells import RESULTS, Cell, finished
from experiments.papers.distillation import inversion
from experiments.papers.registry import experiments
from experiments.papers.run import CellContext, RunnerOptions

pytestmark = pytest.mark.usefixtures("in_the_repository")
PAGE = Path(__file__).parents[3] / "docs" / "distillation.md"


def test_images_are_paired_so_that_correlations_are_largest_within_a_class():
    draw = torch.Generator().manual_seed(0)
    records, images = (torch.randn(6, 1, 3, 3, generator=draw) for _ in range(2))
    labels, classes = torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([0, 0, 0, 1, 1, 1])
    best = []
    for label in (0, 1):
        own, pictures = records[labels == label].flatten(1), images[classes == label].flatten(1)
        sums = [
            sum(float(torch.corrcoef(torch.stack([a, pictures[j]]))[0, 1]) for a, j in zip(own, order, strict=True))
            for order in itertools.permutations(range(3))
        ]
        best.append(max(sums))
    assert inversion.mean_correlation(images, classes, records, labels) == pytest.approx(sum(best) / 6, abs=1e-5)
    shuffled = [4, 0, 2, 5, 1, 3]
    same = inversion.mean_correlation(3 * records[shuffled] + 1, labels[shuffled], records, labels)
    assert same == pytest.approx(1.0, abs=1e-5)


@pytest.mark.e2e
def test_one_record_is_reconstructed_without_noise_alone(monkeypatch):
    monkeypatch.setattr(inversion, "_STEPS", 100)

    def values(column):
        cell = Cell("distillation.inversion", "batch1", column, "small", 0)
        context = CellContext(cell, RunnerOptions(None, Path("results"), Path("runs")))
        return inversion.reconstructed(context, records=1)["values"]

    plain, noisy = values("none"), values("eps8")
    assert plain["correlation"] > 0.9 > plain["correlation_of_class_mean"]
    assert noisy["correlation"] < 0.3 and abs(noisy["correlation_of_noise"]) < 0.3


def test_the_page_has_the_numbers_of_the_cells():
    table = experiments()["distillation.inversion"]
    cells, text = finished(RESULTS, table, "small"), PAGE.read_text()
    for row, line in table.rows.items():
        titles = [one for one in text.splitlines() if one.startswith("|") and line.title.split(",")[0] in one.lower()]
        titles = titles or [one for one in text.splitlines() if row.startswith("batch") and one.startswith("| ")]
        shown = [f"{fmean(run['values'][line.value] for run in cells[row, column]):.2f}" for column in table.columns]
        assert any(all(number in one for number in shown) for one in titles), (row, shown)
