"""Accuracy of delivered models: whose model, on which records."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from dpfl_lightning.data import Population
from dpfl_lightning.federated.client import evaluation
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.evaluation import ClientModels
from dpfl_lightning.federated.transport.threads import Threads
from dpfl_lightning.privacy.noise import Streams


def evaluate(module, population, final_models, engine_type=SerialEngine):
    channel = Threads(engine_type())
    channel.setup(module, HeldClients(population), Streams(), "poisson")
    return evaluation.evaluate(module, population, final_models, channel)


def always(label: int, classes: int = 2, features: int = 3) -> torch.Tensor:
    """Parameters of a linear net that answers `label` whatever comes."""
    bias = torch.zeros(classes)
    bias[label] = 5.0
    return torch.cat([torch.zeros(classes * features), bias])


@pytest.fixture
def population():
    """Client 0 holds out four zeros, client 1 a zero and three ones; the test set has one zero in four."""
    x = torch.zeros(8, 3)
    pairs = [(x, torch.tensor([0] * 8)), (x, torch.tensor([0, 1, 1, 1] * 2))]
    made = Population.from_datasets(pairs, test=(x[:4], torch.tensor([0, 1, 1, 1])), held_out=0.0, num_classes=2)
    made.held_out_of[0], made.held_out_of[1] = torch.arange(4), torch.arange(8, 12)
    return made


def accuracies(scores) -> list[float]:
    return [one.accuracy for one in scores.clients]


def test_each_client_is_scored_by_its_model_with_its_personal_parameters(population):
    module, models = ClientModule(nn.Linear(3, 2)), torch.stack([always(0), always(1)])
    scores = evaluate(module, population, ClientModels(models, (0, 1)))
    assert accuracies(scores) == [1.0, 0.75] and scores.test.accuracy == pytest.approx((0.25 + 0.75) / 2)
    alone = evaluate(module, population, ClientModels(models, (0, 0)))
    assert accuracies(alone) == [1.0, 0.25] and alone.test.accuracy == 0.25

    class Personal(SerialEngine):
        def personalised(self, model, client):
            return always(1) if client == 1 else model

    module = ClientModule(nn.Linear(3, 2), personal=["bias"])
    personal = evaluate(module, population, ClientModels(always(0)[None], (0, 0)), Personal)
    assert accuracies(personal) == accuracies(scores) and personal.test.accuracy == scores.test.accuracy
    more_classes = ClientModule(nn.Linear(3, 7)), population, ClientModels(always(1, classes=7)[None], (0, 0))
    assert evaluate(*more_classes).test.accuracy == 0.75


def test_the_fast_engine_shares_the_work_and_gives_the_same_scores():
    x, y = torch.randn(605, 3), torch.arange(605) % 2
    population = Population.from_datasets([(x[:20], y[:20])] * 4, test=(x, y), num_classes=2)
    work = ClientModule(nn.Linear(3, 2)), population, ClientModels(torch.randn(2, 8), (1, 0, 0, 1))
    for workers in (1, 2, 3):
        assert evaluate(*work, functools.partial(FastEngine, workers)) == evaluate(*work)


def test_without_a_test_set_the_clients_stand_in():
    x, y = torch.randn(10, 3), torch.zeros(10, dtype=torch.long)
    population = Population.from_datasets([(x, y), (x, 1 - y)], held_out=0.5, num_classes=2)
    scores = evaluate(ClientModule(nn.Linear(3, 2)), population, ClientModels(always(0)[None], (0, 0)))
    assert accuracies(scores) == [1.0, 0.0] and scores.test.accuracy == 0.5


def test_scores_do_not_depend_on_a_finite_loss(population):
    module = ClientModule(nn.Linear(3, 2), loss=lambda output, y: y / 0.0 * 0.0)
    population = replace(population, test=None)
    scores = evaluate(module, population, ClientModels(torch.stack([always(0), always(1)]), (0, 1)))
    assert scores.test.accuracy == 0.875 and math.isnan(scores.test.loss)


class Given(nn.Module):
    """Its inputs are its logits."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale * x


def test_the_test_set_has_a_confusion_table_and_a_calibration_curve():
    p = torch.tensor([0.05, 0.08, 0.72, 0.76, 0.78, 0.74])
    y = torch.tensor([0, 1, 1, 1, 0, 1])
    population = Population.from_datasets([(p[:, None], y)], test=(p.logit()[:, None], y), num_classes=2)
    scores = evaluate(ClientModule(Given()), population, ClientModels(torch.ones(1, 1), (0,)))
    assert scores.test.tables["confusion"] == ((1, 1), (1, 3)), "rows are labels, columns are predictions"
    few, many = scores.test.tables["calibration"]
    assert few == pytest.approx((2, 0.065, 0.5)) and many == pytest.approx((4, 0.75, 0.75))
    assert all(not one.tables for one in scores.clients), "a table of private records would be a release"
    at_clients = replace(population, test=None)
    assert not evaluate(ClientModule(Given()), at_clients, ClientModels(torch.ones(1, 1), (0,))).test.tables


def test_several_classes_are_calibrated_by_the_probability_of_the_predicted_one():
    probabilities = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.65, 0.25], [0.05, 0.9, 0.05]])
    y = torch.tensor([0, 2, 1])
    population = Population.from_datasets([(probabilities, y)], test=(probabilities.log(), y), num_classes=3)
    scores = evaluate(ClientModule(Given()), population, ClientModels(torch.ones(1, 1), (0,)))
    assert scores.test.tables["confusion"] == ((1, 0, 0), (0, 1, 0), (0, 1, 0))
    assert scores.test.tables["calibration"] == (pytest.approx((2, 0.625, 0.5)), pytest.approx((1, 0.9, 1.0)))
    two_models = ClientModels(torch.ones(2, 1), (0,))
    assert evaluate(ClientModule(Given()), population, two_models).test.tables, "one of which is used"
