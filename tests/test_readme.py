"""Every block of README.md but the test command runs, long ones shrunken."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import ranked_runs
import warm
from test_conf import shrunken, small_fashion  # noqa: F401 (a fixture)

from dpfl_lightning.config.load import load
from dpfl_lightning.federated.server.strategy import HOOKS, Strategy

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"(<!-- test command -->\n)?```(bash|python)\n(.*?)```", README, re.DOTALL)
BASH = [text for mark, kind, text in BLOCKS if kind == "bash" and not mark]
PYTHON = [text for _, kind, text in BLOCKS if kind == "python"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with the configurations, as a clone has them."""
    folder = tmp_path_factory.mktemp("clone")
    for part in ("conf", "sweeps"):
        shutil.copytree(ROOT / part, folder / part)
    return folder


def run(command: str, folder: Path) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_warm(command: str, folder: Path) -> None:
    """The same for `python ...`, without importing the libraries anew; `test_the_main_command` shows that it starts."""
    python, *words = shlex.split(command)
    assert python == "python"
    process = warm.Process(*words, cwd=folder)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, f"{command}\n{out}\n{err}"


def test_the_main_command(workplace, small_fashion):  # noqa: F811
    (command,) = [text for text in BASH if "conf/fmnist.yaml" in text]
    set_up, install, fit = command.strip().split(" && ")
    assert set_up == "python3 -m venv .venv" and install.endswith("-c constraints.txt .")
    short = " ".join(map(shlex.quote, shrunken(workplace / "conf" / "fmnist.yaml", small_fashion)[2:]))
    out = run(f"{fit.replace('.venv/bin/python', 'python')} {short}", workplace)
    assert "Where to look next" in out


def test_the_commands_one_after_the_other(workplace):
    starts = ("python -m dpfl_lightning", "python -m experiments.papers")
    commands = [line for text in BASH for line in text.strip().splitlines() if line.startswith(starts)]
    assert len(commands) >= 8
    for command in commands:
        short = " --rounds 2" if "--config conf/digits.yaml" in command and ".fit" in command else ""
        if ".sweep" in command:
            short = " --rounds 2 --sweep.trials 2 --sweep.training.epochs 1"
        if ".audit" in command:  # a sound build is refuted once in 10,000 runs
            short = " --rounds 2 --releases 50 --confidence 0.9999 --for_clients 0"
        run_warm(command + short, workplace)
    assert (workplace / "runs" / "digits_seeds" / "result.json").is_file()


def ranks_lines(start: str) -> list[str]:
    return [line for text in BASH for line in text.splitlines() if line.startswith(start)]


def all_at_once(commands: list[tuple[str, dict[str, str]]], folder: Path) -> str:
    """What the commands print together; all end well. The ranks that torchrun starts import everything anew."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    python = {"torchrun": ["-m", "torch.distributed.run"], "python": []}
    started = []
    for command, more in commands:
        first, *rest = shlex.split(command)
        started.append(warm.Process(*python[first], *rest, cwd=folder, env=environment | more))
    output = ["".join(process.communicate(timeout=120)) for process in started]
    assert [process.returncode for process in started] == [0] * len(started), output
    return "".join(output)


SHORT = " --rounds 2 --tracking null"


def test_ranks_on_one_host(workplace):
    (command,) = ranks_lines("torchrun --standalone")
    assert ", 2 ranks" in all_at_once([(command + SHORT, {})], workplace)


@pytest.mark.slow
def test_ranks_on_two_hosts(workplace):
    """Both on this machine."""
    (command,) = ranks_lines("torchrun --nnodes 2")
    command = command.replace("head:29500", f"127.0.0.1:{ranked_runs.free_port()}")
    output = all_at_once([(command + SHORT, {})] * 2, workplace)
    assert output.count(", 4 ranks") == 1


@pytest.mark.slow
def test_ranks_by_slurm(workplace):
    """What `srun` would start, with its variables."""
    (line,) = ranks_lines("srun --nodes 2 --ntasks-per-node 2 ")
    command, port = line[line.index("python") :] + SHORT, ranked_runs.free_port()
    output = all_at_once([(command, ranked_runs.slurm(rank, 2, 2, port)) for rank in range(4)], workplace)
    assert output.count(", 4 ranks") == 1


def test_the_tracking_page_answers(workplace):
    (command,) = [text.strip() for text in BASH if text.startswith("mlflow ui")]
    run_warm("python -m dpfl_lightning.fit --config conf/digits.yaml --rounds 1", workplace)
    port = ranked_runs.free_port()
    words = shlex.split(command)
    words[0] = str(Path(sys.executable).parent / words[0])
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    few = ["--port", str(port), "--workers", "1"]  # each worker imports MLflow anew
    server = subprocess.Popen([*words, *few], cwd=workplace, start_new_session=True, **quiet)
    try:
        for _ in range(240):
            try:
                page = urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).read()
                break
            except OSError:
                assert server.poll() is None, "the server ended"
                time.sleep(0.5)
        assert b"MLflow" in page
    finally:
        os.killpg(server.pid, 15)
        server.wait()


@pytest.mark.parametrize("block", PYTHON, ids=["data", "loss", "strategy"])
def test_python_blocks(block, workplace):
    (workplace / "block.py").write_text(block)
    run_warm("python block.py", workplace)


def test_ci_runs_the_very_test_command():
    (command,) = [text.strip() for mark, kind, text in BLOCKS if mark]
    pattern = "/<!-- test command -->/,/```$/p"
    assert pattern in (ROOT / ".ci" / "run").read_text()
    script = f"sed -n '{pattern}' README.md | sed -e '/^<!--/d' -e '/^```/d'"
    assert subprocess.run(script, shell=True, cwd=ROOT, capture_output=True, text=True).stdout.strip() == command


def test_container_commands_name_real_options(monkeypatch):
    """What follows the image's name are options of `fit`; tests/test_dockerfile.py runs the image's steps."""
    monkeypatch.chdir(ROOT)
    (block,) = [text for text in BASH if text.startswith("docker build")]
    lines = [line for line in block.splitlines() if line.startswith("docker run")]
    runs = [line.split(" dpfl ", 1) for line in lines if " dpfl " in line]
    assert len(runs) == 2
    for flags, words in runs:
        if "--entrypoint mlflow" in flags:
            assert shlex.split(words)[:1] == ["ui"] and "sqlite:////results/mlflow.db" in words
        else:
            assert load(shlex.split(words))[0].data.name == "digits"


def test_the_recipe_of_strategies_runs_and_names_every_hook():
    page = (ROOT / "docs" / "extending.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block, names := {})
    assert names["Uniform"].role == "base"
    missing = [hook for hook in HOOKS if callable(getattr(Strategy, hook)) and f"`{hook}(" not in page]
    assert not missing
