"""Accuracy, loss and metrics on test and held-out records, which the guarantee does not cover."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Protocol

import torch
from torch import Tensor

from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.metrics import Metric, Metrics, Tables, chosen_metrics, measures_of, metrics_of
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.evaluation import ClientModels, Evaluation, Score, mean_metrics
from dpfl_lightning.models.model import forward_chunk
from dpfl_lightning.models.tasks import CUSTOM, Task
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.clipping.inputs import Inputs, take
from dpfl_lightning.privacy.clipping.reference import scoring

MOST_NUMBERS = 1 << 25  # of the outputs of a batch: language models have one for each token and word
_NOTHING = Score(None, math.nan)


class Scorer(Protocol):
    """What an evaluation needs of an engine."""

    @property
    def workers(self) -> int | None: ...

    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        """Outputs `[n, ...]` of the parameters `model` `[P]` for `rows` `[n]` of a population's records."""

    def personalised(self, model: Tensor, client: int) -> Tensor:
        """`model` `[P]` with the client's personal parameters."""


@torch.no_grad()
def outputs_of(
    module: ClientModule,
    model: Tensor,
    population: Population,
    rows: Tensor,
    enter: Callable[[Inputs], Inputs] = lambda x: x,
) -> Tensor:
    """Outputs `[n, ...]` of the parameters `model` `[P]` for `rows` `[n]`; `enter` arranges each part in memory."""
    params, parts = module.unflatten(model), []
    with scoring(module.net, module.sample_loss):
        for chunk in rows.split(forward_chunk(model.device)):
            parts.append(module.output(params, enter(take(population.x, chunk))))
    return torch.cat(parts)


def evaluate(
    module: ClientModule,
    population: Population,
    final_models: ClientModels,
    engine: Scorer,
    baseline: Mapping[str, float | None] | None = None,
) -> Evaluation:
    """Score each client's model on the common test set and on the client's held-out records.

    Without a common test set, `test` is the mean over clients of their scores on held-out records. `baseline` is that
    of an earlier evaluation on the same records, if there was one.
    """
    count, held_out_of = len(final_models.model_of), population.held_out_of
    groups: dict[int, list[int]] = {}  # clients that share a model
    for client, row in enumerate(final_models.model_of):
        groups.setdefault(client if module.personal else row, []).append(client)
    clients, tests = [_NOTHING] * count, [_NOTHING] * count
    for group in groups.values():
        model = engine.personalised(final_models.models[final_models.model_of[group[0]]], group[0])
        scored = [client for client in group if client < len(held_out_of) and len(held_out_of[client])]
        held_out = [held_out_of[client] for client in scored]
        test = population.y.new_zeros(0, dtype=torch.long) if population.test is None else population.test
        on_test, *on_held_out = _scores(
            module, model, population, [test, *held_out], engine, population.test is not None
        )
        for client in group:
            tests[client] = on_test
        for client, score in zip(scored, on_held_out, strict=True):
            clients[client] = score
    constant = _baseline(module, population) if baseline is None else baseline
    mean = _mean(clients if population.test is None else tests)
    return Evaluation(mean, tuple(clients), constant, dict(module.scores))


class PlainScorer:
    """Computes what an evaluation on a test set needs where no client is: the outputs of models, in one thread."""

    workers = 1

    def __init__(self, module: ClientModule, population: Population) -> None:
        self._module, self._population = module, population

    def outputs(self, model: Tensor, rows: Tensor) -> Tensor:
        return outputs_of(self._module, model, self._population, rows)

    def personalised(self, model: Tensor, client: int) -> Tensor:
        return model


def evaluate_own(module: ClientModule, held: HeldClients, model: Tensor, client: int, engine: Scorer) -> Evaluation:
    """Score `model` `[P]`, with the client's personal parameters, on its held-out records, as `test`.

    It has the tables of a test set, and all metrics of the task and of the module.

    **Privacy** The scores and tables are private: they stay with the client.
    """
    population = held.population
    rows = population.held_out_of[held.places[client]]
    own = dataclasses.replace(population, test=rows)
    task = module.task
    every = {} if task is None else {**metrics_of(task), **module.metrics}
    (score,) = _scores(module, engine.personalised(model, client), own, [rows], engine, True, every)
    measures = {} if task is None else measures_of(every, task)
    return Evaluation(score, (), _baseline(module, own, every) if len(rows) else {}, measures)


def _baseline(
    module: ClientModule, population: Population, every: Mapping[str, Metric] | None = None
) -> dict[str, float | None]:
    """Return the scores of the best constant predictions: on the test set, or the means over held-out records."""
    if (task := module.task) is None or task is CUSTOM:
        return {}
    sets = population.held_out_of if population.test is None else [population.test]
    chosen, labels = every or chosen_metrics(module.metrics, task), (population.y[rows] for rows in sets if len(rows))
    return mean_metrics(of_constant(chosen, task, population.num_classes, y) for y in labels)


def of_constant(chosen: Mapping[str, Metric], task: Task, num_classes: int, y: Tensor) -> dict[str, float | None]:
    """Return accuracy and metrics of the best prediction that is the same for all records, on labels `y [n, ...]`.

    See `Task.best_constant`. Metrics without a baseline, such as calibration, are left out.
    """
    chosen = {name: metric for name, metric in chosen.items() if metric.has_baseline}
    task = task.of_logits()
    constant = task.best_constant(y, num_classes)
    metrics = Metrics(chosen, task, num_classes)
    hits = y.new_zeros(2, dtype=torch.float64)
    for part in y.split(max(1, MOST_NUMBERS // max(1, constant.numel()))):
        output = constant.expand(len(part), *constant.shape).contiguous()
        metrics.update(output, part)
        hits += torch.stack(task.hits(output, part)).sum(dim=1)
    exact = {name: metric.exact[task.constant] for name, metric in chosen.items() if task.constant in metric.exact}
    return {"accuracy": finite_or_none(float(hits[0] / hits[1])), **metrics.values(), **exact}


def of_records(losses: Tensor, task: Task, output: Tensor, y: Tensor) -> Tensor:
    """Return for each record its loss, how many of its predictions are right, and how many count, `[3, B]` float64."""
    return torch.stack([losses.double(), *task.hits(output, y)])


def _scores(
    module: ClientModule,
    model: Tensor,
    population: Population,
    sets: Sequence[Tensor],
    engine: Scorer,
    tables_of_first: bool,
    every: Mapping[str, Metric] | None = None,
) -> list[Score]:
    """Scores of one model on several sets of rows, which may overlap. Few outputs are held at once.

    The first set has tables if it is a test set: of private records they would be a release. `every` are the metrics,
    if they are not those of the run.
    """
    rows, place = torch.cat(list(sets)).unique(return_inverse=True)
    if len(rows) == 0:
        return [_NOTHING] * len(sets)
    sizes = torch.tensor([len(one) for one in sets], device=rows.device)
    places, values = place.split(sizes.tolist()), []
    metrics: list[Metrics] = []
    tables: Tables | None = None
    for first, some_rows in _batches(rows, population, engine):
        output, y = engine.outputs(model, some_rows), population.y[some_rows]
        task = module.task or module.infer_task(output, y, population.num_classes)
        chosen = every or chosen_metrics(module.metrics, task)
        metrics = metrics or [Metrics(chosen, task, population.num_classes) for _ in sets]
        with torch.no_grad():
            of_each = module.reported_loss(model, population.x, some_rows, output, y)
            values.append(of_records(of_each, task, output, y))
            if tables_of_first:
                tables = tables or Tables(task, population.num_classes)
                inside = _inside(places[0], first, len(some_rows))
                tables.update(output[inside], y[inside])
            for metric, in_set in zip(metrics, places, strict=True) if chosen else ():
                inside = _inside(in_set, first, len(some_rows))
                if len(inside):
                    metric.update(output[inside], y[inside])
    of_set = torch.arange(len(sets), device=rows.device).repeat_interleave(sizes)
    sums = values[0].new_zeros(3, len(sets)).index_add_(1, of_set, torch.cat(values, dim=1)[:, place])
    losses, accuracies = (sums[0] / sizes).tolist(), (sums[1] / sums[2]).tolist()  # 0 / 0 is NaN
    scores = [
        Score(finite_or_none(accuracy), loss, metric.values(), metric.undefined()) if size else _NOTHING
        for accuracy, loss, metric, size in zip(accuracies, losses, metrics, sizes.tolist(), strict=True)
    ]
    return scores if tables is None else [dataclasses.replace(scores[0], tables=tables.values()), *scores[1:]]


def _inside(places: Tensor, first: int, count: int) -> Tensor:
    return places[(places >= first) & (places < first + count)] - first


def _batches(rows: Tensor, population: Population, engine: Scorer) -> Iterator[tuple[int, Tensor]]:
    """Yield parts of `rows` with the place of their first; outputs for the classes of a part are few enough."""
    numbers = population.y[0].numel() * (population.num_classes if population.y.dim() > 1 else 1)
    records, chunk = max(1, MOST_NUMBERS // max(1, numbers)), forward_chunk(rows.device) * (engine.workers or 1)
    parts = rows.split(records - records % chunk or records)
    yield from zip(itertools.accumulate(map(len, parts), initial=0), parts, strict=False)


def _mean(scores: Sequence[Score]) -> Score:
    scored = [one for one in scores if one is not _NOTHING]
    if not scored:
        return _NOTHING
    accuracies = [one.accuracy for one in scored if one.accuracy is not None]
    metrics = mean_metrics(one.metrics for one in scored)
    losses = [one.loss for one in scored if not math.isnan(one.loss)] or [math.nan]
    tables = scored[0].tables if all(one is scored[0] for one in scored) else {}  # of one model
    return Score(fmean(accuracies) if accuracies else None, fmean(losses), metrics, tables=tables)
