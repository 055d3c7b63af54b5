"""SIGTERM, as docker stop, SLURM and systemd send it: real processes, stopped by a real signal."""

import _thread
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
import yaml
from mlflow.tracking import MlflowClient
from test_sweep import SMALL

from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.runtime.stopping import Terminated, between_rounds, passed_on, terminable
from dpfl_lightning.sites.node.service import Listener

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def usual_handlers():
    """Those of a command in the foreground: a shell lets what it runs in the background ignore Ctrl-C."""
    usual = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), signal.SIG_DFL)
    usual |= {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_sigterm_is_an_exception_once_and_the_former_handler_is_restored():
    with pytest.raises(Terminated), terminable():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # while the run is saved
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("line", range(5))
def test_of_two_signals_at_once_one_is_raised(line):
    """The second one arrives at a line of the handler of the first."""
    left = [line]

    def trace(frame, event, _):
        if frame.f_code.co_name != "note":
            return None
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                sys.settrace(None)
                frame.f_trace = None
                signal.raise_signal(signal.SIGTERM)
        return trace

    with pytest.raises(Terminated), terminable():
        sys.settrace(trace)
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            sys.settrace(None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("block", [nullcontext, between_rounds])
@pytest.mark.parametrize("count", [1, 2])
def test_a_signal_whose_exception_python_drops_comes_again(count, block, number, capfd):
    class Referred:
        pass

    def told(_):
        for _ in range(count):
            signal.raise_signal(number)

    one = Referred()
    reference = weakref.ref(one, told)
    with pytest.raises(KeyboardInterrupt), terminable(), block():
        if block is between_rounds:
            signal.raise_signal(number)  # which waits
        del one  # the callback drops exceptions
        for _ in range(100):
            time.sleep(0.02)
    assert reference() is None and "Traceback" not in capfd.readouterr().err


def test_a_signal_that_does_not_interrupt_a_waiting_node_ends_it(tmp_path):
    """It came just before the node began to wait for the next connection."""
    listener = Listener(None, tmp_path / "socket", 1.0)
    early = threading.Timer(0.3, _thread.interrupt_main, [signal.SIGTERM])
    late = threading.Timer(10.0, listener.close)
    begun = time.monotonic()
    for timer in (early, late):
        timer.start()
    with pytest.raises(Terminated), terminable():
        listener.serve()
    assert time.monotonic() - begun < 9, "the later close has ended it"
    late.cancel()
    listener.close()


def test_a_handler_of_the_process_stays():
    numbers = []
    signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number))
    with terminable():
        signal.raise_signal(signal.SIGTERM)
    assert numbers == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with between_rounds() as check:
        signal.raise_signal(signal.SIGTERM)
        check()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_only_the_main_thread_has_the_handler():
    inside = []

    def work():
        with terminable():
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [signal.SIG_DFL]


def test_a_first_signal_waits_for_the_end_of_the_round_and_a_second_does_not(capfd):
    """Ctrl-C and SIGTERM, in any order; each handler is restored."""
    signals = ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated), (signal.SIGHUP, Terminated))
    before = [signal.getsignal(number) for number, _ in signals]
    for first, ended in signals:
        done = []
        with pytest.raises(ended) as error, terminable(), between_rounds() as check:
            check()
            signal.raise_signal(first)
            assert "round is finished first" in capfd.readouterr().err
            done.append("the round")
            check()
            done.append("another round")
        assert done == ["the round"] and error.type is ended
        for second, ended_at_once in signals:
            with pytest.raises(ended_at_once) as error, terminable(), between_rounds():
                signal.raise_signal(first)
                signal.raise_signal(second)
                done.append("another round")
            assert done == ["the round"] and error.type is ended_at_once
    assert [signal.getsignal(number) for number, _ in signals] == before


def test_no_later_signal_interrupts_the_saving():
    """In a command and in a user's program: of five signals two count, and the handlers are the former ones again."""
    for outside in (terminable, nullcontext):
        saved = []
        with pytest.raises(KeyboardInterrupt), outside(), between_rounds():
            try:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.raise_signal(number)
                saved.append("the run")
                raise
        assert saved and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_helpers_receive_it_too():
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(Terminated), passed_on([helper]):
        raise Terminated
    assert helper.wait(timeout=10) == -signal.SIGTERM


def begun(words: list[str], folder: Path, file: str) -> subprocess.Popen:
    """A command that has written that file."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words]
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes)
    for _ in range(600):
        if list(folder.glob(file)):
            return process
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError("it did not begin")


def statuses(folder: Path) -> list[str]:
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return [run.info.status for run in runs]


@pytest.mark.parametrize("engine", ["fast", pytest.param("trainer", marks=pytest.mark.slow)])
def test_a_stopped_run_is_saved_and_names_the_command_that_resumes_it(engine, tmp_path):
    words = ["--config", str(ROOT / "conf" / "digits.yaml"), "--engine.name", engine]
    words = ["dpfl_lightning", "fit", *words, "--rounds", "500", "--output_dir", "run"]
    process = begun(words, tmp_path, "run/checkpoint.before.pt")  # after a first round, however slow the machine
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1]) == (143, "stopped by SIGTERM"), err
    assert "interrupted; resume with: python -m dpfl_lightning fit --resume run" in out
    assert statuses(tmp_path) == ["KILLED"] and "Traceback" not in err
    finished = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["round"]
    assert len(read_ledger(tmp_path / "run" / "ledger.jsonl")) == 5 * finished > 0, "no paid round is lost"


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
MOMENTS = {"start": "run/options.yaml", "middle": "run/checkpoint.pt", "end": "run/model.safetensors"}
TRIALS = [(number, count, moment) for number in SIGNALS for count in (1, 5) for moment in MOMENTS]
QUICK = [(signal.SIGINT, 5, "middle"), (signal.SIGHUP, 1, "middle"), (signal.SIGTERM, 5, "end")]


@pytest.mark.parametrize(
    ("number", "count", "moment"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in TRIALS if one not in QUICK)],
)
def test_no_signal_leaves_a_run_running_or_one_that_cannot_be_resumed(number, count, moment, tmp_path):
    """One signal or five, at the start, in a round, or while the end is written: saved, marked, one line."""
    config = ["--config", str(ROOT / "conf" / "digits.yaml"), "--output_dir", "run"]
    rounds = "500" if moment == "middle" else "3"
    process = begun(["dpfl_lightning", "fit", *config, "--rounds", rounds], tmp_path, MOMENTS[moment])
    for _ in range(count):
        if process.poll() is None:
            process.send_signal(number)
            time.sleep(0.1)
    _, err = process.communicate(timeout=120)
    if process.returncode != 0:  # else it had ended before
        words = "Ctrl-C" if number == signal.SIGINT else number.name
        assert (process.returncode, err.splitlines()[-1]) == (128 + number, f"stopped by {words}"), err
    assert "Traceback" not in err and "RUNNING" not in statuses(tmp_path), err
    if not (tmp_path / "run" / "options.yaml").is_file():  # before the ledger: nothing is charged, and nothing is left
        assert moment == "start" and statuses(tmp_path) == []
    elif rounds == "3":
        process = begun(["dpfl_lightning", "fit", "--resume", "run", "--quiet"], tmp_path, "run/options.yaml")
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0 and statuses(tmp_path) == ["FINISHED"], err
    else:
        finished = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["round"]
        assert len({charge.round for charge in read_ledger(tmp_path / "run" / "ledger.jsonl")}) <= finished + 1


@pytest.mark.slow  # two imports of torch and a database
def test_a_stopped_search_is_saved_and_leaves_no_worker_behind(tmp_path):
    raw = {**SMALL, "tracking": {"uri": f"sqlite:///{tmp_path}/mlflow.db"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(raw))
    words = shlex.split("--config mine.yaml --output_dir out --workers 2 --sweep.trials 500 --sweep.training.epochs 5")
    process = begun(["dpfl_lightning", "sweep", *words], tmp_path, "out/study.db")
    for _ in range(2):
        while "trial " not in process.stdout.readline():
            assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "The same command resumes the search" in err and "Traceback" not in err, err
    assert "RUNNING" not in statuses(tmp_path) and "KILLED" in statuses(tmp_path)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


# of a private search with two trials at once, and of a run on two ranks, that would charge for minutes
PARTS = {
    "search": "dpfl_lightning sweep --config mine.yaml --output_dir out --workers 2 --rounds 1000",
    "ranks": "torch.distributed.run --standalone --nproc_per_node 2 -m dpfl_lightning fit --config digits "
    "--rounds 5000 --tracking null --output_dir out",
}


@pytest.mark.parametrize("kind", PARTS)
def test_parts_of_a_killed_command_charge_nothing_more(kind, tmp_path):
    """SIGKILL to the process that started them: it cannot tell them."""
    search = {**SMALL["sweep"], "objective": "private", "training": {}, "trials": 4}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**SMALL, "sweep": search}))

    def lines() -> dict[Path, int]:
        found = {path: path.read_bytes().count(b"\n") for path in tmp_path.glob("out/**/ledger.jsonl")}
        return {path: count for path, count in found.items() if count > 1}  # beside the header

    process = begun(PARTS[kind].split(), tmp_path, "out/**/ledger.jsonl")
    try:
        while len(lines()) < (2 if kind == "search" else 1):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.kill()
        process.wait()
        before = lines()
        _, err = process.communicate(timeout=60)  # until its last part has ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    after = lines()
    assert after.keys() == before.keys(), "no further trial begins"
    more = sum(after.values()) - sum(before.values())
    assert more <= 5, "at most the charge, of five clients, that was being written"
    assert "stopped by the end of the process that started it" in err and "Traceback" not in err, err
