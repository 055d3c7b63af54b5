"""The attack by models that mix records once a server sends large weights: clipped sum, whole run, persons and node."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpfl_lightning import ClientModule, ClientOptions, FederatedLoop, Population, PrivacyOptions, Strategy
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from experiments.attacks import forms
from experiments.attacks.guess import DELTA, Batch, Worst, guessed, multiplier
from experiments.attacks.node import Refused, Server, site

COUNT, ROWS = 40, 2  # records or persons; rows of a person
RATE = 1e3  # learning rate: a step is not lost beside large weights
MODELS = 200  # of which the server takes the one that tells most
SIMULATED = 6  # rounds: what is kept shows from the third one on
WAYS = ("clipped sum", "whole run", "persons", "node")


def records(kind: str) -> tuple[Batch, Batch]:
    """Return records and the same with one more; it is the first, so that all others follow."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(COUNT + 1, forms.FEATURES, generator=generator)
    x[0] *= 50
    y = torch.arange(COUNT + 1) % forms.CLASSES
    return (x[1:].clone(), y[1:].clone()), (x, y)


def branch(trials: int) -> list[dict[str, Any]]:
    """Attack each model in each way, and guess so many times from releases; a refused model has a row, too."""
    rows = []
    for form in (*forms.BRANCHES, *forms.KEPT):
        torch.manual_seed(0)
        worst = Worst(_hostile(form(), 1), torch.zeros(1), torch.zeros(1))  # if the sum refuses the model
        for way in WAYS:
            row: dict[str, Any]
            try:
                if way == "clipped sum":
                    worst = _worst(form())
                    row = {"moved": worst.moved}
                else:
                    row = _guesses(form, way, worst, trials)
            except (UserError, Refused) as error:
                row = {"refused": str(error)}
            rows.append({**row, "records": f"{form.__name__}, {way}"})
            print(rows[-1], file=sys.stderr)
    return rows


def _hostile(net: nn.Module, seed: int) -> Mapping[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    large = 30.0 * (1 + seed % 4)
    found = {}
    for name, p in net.named_parameters():
        drawn = torch.randn(p.shape, generator=generator)
        found[name] = large * drawn if name in ("first.weight", "gate") else drawn
    return found


def _worst(net: nn.Module) -> Worst:
    clipped_sum, _ = clipped_sum_for(net, None, torch.zeros(0, forms.FEATURES), torch.zeros(0, dtype=torch.long))
    best: Worst | None = None
    for seed in range(MODELS):
        params = _hostile(net, seed)
        sums = (clipped_sum(params, *batch, ClipRequest(1.0))[0][0].clone() for batch in records(""))
        found = Worst(params, *sums)
        if best is None or found.moved > best.moved:
            best = found
    assert best is not None  # for mypy
    return best


def _guesses(form: type[nn.Module], way: str, worst: Worst, trials: int) -> dict[str, Any]:
    persons = way == "persons"
    both = [_releases(form, world, worst, SIMULATED, 1e-6, persons)[-1] for world in (0, 1)]
    worst = Worst(worst.params, *both)  # what the server computes itself, without noise
    if way == "node":
        with contextlib.ExitStack() as stack:
            names = (f"{__name__}.{name}" for name in ("without", "with_one"))
            model, fit = f"{form.__module__}.{form.__qualname__}", {"num_classes": forms.CLASSES}
            sites = [stack.enter_context(site(name, trials, model, fit)) for name in names]
            return guessed(way, COUNT, worst, trials, Server(sites, worst, COUNT, RATE).release)
    worlds = [_releases(form, world, worst, trials + 1, multiplier(), persons) for world in (0, 1)]
    return guessed(way, COUNT, worst, trials, lambda coin: worlds[coin].pop())


def _releases(
    form: type[nn.Module], world: int, worst: Worst, rounds: int, noise_multiplier: float, persons: bool
) -> list[Tensor]:
    """Return the releases of a run from its second round on, as sums `[P]`."""
    x, y = records("")[world]
    ids = None
    if persons:
        x, y = (one.repeat_interleave(ROWS, dim=0) for one in (x, y))
        ids = [[f"{row // ROWS}" for row in range(len(y))]]
    population = Population.from_datasets([(x, y)], held_out=0.0, num_classes=forms.CLASSES, persons=ids)
    unit: dict[str, Any] = {"unit": "person", "rows_per_person": ROWS} if persons else {}
    server = _Hostile(worst)
    FederatedLoop(
        population,
        ClientModule(form()),
        rounds=rounds,
        clients=ClientOptions(batch_size=None, learning_rate=RATE),
        privacy=PrivacyOptions(epsilon=None, noise_multiplier=noise_multiplier, delta=DELTA, **unit),
        strategies=[server],
        device="cpu",
    ).run()
    return [-released * (COUNT + world) / RATE for released in server.found[1:]]


class _Hostile(Strategy):
    """Sends the same weights in every round but the first one, and notes what comes back."""

    role = "base"

    def __init__(self, worst: Worst) -> None:
        self.model, self.found = torch.cat([p.flatten() for p in worst.params.values()]), list[Tensor]()

    def needs_updates(self, plan: Any, view: Any) -> bool:
        return True

    def weigh(self, updates: Any, view: Any) -> Tensor:
        return torch.ones(len(updates.clients))

    def after_step(self, state: ServerState, updates: Any, view: Any) -> ServerState:
        self.found.append(updates.released[0].double().clone())
        return ServerState(self.model[None].to(state.models), state.model_of, state.round)


def without() -> list[Batch]:
    return [records("")[0]]


def with_one() -> list[Batch]:
    return [records("")[1]]
