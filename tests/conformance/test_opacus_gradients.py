"""The tests of Opacus' per-record gradients, with our clipped sums in the place of its hooks."""

import math

import hypothesis
import pytest
import torch
from opacus.utils import per_sample_gradients_utils as utils
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence

from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.layer_rules import RULES, embedding_rule
from dpfl_lightning.privacy.clipping.reference import ClipRequest, VmapClippedSum
from dpfl_lightning.privacy.clipping.taps import TappedSum

usual = hypothesis.settings.get_current_profile_name()
hypothesis.settings.load_profile("conformance")  # the tests take the number of examples when they are imported
from opacus.tests.grad_samples import (  # noqa: E402
    common,
    conv1d_test,
    conv2d_test,
    conv3d_test,
    dp_multihead_attention_test,
    dp_rnn_test,
    embedding_bag_test,
    embedding_norm_sample_test,
    embedding_test,
    group_norm_test,
    instance_norm1d_test,
    instance_norm2d_test,
    instance_norm3d_test,
    layer_norm_test,
    linear_test,
    rms_norm_test,
    sequence_bias_test,
)

hypothesis.settings.load_profile(usual)
pytestmark = pytest.mark.e2e

WITH_A_RULE = tuple(RULES)  # the rule must be used: the reference would be compared with itself
OPACUS_ITSELF = "it tests a function of Opacus that no gradient of ours uses"


@pytest.fixture(autouse=True)
def rules_of_layers(code_was_read):
    """The tests are of rules: what stands around a layer is taken for read."""


class RecordsFirst(nn.Module):
    """A module whose records are in the first dimension, as all of ours."""

    def __init__(self, module: nn.Module, second: bool) -> None:
        super().__init__()
        self.module, self.second = module, second

    def forward(self, x):
        return self.module(x.transpose(0, 1)).transpose(0, 1) if self.second else self.module(x)


def our_gradients(x, module, batch_first=True, loss_reduction="mean", grad_sample_mode="hooks"):
    """Return per-record gradients by name, as Opacus does.

    Its three modes are: what we choose for the model, in passes of two records ("ew"), and the reference ("functorch").
    """
    net = RecordsFirst(utils.clone_module(module), second=not (batch_first or isinstance(module, WITH_A_RULE)))
    if isinstance(x, PackedSequence):  # records of unequal lengths: one by one
        parts = [
            gradients(net, record[None], loss_reduction, grad_sample_mode) for record in utils.unpack_packedsequences(x)
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return gradients(net, x if batch_first else x.transpose(0, 1), loss_reduction, grad_sample_mode)


def gradients(net, x, reduction, mode):
    def loss(params, x, y):
        return getattr(functional_call(net, dict(params), (x,)).abs().flatten(1), reduction)(1)

    params, y = dict(net.named_parameters()), torch.zeros(len(x))
    clipped_sum = VmapClippedSum(loss)
    if mode != "functorch":
        clipped_sum, how = clipped_sum_for(net, loss, x, y)
        ruled = clipped_sum.by_rules or isinstance(clipped_sum.choose(), TappedSum)
        assert ruled or not isinstance(net.module, WITH_A_RULE), how
    every = ClipRequest(math.inf, group=torch.arange(len(x)), num_groups=max(len(x), 1))
    sums, norms = clipped_sum(params, x, y, every)
    exact = sums.norm(dim=1)[: len(x)]
    torch.testing.assert_close(norms.to(exact.dtype), exact, rtol=1e-4, atol=1e-9)
    clip_norm = max(float(exact.median()), 1e-12) if len(x) else 1.0
    clipped = clipped_sum(params, x, y, ClipRequest(clip_norm))[0][0]
    factors = (clip_norm / exact).clamp(max=1.0).nan_to_num(nan=1.0)
    torch.testing.assert_close(clipped, factors @ sums[: len(x)], rtol=1e-4, atol=1e-4 * clip_norm)
    by_name = sums[: len(x)].float().split([p.numel() for p in params.values()], dim=1)
    return {
        name.removeprefix("module."): rows.view(len(x), *p.shape)
        for (name, p), rows in zip(params.items(), by_name, strict=True)
    }


class Gradients:
    """Replaces the gradients, and the function that computes them beside those of microbatches."""

    def setUp(self):
        patch = pytest.MonkeyPatch()
        self.addCleanup(patch.undo)
        for module in (utils, common):
            patch.setattr(module, "compute_opacus_grad_sample", our_gradients)
        super().setUp()


def norms_of_embedding(layer, activations, backprops):
    ids, dy = (
        activations[0].reshape(len(activations[0]), -1),
        backprops.reshape(len(backprops), -1, backprops.shape[-1]),
    )
    return {layer.weight: embedding_rule(layer, {"weight": layer.weight}, (ids,), dy)["weight"].norms().float()}


class EmbeddingNorms(embedding_norm_sample_test.TestComputeEmbeddingNormSample):
    def setUp(self):
        patch = pytest.MonkeyPatch()
        self.addCleanup(patch.undo)
        patch.setattr(
            embedding_norm_sample_test.embedding_norm_sample, "compute_embedding_norm_sample", norms_of_embedding
        )


TESTS = {
    "Linear": linear_test.Linear_test,
    "Conv1d": conv1d_test.Conv1d_test,
    "Conv2d": conv2d_test.Conv2d_test,
    "Conv3d": conv3d_test.Conv3d_test,
    "GroupNorm": group_norm_test.GroupNorm_test,
    "InstanceNorm1d": instance_norm1d_test.InstanceNorm1d_test,
    "InstanceNorm2d": instance_norm2d_test.InstanceNorm2d_test,
    "InstanceNorm3d": instance_norm3d_test.InstanceNorm3d_test,
    "LayerNorm": layer_norm_test.LayerNorm_test,
    "RMSNorm": rms_norm_test.RMSNorm_test,
    "Embedding": embedding_test.Embedding_test,
    "EmbeddingBag": embedding_bag_test.Embedding_bag_test,
    "RNN": dp_rnn_test.RNN_test,
    "MultiheadAttention": dp_multihead_attention_test.MultiHeadAttention_test,
    "SequenceBias": sequence_bias_test.SequenceBias_test,
}
LEFT_OUT = {
    "EmbeddingBag": {"test": "its records are parts of one list at given offsets; ours are rows of one tensor"},
    "Conv2d": {"test_(unfold|asym)": OPACUS_ITSELF},
    "Conv3d": {"test_(unfold|asym)": OPACUS_ITSELF},
    "Conv1d": {"test_(unfold|asym)": OPACUS_ITSELF},
}
for name in TESTS:
    globals()[name] = type(name, (Gradients, TESTS[name]), {"left_out": LEFT_OUT.get(name, {})})
