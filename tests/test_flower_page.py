"""The blocks of docs/howto/flower.md run with a SuperLink and three SuperNodes, and give the bits of the simulation."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import FIXED_KEY
from safetensors.torch import load_file

from dpfl_lightning.privacy.ledger.ledger import read_ledger

ROOT = Path(__file__).parents[1]
SITES = ("berlin", "paris", "rome")
CONFIG = "--config digits --rounds 2 --clients.count 3 --privacy.epsilon [2,4,8]"


def free_ports(count: int) -> list[int]:
    """Ports that no process uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def script_of(tls: bool) -> str:
    """The commands of the page, with two rounds, a test key and free ports."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "howto" / "flower.md").read_text(), re.DOTALL)
    _, environment, nodes, plain, run, checks, secure = blocks
    script = environment + nodes + (secure if tls else plain) + run + checks
    assert script.count("--config digits") == 2 and "examples/flower" in script
    script = script.replace("--config digits", "--config digits --rounds 2")
    script = re.sub("(dpfl node init .*)", rf"\1 --privacy.noise_key {FIXED_KEY}", script)
    for port, free in zip(("8000", "9091", "9092", "9093"), free_ports(4), strict=True):
        script = re.sub(rf"\b{port}\b", str(free), script)
    return script.replace("examples/flower", str(ROOT / "examples" / "flower"))


@pytest.mark.e2e
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_the_page_gives_the_bits_and_ledgers_of_the_simulation(tls, tmp_path):
    pytest.importorskip("flwr", reason="needs the extra flower, with constraints-flower.txt: see CONTRIBUTING.md")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "dpfl"
    program.write_text(f"#!{sys.executable}\nfrom dpfl_lightning.__main__ import main\nraise SystemExit(main())\n")
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    simulate = f"dpfl fit {CONFIG} --privacy.noise_key {FIXED_KEY} --output_dir simulated"
    whole = f"set -e\n{script_of(tls)}\n{simulate}\n"
    process = subprocess.Popen(
        ["bash", "-c", whole],
        cwd=tmp_path,
        env=environment,
        stdout=(tmp_path / "log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        status = process.wait(900)
    finally:
        os.killpg(process.pid, signal.SIGTERM)  # the SuperLink, the SuperNodes and the nodes
    log = (tmp_path / "log").read_text()
    assert status == 0 and "1 plan verified" in log and "The chain is intact" in log, log
    models = [load_file(tmp_path / folder / "model.safetensors") for folder in ("simulated", "runs/sites")]
    assert all(torch.equal(*(one[name] for one in models)) for name in models[0])
    expected = read_ledger(tmp_path / "simulated" / "ledger.jsonl")
    for client, site in enumerate(SITES):
        (ledger,) = (tmp_path / site).glob("plans/*/ledger.jsonl")
        assert read_ledger(ledger) == [one for one in expected if one.client == client]
