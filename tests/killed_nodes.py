"""A server and the nodes of three sites in processes that are killed, and what crosses the connections between them."""

import contextlib
import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socket
from typing import Any

import numpy as np
import pandas
import yaml
from killed_commands import KILLED, Command

from dpfl_lightning.privacy.ledger.file import is_begun, read_header
from dpfl_lightning.runtime.digests import memory_of
from dpfl_lightning.sites import sockets, wire
from dpfl_lightning.sites.exchange import Released, Reply, Signed, ToNode
from dpfl_lightning.sites.node.state import StateFolder
from dpfl_lightning.sites.receipt import digest_of
from dpfl_lightning.sites.terms import read_terms

NAMES, ROWS, ROUNDS, EPSILON, DELTA = ("aarhus", "bergen", "cork"), 40, 3, 2.0, 1e-3
_MOST = wire.Limits(1 << 20, 1 << 20)
#: how many operations a command makes, see `Command`; a node or server from its first message on, in a study
_OPERATIONS = {"accept": 20, "node": 100, "server": 200}
_TABLE = {
    "label": "died",
    "classes": ["no", "yes"],
    "columns": {"age": {"scale": [50, 20]}, "crp": {"scale": [10, 10]}},
    "held_out": 0.2,
}
_OTHERS = {
    "model": {"name": "logistic"},
    "clients": {"batch_size": 16, "learning_rate": 0.5},
    "rounds": ROUNDS,
    "tracking": None,
}


def charged(account: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of the ledger of each run in an account, as the file has them now."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in account.read_bytes().splitlines(keepends=True) if account.is_file() else ():
        if line.endswith(b"\n") and "charged" in (content := json.loads(line)):
            found[content["charged"]] += content["lines"]
    return found


def ledger_lines(ledger: Path) -> list[dict[str, Any]]:
    """The complete lines of a ledger after its header."""
    content = ledger.read_bytes().splitlines(keepends=True) if ledger.is_file() else []
    return [json.loads(line) for line in content if line.endswith(b"\n")][1:]


@dataclass
class Site:
    """The folders of a site, and all releases and signed heads that have left it."""

    folder: Path
    releases: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))  # of plan and round
    heads: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))  # run -> chain -> lines
    faults: list[str] = field(default_factory=list)

    @property
    def state(self) -> Path:
        return self.folder / "node"

    @property
    def account(self) -> Path:
        return self.folder / "account.jsonl"

    @property
    def environment(self) -> dict[str, str]:
        return {"DPFL_ACCOUNT": str(self.account), "XDG_STATE_HOME": str(self.folder / "remembered")}

    def listens(self) -> bool:
        """Whether the node accepts connections; one that was killed has left its socket."""
        with socket(AF_UNIX, SOCK_STREAM) as probe:
            return probe.connect_ex(str(self.state / "socket")) == 0

    def ledgers(self) -> dict[str, list[dict[str, Any]]]:
        """The lines of the ledger of each run in the folder of the node."""
        files = [file for file in self.state.glob("plans/*/ledger.jsonl") if is_begun(file)]
        return {read_header(file).run: ledger_lines(file) for file in files}  # type: ignore[union-attr]

    def check_files(self) -> int:
        """Compare account and ledgers while no node runs; return how many lines the account has more."""
        account, ahead = charged(self.account), 0
        for run, lines in self.ledgers().items():
            more = len(account[run]) - len(lines)
            if account[run][: len(lines)] != lines or more not in (0, 1):
                self.faults.append(f"run {run}: the account has {more} lines more than the ledger, or others")
            ahead += more
        return ahead

    def see(self, request: ToNode, signed: Signed) -> None:
        """Compare a reply, as it leaves, with the account."""
        receipt, reply = signed.receipt, wire.decode(Reply, memory_of(signed.reply).tobytes())
        if receipt.ledger is None:
            return
        lines = charged(self.account)[receipt.ledger.run]
        self.heads[receipt.ledger.run][receipt.ledger.chain] = receipt.ledger.lines
        if receipt.releases and receipt.ledger.chain not in [line["chain"] for line in lines]:
            self.faults.append(f"signed {receipt.ledger}, which the account lacks")
        if isinstance(reply, Released):
            released = self.releases[request.plan, request.request.round]
            released.add(digest_of(memory_of(reply.value).tobytes()))
            paid = sum(line["round"] == request.request.round for line in lines)
            if len(released) > paid:
                self.faults.append(
                    f"{len(released)} releases of round {request.request.round}, of which {paid} are paid for"
                )


class Relay:
    """The connection of a site, on which each reply is seen before the server gets it."""

    def __init__(self, site: Site, path: Path) -> None:
        self._site, self.path = site, path
        self._socket = socket(AF_UNIX, SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._carry, args=(connection,), daemon=True).start()

    def _carry(self, server: socket) -> None:
        with server, socket(AF_UNIX, SOCK_STREAM) as node, contextlib.suppress(OSError):
            node.connect(str(self._site.state / "socket"))
            while (request := sockets.receive(server, _MOST)) is not None:
                node.sendall(request)
                if (reply := sockets.receive(node, _MOST)) is None:
                    return
                self._site.see(wire.decode(ToNode, request), wire.decode(Signed, reply))
                server.sendall(reply)

    def close(self) -> None:
        self._socket.close()


class Federation:
    """Three sites whose nodes and server are killed in one study after another; accounts and limits go on."""

    def __init__(self, folder: Path, moments: random.Random) -> None:
        self._folder, self._moments = folder, moments
        self.sites = {name: Site(folder / name) for name in NAMES}
        self.kills: dict[str, int] = defaultdict(int)
        for number, (name, site) in enumerate(self.sites.items()):
            rows, rng = ROWS + 10 * number, np.random.default_rng(number)
            site.folder.mkdir(parents=True)
            age = rng.normal(50, 20, rows).round(1)
            columns = {"age": age, "crp": rng.normal(10, 10, rows), "died": np.where(age > 50, "yes", "no")}
            pandas.DataFrame(columns).to_csv(site.folder / "table.csv", index=False)
            data = _data(_TABLE | {"df": str(site.folder / "table.csv")})
            words = _written(site.folder / "site.yaml", {**data, "privacy": {"epsilon": 1e6, "delta": 0.5}})
            self.done(["node", "init", str(site.state), "--name", name, *words], site)
        self._relays = [Relay(site, folder / f"{name}.socket") for name, site in self.sites.items()]

    def done(self, words: list[str], site: Site | None = None, dies_at: int | None = None) -> Command:
        """A command that has ended well, or was killed."""
        command = Command(words, self._folder / "output.txt", self._environment(site), dies_at)
        command.process.join()
        assert command.status in ((0,) if dies_at is None else (0, KILLED)), command.text
        return command

    def _environment(self, site: Site | None) -> Mapping[str, str]:
        server = {"DPFL_ACCOUNT": str(self._folder / "server.jsonl"), "XDG_STATE_HOME": str(self._folder / "server")}
        return server if site is None else site.environment

    def study(self, name: str, kills: int) -> Path:
        """Plan a study, let the sites accept it, and begin it again until it is done; return the run's folder."""
        privacy = {"epsilon": EPSILON, "delta": DELTA, "reserve_rounds": kills}
        words = _written(self._folder / f"{name}.yaml", {**_data(_TABLE), **_OTHERS, "privacy": privacy})
        plan, run = self._folder / f"{name}.json", self._folder / name
        facts = [str(site.state / "site.json") for site in self.sites.values()]
        self.done(["plan", *words, "--sites", *facts, "--export", str(plan)])
        for site in self.sites.values():
            self._accept(site, plan, kills > 0)
        sockets_of = [str(relay.path) for relay in self._relays]
        given = ["--plan", str(plan), "--nodes", *sockets_of, "--output_dir", str(run), "--resume", "auto"]
        self._serve(["fit", *words, *given], name, kills)
        return run

    def _accept(self, site: Site, plan: Path, dies: bool) -> None:
        """Accept a plan, also if the command is killed."""
        words = ["node", "accept", str(site.state), str(plan)]
        dies_at = self._moments.randrange(_OPERATIONS["accept"]) if dies else None
        if self.done(words, site, dies_at).status == KILLED:
            self.kills["accept"] += 1
            if wire.digest(read_terms(plan)) not in StateFolder(site.state).plans():
                self.done(words, site)

    def _serve(self, fit: list[str], name: str, kills: int) -> None:
        """Run nodes and server, each again when it has ended, until the server is done; kill so many of them."""
        left, starts, server = kills, 0, self._folder / f"{name}.txt"
        running: dict[str, Command] = {}

        def begin(who: str) -> None:
            kind, share = ("server", 0.8) if who == "server" else ("node", 0.6)
            dies = left > 0 and self._moments.random() < share
            dies_at = self._moments.randrange(_OPERATIONS[kind]) if dies else None
            connects = self._moments.random() < 0.8  # else it may die before
            if (site := self.sites.get(who)) is None:
                running[who] = Command(fit, server, self._environment(None), dies_at, connects)
            else:
                if site.check_files():
                    self.kills["between account and ledger"] += 1
                    for verb in ("status", "verify"):
                        told = self.done(["node", verb, str(site.state)], site).text
                        assert "The account counts 1 line more of run" in told, told
                words = ["node", "serve", str(site.state), "--slot", "0.01"]
                running[who] = Command(words, site.folder / "output.txt", site.environment, dies_at, connects)

        while True:
            for who in self.sites:
                if who not in running:
                    begin(who)
            if "server" not in running and all(site.listens() for site in self.sites.values()):
                begin("server")
                starts += 1
                assert starts <= 5 * kills + 5, f"the study {name} does not end: {running['server'].text}"
            if left > 0 and "server" in running and self._moments.random() < 0.005:
                running[self._moments.choice(sorted(running))].process.kill()
            time.sleep(0.01)
            for who in [who for who, command in running.items() if command.status is not None]:
                ended = running.pop(who)
                if ended.status == KILLED:
                    left -= 1
                    self.kills["server" if who == "server" else "node"] += 1
                elif ended.status == 0:
                    assert who == "server", ended.text
                    for node in running.values():
                        node.stop()
                    return
                else:
                    assert who == "server" and "Start its node again" in ended.text, ended.text

    def close(self) -> None:
        for relay in self._relays:
            relay.close()


def _data(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"data": {"class_path": "dpfl_lightning.Population.from_dataframe", "init_args": dict(arguments)}}


def _written(path: Path, options: Mapping[str, Any]) -> list[str]:
    path.write_text(yaml.safe_dump(dict(options)))
    return ["--config", str(path)]
