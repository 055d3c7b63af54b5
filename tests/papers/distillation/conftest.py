import pytest
from fake_experiments import held

from dpfl_lightning.commands.fit import fit
from experiments.papers.cells import required_cells, write
from experiments.papers.registry import experiments
from experiments.papers.run import RunnerOptions

#: column -> the best rows of distillation.tuning and distillation.private_tuning
BEST = {
    "public": ("lr1060_steps30",),
    "eps1": ("distdd_rounds5_lr318", "dpfedavg_lr0.25"),
    "eps8": ("distdd_rounds20_lr318", "dpfedavg_lr0.05"),
}


@pytest.fixture
def work(tmp_path, tuned):
    free = ("--tracking=null", "--engine.device=cpu", "--engine.workers=1")
    return RunnerOptions(fit, tmp_path / "results", tmp_path / "runs", free)


@pytest.fixture
def tuned(results):
    """Finished cells of both tables that choose settings."""
    for name in ("distillation.tuning", "distillation.private_tuning"):
        for cell in required_cells(experiments()[name], "small"):
            write(results, cell, held(test_accuracy=60.0 if cell.row in BEST[cell.column] else 50.0))
