"""What strategies say of clients' weights: shapes and signs that would pass for other weights are refused."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import blobs
from torch import nn

from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.strategies.aggregation.uniform import Uniform


@pytest.mark.parametrize("role", ["base", "route"])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (torch.ones(3, 1), r"3 clients, \[K, C\], got \(3, 1\)"),
        (torch.ones(2, 3), r"got \(2, 3\)"),
        (torch.ones(1), r"got \(1,\)"),
        ([1.0, 1.0, 1.0], "got 'list'"),
        (torch.tensor([1.0, -1.0, 1.0]), r"give numbers >= 0 and finite, got \[1.0, -1.0, 1.0\]"),
        (torch.tensor([1.0, math.nan, 1.0]), "give numbers >= 0 and finite"),
    ],
)
def test_a_say_of_another_shape_or_sign_is_refused(role, answer, words, make_loop):
    own = type("Mine", (Strategy,), {"role": role, "weigh": lambda self, updates, view: answer})
    base = [] if role == "base" else [Uniform()]
    clients = ClientOptions(count=3, batch_size=16)
    loop = make_loop(population=blobs(num_clients=3), clients=clients, parts=[*base, own()], privacy=None)
    with pytest.raises(UserError, match="`weigh of Mine` must.*" + words):
        loop.run()


def test_a_plain_net_must_be_wrapped(make_loop):
    with pytest.raises(UserError, match=r"must be a ClientModule, got 'Linear'. Wrap a net: ClientModule\(net\)"):
        make_loop(module=nn.Linear(6, 3))
