"""A SuperLink, a SuperNode and a node for each site, as processes of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dpfl_lightning.config.load import load
from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.config.options import Options
from dpfl_lightning.privacy.ledger.ledger import Charge, read_ledger
from dpfl_lightning.sites.exchange import Terms
from dpfl_lightning.sites.node.accept import accept, new_node
from dpfl_lightning.sites.node.records import settings_of
from dpfl_lightning.sites.node.state import StateFolder
from dpfl_lightning.sites.server.deploy import export, planning_loop
from dpfl_lightning.sites.wire import digest

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "flower"
TEST_KEY = "00112233445566778899aabbccddeeff"
SITES = ("berlin", "paris", "rome")
_PATIENCE = 900.0  # seconds for a process to be ready; machines can be busy


def free_port() -> int:
    """Return a port that no process uses now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Return what the condition returns once it holds. Raises TimeoutError."""
    end = time.monotonic() + _PATIENCE
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.05)
    return value


@dataclasses.dataclass
class Federation:
    """Processes by their names; `data` is the name of a public data set, of which each site has a third."""

    folder: Path
    data: str
    slot: float
    processes: dict[str, subprocess.Popen] = dataclasses.field(default_factory=dict)
    ports: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        privacy = {"epsilon": 1000.0, "delta": 0.9, "noise_key": TEST_KEY}
        options = from_mapping({"data": {"name": self.data}, "clients": {"count": len(SITES)}, "privacy": privacy})
        for number, site in enumerate(SITES):
            new_node(self.folder / site, settings_of(options, site, str(number)))
        for name in ("link", *SITES):
            self.ports[name] = free_port()
        home = self.folder / "home"
        home.mkdir()
        address = f'address = "127.0.0.1:{self.ports["link"]}"'
        (home / "config.toml").write_text(f"[superlink.here]\n{address}\ninsecure = true\n")

    @property
    def environment(self) -> dict[str, str]:
        more = {"FLWR_HOME": str(self.folder / "home"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, **more, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(self, name: str, command: str) -> subprocess.Popen:
        """Start a process, whose output goes to a file of its name."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                shlex.split(command), cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )
        self.processes[name] = process
        return process

    def start_node(self, site: str) -> None:
        (self.folder / site / "socket").unlink(missing_ok=True)
        command = f"{sys.executable} -m dpfl_lightning node serve {site} --slot {self.slot}"
        process = self.start(f"node {site}", command)
        wait_until(lambda: (self.folder / site / "socket").exists() or process.poll() is not None, f"node {site}")

    def start_superlink(self) -> None:
        more = "--database link.db --disable-runtime-dependency-installation"
        self.start("link", f"flower-superlink --insecure --host 127.0.0.1 --port {self.ports['link']} {more}")

        def listens() -> bool:
            with socket.socket() as one:
                return one.connect_ex(("127.0.0.1", self.ports["link"])) == 0

        wait_until(listens, "the SuperLink")

    def start_supernode(self, site: str) -> None:
        config = f'socket="{self.folder / site / "socket"}"'
        ports = f"--superlink 127.0.0.1:{self.ports['link']} --port {self.ports[site]}"
        self.start(f"supernode {site}", f"flower-supernode --insecure {ports} --node-config {shlex.quote(config)}")

    def kill(self, name: str) -> None:
        """End a process by SIGKILL, as a crash would."""
        self.processes[name].kill()
        self.processes[name].wait()

    @contextlib.contextmanager
    def running(self, nodes: bool = True, flower: bool = True) -> Iterator[Federation]:
        try:
            for site in SITES if nodes else ():
                self.start_node(site)
            if flower:
                self.start_superlink()
                for site in SITES:
                    self.start_supernode(site)
            yield self
        finally:
            for process in self.processes.values():
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
            for process in self.processes.values():
                process.wait(60)

    def plan(self, config: str, name: str) -> Terms:
        """Export a plan to `name`.json, which all nodes accept."""
        facts = [StateFolder(self.folder / site).site() for site in SITES]
        terms = export(planning_loop(options_of(config), facts), facts, str(self.folder / f"{name}.json"))
        for site in SITES:
            accept(StateFolder(self.folder / site), terms)
        return terms

    def run(self, name: str, app: Path, run_config: dict[str, Any]) -> subprocess.Popen:
        """Start `flwr run`, which ends with the run."""
        values = " ".join(f"{key}={json.dumps(value)}" for key, value in run_config.items())
        return self.start(name, f"flwr run {app} here --stream -c {shlex.quote(values)}")

    def fit(self, name: str, arguments: str) -> subprocess.Popen:
        return self.run(name, APP, {"folder": str(self.folder), "fit": arguments})

    def charges(self, site: str, terms: Terms) -> list[Charge]:
        ledger = StateFolder(self.folder / site).plan_folder(digest(terms)) / "ledger.jsonl"
        return read_ledger(ledger) if ledger.is_file() and ledger.stat().st_size else []

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


def options_of(config: str) -> Options:
    """Return the options that `dpfl fit` would read from these arguments."""
    options, _ = load(shlex.split(config), lambda parser: None, name="fit", description="", examples=())
    return options
