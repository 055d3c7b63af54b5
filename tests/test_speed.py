"""The benchmark: its output, that every contestant does the same work, and what the docs show of it."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest
import torch
from numba.core.registry import CPUDispatcher
from torch.nn.utils import parameters_to_vector

from dpfl_lightning.algorithms.robust_pca import PcpSettings
from dpfl_lightning.algorithms.robust_pca import robust_pca as pca
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.privacy.clipping.fast import FastClippedSum
from dpfl_lightning.privacy.clipping.gradient_sums import Totals
from experiments.speed import (
    class_gradients,
    clients,
    kernels,
    layers,
    matching,
    measure,
    parts,
    peers,
    ranks,
    robust_pca,
    sizes,
    supported,
)
from experiments.speed.__main__ import main
from experiments.speed.baselines import build_net, contestants
from experiments.speed.cases import CASES, CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, NUM_CLASSES, STEP_PARTS
from experiments.speed.measure import startup
from experiments.speed.peers import Peer
from experiments.speed.report import report, write_page

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]
SAVED = ROOT / "experiments" / "results" / "bench.json"
QUICK = ["--cases", "common,small_clients", "--repeats", "1", "--scale", "0.04"]  # 1 and 20 clients

#: what the slow test holds the package to, on any machine
FLOOR_VS_OPACUS = 2.0
FLOOR_VS_LOOP = 1.0


@pytest.fixture(autouse=True)
def threads_as_before():
    """The engine chooses for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench(capsys):
    """`bench(*words)`: standard output, standard error, and the results of its last line."""

    def run(*words: str) -> tuple[str, str, dict]:
        assert main([*words, "--json"]) == 0
        out, err = capsys.readouterr()
        return out, err, json.loads(out.splitlines()[-1])

    return run


@pytest.fixture
def page(tmp_path) -> Path:
    return Path(shutil.copy(ROOT / "docs" / "benchmarks.md", tmp_path / "page.md"))


def test_json_is_the_last_line_and_the_page_is_filled(bench, page, tmp_path, monkeypatch):
    monkeypatch.setitem(CASES, "common", dataclasses.replace(CASES["common"], records=640))
    saved = tmp_path / "bench.json"
    out, err, results = bench(*QUICK, "--save", str(saved), "--page", str(page))
    assert set(results) == {"common", "small_clients", "machine", "date"}
    for name, unit in (("common", "records_per_second"), ("small_clients", "clients_per_second")):
        case = results[name]
        assert case["ratio_vs_nonprivate"] > 0 and case["ratio_vs_opacus"] > 0
        assert set(case[unit]) == set(case["seconds_per_round"]) == {"ours", "nonprivate", "opacus"}
        assert all(value > 0 for value in case[unit].values())
    assert results["common"]["parameters"] == 28_938
    assert out.startswith("| ours is") and "common: opacus, round 1 of 1" in err
    assert json.loads(saved.read_text()) == results and report(results) in page.read_text()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--cases comon", ["--cases", "comon", "Did you mean `common`?"]),
        ("--case common", ["--case", "Did you mean `--cases`?"]),
        ("--repeats 0", ["--repeats", "at least 1", "0"]),
        ("--repeats x", ["--repeats", "'x'"]),
        ("--scale 1.5", ["--scale", "(0, 1]", "1.5"]),
        ("--workers 0", ["--workers", "at least 1"]),
        ("--device gpu", ["--device", "gpu", "cpu, cuda, auto"]),
        ("--cases startup --peers", ["--cases", "common", "startup"]),
        ("--peers --peers_python no/python", ["--peers_python", "no/python"]),
        ("--peers --device auto", ["--device", "cpu", "auto"]),
        ("--load nowhere.json", ["--load", "nowhere.json"]),
        ("--load experiments/results/flower.json", ["--load", "flower.json"]),
        ("--save no/folder/bench.json", ["--save", "no/folder"]),
        ("--page README.md", ["--page", "README.md", "marks"]),
        ("--device cuda", ["--device", "cuda", "torch finds no CUDA"]),
    ],
)
def test_a_mistake_is_one_line_and_costs_no_time(argv, words, capsys, monkeypatch):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU, so it is no mistake")
    monkeypatch.chdir(ROOT)
    assert main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and not out, (out, err)
    assert not [word for word in words if word not in err], err


@contextmanager
def counted_records():
    """Records that reach a net's last linear layer."""
    counts: list[int] = []

    def count(layer, inputs):
        if isinstance(layer, torch.nn.Linear) and layer.out_features == NUM_CLASSES:
            counts.append(len(inputs[0]))

    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    yield counts
    hook.remove()


@pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")
@pytest.mark.parametrize(
    ("name", "changed"), [("common", {"records": 640}), ("small_clients", {}), ("lstm", {}), ("transformer", {})]
)
def test_every_contestant_does_the_same_work(name, changed):
    """Each takes its records once, in expectation where batches are Poisson's, and the private ones are noised."""
    case = dataclasses.replace(CASES[name], clients=2, **changed)
    start = parameters_to_vector(build_net(case).parameters()).detach()
    steps = -(-case.records // case.batch_size)
    noise = LEARNING_RATE * NOISE_MULTIPLIER * CLIP_NORM / case.batch_size * (steps * len(start) / case.clients) ** 0.5
    for contestant in contestants(case, torch.device("cpu"), FastEngine(1)):
        with counted_records() as counts:
            moved = (contestant.round() - start).norm()
        assert torch.isfinite(moved) and moved > 0
        if contestant.name == "ours":
            assert moved > 0.9 * noise
            continue  # its layer rules run some layers more than once
        opacus = contestant.name == "opacus"  # Poisson: 1,280 records with a standard deviation of 34
        assert sum(counts) == pytest.approx(case.clients * case.records, rel=0.15 if opacus else 0)
        assert (moved > 0.9 * noise) == opacus


def test_start_up_is_quick_and_imports_little():
    start = startup(repeats=1)
    assert start["fit_help_seconds"] < 3 and start["import_seconds"] < 3
    assert not {"torch", "lightning"} & set(start["fit_help_imports"]) and start["import_imports"] == []
    code = "import sys; from experiments.speed.__main__ import main; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_scaling_is_measured_and_drawn(bench, page, tmp_path, monkeypatch):
    """Hardly more memory for eight times the clients; slow tests take thousands."""
    times = clients.client_times, sizes.parameter_times, sizes.batch_times
    monkeypatch.setattr(clients, "client_times", lambda log: times[0](log, clients=(20, 160), cohort=20, rounds=3))
    monkeypatch.setattr(sizes, "parameter_times", lambda log: times[1](log, (1000, 9000), repeats=1))
    monkeypatch.setattr(sizes, "batch_times", lambda log: times[2](log, (2, 4), repeats=1))
    for name, value in (("RANKS", (2,)), ("RECORDS", 64), ("ROUNDS", 1)):
        monkeypatch.setattr(ranks, name, value)

    def here(launcher, module, options, what):  # `test_ranks.py` starts ranks
        assert launcher[-1] == "--nproc_per_node=2" and module == ranks.__name__
        return {"round": ranks._measured(**options)}

    monkeypatch.setattr(ranks, "measured_apart", here)
    out, _, results = bench("--cases", "scaling", "--page", str(page))
    found = {name: list(one["of"].values()) for name, one in results["scaling"].items()}
    few, many = found["clients"]
    assert few["round"] > 0 and few["setup"] > 0
    assert few["end"] > -few["round"]  # what the last round takes longer than others: near 0 with few clients
    assert 50 < few["peak_mib"] < many["peak_mib"] * 1.1 and many["peak_mib"] < few["peak_mib"] * 1.1
    assert "| 160     |" in out and "20 of them in each round" in out
    assert list(results["scaling"]["parameters"]["of"]) == ["807", "8887"]
    assert all(0 < row["share"] < 1 and row["plain"] > 0 for row in found["parameters"])
    assert all(row["ratio"] == pytest.approx(row["step"] / row["plain"], abs=1e-3) for row in found["batch"])
    assert all(row["rate"] * row["seconds"] == pytest.approx(20 * 64, rel=1e-2) for row in found["ranks"])
    for name in results["scaling"]:
        assert f"scaling_{name}.svg" in page.read_text() and "</svg>" in (tmp_path / f"scaling_{name}.svg").read_text()


def test_a_run_that_fails_is_an_error():
    with pytest.raises(UserError, match=r"scaling only where runs with 20 clients work, got: .*no_such_module"):
        clients.measured_apart([], "no_such_module", {}, "20 clients")


def test_a_step_is_timed_by_part_and_left_as_it_was(bench, monkeypatch):
    real, places = parts.part_times, [vars(owner).copy() for owner in (FastClippedSum, Totals, CPUDispatcher)]
    monkeypatch.setattr(parts, "part_times", lambda repeats, log: real(repeats, log, nets=("common",)))
    out, _, results = bench("--cases", "parts", "--repeats", "1")
    row = results["parts"]["of"]["common"]
    assert sum(row[part] for part in STEP_PARTS) == pytest.approx(row["step"], abs=0.5)
    assert min(row[part] for part in STEP_PARTS) > 0 and 0 < row["python"] < row["step"] and row["plain"] > 0
    first, second, last = (2 * n / 1e6 for n in (28 * 28 * 16 * 25, 14 * 14 * 32 * 400, 1568 * 10))
    assert row["mflop"] == pytest.approx(first + second + 3 * last + (first + 2 * second) / 4, abs=1e-3)
    assert min(results["parts"][kind] for kind in ("gemm", "convolution")) > 1 and "| cnn_small | 64 " in out
    assert [vars(owner) for owner in (FastClippedSum, Totals, CPUDispatcher)] == places


def test_a_step_is_timed_with_and_without_a_compiled_loop(bench, monkeypatch):
    (_, owner, name, answer), used = kernels.KERNELS["float64_sums"], []
    really = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda grads: used.append(1) or really(grads))
    monkeypatch.setattr(kernels, "KERNELS", {"float64_sums": (("batch_16",), owner, name, answer)})
    out, _, results = bench("--cases", "kernels", "--repeats", "1")
    ratios = results["kernels"]["float64_sums"]["batch_16"]
    assert len(ratios) == 4 and ratios == sorted(ratios) and min(ratios) > 0 and "| float64_sums | batch_16 |" in out
    # 5 turns take two measures of 2 passes of 6 parameters with the loop, and one measure without; one pass is set-up
    assert 5 * 2 * 2 * 6 <= len(used) <= 5 * 2 * 2 * 6 + 6


# ---- parts beside plain forms


def test_parts_are_timed_beside_plain_forms(bench, monkeypatch):
    match, gradients = matching.matching_times, class_gradients.class_gradient_times
    monkeypatch.setattr(matching, "matching_times", lambda *args: match(*args, width=4, steps=1))
    monkeypatch.setattr(class_gradients, "class_gradient_times", lambda *args: gradients(*args, width=4))
    monkeypatch.setattr(robust_pca, "SHAPES", ((5, 400), (8, 300)))
    out, err, results = bench("--cases", "robust_pca,matching,class_gradients", "--repeats", "2", "--scale", "0.8")
    assert list(results["robust_pca"]) == ["4 x 400", "6 x 300"]
    for times in results["robust_pca"].values():
        assert len(times["seconds"]) == len(times["svd_seconds"]) == 2 and times["ratio_vs_svd"] > 0
    for name, size in (("matching", {"images": 100}), ("class_gradients", {"records": 640})):
        times = results[name]
        assert len(times["seconds"]) == len(times["loop_seconds"]) == 2 and times.items() >= size.items()
        ratios = [loop / ours for ours, loop in zip(times["seconds"], times["loop_seconds"], strict=True)]
        assert times["range_vs_loop"] == pytest.approx([min(ratios), max(ratios)], abs=1e-3)
    assert "robust PCA of 4 x 400 updates: " in out and "4 x 400, 2 of 2" in err
    assert "a plain loop over the classes takes" in out and "matching: loop, 2 of 2" in err
    assert "gradients of each of 10 classes without privacy, 640 records" in out


def test_robust_pca_is_compared_with_a_round_of_the_same_size():
    saved = json.loads(SAVED.read_text())
    times = saved["common"]["seconds_per_round"]["ours"], saved["robust_pca"]["20 x 28,938"]["seconds"]
    share = median(times[1]) / median(times[0])
    assert share < 0.15 and f"updates is {share:.1%} of a round" in report(saved)
    del saved["common"]
    assert "of a round of the common work" not in report(saved)


@pytest.mark.filterwarnings("ignore:robust PCA did not converge")
def test_the_textbooks_robust_pca_takes_the_same_steps():
    deltas = robust_pca.noisy_updates(6, 500)
    settings = PcpSettings(primal_tol=0, dual_tol=0, weight_tol=0, max_iterations=12)
    ours = pca(deltas.double(), settings).noise_var
    torch.testing.assert_close(robust_pca.textbook(deltas, iterations=12), ours, rtol=1e-9, atol=0)


def test_the_loop_takes_the_same_steps():
    """Except for images in which a unit is between on and off, where rounding decides."""
    start = matching.first_images().images
    steps = [make(4, torch.device("cpu")) for make in (matching.ours, matching.loop)]
    for _ in range(2):
        ours, theirs = (step().clone() for step in steps)
    moved = (theirs - start).flatten(0, 1).flatten(1).norm(dim=1)
    apart = (theirs - ours).flatten(0, 1).flatten(1).norm(dim=1) / moved
    assert bool((moved > 0).all()) and apart.median() < 1e-4 and apart.max() < 0.2


def test_the_loops_class_gradients_are_ours():
    x, y = class_gradients.records(16, torch.device("cpu"))
    ours, theirs = (make(4, x, y)() for make in (class_gradients.ours, class_gradients.loop))
    assert ours.shape == theirs.shape and (ours - theirs).norm() < 1e-3 * theirs.norm()


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", layers.LAYERS)
def test_the_sums_over_a_layer_are_the_same(name):
    """The same parameters stand in another order in Opacus' layers, so that norms are compared.

    With `batch_first`, Opacus' attention (1.6) views heads as places: it is as much work, but another function.
    """
    build, build_for_opacus, _ = layers.LAYERS[name]
    layer, other, x = build(), build_for_opacus(), layers.records(name, 3)
    first, second = (getattr(module, "layer", module) for module in (layer, other))
    second.load_state_dict(first.state_dict())
    ours, theirs = layers.ours(layer, x)(), layers.opacus(other, x)()
    assert ours.numel() == theirs.numel() and ours.norm() > 0
    if name != "MultiheadAttention":
        assert float(ours.norm()) == pytest.approx(float(theirs.norm()), rel=1e-3)


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_layers_are_timed_beside_opacus(bench, monkeypatch):
    monkeypatch.setattr(layers, "LAYERS", {name: layers.LAYERS[name] for name in ("LayerNorm", "GRU")})
    out, err, results = bench("--cases", "layers", "--repeats", "2")
    assert list(results["layers"]) == ["LayerNorm", "GRU"] and list(results["layers"]["GRU"]) == ["16", "64"]
    assert all(times["ratio_vs_opacus"] > 0 for times in results["layers"]["GRU"].values())
    assert "| GRU " in out and "GRU, batch 64: opacus, 2 of 2" in err


@pytest.mark.slow
def test_a_matching_step_is_no_slower_than_the_loop():
    times = matching.matching_times(3, torch.device("cpu"), lambda line: None)
    assert times["parameters"] == 317_706 and times["ratio_vs_loop"] >= FLOOR_VS_LOOP


# ---- peers


@pytest.fixture
def fake_peers(monkeypatch, tmp_path):
    """One that is not installed, one that fails, one that works; as scripts for this very Python."""
    works = """
import json, pathlib, sys
job = pathlib.Path(sys.argv[1])
for _ in range(json.loads(job.read_text())["rounds"]):
    assert sys.stdin.readline() == "go\\n"
    assert (job.parent / "net.pt").exists() and (job.parent / "client_0.pt").exists()
    print("chatter\\nDONE", flush=True)
"""
    fails = "import sys; sys.stdin.readline(); sys.exit('no Ray here')"
    for name, text in (("works", works), ("fails", fails)):
        (tmp_path / f"{name}.py").write_text(text)
    known = {
        "absent": Peer(tmp_path / "works.py", ("no_such_framework",), "no-such-framework"),
        "failing": Peer(tmp_path / "fails.py", ("torch",), "torch"),
        "flower": Peer(tmp_path / "works.py", ("torch",), "torch"),
    }
    monkeypatch.setattr(peers, "PEERS", known)
    monkeypatch.setattr(measure, "PEERS", known)


def test_a_missing_peer_is_named_and_the_others_are_measured(fake_peers, bench, monkeypatch):
    monkeypatch.setitem(CASES, "common", dataclasses.replace(CASES["common"], clients=1, records=128))
    out, err, results = bench("--cases", "common", "--repeats", "2", "--peers")
    common = results["common"]
    assert set(common["not_measured"]) == {"absent", "failing"}
    assert "pip install no-such-framework" in err and "status 1: no Ray here" in err
    assert len(common["seconds_per_round"]["flower"]) == len(common["seconds_per_round"]["ours_beside_flower"]) == 2
    smallest, largest = common["range_vs_flower"]
    assert 0 < smallest <= common["ratio_vs_flower"] <= largest
    assert "Flower" in out and "Not measured: absent" in out and "flower: torch" in out


def test_the_docs_show_the_saved_figures(page):
    write_page(page, json.loads(SAVED.read_text()))
    command = f"python -m experiments.speed --load {SAVED.relative_to(ROOT)} --page docs/benchmarks.md"
    assert page.read_text() == (ROOT / "docs" / "benchmarks.md").read_text(), f"write the page anew: {command}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["common", "small_clients"])
def test_rounds_are_much_faster_than_with_opacus(name, bench):
    assert bench("--cases", name, "--repeats", "3")[2][name]["ratio_vs_opacus"] >= FLOOR_VS_OPACUS


@pytest.mark.e2e
def test_the_page_of_what_is_supported_is_what_a_trial_finds():
    page = Path("docs/supported.md").read_text()
    rows = [line for line in supported.report({"date": "", "machine": {"cores": 0, "cpu": ""}}).splitlines()]
    known = [[cell.strip() for cell in line.split("|")[1:]] for line in page.splitlines() if line.startswith("|")]
    for row in rows:
        if row.startswith("|") and "---" not in row:
            cells = [cell.strip() for cell in row.split("|")[1:]]
            tried = [cell for cell in cells if cell not in ("-", "")]  # without speeds
            assert any(
                tried == [cell for cell in one if cell and not re.fullmatch(r"-|[0-9.]+ x", cell)] for one in known
            )


def test_a_layer_that_mixes_records_is_shown_as_refused():
    assert supported.support_of("BatchNorm2d").startswith("refused: mixes the records")
    assert supported.support_of("Linear") == "exact rule"
