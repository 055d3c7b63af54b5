"""Runs in which some clients send false updates, to see what each strategy makes of them."""

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.federated.messages.clients import Clients
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates, UpdateBuffer
from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.loop import build_loop
from experiments.papers.recorder import Recorder, guarantee_of
from experiments.papers.run import CellContext

#: an attack: the attackers' updates `[A, P]`, those of the others `[H, P]`, a generator -> the updates that are sent
Attack = Callable[[Tensor, Tensor, torch.Generator], Tensor]


def _noise(true: Tensor, honest: Tensor, generator: torch.Generator) -> Tensor:
    length = true.norm(dim=1, keepdim=True)
    random = torch.randn(true.shape, generator=generator)
    return true + 10 * length * random / random.norm(dim=1, keepdim=True)


def _collude(true: Tensor, honest: Tensor, generator: torch.Generator) -> Tensor:
    mean = honest.mean(dim=0)
    return (-mean / mean.norm() * honest.norm(dim=1).median()).expand_as(true)


def _push(true: Tensor, honest: Tensor, generator: torch.Generator) -> Tensor:
    direction = torch.randn(true.shape[1], generator=torch.Generator().manual_seed(0))
    return (1000 * honest.norm(dim=1).median() * direction / direction.norm()).expand_as(true)


#: name -> attack: ten times the opposite; ten times its length of noise; a hundredth; one vector, sent by all
#: attackers, against the mean of the others and as long as their median update; one vector for all rounds, very long
ATTACKS: Mapping[str, Attack] = {
    "flip": lambda true, honest, generator: -10 * true,
    "noise": _noise,
    "tiny": lambda true, honest, generator: 0.01 * true,
    "collude": _collude,
    "push": _push,
}


class HostileClients:
    """All clients of a run, of which some replace their updates; everything else is done by `clients`."""

    def __init__(self, clients: Clients, attack: Attack, attackers: frozenset[int], seed: int) -> None:
        self._clients, self._attack, self._attackers = clients, attack, attackers
        self._generator = torch.Generator().manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clients, name)

    def train(self, plan: RoundPlan, models: Tensor, raw_weights: Tensor | None) -> ClientUpdates:
        updates = self._clients.train(plan, models, None)
        assert updates.deltas is not None  # for mypy
        hostile = torch.tensor([client in self._attackers for client in updates.clients])
        sent = updates.deltas.clone()
        if bool(hostile.any()) and not bool(hostile.all()):
            sent[hostile] = self._attack(sent[hostile], sent[~hostile], self._generator)
        buffer = UpdateBuffer(plan, raw_weights)
        for client, delta in zip(updates.clients, sent, strict=True):
            buffer.take(client, delta)
        for client in updates.lost:
            buffer.lose(client)
        return buffer.updates()


def attacked(context: CellContext) -> dict[str, Any]:
    """Accuracy on the test set beside the attack that the column names, `<attack>_<per cent of the clients>`.

    `labels` are honest updates from data whose labels are all wrong (`data.label_noise`); other names are no attack.
    Where clients have test sets of their own it is the mean of those that do not attack.
    """
    attack, _, percent = context.cell.column.partition("_")
    options, share = context.options, int(percent or 0) / 100
    if attack == "labels":
        wrong = dataclasses.replace(options.data, label_noise={"name": "clients", "share": share})
        options = dataclasses.replace(options, data=wrong)
    recorder, attackers = Recorder(), frozenset[int]()
    with tempfile.TemporaryDirectory() as folder:
        loop = build_loop(dataclasses.replace(options, output_dir=f"{folder}/run"), [recorder])
        if attack in ATTACKS:
            count = loop.config.facts.num_clients
            order = torch.randperm(count, generator=torch.Generator().manual_seed(options.seed)).tolist()
            attackers = frozenset(order[: round(share * count)])
            loop.clients = HostileClients(loop.clients, ATTACKS[attack], attackers, options.seed)  # type: ignore[assignment]
        result = loop.run()
    values = recorder.record["values"]
    accuracy = values["test_accuracy"]
    if options.data.test_per_client is not None:
        of_clients = recorder.record["clients"]["accuracy"]
        accuracy = 100 * fmean(value for client, value in enumerate(of_clients) if client not in attackers)
    return {"values": {**values, "accuracy": accuracy}, **guarantee_of(result)}


class FalseAlarms(Recorder):
    """Counts honest updates, and those that `noise_floor` leaves out."""

    _kept = ("_updates", "_removed")

    def __init__(self) -> None:
        super().__init__()
        self._updates, self._removed = 0, 0.0

    def on_round_end(self, view: View, report: RoundReport) -> None:
        super().on_round_end(view, report)
        self._updates += len(report.clients)
        self._removed += float(report.metrics["below_noise_floor"])

    def _values(self, view: View, result: RunResult) -> dict[str, Any]:
        return {**super()._values(view, result), "updates": self._updates, "removed": self._removed}
