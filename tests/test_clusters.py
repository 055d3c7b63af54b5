"""The files of `deploy/` for clusters under a fake scheduler that kills at random; ranks on hosts of their own.

`DPFL_KILLS` is how often the scheduler kills.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import warm
import yaml
from conftest import FIXED_KEY
from ranked_runs import free_port, slurm
from safetensors.torch import load_file

from dpfl_lightning.commands.fit import main as fit
from dpfl_lightning.privacy.ledger.ledger import read_ledger

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("in_the_repository")]

ROOT = Path(__file__).parents[1]
KILLS = int(os.environ.get("DPFL_KILLS", 2))
ROUNDS = 30
DIGITS = [
    "--config",
    "conf/digits.yaml",
    "--tracking",
    "null",
    "--privacy.noise_key",
    FIXED_KEY,
    "--rounds",
    str(ROUNDS),
]


def of_sbatch(folder: Path) -> tuple[int, list[str]]:
    """How many ranks `deploy/fit.sbatch` starts on a host, and its command, as an `srun` of this test gets it."""
    srun = folder.with_name("srun")
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    environment = {"PATH": f"{srun.parent}{os.pathsep}{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "8"}
    script = ["bash", "deploy/fit.sbatch", *DIGITS, "--output_dir", str(folder)]
    said = subprocess.run(script, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    words = said.splitlines()
    assert words[:4] == ["--cpus-per-task", "8", "--kill-on-bad-exit=1", "dpfl"], "of #SBATCH, srun inherits no cores"
    assert "--ntasks-per-node=2 --cpus-per-task=8" in (ROOT / "deploy" / "fit.sbatch").read_text()
    return 2, words[4:]


def of_kubernetes(folder: Path) -> tuple[int, list[str]]:
    """The command of the Job, with the configuration and the folder of this test."""
    job, claim = yaml.safe_load_all((ROOT / "deploy" / "fit.kubernetes.yaml").read_text())
    evicted, mistaken = job["spec"]["podFailurePolicy"]["rules"]
    assert evicted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert mistaken == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), "others are evicted first"
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (mount,) = container["volumeMounts"]
    words = container["args"]
    at = words.index("--output_dir") + 1
    assert words[at].startswith(mount["mountPath"]) and words[1:3] == ["--config", "conf/fmnist.yaml"]
    return 1, [words[0], *DIGITS, *words[3:at], str(folder), *words[at + 1 :]]


def started(ranks: int, words: list[str]) -> list[warm.Process]:
    """The command on its ranks, as the scheduler starts it."""
    port = free_port()
    places = [slurm(rank, 1, ranks, port) if ranks > 1 else {} for rank in range(ranks)]
    return [warm.Process("-m", "dpfl_lightning", *words, env={**os.environ, **place}) for place in places]


def rounds_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


@pytest.mark.parametrize("file", [of_sbatch, of_kubernetes])
def test_a_killed_and_restarted_job_is_the_unbroken_one(file, tmp_path):
    """The same command again until it is done; it is killed at random moments, as a whole or one of its ranks."""
    moments = random.Random(time.time_ns())
    ranks, words = file(tmp_path / "broken")
    for kill in range(KILLS + 1):
        processes = started(ranks, words)
        if kill < KILLS:
            until = moments.randint(0, ROUNDS * (kill + 1) // (KILLS + 1))
            while rounds_of(tmp_path / "broken") < until and processes[0].poll() is None:
                time.sleep(0.01)
            time.sleep(moments.uniform(0.0, 0.2))
            number = moments.choice([signal.SIGKILL, signal.SIGTERM])
            for process in processes if number == signal.SIGTERM else moments.sample(processes, 1):
                process.send_signal(number)
            time.sleep(moments.uniform(0.0, 0.2))
            for process in processes if number == signal.SIGKILL else ():
                process.kill()  # `--kill-on-bad-exit`
        ended = [process.wait(timeout=60) for process in processes]
        assert set(ended) <= ({0, 2, 143, -signal.SIGKILL, -signal.SIGTERM} if kill < KILLS else {0}), ended
    unbroken = [*words[1:], "--output_dir", str(tmp_path / "unbroken")]
    assert fit(unbroken) == 0
    same_run(tmp_path / "broken", tmp_path / "unbroken")


def same_run(ours: Path, theirs: Path) -> None:
    models = [load_file(folder / "model.safetensors") for folder in (ours, theirs)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])
    assert read_ledger(ours / "ledger.jsonl") == read_ledger(theirs / "ledger.jsonl")


# ---- several hosts


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[list[str]]]:
    """Network namespaces on one bridge: for each the words that run a command there, as the host of that name."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs root, ip (iproute2) and unshare")
    bridge, names = f"br{os.getpid()}", [f"host{number}-{os.getpid()}" for number in range(count)]
    files = [Path("/etc/netns", name) for name in names]
    made: list[list[str]] = []
    try:
        try:
            run("ip", "link", "add", bridge, "type", "bridge")
            made.append(["link", "delete", bridge])
            run("ip", "link", "set", bridge, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
        for number, name in enumerate(names):
            run("ip", "netns", "add", name)
            made.append(["netns", "delete", name])
            pair = f"v{number}-{os.getpid()}"
            run("ip", "link", "add", pair, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", pair, "master", bridge, "up")
            for words in (["addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                run("ip", "-n", name, *words)
            run("ip", "-n", name, "link", "set", "lo", "up")
            files[number].mkdir(parents=True)  # `ip netns exec` shows it in the place of /etc/hosts
            known = "".join(f"10.77.0.{other + 1} {one}\n" for other, one in enumerate(names))
            (files[number] / "hosts").write_text("127.0.0.1 localhost\n" + known)
        enter = 'hostname "$0" && exec "$@"'
        yield [["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", enter, name] for name in names]
    finally:
        for words in reversed(made):
            run("ip", *words)
        for file in files:
            shutil.rmtree(file, ignore_errors=True)


def test_two_hosts_with_two_ranks_each_give_the_bits_of_one_process(tmp_path):
    """The command of docs/howto/operate.md, on each host."""
    with hosts(2) as places:
        head = places[0][-1]
        torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
        words = [*torchrun, "--rdzv_endpoint", f"{head}:29500", "-m", "dpfl_lightning.fit", *DIGITS, "--rounds", "5"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *words, "--output_dir", str(tmp_path / "hosts")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
        processes = [subprocess.Popen([*place, *command], **pipes) for place in places]
        said = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert ", 4 ranks, device cpu" in said[0] + said[1]
    assert fit([*DIGITS, "--rounds", "5", "--output_dir", str(tmp_path / "alone")]) == 0
    same_run(tmp_path / "hosts", tmp_path / "alone")
