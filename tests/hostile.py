"""What a hostile server asks a node for, beside a plan of ifca with updates and choices of a model."""

import dataclasses
import math

import torch
from sites import a_question, a_request

from dpfl_lightning.federated.messages.jobs import ClassGradients
from dpfl_lightning.federated.messages.query import FeatureSums, LowestLoss, MeanLoss, NoMechanism, SelectModel
from dpfl_lightning.models.augmentation import ClassAugmentation
from dpfl_lightning.models.optimizers import OPTIMIZERS
from dpfl_lightning.privacy.mechanism import ExponentialMechanism, Gaussian, Laplace
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.wire import digest

MODEL = torch.zeros(650)
ROUNDS = 3


def selection(terms, **changed):
    line = next(one for one in terms.plan.schedule.clients[0].planned if one.purpose == "select")
    honest = {"epsilon": line.event.epsilon, "purpose": "select", "models": torch.zeros(2, 650), "loss_bound": 2.0}
    given = honest | changed
    return SelectModel(mechanism_of={0: ExponentialMechanism(given.pop("epsilon"))}, **given)


def mechanism(ask):
    """That of an honest request."""
    return ask().request.mechanism


IMAGES = ClassAugmentation(("flip",) * 10, ((0.0, 0.0, 0.0),) * 10)

#: what is asked for -> the request, of (the plan, a function that changes an honest request); none is planned
HOSTILE = {
    "less noise": lambda terms, ask: ask(mechanism=dataclasses.replace(mechanism(ask), noise_multiplier=1e-3)),
    "no noise": lambda terms, ask: ask(mechanism=dataclasses.replace(mechanism(ask), noise_multiplier=0.0)),
    "another mechanism": lambda terms, ask: ask(mechanism=Laplace(1.0, 1.0, 1.0, 480.0)),
    "a higher rate": lambda terms, ask: ask(mechanism=dataclasses.replace(mechanism(ask), sample_rate=1.0)),
    "more steps": lambda terms, ask: ask(steps=100),
    "another clip norm": lambda terms, ask: ask(mechanism=dataclasses.replace(mechanism(ask), clip_norm=2.0)),
    "a larger divisor": lambda terms, ask: ask(mechanism=dataclasses.replace(mechanism(ask), expected_batch_size=1e9)),
    "another optimiser": lambda terms, ask: ask(optimizer=OPTIMIZERS["adam"]()),
    "another purpose": lambda terms, ask: ask(purpose="evaluate"),
    "training paid as a choice": lambda terms, ask: ask(purpose="select"),
    "round 0": lambda terms, ask: ask(round=0),
    "a round after the last": lambda terms, ask: ask(round=ROUNDS + 2),
    "a negative round": lambda terms, ask: ask(round=-1),
    "an infinite learning rate": lambda terms, ask: ask(learning_rate=math.inf),
    "a pull that is no number": lambda terms, ask: ask(pull=math.nan),
    "exact counts": lambda terms, ask: ask(job=ClassGradients(10, counts=True)),
    "classes in several steps": lambda terms, ask: ask(job=ClassGradients(10)),
    "other classes": lambda terms, ask: ask(job=ClassGradients(3)),
    "parameters that there are not": lambda terms, ask: ask(job=ClassGradients(10, ("__class__",))),
    "an unknown operation": lambda terms, ask: ask(
        job=ClassGradients(10, augmentation=dataclasses.replace(IMAGES, operations=("eval",) * 10))
    ),
    "a loss without noise": lambda terms, ask: a_question(
        digest(terms), 1, LowestLoss(mechanism_of={0: NoMechanism("the best model")}, models=torch.zeros(2, 650))
    ),
    "a choice with less noise": lambda terms, ask: a_question(digest(terms), 1, selection(terms, epsilon=100.0)),
    "a choice paid as training": lambda terms, ask: a_question(digest(terms), 1, selection(terms, purpose="train")),
    "a choice among no models": lambda terms, ask: a_question(
        digest(terms), 1, selection(terms, models=torch.zeros(0, 650))
    ),
    "a choice without a bound": lambda terms, ask: a_question(digest(terms), 1, selection(terms, loss_bound=math.inf)),
    "another client's answer": lambda terms, ask: a_question(
        digest(terms), 1, dataclasses.replace(selection(terms), mechanism_of={1: ExponentialMechanism(0.1)})
    ),
    "a question that is not planned": lambda terms, ask: a_question(
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
    "sums of features": lambda terms, ask: a_question(
        digest(terms),
        1,
        FeatureSums(mechanism_of={0: Gaussian(1.0, 9.0, 1.0, 480.0)}, nets=torch.zeros(1, 650), num_classes=10),
    ),
}


def hostile(terms, what):
    return HOSTILE[what](terms, lambda **changed: a_request(terms, **{"model": MODEL, **changed}))


def one_is(value):
    model = MODEL.clone()
    model[17] = value
    return model


#: models that no node trains, for a plan of 650 parameters in float32
UNFIT = {
    "not a number": one_is(math.nan),
    "infinite": one_is(math.inf),
    "minus infinite": one_is(-math.inf),
    "larger than a parameter can be": one_is(1.5e6),
    "the largest number": one_is(-3.4e38),
    "of another size": torch.zeros(651),
    "empty": torch.zeros(0),
    "of another type": MODEL.double(),
    "of whole numbers": MODEL.long(),
    "of truth values": MODEL.bool(),
    "in half precision": MODEL.half(),
}


def changed(message, old: str, new: str) -> bytes:
    """The message with another header of its right length."""
    content = wire.encode(message)
    header, _ = wire.sizes(content[: wire.PREFIX.size], wire.Limits(1 << 20, 1 << 20))
    end = wire.PREFIX.size + header
    text = content[wire.PREFIX.size : end].decode()
    assert old in text
    text = text.replace(old, new, 1).encode()
    return wire.PREFIX.pack(b"DPFL", wire.VERSION, len(text), len(content) - end) + text + content[end:]
