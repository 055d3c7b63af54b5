"""Accuracy of delivered models on test and held-out records (torchmetrics), outside what the guarantee covers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from torch.func import functional_call
from torchmetrics.functional.classification import multiclass_accuracy

from dpfl_lightning.client import ClientModule
from dpfl_lightning.data import Population
from dpfl_lightning.federated.state import Delivered

_CHUNK = 100  # records of one forward pass: their activations stay in the caches


@dataclass(frozen=True)
class Score:
    """On n records: accuracy in [0, 1] (None for regression, or without records) and mean loss."""

    accuracy: float | None
    loss: float


_NOTHING = Score(None, math.nan)


@dataclass(frozen=True)
class Evaluation:
    """`test`: mean over clients of the client's own model on the test set. `clients`: on its own held-out records."""

    test: Score
    clients: tuple[Score, ...]


def evaluate(
    module: ClientModule,
    population: Population,
    delivered: Delivered,
    personalised: Callable[[Tensor, int], Tensor] = lambda model, client: model,
    enter: Callable[[Tensor], Tensor] = lambda x: x,
) -> Evaluation:
    """Each client's delivered model on the common test set and on the client's own held-out records.

    A model sees a record once, also where clients hold out parts of the test set. Without a common test set the mean
    over clients on their held-out records stands in for it.

    Args:
        personalised: puts the client's own parameters into a model `[P]`.
        enter: puts records into the memory format that suits the net.
    """
    everyone, model_of = range(population.num_clients), delivered.model_of
    groups = [[client] for client in everyone] if module.personal else [
        [client for client in everyone if model_of[client] == row] for row in sorted(set(model_of))
    ]  # fmt: skip
    clients: list[Score] = [_NOTHING] * population.num_clients
    tests: list[Score] = [_NOTHING] * population.num_clients
    for group in groups:
        model = personalised(delivered.models[model_of[group[0]]], group[0])
        wanted = [population.held_out_of[client] for client in group]
        test = population.test if population.test is not None else wanted[0][:0]
        answers = _Answers(module, model, population, torch.cat([test, *wanted]).unique(), enter)
        on_test = answers.score(test)
        for client, rows in zip(group, wanted, strict=True):
            clients[client], tests[client] = answers.score(rows), on_test
    return Evaluation(_mean(clients if population.test is None else tests), tuple(clients))


class _Answers:
    """One model's outputs `[n, num_classes]` for some rows of the population's storage."""

    def __init__(
        self,
        module: ClientModule,
        model: Tensor,
        population: Population,
        rows: Tensor,
        enter: Callable[[Tensor], Tensor],
    ) -> None:
        self.module, self.population = module, population
        self.place = torch.full((len(population.y),), -1, device=rows.device)
        self.place[rows] = torch.arange(len(rows), device=rows.device)
        params = module.unflatten(model)
        with torch.inference_mode():
            parts = [functional_call(module.net, params, (enter(population.x[chunk]),)) for chunk in rows.split(_CHUNK)]
            self.outputs = torch.cat(parts) if parts else None

    def score(self, rows: Tensor) -> Score:
        if self.outputs is None or len(rows) == 0:
            return _NOTHING
        output, y = self.outputs[self.place[rows]], self.population.y[rows]
        with torch.inference_mode():
            loss = float(self.module.loss(output, y).mean(dtype=torch.float64))
        if y.is_floating_point():
            return Score(None, loss)
        classes = max(self.population.num_classes, output.shape[1])  # a net may know more classes than there are here
        accuracy = multiclass_accuracy(output.argmax(dim=1), y, num_classes=classes, average="micro")
        return Score(float(accuracy), loss)


def _mean(scores: Sequence[Score]) -> Score:
    """Unweighted mean over those that had records."""
    scored = [one for one in scores if not math.isnan(one.loss)]
    if not scored:
        return _NOTHING
    accuracies = [one.accuracy for one in scored if one.accuracy is not None]
    return Score(fmean(accuracies) if accuracies else None, fmean(one.loss for one in scored))
