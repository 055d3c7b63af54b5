"""Several processes, one run: the same bits, one voice, and a clear end when one dies."""

import itertools
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import ranked_runs
import torch
import warm
from conftest import FIXED_KEY
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from dpfl_lightning.commands.fit import main as fit
from dpfl_lightning.federated.transport.ranked import spread
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.runtime.launcher import launched

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("in_the_repository")]

ROOT = Path(__file__).parents[2]
DIGITS = ["--config", "conf/digits.yaml", "--tracking", "null", "--privacy.noise_key", FIXED_KEY]
OWN = "{class_path: torchmetrics.classification.MulticlassMatthewsCorrCoef, init_args: {num_classes: 10}}"
DIGITS += ["--evaluation.metrics", f"[auroc, {OWN}]"]  # rank 0 alone computes them


@pytest.fixture
def torchrun():
    """What still lives at the end is killed, with all that it started."""
    processes: list[warm.Process] = []

    def start(ranks: int, *command: str) -> warm.Process:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        processes.append(process := warm.Process(*run, *command, env=environment))
        return process

    yield start
    for process in processes:
        for pid in [*_children(process.pid), process.pid]:
            if process.poll() is None:
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def srun():
    """What SLURM's `srun` does: a process for each task, known by variables; nobody looks after them."""
    processes: list[warm.Process] = []

    def start(ranks: int, *command: str) -> list[warm.Process]:
        port = ranked_runs.free_port()
        environments = [{**os.environ, **ranked_runs.slurm(rank, 1, ranks, port)} for rank in range(ranks)]
        processes.extend(started := [warm.Process(*command, env=environment) for environment in environments])
        return started

    yield start
    for process in processes:
        process.kill()
        process.wait()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(one) for one in tasks.read_text().split()] if tasks.exists() else []


def _rank(agent: warm.Process, rank: int) -> int:
    """The process of that rank under torchrun."""
    for pid in _children(agent.pid):
        if f"RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes().replace(b"LOCAL_RANK", b""):
            return pid
    raise AssertionError(f"no rank {rank}")


def _lines(folder: Path) -> int:
    ledger = folder / "ledger.jsonl"
    return len(ledger.read_bytes().splitlines()) if ledger.exists() else 0


def _wait_for_rounds(folder: Path, rounds: int, process: warm.Process) -> None:
    while _lines(folder) < 5 * rounds:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def _ended(process: warm.Process, seconds: float = 120) -> tuple[int, str, str]:
    """Its status, and what it wrote to stdout and stderr."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def _same_run(ours: Path, theirs: Path) -> None:
    models = [load_file(folder / "model.safetensors") for folder in (ours, theirs)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])
    results = [json.loads((folder / "result.json").read_text()) for folder in (ours, theirs)]
    for result in results:
        assert result["ledger"]["lines"] == len(read_ledger(ours / "ledger.jsonl")) + 1
        times = "wall_seconds", "training_seconds", "client_seconds", "records_per_second"
        for name in (*times, "output_dir", "ledger"):
            del result[name]
    assert results[0] == results[1]
    assert read_ledger(ours / "ledger.jsonl") == read_ledger(theirs / "ledger.jsonl")


def test_the_command_gives_the_same_run_on_ranks(srun, tmp_path):
    """`test_readme.py` starts it by torchrun."""
    argv = [*DIGITS, "--rounds", "2", "--output_dir"]
    processes = srun(2, "-m", "dpfl_lightning.fit", *argv, str(tmp_path / "ranks"))
    assert fit([*argv, str(tmp_path / "alone")]) == 0
    (status, out, err), other = [_ended(one) for one in processes]
    assert status == 0 and other == (0, "", ""), "one voice"
    _same_run(tmp_path / "ranks", tmp_path / "alone")
    assert out.count("Where to look next") == 1 and out.count("round 2/2") == 1
    assert ", 2 ranks, device cpu" in out and "distributed" not in err


def test_everything_that_a_strategy_may_do_gives_the_same_bits_on_ranks(srun, tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    processes = srun(2, str(ROOT / "tests" / "ranked_runs.py"), str(together))
    alone.mkdir()
    ranked_runs.main(alone)
    ended = [_ended(process) for process in processes]
    assert ended == [(0, "", "")] * 2, "nobody prints"
    ours, theirs = (torch.load(folder / "results.pt", weights_only=True) for folder in (together, alone))
    broken = ours.pop("broken client")
    protected = [results.pop("protected")["models"] for results in (ours, theirs)]
    for name in ranked_runs.RUNS:
        same = {"rtol": 0, "atol": 0, "msg": lambda text, name=name: f"{name}: {text}"}
        torch.testing.assert_close(ours[name], theirs[name], **same)
    notes = [json.loads((folder / "broken records" / "private.json").read_text()) for folder in (together, alone)]
    assert notes[0] == notes[1] and all(client["not_finite"] > 0 for client in notes[0]["clients"])
    assert not torch.equal(*protected), "each rank draws fresh noise"
    assert len(read_ledger(together / "protected" / "ledger.jsonl")) == 4 * 3
    assert set(ours["selection"]["callbacks"]["Selection 0"]["answers"]) == {0, 1, 2, 3}
    kept = {client: [*names] for client, names in ours["personal"]["clients"]["kept"].items()}
    assert kept == {client: ["personal"] for client in range(4)}
    expected = load_file(alone / "trained" / "model.safetensors")
    for rank in (0, 1):
        for ranks_model in torch.load(together / f"trained_{rank}.pt", weights_only=True):
            torch.testing.assert_close(ranks_model, expected, rtol=0, atol=0, msg=f"rank {rank} has the trained model")
    assert broken["error"].startswith("client ") and "On rank 1" in broken["notes"][0]
    assert len(read_ledger(together / "broken client" / "ledger.jsonl")) == 4, "it was charged before it began"


STOPPED = {
    signal.SIGTERM: "stopped by SIGTERM",
    signal.SIGINT: "stopped by Ctrl-C",
    signal.SIGKILL: "error: `ranks` must all run until the run ends, got the end of another rank. The run was saved",
}


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_run_that_is_stopped_or_loses_a_rank_goes_on_by_the_same_command(number, torchrun, tmp_path):
    """The launcher is stopped at a random moment, or a rank is killed; one process goes on."""
    argv = [*DIGITS, "--rounds", "60", "--resume", "auto", "--output_dir"]
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    process = torchrun(2, "-m", "dpfl_lightning.fit", *argv, str(broken))
    _wait_for_rounds(broken, 3, process)
    time.sleep(random.uniform(0.0, 0.5))
    os.kill(_rank(process, 1) if number == signal.SIGKILL else process.pid, number)
    status, out, err = _ended(process, seconds=30)
    assert status != 0 and not (broken / "result.json").exists() and "Stopped after round" in out
    assert err.count(STOPPED[number]) == 1, err
    assert err.count("Traceback") == 1, "that of torchrun itself"
    assert fit([*argv, str(broken)]) == 0
    assert fit([*argv, str(unbroken)]) == 0
    _same_run(broken, unbroken)


def test_when_rank_0_dies_the_others_end_by_themselves(srun, tmp_path):
    ranks = srun(2, "-m", "dpfl_lightning.fit", *DIGITS, "--rounds", "2000", "--output_dir", str(tmp_path / "run"))
    _wait_for_rounds(tmp_path / "run", 2, ranks[0])
    ranks[0].kill()
    status, out, err = _ended(ranks[1], seconds=10)
    assert (status, out, err) == (2, "", "")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_peer_never_starts_ends_with_a_sentence(rank, tmp_path):
    """The timeout, of minutes, is shortened; without one of ours, torch waits for half an hour."""
    script = tmp_path / "alone.py"
    script.write_text(
        "import datetime, sys\n"
        "from dpfl_lightning import fit\n"
        "from dpfl_lightning.federated.transport import ranks\n"
        "ranks._JOINING = datetime.timedelta(seconds=2)\n"
        "sys.exit(fit.main(sys.argv[1:]))\n"
    )
    environment = {**os.environ, **ranked_runs.slurm(rank, 1, 2, ranked_runs.free_port())}
    process = warm.Process(str(script), *DIGITS, "--output_dir", str(tmp_path / "run"), env=environment)
    assert process.wait(timeout=60) == 2
    assert f"`ranks` must all find each other, got on rank {rank} of 2" in process.communicate()[1]
    assert not (tmp_path / "run").exists()


def test_a_mistake_is_told_once_and_is_status_2_on_every_rank(srun):
    ended = [_ended(process) for process in srun(2, "-m", "dpfl_lightning.fit", *DIGITS, "--rouns", "3")]
    assert [status for status, _, _ in ended] == [2, 2]
    assert ended[0][2].startswith("error: ") and "Did you mean `--rounds`" in ended[0][2] and ended[1][1:] == ("", "")


@pytest.mark.slow
def test_ranks_with_other_data_are_refused(srun, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom ranked_runs import make_loop\nfrom dpfl_lightning.errors import command\n"
        "from dpfl_lightning.runtime.launcher import launched\n"
        "def main(argv):\n    loop = make_loop(sys.argv[1])\n"
        "    loop.population.x[0, 0] += launched().rank\n    loop.run()\n"
        "sys.exit(command(main)())\n"
    )
    ended = [_ended(process) for process in srun(2, str(script), str(tmp_path / "run"))]
    assert [status for status, _, _ in ended] == [2, 2]
    assert "`ranks` must all have the same data, got 'another on rank 1'" in ended[0][2]


@given(st.lists(st.floats(0.0, 1e6), max_size=8), st.integers(1, 4))
def test_work_is_spread_whole_and_evenly(costs, ranks):
    pieces = spread(costs, ranks)
    assert len(pieces) == ranks and sorted(itertools.chain(*pieces)) == list(range(len(costs)))
    assert all(part == sorted(part) for part in pieces)
    loads = [sum(costs[piece] for piece in part) for part in pieces]
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0.0) * (1 + 1e-9)
    assert not costs or pieces[0], "rank 0 works too"


def test_launchers_are_known_by_their_variables():
    torchrun = {"TORCHELASTIC_RUN_ID": "", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    srun = {"STEP_NUM_TASKS": "4", "NTASKS": "4", "NNODES": "2", "PROCID": "2", "LOCALID": "0"}
    for environment, expected in (
        ({}, (0, 1, 0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (0, 1, 0, 1)),  # no launcher that we know
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, (0, 1, 0, 1)),  # a batch script without srun
        (torchrun, (3, 4, 1, 2)),
        ({f"SLURM_{name}": value for name, value in srun.items()}, (2, 4, 0, 2)),
    ):
        assert launched(environment)[1:] == expected, environment
