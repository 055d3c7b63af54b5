"""Tables through the command, on a small data set."""

from __future__ import annotations

import pytest
from test_conf import small_fashion  # noqa: F401 (a fixture)

from dpfl_lightning.config.published import EPSILONS
from experiments.papers.__main__ import main
from experiments.papers.cells import finished, read
from experiments.papers.clustered.recorder import fairness
from experiments.papers.registry import experiments
from experiments.papers.report import report

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("in_the_repository")]


def test_one_round_says_how_near_each_estimate_is(small_fashion, tmp_path, capsys):  # noqa: F811
    """20 clients of 140 records with random images: noise outweighs what they share, so every estimate is good."""
    argv = ["noise_aware.table3_measured", "--columns", "dist1", "--tracking", "null", "--engine.device", "cpu"]
    small = ["--data.folder", str(small_fashion), "--data.records_per_client", "140", "--data.held_out_per_client", "5"]
    assert main([*argv, *small, "--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]) == 0
    assert "one round is all that is looked at" in capsys.readouterr().out
    (path,) = tmp_path.glob("results/*/*/*.json")
    held = read(path)
    values, lists = held["values"], held["first_round"]
    assert held["rounds"] == 1 and "experiments.papers noise_aware.table3_measured" in held["command"]
    for name in ("rpca", "hetero_pca", "raw_norm"):
        assert 1 <= values[f"{name}_excess"] < 1.02, name
        assert sum(lists[f"{name}_weights"]) == pytest.approx(1) and len(lists[f"{name}_variance"]) == 20
    assert values["mean_residual_excess"] > values["raw_norm_excess"]
    assert lists["epsilon"] == list(EPSILONS["dist1"][20])
    assert values["oracle_noise"] == pytest.approx(1 / sum(1 / one for one in lists["truth"]), rel=1e-6)


def test_a_row_of_table_13(small_fashion, tmp_path, capsys):  # noqa: F811
    argv = ["noise_aware.table13", "--rows", "weiavg,dpfedavg", "--columns", "dist7", "--tracking", "null"]
    small = ["--data.folder", str(small_fashion), "--data.records_per_client", "140", "--data.held_out_per_client", "5"]
    places = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    assert main([*argv, *small, *places, "--rounds", "1", "--engine.device", "cpu"]) == 0
    text = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["the paper's", "66.80"] in lines and ["the paper's", "64.15"] in lines
    overrides = (("data.held_out_per_client", "5"), ("data.records_per_client", "140"), ("rounds", "1"))
    experiment = experiments()["noise_aware.table13"].restricted(["weiavg", "dpfedavg"], ["dist7"])
    found = finished(tmp_path / "results", experiment, "small", overrides)
    assert {row for row, _ in found} == {"weiavg", "dpfedavg"}
    assert "with rounds 1" in report(experiment, "small", tmp_path / "results", overrides)


SMALL = [
    "--model.name",
    "logistic",
    "--data.records_per_client",
    "100",
    "--data.test_per_client",
    "50",
    "--data.public_records",
    "100",
]


def made(names, small_fashion, tmp_path, *more) -> list[dict]:  # noqa: F811
    places = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    argv = [
        *names,
        *SMALL,
        "--data.folder",
        str(small_fashion),
        "--tracking",
        "null",
        "--engine.device",
        "cpu",
        "--jobs",
        "1",
    ]
    assert main([*argv, *more, *places]) == 0
    return [read(path) for path in sorted(tmp_path.glob("results/*/*/*.json"))]


@pytest.mark.filterwarnings("ignore")
def test_a_run_holds_all_metrics_and_is_read_beside_its_reference(small_fashion, tmp_path, capsys):  # noqa: F811
    some = ["clustered.table6", "--rows", "dpfedavg_f_acc,dpfedavg_gap,oracle_f_acc", "--columns", "eps5"]
    cells = made(some, small_fashion, tmp_path, "--rounds", "2")
    assert {(cell["experiment"], cell["row"]) for cell in cells} == {
        ("clustered.table5", "dpfedavg"),
        ("clustered.table5", "oracle"),
        ("clustered.reference", "reference"),
    }
    oracle = next(cell for cell in cells if cell["row"] == "oracle")
    values = oracle["values"]
    assert values["clustering_accuracy"] == 100 and values["clusters_perfect"] == 1 == values["adjusted_rand_index"]
    assert values["minority_recall"] == 100 and values["models_down"] == values["models_up"] == 2
    means = [values[f"accuracy_{group}"] for group in range(4)]
    assert values["accuracy_minority"] == means[0] and values["accuracy_majority"] == pytest.approx(sum(means[1:]) / 3)
    assert values["accuracy"] == pytest.approx((3 * means[0] + 6 * sum(means[1:])) / 21)
    assert oracle["clients"]["true_group"] == [0] * 3 + [1] * 6 + [2] * 6 + [3] * 6
    assert len(set(oracle["clients"]["model"])) == 4 and all(loss > 0 for loss in oracle["clients"]["loss"])
    assert oracle["curves"]["clustering_accuracy"] == {"1": 100, "2": 100}
    plain = next(cell for cell in cells if cell["row"] == "dpfedavg")
    reference = next(cell for cell in cells if cell["row"] == "reference")
    assert "clustering_accuracy" not in plain["values"] and reference["epsilon_max"] is None
    shown = f"{fairness(plain, reference)['fairness_gap_accuracy']:.2f}"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["DPFedAvg: F_acc", shown] in rows and [
        "DPFedAvg: best - worst",
        f"{plain['values']['accuracy_gap']:.2f}",
    ] in rows


@pytest.mark.filterwarnings("ignore")
def test_groups_are_looked_for_after_one_round(small_fashion, tmp_path):  # noqa: F811
    """Random images: nothing can be found, and the run ends after a round all the same."""
    (cell,) = made(
        ["clustered.found", "--rows", "ours_num_clusters", "--columns", "rotation", "--seeds", "0"],
        small_fashion,
        tmp_path,
    )
    values = cell["values"]
    assert cell["rounds"] == 1 and values["num_clusters"] >= 1 and values["confident"] in (0, 1)
    assert set(values) >= {"clusters_perfect", "adjusted_rand_index", "separation", "silhouette"}
    assert len(cell["points"]) == 21 and max(x * x + y * y for x, y in cell["points"]) == pytest.approx(1)


def test_what_is_not_here_is_said_in_a_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DPFL_DATA", str(tmp_path))
    places = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs"), "--data.download", "false"]
    argv = ["clustered.table7", "--columns", "eps5", "--rows", "dpfedavg_all"]
    assert main([*argv, *places, "--tracking", "null"]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "cifar10" in said.err and "Traceback" not in said.err


@pytest.mark.filterwarnings("ignore")
def test_a_run_holds_what_tables_and_figures_read(small_fashion, tmp_path, capsys):  # noqa: F811
    rows = "uniform,ours,two_stage,privatefl"
    argv = ["selection.methods", "--rows", rows, "--columns", "fashion_mnist_gaussian", "--rounds", "12"]
    argv += ["--clients.count", "20", "--model.name", "logistic", "--evaluation.every", "6"]
    argv += ["--data.partition.min_records", "2", "--data.folder", str(small_fashion), "--tracking", "null"]
    places = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs"), "--jobs", "1"]
    assert main([*argv, "--engine.device", "cpu", *places]) == 0
    cells = {cell["row"]: cell for cell in map(read, tmp_path.glob("results/*/*/*.json"))}
    assert set(cells) == {"uniform", "ours", "two_stage", "privatefl"}
    for cell in cells.values():
        assert set(cell["test_curve"]) == {"6", "12"} and 0 <= cell["values"]["test_accuracy"] <= 100
        counts = cell["clients"]["participations"]
        assert sum(counts) == 12 * 4 and 0 < cell["values"]["equality"] <= 1
        assert cell["values"]["never"] == 5 * sum(not count for count in counts)
    assert cells["uniform"]["values"]["equality"] > max(
        cells[row]["values"]["equality"] for row in ("ours", "two_stage")
    )
    assert len(cells["two_stage"]["clients"]["unlikeness"]) == 20
    assert min(cells["two_stage"]["values"][name] for name in ("decides", "fitted_smoothness")) > 0


@pytest.mark.filterwarnings("ignore")
def test_a_regression_is_read_by_its_test_loss(tmp_path):
    argv = ["selection.regression", "--rows", "ours", "--seeds", "0", "--rounds", "5", "--tracking", "null"]
    places = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs"), "--jobs", "1"]
    assert main([*argv, "--evaluation.every", "5", "--engine.device", "cpu", *places]) == 0
    cells = [read(path) for path in tmp_path.glob("results/*/*/*.json")]
    assert len(cells) == 2
    for cell in cells:
        assert (
            cell["values"]["test_loss"] == pytest.approx(cell["test_curve"]["5"]) and "accuracy" not in cell["values"]
        )
