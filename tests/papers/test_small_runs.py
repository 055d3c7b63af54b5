"""Tables through the command, on a small data set."""

import shutil

import pytest
from test_conf import small_fashion  # noqa: F401 (a fixture)

from dpfl_lightning.config.published import EPSILONS
from experiments.papers.__main__ import main
from experiments.papers.cells import RESULTS, contents, file_of, required_cells, write
from experiments.papers.registry import experiments

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("in_the_repository"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def run(tmp_path):
    """`run("TABLE --rows ...", **options)`: the cells of all files, in their order."""

    def make(words: str, **options) -> list[dict]:
        places = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
        argv = [*words.split(), "--tracking", "null", "--engine.device", "cpu", *places]
        for name, value in options.items():
            argv += [f"--{name.replace('__', '.')}", str(value)]
        assert main(argv) == 0
        results = tmp_path / "results"
        return [cell for path in sorted(results.glob("*.jsonl")) for cell in contents(results, path.stem).values()]

    return make


@pytest.fixture
def groups(small_fashion):  # noqa: F811
    sizes = {"data__records_per_client": 100, "data__test_per_client": 50, "data__public_records": 100}
    return {"model__name": "logistic", "data__folder": small_fashion, **sizes}


def table(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_one_round_says_how_near_each_estimate_is(run, small_fashion, capsys):  # noqa: F811
    """20 clients of 140 records with random images: noise outweighs what they share, so every estimate is good."""
    few = {"data__folder": small_fashion, "data__records_per_client": 140, "data__held_out_per_client": 5}
    (cell,) = run("noise_aware.table3_measured --columns dist1", **few)
    assert "one round is all that is looked at" in capsys.readouterr().out
    values, lists = cell["values"], cell["first_round"]
    assert cell["rounds"] == 1 and "experiments.papers noise_aware.table3_measured" in cell["command"]
    for name in ("rpca", "hetero_pca", "raw_norm"):
        assert 1 <= values[f"{name}_excess"] < 1.02, name
        assert sum(lists[f"{name}_weights"]) == pytest.approx(1) and len(lists[f"{name}_variance"]) == 20
    assert values["mean_residual_excess"] > values["raw_norm_excess"]
    assert lists["epsilon"] == list(EPSILONS["dist1"][20])
    assert values["oracle_noise"] == pytest.approx(1 / sum(1 / one for one in lists["truth"]), rel=1e-6)


def test_rows_and_blocks_of_robust_pca_are_compared_in_one_round(run, small_fashion):  # noqa: F811
    few = {"data__folder": small_fashion, "data__records_per_client": 140, "data__held_out_per_client": 5}
    (cell,) = run("noise_aware.rows --columns dist1", **few)
    excess = {name.removesuffix("_excess"): one for name, one in cell["values"].items() if name.endswith("_excess")}
    assert len(excess) == 24 and all(1 <= one < 1.2 for one in excess.values())
    assert excess["random_250_all"] < excess["random_250_one"], "115 blocks know more than one"


def test_a_run_has_all_metrics_of_its_groups(run, groups, capsys, tmp_path):
    (tmp_path / "results").mkdir()
    shutil.copy(file_of(RESULTS, "clustered.tuning"), tmp_path / "results")  # rates follow from it
    rows = "dpfedavg_gap,oracle_gap"
    cells = run(f"clustered.table6 --rows {rows} --columns eps5 --seeds 0 --rounds 2", **groups)
    cells = {(cell["experiment"], cell["row"]): cell for cell in cells if cell["experiment"] != "clustered.tuning"}
    assert len(cells) == 2
    plain, oracle = (cells["clustered.table5", row] for row in ("dpfedavg", "oracle"))
    values = oracle["values"]
    assert values["clustering_accuracy"] == 100 == values["minority_recall"] and values["adjusted_rand_index"] == 1
    means = [values[f"accuracy_{group}"] for group in range(4)]
    assert values["accuracy_minority"] == means[0] and values["accuracy_majority"] == pytest.approx(sum(means[1:]) / 3)
    assert values["accuracy"] == pytest.approx((3 * means[0] + 6 * sum(means[1:])) / 21)
    assert "clustering_accuracy" not in plain["values"]
    shown = table(capsys.readouterr().out)
    assert ["DPFedAvg: best - worst", f"{plain['values']['accuracy_gap']:.2f}"] in shown


def test_a_compared_run_has_the_fairness_gaps(run, groups, tmp_path):
    for cell in required_cells(experiments()["clustered.rates"], "small"):  # rates follow from it
        if not cell.row.endswith("_beyond"):
            write(tmp_path / "results", cell, {"values": {"accuracy": float("_0.1" in cell.row)}, "seconds": 1.0})
    where = "clustered.paired --rows kmeans_server_f_acc,kmeans_server_f_loss --columns labels --seeds 0 --rounds 2"
    cells = run(where, **groups)
    (values,) = (cell["values"] for cell in cells if cell["experiment"] == "clustered.paired")
    assert 0 < values["fairness_acc"] <= 100 and values["fairness_loss"] > 0 and "clustering_accuracy" in values
