"""The attack on a whole node of a real federation: requests and replies are bytes, and every release is charged."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.federated.messages.jobs import LocalTraining
from dpfl_lightning.federated.messages.requests import Train
from dpfl_lightning.loop import build_loop
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.privacy.mechanism import mechanism_of
from dpfl_lightning.sites import signed, wire
from dpfl_lightning.sites.exchange import Released, Terms, ToNode, most_header
from dpfl_lightning.sites.node.accept import accept, new_node, open_study
from dpfl_lightning.sites.node.records import settings_of
from dpfl_lightning.sites.node.service import Node
from dpfl_lightning.sites.server.deploy import terms_of
from experiments.attacks.guess import (
    DELTA,
    RECORDS,
    WIDTH,
    Batch,
    Regression,
    Worst,
    guessed,
    multiplier,
    neighbours,
    worst_model,
)
from experiments.attacks.nets import loss_of

COUNT = 103
RATE = 1e3  # learning rate: a step is not lost beside weights of 1e5


def node(trials: int) -> list[dict[str, Any]]:
    """Guess from releases of two nodes, one with a record more.

    The number of records is a public fact of a plan. The guess does not use it: only the noisy sum.
    """
    net, rows = Regression(), []
    clipped_sum, _ = clipped_sum_for(net, loss_of(net), torch.empty(0, WIDTH), torch.empty(0))

    def summed(params: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return clipped_sum(params, *batch, ClipRequest(1.0))[0][0].clone()

    for kind in RECORDS:
        worst = worst_model(summed, neighbours(kind, COUNT))
        with contextlib.ExitStack() as stack:
            names = (f"{__name__}.{name}_{kind}" for name in ("without", "with"))
            model = f"{Regression.__module__}.{Regression.__qualname__}"
            sites = [stack.enter_context(site(name, trials, model)) for name in names]
            rows.append(guessed(kind, COUNT, worst, trials, Server(sites, worst).release))
    return rows


class Refused(Exception):
    """A node gives no release."""


class Server:
    """Asks nodes for releases from hostile weights, each in a new round of the accepted plan."""

    def __init__(self, sites: list[tuple[Node, Terms]], worst: Worst, count: int = COUNT, rate: float = RATE) -> None:
        self._sites, self._rounds, self._count, self._rate = sites, [0] * len(sites), count, rate
        self._model = torch.cat([p.flatten() for p in worst.params.values()])

    def release(self, coin: bool) -> Tensor:
        """Return the noisy sum of the node without the record, or with it."""
        node, terms = self._sites[coin]
        self._rounds[coin] += 1
        line, settings = terms.plan.schedule.clients[0].planned[0], terms.plan.settings[0]
        event: Any = line.event
        mechanism, job = mechanism_of(event, settings.clip_norm, settings.num_records), LocalTraining()
        asked = Train(self._rounds[coin], line.purpose, mechanism, event.steps, job, self._rate, self._model)
        plan, site = wire.digest(terms), terms.sites[0]
        content = wire.encode(ToNode(plan, asked))
        most = wire.Limits(most_header(terms.plan.schedule.clients[0]), 8 * self._model.numel())
        reply = signed.answer(node.handle(content), content, plan, {0: site.public_key}, most).reply
        if not isinstance(reply, Released):
            raise Refused(f"the node refused: {reply}")
        return -reply.value.double() * (self._count + coin) / self._rate  # type: ignore[union-attr]


@contextlib.contextmanager
def site(
    records: str, rounds: int, model: str, population: Mapping[str, Any] | None = None
) -> Iterator[tuple[Node, Terms]]:
    """Return a node that has accepted a plan of so many rounds, and the plan; each release has the claimed epsilon.

    `records` and `model` name a function and a class; `population` are arguments of the former's population.
    """
    options = {
        "rounds": rounds,
        "data": {"name": None, "class_path": records, "population_args": {"held_out": 0.0, **(population or {})}},
        "model": {"class_path": model},
        "clients": {"batch_size": None, "learning_rate": RATE},
        "privacy": {"epsilon": None, "noise_multiplier": multiplier(), "delta": DELTA},
        "strategies": {"size_weighted": {}},
        "tracking": None,
    }
    with tempfile.TemporaryDirectory() as folder:
        own = {"data": options["data"], "model": options["model"], "privacy": {"epsilon": 1e6, "delta": 0.5}}
        settings = settings_of(from_mapping(own), "0")
        state, own_site = new_node(Path(folder) / "site", settings)
        terms = terms_of(build_loop(from_mapping({**options, "output_dir": f"{folder}/plan"})), [own_site])
        accept(state, terms)
        made = Node(state, open_study)
        try:
            yield made, terms
        finally:
            made.close()


def without_different() -> list[Batch]:
    return [neighbours("different", COUNT)[0]]


def with_different() -> list[Batch]:
    return [neighbours("different", COUNT)[1]]


def without_equal() -> list[Batch]:
    return [neighbours("equal", COUNT)[0]]


def with_equal() -> list[Batch]:
    return [neighbours("equal", COUNT)[1]]
