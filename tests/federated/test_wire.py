"""Messages as bytes: what goes in comes out, and bytes of others are refused without harm."""

import math
import random

import pytest
import torch
from conftest import blobs
from hostile import changed
from sites import hello

from dpfl_lightning import strategies
from dpfl_lightning.federated.messages.evaluation import Evaluation, Score
from dpfl_lightning.federated.messages.facts import ClientSettings
from dpfl_lightning.federated.messages.jobs import ClassGradients, LocalTraining
from dpfl_lightning.federated.messages.query import MeanLoss, Query
from dpfl_lightning.federated.messages.requests import Train
from dpfl_lightning.models.augmentation import ClassAugmentation
from dpfl_lightning.privacy.accounting.events import GaussianEvent, SelectionEvent
from dpfl_lightning.privacy.mechanism import Gaussian
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Hello, Paid, Released, ToNode, Welcome

EVENT = GaussianEvent(0.1, 1.2345678901234567, 3)
MODEL = torch.arange(6.0).view(2, 3)
TRAIN = ToNode("ab", Train(1, "train", Gaussian(1.0, 2.0, 1.0, 5.0), 1, LocalTraining(), 0.5, MODEL))


def crossed(message, kind=None):
    return wire.decode(kind or type(message), wire.encode(message))


@pytest.mark.parametrize("dtype", sorted(wire._DTYPES))
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 3)])
def test_tensors_keep_type_shape_and_bits(dtype, shape):
    value = (100 * torch.randn(shape)).to(wire._DTYPES[dtype])
    after = crossed(Released(value, ())).value
    assert after.dtype == value.dtype and after.shape == value.shape
    assert torch.equal(after.view(-1), value.view(-1))
    after.zero_()  # it has memory of its own


def test_messages_come_out_as_they_went_in():
    images = ClassAugmentation(("flip", "crop"), ((0.1, 0.2, 0.3), (1 / 3, 0.0, 0.5)))
    job = ClassGradients(2, ("a.weight",), images, None)
    for message in (
        ClientSettings(10, 5, 1, 0.1, math.inf, 1e-5, 1.0, None),
        Evaluation(Score(None, 0.25, {"f1": None, "auroc": 0.5}), (Score(1.0, -math.inf),)),
        Welcome(False, (Paid(1, 0, "train", EVENT), Paid(2, 0, "select", SelectionEvent(0.5)))),
        Released(3, ()),
        job,
    ):
        assert crossed(message) == message
    assert math.isnan(crossed(Score(None, math.nan)).loss)
    assert type(crossed(hello("x")).request) is Hello
    question = MeanLoss(
        purpose="loss",
        mechanism_of={3: Gaussian(1.0, 2.0, 1.0, 5.0)},
        models=torch.ones(1, 4),
        row_of={3: 0},
        loss_bound=2.0,
    )
    assert crossed(question, Query).mechanism_of == question.mechanism_of


@pytest.mark.e2e
def test_a_run_over_the_wire_has_the_same_bits(make_loop, request):
    def model():
        parts = strategies.build({"noise_aware": {}, "fedprox": {"pull": 0.1}})
        loop = make_loop(blobs(), parts=parts, rounds=2)
        loop.run()
        return loop.state.models

    direct = model()
    request.getfixturevalue("over_the_wire")
    assert torch.equal(model(), direct)


def test_only_known_values_can_be_sent():
    class Spy(Gaussian):
        pass

    for value in (
        object(),
        {1, 2},
        lambda: 0,
        b"bytes",
        Spy(1.0, 1.0, 1.0, 1.0),
        torch.zeros(2, dtype=torch.complex64),
    ):
        with pytest.raises(wire.WireError):
            wire.encode(Released(value, ()))
    with pytest.raises(TypeError, match="dataclasses"):
        wire.register(dict)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"kind": "Train"', '"kind": "Refused"'),
        ('"kind": "Train"', '"kind": "os.system"'),
        ('"round": 1', '"round": true'),
        ('"round": 1', '"round": 1.0'),
        ('"round": 1', '"round": 1, "round": 1'),
        ('"round": 1', '"round": 1, "more": 1'),
        ('"round": 1', '"round": 99999999999999999999'),
        ('"plan": "ab", ', ""),
        ('"sample_rate": 1.0', '"sample_rate": 2.0'),
        ('"clip_norm": 1.0', '"clip_norm": {"number": "nan"}'),
        ('"learning_rate": 0.5', '"learning_rate": NaN'),
        ('"learning_rate": 0.5', '"learning_rate": {"number": "1e9"}'),
        ('"learning_rate": 0.5', '"learning_rate": "0.5"'),
        ('{"array": 0}', '{"array": 1}'),
        ('{"array": 0}', '{"array": -1}'),
        ('{"array": 0}', "null"),
        ("[2, 3]", "[2, 4]"),
        ("[2, 3]", "[2, 2]"),
        ("[2, 3]", "[281474976710655, 281474976710655, 0]"),
        ("[2, 3]", "[-2, -3]"),
        ("float32", "complex64"),
        ('"job": {"kind": "LocalTraining"}', '"job": {"kind": "GaussianEvent"}'),
        ('"job": {"kind": "LocalTraining"}', '"job": ' + "[" * 50_000 + "]" * 50_000),
        ('"dpfl": 4', '"dpfl": 3'),
    ],
)
def test_a_changed_header_is_refused(old, new):
    with pytest.raises(wire.WireError):
        wire.decode(ToNode, changed(TRAIN, old, new))


def test_lengths_are_checked_before_anything_is_read():
    content = wire.encode(TRAIN)
    for wrong in (
        b"",
        content[:10],
        content[:-1],
        content + b"\0",
        b"XXXX" + content[4:],
        content[:4] + b"\2" + content[5:],
    ):
        with pytest.raises(wire.WireError):
            wire.decode(ToNode, wrong)
    with pytest.raises(wire.WireError, match="too long"):
        wire.decode(ToNode, content, wire.Limits(len(content), 8))
    with pytest.raises(wire.WireError, match="too long"):
        wire.decode(ToNode, content, wire.Limits(8, len(content)))
    with pytest.raises(wire.WireError, match="too long"):
        wire.sizes(wire.PREFIX.pack(b"DPFL", wire.VERSION, 10, 2**62), wire.Limits(1 << 20, 1 << 20))


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_changes_are_refused_or_give_a_message(count):
    draw, content = random.Random(0), wire.encode(TRAIN)
    for _ in range(count):
        fuzzed = bytearray(content)
        for _ in range(draw.randint(1, 6)):
            place = draw.randrange(len(fuzzed))
            fuzzed[place : place + draw.randint(0, 2)] = draw.randbytes(draw.randint(0, 2))
        try:
            wire.decode(ToNode, bytes(fuzzed))
        except wire.WireError as error:
            assert error.__cause__ is None
