"""Passes that are repeated from a recording, here with a recording that computes them again."""

import pytest
import torch

from dpfl_lightning import models
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.kernels import graphs
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.inputs import Block, take
from dpfl_lightning.privacy.clipping.reference import ClipRequest

pytestmark = pytest.mark.usefixtures("code_was_read")  # of rules, and of trials of code


@pytest.fixture
def sums():
    torch.manual_seed(0)
    net = models.build("cnn_small", (1, 28, 28), 10)
    x, y = torch.randn(150, 1, 28, 28), torch.randint(10, (150,))
    checked = clipped_sum_for(net, None, x[:1], y[:1])[0]
    params = {name: p.detach() for name, p in net.named_parameters()}
    return checked.choose(), checked.passes.examples, params, x, y


@pytest.mark.e2e
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("records", [0, 1, 96, 150])
def test_recorded_passes_give_the_same_sums(sums, groups, records, monkeypatch):
    plain, examples, params, x, y = sums
    recorded = []
    monkeypatch.setattr(graphs, "record", lambda compute: recorded.append(compute) or compute)
    graphed = graphs.GraphedSum(plain, examples)
    for scale, clip_norm in ((1.0, 0.7), (2.0, 0.1)):  # the second time from the same recording
        changed = {name: scale * p for name, p in params.items()}
        group = torch.arange(records) % groups if groups > 1 else None
        request = ClipRequest(clip_norm, group=group, num_groups=groups)
        expected, actual = (one(changed, x[:records], y[:records], request) for one in (plain, graphed))
        torch.testing.assert_close(actual[0], expected[0], rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(actual[1], expected[1], rtol=1e-12, atol=0)
    assert len(recorded) == (records > 0)


@pytest.mark.e2e
def test_recorded_passes_of_persons_give_the_same_sums(monkeypatch):
    module = ClientModule(models.build("cnn_small", (1, 28, 28), 10))
    x = Block.of(torch.randn(150 * 3, 1, 28, 28), torch.arange(3) < torch.arange(150)[:, None] % 3 + 1)
    y = torch.randint(10, (150, 3))
    checked = clipped_sum_for(module.net, module.sample_loss, take(x, slice(1)), y[:1])[0]
    params, request = {name: p.detach() for name, p in module.net.named_parameters()}, ClipRequest(0.5)
    monkeypatch.setattr(graphs, "record", lambda compute: compute)
    expected = checked.choose()(params, x, y, request)
    actual = graphs.GraphedSum(checked.choose(), checked.passes.examples)(params, x, y, request)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-12, atol=0)


def test_a_pass_that_cannot_be_recorded_is_computed(sums, monkeypatch):
    plain, examples, params, x, y = sums

    def refuse(compute):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "record", refuse)
    graphed, request = graphs.GraphedSum(plain, examples), ClipRequest(1.0)
    for one, other in zip(plain(params, x, y, request), graphed(params, x, y, request), strict=True):
        assert torch.equal(one, other)
