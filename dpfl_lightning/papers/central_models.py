"""Fairness of clustered federations: how much each client loses against a central model of its true group."""

# Malekmohammadi, Taik and Farnadi (2024), section 5.1         Here
#   theta*, non-private SGD on the pooled data of a cluster    `CentralModels._trained`, one for each true group
#   Delta acc_i = max_theta* acc_i(theta*) - acc_i(theta_i)    `lost_accuracy`, on held-out records of client i
#   xi_i = f_i(theta_i) - min_theta* f_i(theta*)               `excess_loss`, on training records of client i
#   F_acc = max_{i,j} |Delta acc_i - Delta acc_j|              `fairness_acc_gap`
#   F_loss = max_{i,j} |xi_i - xi_j|                           `fairness_loss_gap`

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.config.typed import options_of, valid
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.draws import fixed_rng
from dpfl_lightning.federated.client.evaluation import PlainScorer, Scorer, evaluate
from dpfl_lightning.federated.client.fairness import KEY, FairnessMeasure
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.evaluation import ClientModels, Score
from dpfl_lightning.models.tasks import Measure
from dpfl_lightning.privacy.clipping.inputs import take

_VALIDATION = 10  # one of so many pooled records chooses the epoch


@dataclass
class CentralModels(FairnessMeasure):
    """Fairness gaps against a model that is trained without privacy on the pooled records of each true group.

    `fairness_acc_gap` (F_acc) and `fairness_loss_gap` (F_loss) are best - worst over clients of the lost accuracy
    (held-out records, [0, 1]) and of the excess loss (training records). 0 is perfectly fair. The papers take the best
    of all models; here it is the trained one, which a client may surpass.

    Args:
        epochs: over nine tenths of the pooled records; the epoch with the best loss on the last tenth is kept.
        batch_size: of SGD.
        learning_rate: of SGD.
        momentum: of SGD.
    """

    epochs: Annotated[int, Interval(ge=1, le=100_000)] = 20
    batch_size: Annotated[int, Interval(ge=1)] = 64
    learning_rate: Annotated[float, Interval(gt=0, lt=math.inf)] = 0.05
    momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.9

    measures: ClassVar[Mapping[str, Measure]] = {
        "fairness_acc_gap": Measure(higher_is_better=False, constant=""),
        "fairness_loss_gap": Measure(higher_is_better=False, constant=""),
    }

    def __post_init__(self) -> None:
        for name, hint in options_of(type(self)).items():
            setattr(self, name, valid(f"{KEY}.{name}", getattr(self, name), hint))
        self._references: tuple[Sequence[Score], Sequence[Score]] | None = None  # on held-out and training records

    def values(
        self,
        module: ClientModule,
        population: Population,
        final_models: ClientModels,
        held_out: Sequence[Score],
        engine: Scorer,
    ) -> dict[str, float]:
        if self._references is None:
            plain = PlainScorer(module, population)
            central = ClientModels(self.models(module, population), _groups(population))
            held = dataclasses.replace(population, test=None)
            self._references = (
                evaluate(module, held, central, plain, {}).clients,
                evaluate(module, on_training(population), central, plain, {}).clients,
            )
        best, least = self._references
        training = evaluate(module, on_training(population), final_models, engine, {}).clients
        return gaps(held_out, training, best, least)

    def models(self, module: ClientModule, population: Population) -> Tensor:
        """The central models `[M, P]` of the true groups 0..M - 1, from the initial parameters of the module."""
        groups = _groups(population)
        members = [[i for i, group in enumerate(groups) if group == one] for one in range(max(groups) + 1)]
        pooled = [torch.cat([population.train_of[i] for i in some]).unique() for some in members]
        with fixed_rng(module.device):
            return torch.stack([self._trained(module, population, rows) for rows in pooled])

    def _trained(self, module: ClientModule, population: Population, rows: Tensor) -> Tensor:
        """The parameters `[P]` of the best epoch of SGD on `rows` `[n]`."""
        rows = rows[torch.randperm(len(rows)).to(rows.device)]
        held, rows = rows.split([len(rows) // _VALIDATION, len(rows) - len(rows) // _VALIDATION])
        chosen_by = held if len(held) else rows
        trained = copy.deepcopy(module)
        optimizer = torch.optim.SGD(trained.trainable, self.learning_rate, self.momentum)
        scorer = PlainScorer(module, population)
        validation = dataclasses.replace(population, held_out_of=[chosen_by], test=None)
        best, lowest = trained.flat.clone(), math.inf
        for _ in range(self.epochs):
            for batch in rows[torch.randperm(len(rows)).to(rows.device)].split(self.batch_size):
                optimizer.zero_grad()
                records = take(population.x, batch), population.y[batch]
                trained.sample_loss(trained.named_trainable, *records).mean().backward()
                optimizer.step()
            model = ClientModels(trained.flat[None], (0,))
            loss = evaluate(module, validation, model, scorer, {}).clients[0].loss
            if loss < lowest:
                best, lowest = trained.flat.clone(), loss
        return best


def gaps(
    held_out: Sequence[Score], training: Sequence[Score], best: Sequence[Score], least: Sequence[Score]
) -> dict[str, float]:
    """F_acc and F_loss of clients from scores on held-out and training records: theirs, and of the central models.

    >>> ours, central = [Score(0.75, 0.5), Score(0.5, 1.0)], [Score(0.75, 0.25), Score(0.75, 0.25)]
    >>> gaps(ours, ours, central, central)
    {'fairness_acc_gap': 0.25, 'fairness_loss_gap': 0.5}
    """
    lost_accuracy = [
        reference.accuracy - score.accuracy
        for score, reference in zip(held_out, best, strict=True)
        if score.accuracy is not None and reference.accuracy is not None
    ]
    excess_loss = [score.loss - reference.loss for score, reference in zip(training, least, strict=True)]
    known = {"fairness_acc_gap": lost_accuracy, "fairness_loss_gap": excess_loss}
    return {name: max(values) - min(values) for name, values in known.items() if values}


def on_training(population: Population) -> Population:
    """The population whose held-out records are the training records."""
    return dataclasses.replace(population, held_out_of=population.train_of, test=None)


def _groups(population: Population) -> tuple[int, ...]:
    assert population.groups is not None, "checked before the run"
    return population.groups
