"""The attack on one full-batch release: by this package's clipped sum and mechanism, and by the loop of Opacus."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest
from dpfl_lightning.privacy.mechanism import Gaussian
from dpfl_lightning.privacy.noise import Streams
from experiments.attacks.guess import RECORDS, WIDTH, Batch, Regression, guessed, multiplier, neighbours, worst_model
from experiments.attacks.nets import loss_of

#: with 641 records the package makes more passes than with 640, so that the rest of each pass is another
PACKAGE, OPACUS = ([(kind, count) for count in counts for kind in RECORDS] for counts in ((103, 640), (103, 599)))


def package(trials: int) -> list[dict[str, Any]]:
    """Guess from releases of this package."""
    net, generator, rows = Regression(), Streams().generator("noise", 1, 0), []
    clipped_sum, _ = clipped_sum_for(net, loss_of(net), torch.empty(0, WIDTH), torch.empty(0))

    def summed(params: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return clipped_sum(params, *batch, ClipRequest(1.0))[0][0].clone()

    for kind, count in PACKAGE:
        mechanism, pair = Gaussian(1.0, multiplier(), 1.0, count), neighbours(kind, count)
        worst = worst_model(summed, pair)

        def release(coin: bool) -> Tensor:
            return mechanism.privatise(summed(worst.params, pair[coin])[None], generator)[0] * count  # noqa: B023

        rows.append(guessed(kind, count, worst, trials, release))
    return rows


def opacus(trials: int) -> list[dict[str, Any]]:
    """Guess from releases of Opacus: its engine, per-record gradients, clipping and noise."""
    rows = []
    for kind, count in OPACUS:
        pair = neighbours(kind, count)
        loops = [_OpacusLoop(batch) for batch in pair]
        worst = worst_model(lambda params, batch: loops[len(batch[1]) > count].step(params)[0], pair)  # noqa: B023
        rows.append(
            guessed(kind, count, worst, trials, lambda coin: loops[coin].step(worst.params)[1])  # noqa: B023
        )
    return rows


class _OpacusLoop:
    """Full-batch steps of Opacus on these records, as its tutorials write them."""

    def __init__(self, batch: Batch) -> None:
        from opacus import PrivacyEngine

        net = Regression()
        loader = DataLoader(TensorDataset(*batch), batch_size=len(batch[1]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that its noise is not cryptographically safe
            self.net, self.optimizer, private_loader = PrivacyEngine().make_private(
                module=net,
                optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
                data_loader=loader,
                noise_multiplier=multiplier(),
                max_grad_norm=1.0,
                poisson_sampling=False,
            )
        ((self.x, self.y),) = private_loader

    def step(self, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the clipped gradients `[P]`, and the same with noise, from these weights."""
        with torch.no_grad():
            for p, value in zip(self.net.parameters(), params.values(), strict=True):
                p.copy_(value)
        self.optimizer.zero_grad()
        F.mse_loss(self.net(self.x), self.y).backward()
        self.optimizer.step()
        trained = list(self.net.parameters())
        exact = torch.cat([p.summed_grad.flatten() for p in trained])
        noisy = torch.cat([p.grad.flatten() for p in trained]) * self.optimizer.expected_batch_size
        return exact.detach().clone(), noisy.detach().clone()
