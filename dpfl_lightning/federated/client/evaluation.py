"""Accuracy and loss on test and held-out records, which the guarantee does not cover."""

import math
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor
from torchmetrics.functional.classification import multiclass_accuracy

from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.engines.engine import Engine
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.evaluation import ClientModels, Evaluation, Score

_NOTHING = Score(None, math.nan)


def evaluate(module: ClientModule, population: Population, final_models: ClientModels, engine: Engine) -> Evaluation:
    """Score each client's model on the common test set and on the client's held-out records.

    Without a common test set, `test` is the mean over clients of their scores on held-out records.
    """
    groups: dict[int, list[int]] = {}  # clients that share a model
    for client, row in enumerate(final_models.model_of):
        groups.setdefault(client if module.personal else row, []).append(client)
    clients, tests = [_NOTHING] * population.num_clients, [_NOTHING] * population.num_clients
    for group in groups.values():
        model = engine.personalised(final_models.models[final_models.model_of[group[0]]], group[0])
        scored = [client for client in group if population.num_held_out[client]]
        held_out = [population.held_out_of[client] for client in scored]
        test = population.test if population.test is not None else population.held_out_of[group[0]][:0]
        on_test, *on_held_out = _scores(module, model, population, [test, *held_out], engine)
        for client in group:
            tests[client] = on_test
        for client, score in zip(scored, on_held_out, strict=True):
            clients[client] = score
    return Evaluation(_mean(clients if population.test is None else tests), tuple(clients))


def _scores(
    module: ClientModule, model: Tensor, population: Population, sets: Sequence[Tensor], engine: Engine
) -> list[Score]:
    """Scores of one model on several sets of rows, which may overlap."""
    rows, place = torch.cat(list(sets)).unique(return_inverse=True)
    if len(rows) == 0:
        return [_NOTHING] * len(sets)
    output, y = engine.outputs(model, rows), population.y[rows]
    with torch.inference_mode():
        losses = module.loss(output, y).double()
    values = losses[None]
    if not y.is_floating_point():
        classes = max(population.num_classes, output.shape[1])  # a net may know more classes than the population has
        labels = output.argmax(dim=1, keepdim=True), y[:, None]
        hits = multiclass_accuracy(*labels, classes, average="micro", multidim_average="samplewise")
        values = torch.stack([losses, hits.double()])
    sizes = torch.tensor([len(one) for one in sets], device=rows.device)
    of_set = torch.arange(len(sets), device=rows.device).repeat_interleave(sizes)
    sums = values.new_zeros(len(values), len(sets)).index_add_(1, of_set, values[:, place])
    means = (sums / sizes).tolist()  # 0 / 0 is NaN: a set without records
    accuracies = [None] * len(sets) if y.is_floating_point() else means[1]
    return [
        Score(accuracy, loss) if size else _NOTHING
        for accuracy, loss, size in zip(accuracies, means[0], sizes.tolist(), strict=True)
    ]


def _mean(scores: Sequence[Score]) -> Score:
    scored = [one for one in scores if not math.isnan(one.loss)]
    if not scored:
        return _NOTHING
    accuracies = [one.accuracy for one in scored if one.accuracy is not None]
    return Score(fmean(accuracies) if accuracies else None, fmean(one.loss for one in scored))
