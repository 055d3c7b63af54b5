"""Every block of README.md (but its test command) and of the pages in PAGES runs, long ones shrunken."""

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

from dpfl_lightning.__main__ import COMMANDS
from dpfl_lightning.config.load import load
from dpfl_lightning.federated.server.strategy import HOOKS, Strategy
from experiments import picture

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = ["README.md", "docs/index.md", "docs/tutorials/first_run.md", "docs/choosing.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "howto").glob("*.md"))
BLOCKS = [
    (page, mark, kind, text)
    for page in PAGES
    for mark, kind, text in re.findall(
        r"(<!-- test command -->\n)?```(bash|python|yaml)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL
    )
]
(FIRST_RUN,) = [text for _, _, kind, text in BLOCKS if kind == "bash" and text.startswith("dpfl init")]
#: different commands of all pages, in their order
LINES = list(
    dict.fromkeys(
        line
        for _, mark, kind, text in BLOCKS
        if kind == "bash" and not mark and text != FIRST_RUN
        for line in text.splitlines()
    )
)
PYTHON = [(page, text) for page, _, kind, text in BLOCKS if kind == "python"]
YAML = [(page, text) for page, _, kind, text in BLOCKS if kind == "yaml"]
COMPLETION = 'eval "$(dpfl completion bash)"'
PAGE_OF_MLFLOW = "MLFLOW_DISABLE_TELEMETRY=true mlflow ui"
INSTALL = "pip install -q -c constraints.txt '.[all]'"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with the configurations, as a clone has them."""
    folder = tmp_path_factory.mktemp("clone")
    for part in ("conf", "sweeps"):
        shutil.copytree(ROOT / part, folder / part)
    return folder


def lines(*starts: str) -> list[str]:
    return [line for line in LINES if line.startswith(starts)]


def run(command: str, folder: Path) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_warm(command: str, folder: Path) -> str:
    """The same for `dpfl` and `python`, without importing the libraries anew; `test_the_main_command` starts them."""
    program, *words = shlex.split(command)
    assert program in ("dpfl", "python")
    words = ["-m", "dpfl_lightning", *words] if program == "dpfl" else words
    process = warm.Process(*words, cwd=folder)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, f"{command}\n{out}\n{err}"
    return out


def test_every_command_has_a_test_here():
    known = ("dpfl ", "python -m experiments.papers", "torchrun ", "srun ", PAGE_OF_MLFLOW, "docker ", COMPLETION)
    installs = [line for line in LINES if line.startswith("python3 -m venv") and INSTALL in line]
    assert set(LINES) == {*lines(*known), *installs, *lines('echo "POSTGRES_PASSWORD=', "export DPFL_ACCOUNT=")}


def test_the_main_command(workplace, small_fashion):  # noqa: F811
    (command,) = [line for line in lines("python3 -m venv") if "conf/fmnist.yaml" in line]
    set_up, install, fit = command.split(" && ")
    assert set_up == "python3 -m venv .venv" and install == f".venv/bin/{INSTALL}"
    short = " ".join(map(shlex.quote, shrunken(workplace / "conf" / "fmnist.yaml", small_fashion)[2:]))
    out = run(f"{fit.replace('.venv/bin/python', 'python')} {short}", workplace)
    assert "Where to look next" in out


def test_the_first_run(workplace):
    init, *steps = FIRST_RUN.splitlines()
    init, folder = init.split(" && cd ")
    run_warm(init, workplace)
    for command in steps:
        run_warm(command, workplace / folder)
    assert (workplace / folder / "report.html").is_file()


def test_the_commands_one_after_the_other(workplace, small_fashion):  # noqa: F811
    commands = [*lines("dpfl ", "python -m experiments.papers"), COMPLETION[len('eval "$(') : -2]]
    assert len(commands) >= 20
    for command in commands:
        short = ""
        if re.search(r"fit --config (conf/digits\.yaml|digits)\b", command) and "--print_config" not in command:
            short = " --rounds 2" + " --tracking null" * ("--tracking" not in command)  # MLflow has a test below
        if re.search(r"--config (conf/fmnist\.yaml|fmnist)\b", command):
            short = " " + shlex.join(shrunken(workplace / "conf" / "fmnist.yaml", small_fashion)[2:])
        if command.startswith("dpfl sweep"):
            short = " --rounds 2 --sweep.trials 2 --sweep.training.epochs 1"
        if command.startswith("dpfl audit"):  # a sound build is refuted once in 10,000 runs
            short = " --rounds 2 --releases 50 --confidence 0.9999 --for_clients 0"
        run_warm(command + short, workplace)
    assert (workplace / "runs" / "digits_seeds" / "result.json").is_file()
    assert "noise_aware" in (workplace / "comparison.html").read_text()


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
    (command,) = lines("torchrun --standalone")
    assert ", 2 ranks" in all_at_once([(command + SHORT, {})], workplace)


@pytest.mark.slow
def test_ranks_on_two_hosts(workplace):
    """Both on this machine."""
    (command,) = lines("torchrun --nnodes 2")
    command = command.replace("head:29500", f"127.0.0.1:{ranked_runs.free_port()}")
    output = all_at_once([(command + SHORT, {})] * 2, workplace)
    assert output.count(", 4 ranks") == 1


@pytest.mark.slow
def test_ranks_by_slurm(workplace):
    """What `srun` would start, with its variables."""
    (line,) = lines("srun --nodes 2 --ntasks-per-node 2 ")
    command, port = line[line.index("python") :] + SHORT, ranked_runs.free_port()
    output = all_at_once([(command, ranked_runs.slurm(rank, 2, 2, port)) for rank in range(4)], workplace)
    assert output.count(", 4 ranks") == 1


def test_the_tracking_page_answers(workplace):
    (command,) = lines(PAGE_OF_MLFLOW)
    run_warm("dpfl fit --config conf/digits.yaml --rounds 1", workplace)
    port = ranked_runs.free_port()
    words = shlex.split(command.removeprefix("MLFLOW_DISABLE_TELEMETRY=true "))
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
        os.killpg(server.pid, 9)  # a graceful end may wait for connections
        server.wait()


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=[page for page, _ in PYTHON])
def test_python_blocks(page, block, workplace):
    (workplace / "block.py").write_text(block)
    out = run_warm("python block.py", workplace)
    if page == "README.md":  # which states what it prints; five runs had 91.9 to 95.3
        accuracy, spent = out.strip().splitlines()[-2:]
        assert 85 < float(re.fullmatch(r"test accuracy ([\d.]+)%", accuracy)[1]) <= 100
        assert f"`{spent}`" in README


MY_MODULE = """
import torch
from dpfl_lightning.strategies.aggregation.uniform import Uniform as SquareRootOfSize
from torchmetrics.classification import MulticlassMatthewsCorrCoef

class MyMetric(MulticlassMatthewsCorrCoef):
    def __init__(self):
        super().__init__(num_classes=10)

class MyModel(torch.nn.Sequential):
    def __init__(self, width):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
"""


@pytest.mark.parametrize(("page", "block"), YAML, ids=[page for page, _ in YAML])
def test_yaml_blocks(page, block, tmp_path):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_module.py").write_text(MY_MODULE)
    patients = [
        f"{('berlin', 'lyon', 'oslo')[n % 3]},{n % 70},{'fm'[n % 2]},{('no', 'yes')[n % 5 > 2]}" for n in range(400)
    ]
    (tmp_path / "patients.csv").write_text("\n".join(["hospital,age,sex,ill", *patients]))
    (tmp_path / "raw").mkdir()
    admissions = [
        f"P{n},2022-03-{n % 28 + 1:02d},{n % 70},{'FM'[n % 2]},{n % 9 or ''},{('no', 'yes')[n % 5 > 2]}"
        for n in range(80)
    ]
    (tmp_path / "raw" / "bergen.csv").write_text("\n".join(["patient_id,admitted,age,sex,crp,died", *admissions]))
    other = [
        f"P{n};{n % 28 + 1:02d}/03/2022;{n % 70},0;{('female', 'male')[n % 2]};{n % 9 or '?'};{int(n % 5 > 2)}"
        for n in range(80)
    ]
    (tmp_path / "raw" / "cork.csv").write_text("\n".join(["patient_id;admitted;age;sex;crp;died", *other]))
    (tmp_path / "block.yaml").write_text(block)
    upon = "" if "data:" in block else "--config digits "
    command, more = ("sweep", " --sweep.trials 1") if "sweep:" in block else ("fit", "")
    run_warm(f"dpfl {command} {upon}--config block.yaml --rounds 1 --tracking null{more}", tmp_path)


def test_the_readme_is_short_and_its_links_exist():
    assert len(README.split()) < 800
    (block,) = [text for page, text in PYTHON if page == "README.md"]
    assert len([line for line in block.splitlines() if line]) <= 15
    for name in ("README.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / name).read_text())
        assert links and not [link for link in links if not (ROOT / link).exists()], name


def test_the_picture_is_drawn_from_the_finished_cells(tmp_path):
    assert picture.main(["--picture", str(tmp_path / "again.svg")]) == 0
    drawn = (tmp_path / "again.svg").read_text()
    assert drawn == (ROOT / "docs" / "strategies.svg").read_text()
    assert all(f">{name}<" in drawn for name in ("DPFedAvg", "mixed_effects", "four groups"))
    assert picture.main(["--results", str(tmp_path), "--picture", str(tmp_path / "none.svg")]) == 2


def test_ci_runs_the_very_test_command():
    (command,) = [text.strip() for _, mark, _, text in BLOCKS if mark]
    pattern = "/<!-- test command -->/,/```$/p"
    assert pattern in (ROOT / ".ci" / "run").read_text()
    script = f"sed -n '{pattern}' README.md | sed -e '/^<!--/d' -e '/^```/d'"
    assert subprocess.run(script, shell=True, cwd=ROOT, capture_output=True, text=True).stdout.strip() == command


def test_container_commands_name_real_options(monkeypatch):
    """What follows the image's name are words of `dpfl`."""
    monkeypatch.chdir(ROOT)
    stages = re.findall(r"^FROM .* AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for line in lines("docker build"):
        assert set(re.findall(r"--target (\S+)", line)) <= set(stages)
    runs = [line for line in lines("docker run", "docker compose run") if not line.endswith(" dpfl")]
    assert len(runs) == 4
    for line in runs:
        _, words = re.split(r" (?:dpfl|job) ", line, maxsplit=1)
        if "--entrypoint mlflow" in line:
            assert shlex.split(words)[:1] == ["ui"] and "sqlite:////results/mlflow.db" in words
        else:
            command, *options = shlex.split(words)
            assert command in COMMANDS and load(options)[0].data.name == "digits"


def test_the_recipes_run_and_every_hook_is_named():
    page = (ROOT / "docs" / "extending.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, {})
    page += (ROOT / "docs" / "howto" / "strategy.md").read_text()
    missing = [hook for hook in HOOKS if callable(getattr(Strategy, hook)) and f"`{hook}(" not in page]
    assert not missing
