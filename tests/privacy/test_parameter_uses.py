"""Parameters that no rule of a layer covers: each operator that uses them gives their gradients."""

import math

import torch
from torch import nn

from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum, cross_entropy_of


class Tokens(nn.Module):
    """A class and a distillation token beside each record's own, as vision transformers have; one of them twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(torch.zeros(1, 1, 4))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        tokens = (self.first.expand(len(x), -1, -1), self.second.expand(len(x), -1, -1), x)
        twice = self.first.expand(len(x), 2, -1)
        return self.head(torch.tanh(self.norm(torch.cat([*tokens, twice], dim=1))).mean(1))


def test_parameters_that_lie_in_one_vector_have_the_gradients_of_the_loop():
    net, x, y = Tokens(), torch.randn(9, 5, 4), torch.arange(9) % 3
    clipped_sum, reason = clipped_sum_for(net, None, x, y)
    assert reason.startswith("fast")
    shapes = {name: p.shape for name, p in net.named_parameters()}
    flat = torch.randn(sum(shape.numel() for shape in shapes.values()))
    parts = flat.split([shape.numel() for shape in shapes.values()])
    params = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    each = ClipRequest(math.inf, group=torch.arange(9), num_groups=9)
    before = flat.clone()
    for _ in range(2):
        ours = clipped_sum(params, x, y, each)[0]
        torch.testing.assert_close(ours, LoopClippedSum(net, cross_entropy_of(net))(params, x, y, each)[0].to(ours))
        assert torch.equal(flat, before) and not flat.requires_grad
