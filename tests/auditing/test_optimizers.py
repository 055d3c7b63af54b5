"""An audit of a run whose clients use another optimiser than plain SGD."""

import lightning as L
import pytest
import torch
from conftest import small_net
from torch.nn import functional as F

from dpfl_lightning.auditing.run import audit
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions

PRIVACY = PrivacyOptions(noise_multiplier=1.0, delta=1e-3)
#: they compare releases with the planned noise of plain SGD
CHECKS = [{"fresh noise"}, pytest.param({"grid", "fresh noise", "noise", "canary"}, marks=pytest.mark.e2e)]


class WithAdam(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = small_net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


@pytest.mark.e2e
@pytest.mark.parametrize(("module", "optimizer"), [(WithAdam, None), (None, {"name": "adam"})])
@pytest.mark.parametrize("checks", CHECKS)
def test_the_mechanism_of_a_run_with_adam_is_audited_with_plain_sgd(module, optimizer, checks, make_loop):
    clients = ClientOptions(count=4, batch_size=16, optimizer=optimizer or {"name": "sgd"})
    loop = make_loop(module=None if module is None else module(), privacy=PRIVACY, clients=clients)
    found = audit(loop, [0], 0.99999, 20, only=checks)
    assert found["refuted"] == [] and len(found["clients"][0]["findings"]) == len(checks)
    assert "the optimiser: the audit uses plain SGD" in found["not_audited"][0]
    assert bool(loop.module.optimizer_from) == (module is not None)


def test_plain_sgd_is_no_exception(make_loop):
    assert audit(make_loop(privacy=PRIVACY), [0], only={"nothing"})["not_audited"] == []
