"""What a hostile server asks a node for, beside a plan of ifca with updates and choices of a model."""

import dataclasses
import math

import torch
from sites import a_request

from dpfl_lightning.federated.messages.exchange import Ask
from dpfl_lightning.federated.messages.plan import ClassGradients
from dpfl_lightning.federated.messages.query import FeatureSums, LowestLoss, MeanLoss, NoMechanism, SelectModel
from dpfl_lightning.federated.messages.wire import digest
from dpfl_lightning.models.augmentation import ClassAugmentation
from dpfl_lightning.privacy.accounting.events import LaplaceEvent, NonPrivateEvent
from dpfl_lightning.privacy.mechanism import ExponentialMechanism, Gaussian

MODEL = torch.zeros(650)
ROUNDS = 3


def selection(terms, **changed):
    line = next(one for one in terms.plan.schedule.clients[0].planned if one.purpose == "select")
    honest = {"epsilon": line.event.epsilon, "purpose": "select", "models": torch.zeros(2, 650), "loss_bound": 2.0}
    given = honest | changed
    return SelectModel(mechanism_of={0: ExponentialMechanism(given.pop("epsilon"))}, **given)


IMAGES = ClassAugmentation(("flip",) * 10, ((0.0, 0.0, 0.0),) * 10)

#: what is asked for -> the request, of (the plan, a function that changes an honest request); none is planned
HOSTILE = {
    "less noise": lambda terms, ask: ask(event=dataclasses.replace(ask().event, noise_multiplier=1e-3)),
    "no noise": lambda terms, ask: ask(event=NonPrivateEvent("everything")),
    "another mechanism": lambda terms, ask: ask(event=LaplaceEvent(1.0, 2)),
    "a higher rate": lambda terms, ask: ask(event=dataclasses.replace(ask().event, sample_rate=1.0)),
    "more steps": lambda terms, ask: ask(event=dataclasses.replace(ask().event, steps=100)),
    "noise that is left open": lambda terms, ask: ask(event=dataclasses.replace(ask().event, noise_multiplier=None)),
    "another purpose": lambda terms, ask: ask(purpose="evaluate"),
    "training paid as a choice": lambda terms, ask: ask(purpose="select"),
    "round 0": lambda terms, ask: ask(round=0),
    "a round after the last": lambda terms, ask: ask(round=ROUNDS + 2),
    "a negative round": lambda terms, ask: ask(round=-1),
    "a model of another size": lambda terms, ask: ask(model=torch.zeros(651)),
    "a model of another type": lambda terms, ask: ask(model=MODEL.double()),
    "an anchor of another size": lambda terms, ask: ask(anchor=torch.zeros(3)),
    "an infinite learning rate": lambda terms, ask: ask(learning_rate=math.inf),
    "a pull that is no number": lambda terms, ask: ask(pull=math.nan),
    "exact counts": lambda terms, ask: ask(job=ClassGradients(10, counts=True)),
    "classes in several steps": lambda terms, ask: ask(job=ClassGradients(10)),
    "other classes": lambda terms, ask: ask(job=ClassGradients(3)),
    "parameters that there are not": lambda terms, ask: ask(job=ClassGradients(10, ("__class__",))),
    "an unknown operation": lambda terms, ask: ask(
        job=ClassGradients(10, augmentation=dataclasses.replace(IMAGES, operations=("eval",) * 10))
    ),
    "a loss without noise": lambda terms, ask: Ask(
        digest(terms), 1, LowestLoss(mechanism_of={0: NoMechanism("the best model")}, models=torch.zeros(2, 650))
    ),
    "a choice with less noise": lambda terms, ask: Ask(digest(terms), 1, selection(terms, epsilon=100.0)),
    "a choice paid as training": lambda terms, ask: Ask(digest(terms), 1, selection(terms, purpose="train")),
    "a choice among no models": lambda terms, ask: Ask(digest(terms), 1, selection(terms, models=torch.zeros(0, 650))),
    "a choice without a bound": lambda terms, ask: Ask(digest(terms), 1, selection(terms, loss_bound=math.inf)),
    "another client's answer": lambda terms, ask: Ask(
        digest(terms), 1, dataclasses.replace(selection(terms), mechanism_of={1: ExponentialMechanism(0.1)})
    ),
    "a question that is not planned": lambda terms, ask: Ask(
        digest(terms),
        1,
        MeanLoss(
            purpose="loss",
            mechanism_of={0: Gaussian(1.0, 9.0, 1.0, 480.0)},
            models=torch.zeros(1, 650),
            row_of={0: 0},
            loss_bound=2.0,
        ),
    ),
    "sums of features": lambda terms, ask: Ask(
        digest(terms),
        1,
        FeatureSums(mechanism_of={0: Gaussian(1.0, 9.0, 1.0, 480.0)}, nets=torch.zeros(1, 650), num_classes=10),
    ),
}


def hostile(terms, what):
    return HOSTILE[what](terms, lambda **changed: a_request(terms, **{"model": MODEL, **changed}))
