"""The benchmark: its output, that every contestant does the same work, and what its page shows."""

import dataclasses
import json
import re
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from dpfl_lightning.federated.client.engines.fast import FastEngine
from experiments.flower import __main__ as flower
from experiments.speed import layers, supported
from experiments.speed.__main__ import main
from experiments.speed.baselines import build_net, contestants
from experiments.speed.cases import CASES, CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, NUM_CLASSES
from experiments.speed.report import PAGE, page

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]
SAVED = ROOT / "experiments" / "results" / "bench.json"
QUICK = ["--cases", "common,small_clients", "--repeats", "1", "--scale", "0.04"]  # 1 and 20 clients

#: what the slow test holds the package to, on any machine
FLOOR_VS_OPACUS = 2.0


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


def test_json_is_the_last_line_and_the_page_is_written(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.speed.__main__.PAGE", tmp_path / "page.md")
    monkeypatch.setitem(CASES, "common", dataclasses.replace(CASES["common"], records=640))
    saved = tmp_path / "bench.json"
    out, err, results = bench(*QUICK, "--save", str(saved), "--page")
    assert set(results) == {"common", "small_clients", "machine", "date"}
    for name, unit in (("common", "records_per_second"), ("small_clients", "clients_per_second")):
        case = results[name]
        assert case["ratio_vs_nonprivate"] > 0 and case["ratio_vs_opacus"] > 0
        assert set(case[unit]) == set(case["seconds_per_round"]) == {"ours", "nonprivate", "opacus"}
        assert all(value > 0 for value in case[unit].values())
    assert results["common"]["parameters"] == 28_938
    assert out.startswith("| ours is") and "common: opacus, round 1 of 1" in err
    assert json.loads(saved.read_text()) == results and (tmp_path / "page.md").read_text() == page(results)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--cases comon", ["--cases", "comon", "Did you mean `common`?"]),
        ("--repeats 0", ["--repeats", "at least 1", "0"]),
        ("--scale 1.5", ["--scale", "(0, 1]", "1.5"]),
        ("--device gpu", ["--device", "gpu", "cpu, cuda, auto"]),
        ("--cases startup --peers", ["--cases", "common", "startup"]),
        ("--peers --peers_python no/python", ["--peers_python", "no/python"]),
        ("--load experiments/results/flower.json", ["--load", "flower.json"]),
        ("--save no/folder/bench.json", ["--save", "no/folder"]),
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
    try:
        yield counts
    finally:
        hook.remove()


@pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("common", {"records": 640}),
        ("persons", {"records": 640}),
        ("small_clients", {}),
        ("lstm", {}),
        ("transformer", {}),
    ],
)
def test_every_contestant_does_the_same_work(name, changed):
    """Each takes its records once, in expectation where batches are Poisson's, and the private ones are noised."""
    case = dataclasses.replace(CASES[name], clients=2, **changed)
    start = parameters_to_vector(build_net(case).parameters()).detach()
    steps = -(-case.records // case.batch_size)
    noise = LEARNING_RATE * NOISE_MULTIPLIER * CLIP_NORM / case.batch_size * (steps * len(start) / case.clients) ** 0.5
    for contestant in contestants(case, torch.device("cpu"), FastEngine(1)):
        ours = contestant.name in ("ours", "records")  # layer rules run some layers more than once
        with nullcontext([]) if ours else counted_records() as counts:
            moved = (contestant.round() - start).norm()
        assert torch.isfinite(moved) and moved > 0
        if ours:
            assert moved > 0.9 * noise
            continue
        opacus = contestant.name == "opacus"  # Poisson: 1,280 records with a standard deviation of 34
        assert sum(counts) == pytest.approx(case.clients * case.records, rel=0.15 if opacus else 0)
        assert (moved > 0.9 * noise) == opacus


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


# ---- peers


def test_the_page_shows_the_saved_figures():
    command = f"python -m experiments.speed --load {SAVED.relative_to(ROOT)} --page"
    assert PAGE.read_text() == page(json.loads(SAVED.read_text())), f"write the page anew: {command}"


def test_the_page_of_flower_shows_the_saved_figures():
    command = "python -m experiments.flower speed --only --page"
    saved = json.loads(flower.RESULTS.read_text())
    assert flower.PAGE.read_text() == flower.page(saved), f"write the page anew: {command}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["common", "small_clients"])
def test_rounds_are_much_faster_than_with_opacus(name, bench):
    assert bench("--cases", name, "--repeats", "3")[2][name]["ratio_vs_opacus"] >= FLOOR_VS_OPACUS


@pytest.mark.e2e
def test_the_page_of_what_is_supported_is_what_a_trial_finds():
    kept = supported.PAGE.read_text().splitlines()
    rows = [
        line for line in supported.report({"layers": {}, "date": "", "machine": {"cores": 0, "cpu": ""}}).splitlines()
    ]
    known = [[cell.strip() for cell in line.split("|")[1:]] for line in kept if line.startswith("|")]
    for row in rows:
        if row.startswith("|") and "---" not in row:
            cells = [cell.strip() for cell in row.split("|")[1:]]
            tried = [cell for cell in cells if cell not in ("-", "")]  # without speeds
            assert any(
                tried == [cell for cell in one if cell and not re.fullmatch(r"-|[0-9.]+ x", cell)] for one in known
            )


def test_every_task_has_a_case():
    assert list(supported.TASK_CASES) == list(supported.TASKS)
