"""What a node makes of a request: one meaning is one release, and models that cannot be trained are not charged."""

import dataclasses

import pytest
import torch
from hostile import UNFIT, changed, one_is
from sites import a_question, a_request, accepting, charges, configured, nodes_of, over, planned, reply_in, with_lines

from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.messages.jobs import ClassGradients
from dpfl_lightning.federated.messages.query import FeatureSums, MeanLoss, SelectModel
from dpfl_lightning.federated.messages.requests import Train
from dpfl_lightning.models.augmentation import ClassAugmentation
from dpfl_lightning.privacy.accounting.events import GaussianEvent, SelectionEvent
from dpfl_lightning.privacy.accounting.planned import Planned
from dpfl_lightning.privacy.mechanism import ExponentialMechanism, Gaussian
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import REFUSALS, Refused, Released, ToNode
from dpfl_lightning.sites.wire import digest

NOISE, MANY = 400.0, 200
WHOLE = GaussianEvent(1.0, NOISE, 1)
MODEL = torch.linspace(-1.0, 1.0, 650)
MODEL[10] = 0.0
ANCHOR = torch.ones(650)
GAUSSIAN = Gaussian(1.0, NOISE, 1.0, 480.0)
FLIP = ClassAugmentation(("flip",) * 10, ((0.0, 1 / 3, 0.5),) * 10)


@pytest.fixture(scope="module")
def terms(tmp_path_factory):
    """Noise so large that hundreds of releases of every kind are planned."""
    lines = (Planned("train", GaussianEvent(0.5, NOISE, 2), MANY), Planned("classes", WHOLE, MANY))
    lines += (Planned("loss", WHOLE, MANY), Planned("select", SelectionEvent(1e-4), MANY))
    lines += (Planned("features", WHOLE, MANY),)
    return with_lines(planned(tmp_path_factory.mktemp("plan")), *lines)


@pytest.fixture(scope="module")
def node(tmp_path_factory, terms):
    with accepting(tmp_path_factory.mktemp("site"), terms) as made:
        yield made


def train(terms, **given):
    return a_request(terms, given.pop("model", MODEL), **given)


def classes(terms, job=None, **given):
    job = ClassGradients(10) if job is None else job
    return train(terms, purpose="classes", event=WHOLE, job=job, **given)


def loss(terms, models=None, row_of=None, **given):
    models, row_of = MODEL[None] if models is None else models, {0: 0} if row_of is None else row_of
    given = {"mechanism_of": {0: GAUSSIAN}, "models": models, "row_of": row_of, "loss_bound": 2.0} | given
    return a_question(digest(terms), 1, MeanLoss(**given))


def selection(terms, models=None):
    models = torch.stack([MODEL, ANCHOR]) if models is None else models
    return a_question(
        digest(terms), 1, SelectModel(mechanism_of={0: ExponentialMechanism(1e-4)}, models=models, loss_bound=2.0)
    )


def sums(terms, nets):
    return a_question(digest(terms), 1, FeatureSums(mechanism_of={0: GAUSSIAN}, nets=nets, num_classes=10))


NAMES = ("1.weight", "1.bias")  # of the parameters of the plan's model
LOSSES = torch.stack([ANCHOR, MODEL])

#: the same meaning in two forms, as messages
MESSAGES = {
    "a parameter of minus zero": (lambda t: train(t), lambda t: train(t, model=one_at_ten(-0.0))),
    "an anchor without a proximal term": (lambda t: train(t), lambda t: train(t, anchor=ANCHOR)),
    "a proximal term without an anchor": (lambda t: train(t), lambda t: train(t, pull=0.7)),
    "a proximal term of minus zero": (lambda t: train(t), lambda t: train(t, anchor=ANCHOR, pull=-0.0)),
    "a learning rate of gradients": (lambda t: classes(t), lambda t: classes(t, learning_rate=0.25)),
    "an anchor of gradients": (lambda t: classes(t), lambda t: classes(t, anchor=ANCHOR, pull=0.5)),
    "all parameters by name": (lambda t: classes(t), lambda t: classes(t, ClassGradients(10, NAMES))),
    "all parameters in another order": (lambda t: classes(t), lambda t: classes(t, ClassGradients(10, NAMES[::-1]))),
    "a parameter twice": (
        lambda t: classes(t, ClassGradients(10, NAMES[:1])),
        lambda t: classes(t, ClassGradients(10, NAMES[:1] * 2)),
    ),
    "a row of another client": (lambda t: loss(t), lambda t: loss(t, row_of={2: 0, 0: 0})),
    "a model that is not asked about": (lambda t: loss(t), lambda t: loss(t, models=LOSSES, row_of={0: 1})),
    "models of minus zero": (
        lambda t: selection(t),
        lambda t: selection(t, torch.stack([one_at_ten(-0.0), ANCHOR])),
    ),
}

#: the same meaning in another header: the request, what is replaced, and by what
HEADERS = {
    "a whole number": (lambda t: train(t, learning_rate=1.0), '"learning_rate": 1.0', '"learning_rate": 1'),
    "an exponent": (lambda t: train(t, learning_rate=1.0), '"learning_rate": 1.0', '"learning_rate": 1.00e0'),
    "zero": (lambda t: train(t), '"pull": 0.0', '"pull": 0'),
    "minus zero": (lambda t: train(t), '"pull": 0.0', '"pull": -0.0'),
    "noise as a whole number": (lambda t: train(t), f'"noise_multiplier": {NOISE}', '"noise_multiplier": 400'),
    "another order of keys": (
        lambda t: train(t),
        '"round": 1, "purpose": "train"',
        '"purpose": "train", "round": 1',
    ),
    "an escaped letter": (lambda t: train(t), '"purpose": "train"', '"purpose": "\\u0074rain"'),
    "white space": (lambda t: train(t), '"round": 1', '"round" :\n 1'),
    "a bound as a whole number": (lambda t: loss(t), '"loss_bound": 2.0', '"loss_bound": 2'),
    "a mechanism of whole numbers": (lambda t: loss(t), '"clip_norm": 1.0', '"clip_norm": 1'),
    "places as whole numbers": (
        lambda t: classes(t, ClassGradients(10, augmentation=FLIP), round=2),
        "[0.0, 0.3333333333333333, 0.5]",
        "[-0, 0.3333333333333333, 0.5]",
    ),
}


def one_at_ten(value):
    model = MODEL.clone()
    model[10] = value
    return model


def counted(node, terms, content):
    """The reply to these bytes, and how many lines the ledger gets."""
    before = len(charges(node.state, terms))
    reply = reply_in(node.handle(content))
    return reply, len(charges(node.state, terms)) - before


def same(one, other):
    return torch.equal(torch.as_tensor(one.value), torch.as_tensor(other.value))


@pytest.mark.parametrize("what", [*MESSAGES, *HEADERS])
def test_one_meaning_is_one_release(node, terms, what):
    if what in MESSAGES:
        first, second = (wire.encode(request(terms)) for request in MESSAGES[what])
    else:
        request, old, new = HEADERS[what]
        first, second = wire.encode(request(terms)), changed(request(terms), old, new)
    assert first != second
    (one, _), (other, lines) = (counted(node, terms, content) for content in (first, second))
    assert isinstance(one, Released) and isinstance(other, Released)
    assert lines == 0 and same(one, other)


#: what changes the release, or could
DIFFERENT = {
    "a learning rate": lambda t: train(t, learning_rate=0.500001),
    "a round": lambda t: train(t, round=2),
    "a parameter": lambda t: train(t, model=one_at_ten(1e-30)),
    "an anchor": lambda t: train(t, anchor=ANCHOR, pull=0.5),
    "another anchor": lambda t: train(t, anchor=MODEL, pull=0.5),
    "some parameters": lambda t: classes(t, ClassGradients(10, NAMES[1:])),
    "an augmentation": lambda t: classes(t, ClassGradients(10, augmentation=FLIP)),
    "a loss of another model": lambda t: loss(t, models=LOSSES, row_of={0: 0}),
    "a bound": lambda t: loss(t, loss_bound=3.0),
    "another order of models": lambda t: selection(t, torch.stack([ANCHOR, MODEL])),
}


def test_other_meanings_are_other_releases(node, terms):
    turned = dataclasses.replace(FLIP, operations=("rotate",) * 10)
    job = ClassGradients(10, augmentation=turned)
    for request in (train(terms), classes(terms), classes(terms, job), loss(terms), selection(terms)):
        counted(node, terms, wire.encode(request))
    for what, request in DIFFERENT.items():
        reply, lines = counted(node, terms, wire.encode(request(terms)))
        assert isinstance(reply, Released) and lines == 1, what


WITH_MODELS = {
    "a model": lambda t, model: train(t, model=model),
    "an anchor": lambda t, model: train(t, anchor=model, pull=0.1),
    "an anchor without a proximal term": lambda t, model: train(t, anchor=model),
    "a model of gradients": lambda t, model: classes(t, model=model),
    "models of a choice": lambda t, model: selection(t, torch.stack([model, model])),
    "models of a loss": lambda t, model: loss(t, models=model[None]),
    "a model of a loss that is not asked about": lambda t, model: loss(
        t, models=torch.stack([model, torch.zeros_like(model)]), row_of={0: 1}
    ),
    "models of features": lambda t, model: sums(t, model[None]),
}


@pytest.mark.parametrize("where", WITH_MODELS)
def test_models_that_cannot_be_trained_are_refused_before_the_charge(node, terms, where):
    for what, model in UNFIT.items():
        reply, lines = counted(node, terms, wire.encode(WITH_MODELS[where](terms, model)))
        assert reply == Refused("unfit_model") and lines == 0, what
    reply, lines = counted(node, terms, wire.encode(WITH_MODELS[where](terms, one_is(1e6))))
    assert isinstance(reply, Released), "as large as a model of the server can be"


@pytest.mark.e2e
def test_the_server_is_told_which_models_are_refused(tmp_path, monkeypatch):
    terms = planned(tmp_path)
    nodes = nodes_of(tmp_path, terms)
    loop = over(nodes, terms, configured(tmp_path / "run"))

    def sick(message):
        if isinstance(message, ToNode) and isinstance(message.request, Train):
            message = dataclasses.replace(
                message, request=dataclasses.replace(message.request, model=UNFIT["not a number"])
            )
        return encode(message)

    encode = wire.encode
    monkeypatch.setattr(wire, "encode", sick)
    with (
        pytest.warns(UserNotice, match=f"refuses: {REFUSALS['unfit_model']}"),
        pytest.raises(UserError, match="got none"),
    ):
        loop.run()
    assert not any(charges(node.state, terms) for node in nodes)
    for node in nodes:
        node.close()


def test_a_request_has_one_hash_in_memory_and_in_a_file(terms):
    whole = dataclasses.replace(terms.plan, seed=1)
    floats = dataclasses.replace(whole, settings=tuple(dataclasses.replace(one, epsilon=4) for one in whole.settings))
    wholes = dataclasses.replace(whole, settings=tuple(dataclasses.replace(one, epsilon=4.0) for one in whole.settings))
    assert digest(floats) == digest(wholes) != digest(whole)
