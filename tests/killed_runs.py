"""A run that is killed at random moments, in separate processes, and the releases that an onlooker keeps."""

import contextlib
import dataclasses
import itertools
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch
from _pytest.monkeypatch import MonkeyPatch
from conftest import blobs, parts_of, private, small_loop, small_net
from contracts.test_strategies import LOOPS, OPTIONS

from dpfl_lightning import strategies
from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.loop import FederatedLoop
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.ledger.account_file import RunRecord
from dpfl_lightning.privacy.ledger.evidence import Evidence
from dpfl_lightning.privacy.ledger.file import Charge, Header, read_header
from dpfl_lightning.privacy.ledger.ledger import Ledger
from dpfl_lightning.privacy.ledger.operator import OperatedAccount
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted

BUDGETS, DELTA = (4.0, 6.0, 8.0, 10.0), 1e-3
RATE = 0.3
WRITTEN, OTHER = GaussianEvent(0.1, 2.0, 10), GaussianEvent(0.2, 2.0, 5)


class Onlooker(Strategy, Callback):
    """Keeps each update and each round's end in a separate file, at once."""

    start = 0  # number of the process; of the class, for it is no setting of the run

    def needs_updates(self, plan, view):
        return True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def weigh(self, updates, view):
        path = self._folder / f"{self.start:03d}_{view.round:04d}.pt"
        torch.save(updates.released.clone(), path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)

    def on_round_end(self, view, report):
        (self._folder / f"{self.start:03d}_{report.round:04d}.told").touch()


def loop_of(folder: Path, rounds: int, reserve: int, key: str | None, parts=()) -> FederatedLoop:
    return FederatedLoop(
        blobs(),
        ClientModule(small_net()),
        rounds=rounds,
        clients=ClientOptions(count=4, batch_size=None, learning_rate=RATE),
        privacy=PrivacyOptions(epsilon=BUDGETS, delta=DELTA, reserve_rounds=reserve, noise_key=key),
        output_dir=folder,
        device="cpu",
        evaluate_every=1000,
        **parts_of(parts),
    )


def one_start(folder: Path, start: int, rounds: int, reserve: int, key: str | None, begun: Connection) -> None:
    """Begin the run, or go on with it, until it is done or killed."""
    torch.set_num_threads(1)
    Onlooker.start = start
    seen = folder.parent / "seen"
    seen.mkdir(exist_ok=True)
    loop = loop_of(folder, rounds, reserve, key, [Onlooker(seen)])
    begun.send("ready")
    loop.run(resume=(folder / "options.yaml").exists())


def of_strategy(folder: Path, name: str, engine: str) -> FederatedLoop:
    """A simulation with this strategy, as the contract tests of strategies make it."""
    (strategy,) = strategies.build({name: OPTIONS.get(name)})
    parts = [strategy] if strategy.role == "base" else [SizeWeighted(), strategy]
    usual = {"rounds": 3, "clients": ClientOptions(count=4, batch_size=16, learning_rate=RATE)}
    options = {**usual, **LOOPS.get(name, {}), "privacy": private([4.0, 6.0, 8.0, 10.0], accountant="rdp")}
    population = dataclasses.replace(blobs(), groups=(0, 1, 0, 1))
    return small_loop(population, parts=parts, engine=ENGINES[engine](), output_dir=folder, **options)


def one_run(folder: Path, name: str, engine: str, begun: Connection) -> None:
    """Begin `of_strategy`, or go on with it."""
    torch.set_num_threads(1)
    loop = of_strategy(folder, name, engine)
    begun.send("ready")
    loop.run(resume=(folder / "options.yaml").exists())


def timed_run(folder: Path, name: str, engine: str, kill_after: float | None) -> float:
    """Seconds that `one_run` took in a process, which is killed after `kill_after` seconds if it still runs then."""
    processes = forking()
    ours, theirs = processes.Pipe()
    process = processes.Process(target=one_run, args=(folder, name, engine, theirs))
    process.start()
    assert ours.recv() == "ready"
    begun = time.monotonic()
    process.join(kill_after)
    process.kill()
    process.join()
    assert process.exitcode in ((0,) if kill_after is None else (0, -9)), f"{name}, {engine}: {process.exitcode}"
    return time.monotonic() - begun


@dataclass
class Killed:
    """A run that was killed several times and is finished: its processes, releases `[C, P]` and reported rounds."""

    folder: Path
    starts: int
    releases: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # by (start, round)
    told: set[tuple[int, int]] = field(default_factory=set)  # (start, round) of the rounds whose end was reported

    def again(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Each round that was released twice, by one start and by a later one."""
        for (start, round), first in self.releases.items():
            for (later, same), second in self.releases.items():
                if later > start and same == round:
                    yield round, first, second


def forking() -> ForkServerContext:
    """Processes forked from a server that has imported everything: a start is quick, and shares what imports make."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["killed_runs", "killed_commands"])
    with MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # the server's own path, to find this file
        forkserver.ensure_running()
    return processes


def killed(
    parent: Path, kills: int, rounds: int, key: str | None, reserve: int | None = None, latest: float | None = None
) -> Killed:
    """The run, SIGKILLed so often at random moments, then left alone; by default with a reserve for every kill.

    With `latest` it is killed at most that many seconds after it began.
    """
    reserve = kills if reserve is None else reserve
    parent.mkdir(exist_ok=True)
    processes, folder, moments = forking(), parent / "run", random.Random(time.time_ns())
    for start in range(kills + 1):
        ours, theirs = processes.Pipe()
        process = processes.Process(target=one_start, args=(folder, start, rounds, reserve, key, theirs))
        process.start()
        assert ours.recv() == "ready"
        if start < kills:
            some = moments.randint(0, rounds // kills) if latest is None else 0
            while process.is_alive() and len(list((parent / "seen").glob(f"{start:03d}_*.pt"))) < some:
                time.sleep(0.002)
            time.sleep(moments.uniform(0.0, 0.05 if latest is None else latest))
            process.kill()
        process.join()
        assert process.exitcode in ((0, -9) if start < kills else (0,))
    run = Killed(folder, kills + 1)
    for path in sorted((parent / "seen").iterdir()):
        if path.suffix != ".part":
            start, round = map(int, path.stem.split("_"))
            if path.suffix == ".told":
                run.told.add((start, round))
            else:
                run.releases[start, round] = torch.load(path, weights_only=True)
    return run


def charging(folder: Path, number: int, told: Connection) -> None:
    """Charge the run `number` to its ledger and the account of all, round after round, and tell each that is done."""
    path, account = folder / str(number) / "ledger.jsonl", OperatedAccount(folder / "account.jsonl")
    path.parent.mkdir(exist_ok=True)
    names, count = {"names": ["bergen", f"ward {number}"]}, 2
    begun = read_header(path) if path.exists() else None
    header = begun or Header("pld", "add_remove", "poisson", (DELTA,) * count, (math.inf,) * count, identity=names)
    holders = dict(enumerate(names["names"]))
    rest = (DELTA,) * count, ((),) * count, (Evidence(),) * count, *((None,) * count,) * 2
    account.enter(RunRecord(header.run, str(path), "add_remove", "poisson", "pld", holders, *rest))
    ledger = Ledger(path, header, account=account)
    ledger.accept()
    told.send("ready")
    for round in itertools.count(max(ledger.rounds(0), default=0) + 1):
        ledger.charge([Charge(0, round, "train", WRITTEN), Charge(1, round, "train", OTHER)])
        told.send(round)


class Writer:
    """A process that is `charging`, until it is killed."""

    def __init__(self, folder: Path, number: int) -> None:
        self._told, theirs = multiprocessing.Pipe(duplex=False)
        self._process = forking().Process(target=charging, args=(folder, number, theirs))
        self._process.start()
        theirs.close()
        assert self._told.recv() == "ready"

    def kill(self) -> int:
        """The last round whose charge was told; 0 for none."""
        self._process.kill()
        self._process.join()
        last = 0
        with contextlib.suppress(EOFError):
            while True:
                last = self._told.recv()
        return last
