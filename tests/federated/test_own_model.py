"""A user's own model and training: LightningModules, optimisers and schedules, and the trained model after a run."""

import copy
import random
import sys

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from conftest import FIXED_KEY, break_off, private, small_net
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from dpfl_lightning import Population
from dpfl_lightning.build import ENGINES
from dpfl_lightning.commands.evaluate import evaluate_run
from dpfl_lightning.commands.fit import fit
from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.checks import check_fits
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.models.learning_rates import build_schedule
from dpfl_lightning.models.model import load_trained
from dpfl_lightning.models.optimizers import SGD, build_optimizer
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.inputs import Block, take
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum, evaluating
from dpfl_lightning.reporting.progress import Progress
from dpfl_lightning.strategies.aggregation.noise_aware import NoiseAware
from dpfl_lightning.strategies.clustering.local import Local

pytestmark = pytest.mark.filterwarnings("ignore:not used of|configure_optimizers:UserWarning")


class Lit(L.LightningModule):
    """As many tutorials write it: Adam with a schedule, a metric and logs in the training step."""

    def __init__(self, learning_rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net, self.criterion = small_net(), nn.CrossEntropyLoss(label_smoothing=0.1)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self(x.view(x.size(0), -1))
        loss = self.criterion(output, y)
        self.accuracy(output, y)
        self.log("loss", loss)
        self.log("accuracy", self.accuracy)
        return loss

    def validation_step(self, batch, batch_idx):
        raise AssertionError

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
        return [optimizer], [StepLR(optimizer, step_size=1, gamma=0.5)]


class OfAChild(Lit):
    """The net itself is called, not `forward`."""

    def training_step(self, batch, batch_idx):
        return {"loss": self.criterion(self.net(batch[0]), batch[1])}


class OwnFormula(Lit):
    """The loss is no function of torch."""

    def training_step(self, batch, batch_idx):
        smooth = 0.9 * F.one_hot(batch[1], 3) + 0.1 / 3
        return -(smooth * self(batch[0]).log_softmax(dim=1)).sum(dim=1).mean()


class Dropping(Lit):
    """The net draws random numbers in training."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(self.net, nn.Dropout(0.3))


class Standardising(Lit):
    """It changes its input."""

    def forward(self, x):
        return self.net(x.sub_(0.5).div_(2.0))


class MixesNowAndThen(Lit):
    """The step adds noise to records; with some draws it makes all of them the first one."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = self.mixed(x + 0.1 * torch.randn_like(x))
        return self.criterion(self(x.view(x.size(0), -1)), y)

    def mixed(self, x):
        chance = torch.rand(())
        return torch.where((chance > 0.55) & (chance < 0.95), x[:1].expand_as(x), x)


class MixesByPython(MixesNowAndThen):
    def mixed(self, x):
        return x[:1].expand_as(x) if random.random() < 0.02 else x


class OnlyMixes(MixesByPython):
    """The step draws nothing else."""

    def training_step(self, batch, batch_idx):
        return self.criterion(self(self.mixed(batch[0]).flatten(1)), batch[1])


class MixesByNumPy(OnlyMixes):
    def mixed(self, x):
        return x[:1].expand_as(x) if np.random.rand() < 0.02 else x


class MixesInForward(MixesNowAndThen):
    """`forward` draws, not the step."""

    def forward(self, x):
        return self.net(self.mixed(x + 0.1 * torch.randn_like(x)))

    training_step = Lit.training_step


class OfInputs(Lit):
    """The loss is no function of outputs alone, and every layer has its learning rate."""

    def training_step(self, batch):
        x, y = batch
        return self.criterion(self(x), y) + 0.01 * (self.net[0].weight ** 2).sum() * (x**2).mean()

    def configure_optimizers(self):
        groups = [{"params": self.net[0].parameters(), "lr": 0.1}, {"params": self.net[2].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        cycle = OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


def halving_adam(parameters):
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, step_size=1, gamma=0.5)}


def by_hand() -> ClientModule:
    """What an engine does with `Lit`, by functions."""
    return ClientModule(small_net(), nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none"), halving_adam)


def trained(make_loop, module, engine="fast", **options) -> torch.Tensor:
    loop = make_loop(module=module, engine=ENGINES[engine](), **options)
    loop.run()
    assert torch.equal(loop.module.flat, loop.state.models[0])
    return loop.state.models[0]


@pytest.mark.e2e
def test_loss_optimiser_and_schedule_of_a_lightning_module_are_used(make_loop, one_noise):
    options = {"rounds": 2, "clients": ClientOptions(4, batch_size=16)}
    expected = trained(make_loop, by_hand(), "serial", **options)
    for engine, kind in (("serial", Lit), ("trainer", Lit), ("fast", Lit), ("fast", OfAChild), ("fast", OwnFormula)):
        torch.testing.assert_close(trained(make_loop, kind(), engine, **options), expected, rtol=1e-4, atol=1e-5)
    ours, reference = (trained(make_loop, OfInputs(), name, **options) for name in ("fast", "serial"))
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(reference, expected, atol=1e-3)


@pytest.mark.parametrize("kind", [Lit, OfAChild, OwnFormula, OfInputs, Dropping, Standardising])
def test_the_loss_of_a_record_is_the_training_step_on_it_alone(kind, make_loop, recwarn):
    loop = make_loop(module=kind())
    module, net = loop.module, copy.deepcopy(loop.module.net)
    assert module.adapted.runs_under_vmap and not any("alone" in str(one.message) for one in recwarn)
    x, y = loop.population.x[:5], loop.population.y[:5]
    with evaluating(module.net, net), torch.no_grad():
        losses = module.sample_loss(module.named_trainable, x, y)
        batches = [((x[row : row + 1].clone(), y[row : row + 1]), 0) for row in range(5)]
        each = [net.training_step(*batch[: 1 if kind is OfInputs else 2]) for batch in batches]
    each = [one["loss"] if kind is OfAChild else one for one in each]
    torch.testing.assert_close(losses, torch.stack(each))


@pytest.mark.parametrize("kind", [MixesByPython, OnlyMixes, MixesByNumPy])
def test_random_numbers_that_torch_does_not_draw_are_refused(kind, make_loop):
    with pytest.raises(UserError, match=r"must keep nothing of a pass .* Draw random numbers by torch"):
        make_loop(module=kind())


@pytest.mark.parametrize("kind", [MixesNowAndThen, MixesInForward])
def test_a_training_step_that_mixes_records_now_and_then_mixes_none_in_a_run(kind, make_loop, monkeypatch):
    module = make_loop(module=kind()).module
    monkeypatch.setattr("torch.rand", lambda _: torch.tensor(0.6))
    monkeypatch.setattr("torch.randn_like", torch.zeros_like)
    x, y = torch.randn(4, 6), torch.arange(4) % 3
    with torch.no_grad():
        losses = module.sample_loss(module.named_trainable, x, y)
        each = [module.net.criterion(module.net.net(x[[row]]), y[[row]]) for row in range(4)]
    torch.testing.assert_close(losses, torch.stack(each))


def test_what_is_not_used_of_a_lightning_module_is_said(make_loop):
    with pytest.warns(UserNotice) as caught:
        make_loop(module=Lit(), clients=ClientOptions(4, learning_rate=0.3))
    assert [str(one.message) for one in caught] == [
        "not used of Lit: validation_step, accuracy",
        "configure_optimizers replaces clients.learning_rate",
    ]


class Keeps(Lit):
    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        self.losses.append(super().training_step(batch, batch_idx))
        return self.losses[-1]


class Manual(Lit):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Step(Lit):
    """A module for each case: `of(self, x, y)` is its loss."""

    def training_step(self, batch, batch_idx):
        return self.of(*batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def step(of, kind=Step, **methods) -> L.LightningModule:
    return type("Own", (kind,), {"of": of, **methods})()


def augmented(self, x, y):
    return F.cross_entropy(self(0 * x if self.training else x), y)


def penalised(self, x, y):
    return F.cross_entropy(self(x), y) + (5 * (self.net[0].weight ** 2).sum() if self.training else 0)


def noisy(self, x, y):
    return F.cross_entropy(self(x + torch.randn_like(x) * self.training), y)


@pytest.mark.e2e
@pytest.mark.parametrize("of", [augmented, penalised, noisy])
def test_what_a_training_step_does_only_in_training_is_trained(of, make_loop):
    loop = make_loop(module=step(of), rounds=1)
    module, batch = loop.module, (torch.ones(3, 6), torch.arange(3))
    with torch.no_grad():
        plain = F.cross_entropy(module.net(batch[0]), batch[1], reduction="none")
        assert not torch.allclose(module.sample_loss(module.named_trainable, *batch), plain, rtol=1e-2)
        rows = torch.arange(5)
        x, y = loop.population.x[rows], loop.population.y[rows]
        reported = module.reported_loss(module.flat, loop.population.x, rows, module.net(x), y)
        torch.testing.assert_close(reported, F.cross_entropy(module.net(x), y, reduction="none"))
    if of is not noisy:
        ours, reference = (trained(make_loop, step(of), name, rounds=1) for name in ("fast", "serial"))
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


def weighted(self, x, y):
    return F.cross_entropy(self(x), y, weight=torch.tensor([1.0, 1.0, 50.0], device=x.device))


def of_epoch(self, x, y):
    return F.cross_entropy(self(x), y) * (1 + self.current_epoch)


def of_step(self, x, y):
    return F.cross_entropy(self(x), y) * min(1.0, self.global_step / 2)


def read(self, x, y):
    loss = F.cross_entropy(self(x), y)
    return loss if loss.item() < 100 else 0 * loss


def squeezed(self, x, y):
    return F.binary_cross_entropy_with_logits(self(x)[:, :1].squeeze(), (y > 0).float())


def mixed_up(self, x, y):
    share, other = torch.rand(()) * self.training, torch.randperm(len(x))
    mixture = self((1 - share) * x + share * x[other])
    return (1 - share) * F.cross_entropy(mixture, y) + share * F.cross_entropy(mixture, y[other])


class Indexed(Step):
    def training_step(self, batch, batch_idx):
        return self.criterion(self(batch[0]), batch[1]) * (1 + batch_idx)


class NoForward(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = small_net()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.parametrize(
    "module, words",
    [
        (lambda: Manual(), "Manual"),
        (lambda: Keeps(), "losses"),
        (lambda: step(mixed_up), "other records"),
        (lambda: step(of_epoch), "trainer.current_epoch"),
        (lambda: step(of_step), "trainer.global_step"),
        (lambda: step(lambda self, x, y: self.optimizers()), "trainer.strategy"),
        (lambda: step(squeezed), "batch of one record.*squeeze"),
        (lambda: Indexed(), "batch_idx"),
        (lambda: NoForward(), "`forward` must be a method"),
        (
            lambda: step(
                lambda self, x, y: F.cross_entropy(self.net(x), y), forward=lambda self, x: self.net(x).argmax(dim=1)
            ),
            "floating outputs.*argmax",
        ),
    ],
)
def test_a_training_step_that_needs_more_than_its_records_is_refused(module, words, make_loop):
    with pytest.raises(UserError, match=words):
        make_loop(module=module())


def contrastive(self, x, y):
    return F.cross_entropy(self(x) @ self(x).T, torch.arange(len(x), device=x.device))


def of_half_the_batch(self, x, y):
    return F.cross_entropy(self(x), y) + F.cross_entropy(self(x).mean(dim=0, keepdim=True), y[:1])


def normalised(self, x, y):
    return F.cross_entropy(self((x - x.mean(dim=0)) / (x.var(dim=0, correction=0) + 1e-2).sqrt()), y)


def rooted(self, x, y):
    return F.mse_loss(self(x), F.one_hot(y, 3).float()).sqrt()


def of_most_labels(self, x, y):
    losses, weights = F.cross_entropy(self(x), y, reduction="none"), 1.0 + y
    return (losses * weights).sum() / weights.sum()


def dropping_contrastive(self, x, y):
    return contrastive(self, F.dropout(x, 0.1), y)


PAIRING = (contrastive, of_half_the_batch, normalised, rooted, of_most_labels, dropping_contrastive, mixed_up)


@pytest.mark.parametrize("of", PAIRING)
def test_a_loss_that_pairs_records_is_refused_unless_that_of_single_records_is_asked_for(of, make_loop):
    words = "depends on other records.*losses of single records, which train nothing of what pairs.*per_record=True"
    with pytest.raises(UserError, match=words):
        make_loop(module=ClientModule(step(of)))
    make_loop(module=ClientModule(step(of), per_record=True))


def by_size(self, x, y):
    return F.cross_entropy(self(x), y) * len(x) ** 0.5


class DroppingStep(Step, Dropping):
    pass


def test_a_loss_is_compared_without_dropout_away_from_zeros_and_for_labels_of_several_classes():
    of_zeros = step(of_most_labels)
    nn.init.zeros_(of_zeros.net[2].weight)
    nn.init.zeros_(of_zeros.net[2].bias)
    for own in (step(by_size, DroppingStep), step(of_most_labels), of_zeros):
        with pytest.raises(UserError, match="depends on other records"):
            ClientModule(own).prepare(torch.randn(2, 6), torch.zeros(2).long(), 3)


@pytest.mark.e2e
def test_a_loss_that_pairs_records_trains_by_single_records_if_that_is_asked_for(make_loop, one_noise):
    options = {"rounds": 1, "privacy": None}
    paired = trained(make_loop, ClientModule(step(of_half_the_batch), per_record=True), **options)
    once, twice = (step(lambda self, x, y, many=many: many * F.cross_entropy(self(x), y)) for many in (1, 2))
    torch.testing.assert_close(paired, trained(make_loop, twice, **options), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(paired, trained(make_loop, once, **options), atol=1e-4)


def logged(self, x, y):
    self.history.append(F.cross_entropy(self(x), y).item())
    self.history.clear()
    return F.cross_entropy(self(x), y)


def read_of_inputs(self, x, y):
    loss = F.cross_entropy(self(x), y) + 0.1 * (x**2).mean() * (self.net[0].weight ** 2).sum()
    return loss if loss.item() < 100 else 0 * loss


@pytest.mark.e2e
@pytest.mark.parametrize("of, engine", [(logged, "loop: "), (read_of_inputs, "loop: ")])
def test_a_training_step_may_read_its_loss(of, engine, make_loop, one_noise):
    loop = make_loop(module=step(of, history=[]), rounds=1)
    assert not loop.module.adapted.runs_under_vmap
    loop.run()
    assert engine in loop.clients.description
    ours, reference = (trained(make_loop, step(of, history=[]), name, rounds=1) for name in ("fast", "serial"))
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.e2e
def test_metrics_of_forward_beside_the_loss_of_a_child_are_said(make_loop):
    module = step(lambda self, x, y: F.cross_entropy(self.net(x), y), forward=lambda self, x: -self.net(x))
    with pytest.warns(UserNotice, match="does not call forward, whose outputs give accuracy"):
        loop = make_loop(module=module, rounds=1)
    result = loop.run()
    x, y = (part[loop.population.test] for part in (loop.population.x, loop.population.y))
    assert result.test_loss == pytest.approx(F.cross_entropy(result.model.net(x), y).item(), rel=1e-4)


def test_each_record_has_the_mean_over_its_labels_that_count():
    module = step(lambda self, x, y: F.cross_entropy(self(x).movedim(-1, 1), y), forward=lambda self, x: self.net(x))
    own, x, y = ClientModule(module), torch.randn(8, 4, 6), torch.randint(3, (8, 4))
    own.prepare(x, y, 3)
    y[:, 1:3] = -100
    expected = [F.cross_entropy(one, labels) for one, labels in zip(module.net(x), y, strict=True)]
    torch.testing.assert_close(own.sample_loss(own.named_trainable, x, y), torch.stack(expected))


def test_class_weights_weigh_each_record_whatever_the_others_are():
    module = step(weighted)
    own, x, y = ClientModule(module), torch.randn(9, 6), torch.arange(9) % 3
    own.prepare(x, y, 3)
    expected = F.cross_entropy(module.net(x), y, reduction="none") * torch.tensor([1.0, 1.0, 50.0])[y]
    torch.testing.assert_close(own.sample_loss(own.named_trainable, x, y), expected)
    torch.testing.assert_close(own.sample_loss(own.named_trainable, x[2:3], y[2:3]), expected[2:3])


def test_class_weights_weigh_the_labels_of_a_record_that_count():
    weights = torch.tensor([1.0, 1.0, 50.0])
    of = step(lambda self, x, y: F.cross_entropy(self(x), y, weights), forward=lambda self, x: self.net(x).mT)
    own, x, y = ClientModule(of), torch.randn(8, 4, 6), torch.randint(3, (8, 4))
    own.prepare(x, y, 3)
    y[:, 1:3] = -100
    each = F.cross_entropy(own.net(x), y, weights, reduction="none")
    torch.testing.assert_close(own.sample_loss(own.named_trainable, x, y), each.sum(dim=1) / 2)


@pytest.mark.e2e
def test_a_person_has_the_mean_of_the_losses_of_its_records():
    own, x, y = ClientModule(step(plain)), torch.randn(20, 6), torch.arange(20) % 3
    own.prepare(x, y, 3)
    present = torch.ones(5, 4, dtype=torch.bool)
    present[3, 1:] = False
    people, labels = Block.of(x, present), y.unflatten(0, (5, 4))
    each = [
        F.cross_entropy(own.net(x[4 * row : 4 * row + 4][some]), y[4 * row : 4 * row + 4][some])
        for row, some in enumerate(present)
    ]
    torch.testing.assert_close(own.sample_loss(own.named_trainable, people, labels), torch.stack(each))
    clipped_sum, reason = clipped_sum_for(own.net, own.sample_loss, take(people, slice(0)), labels[:0])
    loop, request = LoopClippedSum(own.net, own.sample_loss), ClipRequest(0.1, group=torch.arange(5), num_groups=5)
    ours, expected = (one(own.named_trainable, people, labels, request)[0] for one in (clipped_sum, loop))
    torch.testing.assert_close(ours, expected)
    assert reason.startswith("vmap: ") and not clipped_sum.choose().direct


@pytest.mark.e2e
def test_a_training_step_that_reads_its_loss_runs_for_one_record_after_the_other(make_loop):
    ours, reference = (trained(make_loop, step(of), rounds=1) for of in (read, plain))
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


def without_padding(self, x, y):
    return (F.cross_entropy(self(x), y, reduction="none") * (x != 0).any(dim=1)).mean()


def none_for_padding(self, x, y):
    return F.cross_entropy(self(x), y) if (x != 0).any() else None


def none_by_a_number(self, x, y):
    return None if x.abs().sum().item() == 0 else F.cross_entropy(self(x), y)


def none_and_penalty(self, x, y):
    return F.cross_entropy(self(x), y) + (x**2).mean() * self.net[0].weight.norm() if (x != 0).any() else None


def none_without_labels(self, x, y):
    return None if (y < 0).all() else F.cross_entropy(self(x), y.clamp(min=0))


def none_by_an_array(self, x, y):
    return None if (y.numpy() < 0).all() else F.cross_entropy(self(x), y.clamp(min=0))


def of_labelled(self, x, y):
    return F.cross_entropy(self(x)[y >= 0], y[y >= 0])


def of_masked(self, x, y):
    return F.cross_entropy(self(x, y >= 0), y.clamp(min=0))


def masking(self, x, mask=None):
    return self.net(x if mask is None else x * mask[:, None])


def without_nan(self, x, y):
    return F.cross_entropy(self(x.nan_to_num()), y)


def cut_off(self, x, y):
    loss = F.cross_entropy(self(x), y)
    return loss if loss.item() < 1e3 else 0 * loss


@pytest.mark.e2e
@pytest.mark.parametrize(
    "of, methods, unusual_x, unusual_y",
    [
        (without_padding, {}, 0.0, 0),
        (none_for_padding, {}, 0.0, 0),
        (none_by_a_number, {}, 0.0, 0),
        (none_and_penalty, {}, 0.0, 0),
        (none_without_labels, {}, 1.0, -100),
        (none_by_an_array, {}, 1.0, -100),
        (of_labelled, {}, 1.0, -100),
        (of_masked, {"forward": masking}, 1.0, -100),
        (without_nan, {}, torch.nan, 0),
        (cut_off, {}, 1e6, 0),
    ],
)
def test_what_a_training_step_does_for_unusual_records_only_is_trained(of, methods, unusual_x, unusual_y):
    module = step(of, **methods)
    own, x, y = ClientModule(module), torch.randn(8, 6), torch.arange(8) % 3
    own.prepare(x, y, 3)
    x[1], y[1] = unusual_x, unusual_y
    each = [module.training_step((x[row : row + 1], y[row : row + 1]), 0) for row in range(8)]
    expected = torch.stack([torch.zeros(()) if one is None else one.detach() for one in each])
    with torch.no_grad():
        losses = own.sample_loss(own.named_trainable, x, y)
        reported = own.reported_loss(own.flat, x, torch.arange(8), module.net(x), y)
    torch.testing.assert_close(losses, expected, equal_nan=True)
    torch.testing.assert_close(reported, expected, equal_nan=True)
    clipped_sum = clipped_sum_for(module, own.sample_loss, x[:0], y[:0])[0]
    request = ClipRequest(1e9, group=torch.arange(8), num_groups=8)
    ours = clipped_sum(own.named_trainable, x, y, request)[0].float()
    for one, gradient in zip(each, ours, strict=True):
        grads = torch.autograd.grad(one, own.trainable) if one is not None else map(torch.zeros_like, own.trainable)
        right = torch.cat([part.reshape(-1) for part in grads]).nan_to_num()
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-5)


def of_views(self, x, y):
    weight = torch.ones(3, device=x.device, dtype=x.dtype) + torch.zeros_like(x).sum() + x.new_zeros(3)
    return F.cross_entropy(self(x.view(len(x), -1).float().contiguous().to(self.device)), y, weight=weight)


def of_wide(self, x, y):
    return F.cross_entropy(self(x.double()), y)


def of_log(self, x, y):
    loss = F.cross_entropy(self(x), y)
    self.log("loss", float(loss) + loss.item())
    return loss


@pytest.mark.parametrize("of, engine", [(of_views, "vmap: "), (of_wide, "vmap: "), (of_log, "loop: ")])
def test_shapes_and_dtypes_leave_a_training_step_under_vmap(of, engine):
    module = step(of, forward=lambda self, x: self.net(x.float()))
    own, x, y = ClientModule(module), torch.randn(8, 6), torch.arange(8) % 3
    own.prepare(x, y, 3)
    assert clipped_sum_for(module, own.sample_loss, x[:0], y[:0])[1].startswith(engine)


def test_a_training_step_without_a_loss_is_refused(make_loop):
    with pytest.raises(UserError, match="`training_step` must return a loss"):
        make_loop(module=step(lambda self, x, y: print(F.cross_entropy(self(x), y).shape)))


def attending(self, x):
    tokens = x[:, None, :, None] * self.net[0].weight.mean(dim=0)[:, None]
    attended = F.scaled_dot_product_attention(tokens, tokens, tokens, None, 0.3 * self.training)
    return self.net(F.dropout(attended[:, 0, :, 0] + x, 0.3, self.training))


def test_dropout_by_functions_leaves_a_training_step_under_vmap():
    module = step(plain, forward=attending)
    own, x, y = ClientModule(module).train(), torch.randn(8, 6), torch.arange(8) % 3
    own.prepare(x, y, 3)
    assert own.adapted.runs_under_vmap


class Masked(nn.Module):
    """As models of Hugging Face: keywords, a mask, and the loss beside the logits if there are labels."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask, labels=None):
        weights = attention_mask.unsqueeze(2).float()
        logits = self.head((self.embedding(input_ids) * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1))
        loss = None if labels is None else nn.CrossEntropyLoss()(logits.view(-1, 3), labels.view(-1))
        return {"loss": loss, "logits": logits}


class OfBatch(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Masked()

    def forward(self, **batch):
        return self.model(**batch)

    def training_step(self, batch, batch_idx):
        return self(**batch)["loss"]


@pytest.mark.e2e
def test_batches_are_dictionaries_or_tuples_as_the_users_records_are(make_loop, one_noise):
    g = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(9, (40, 5), generator=g), torch.ones(40, 5).long()
    mask[::3, 2:] = 0
    named = {"attention_mask": mask, "input_ids": ids, "labels": ids[:, 0] % 3}
    reference = None
    for records, module in (
        (({"input_ids": ids, "attention_mask": mask}, named["labels"]), Masked()),
        (named, Masked()),
        ([dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True)], Masked()),
        (torch.utils.data.TensorDataset(ids, mask, named["labels"]), Masked()),
        (named, OfBatch()),
    ):
        people = Population.from_datasets([records], num_classes=3, held_out=0)
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        loop = make_loop(
            people, ClientModule(module), clients=ClientOptions(1, batch_size=20), privacy=private(8.0), rounds=1
        )
        loop.run()
        reference = loop.module.flat if reference is None else reference
        torch.testing.assert_close(loop.module.flat, reference, rtol=1e-4, atol=1e-5)
    assert people.form.label == "labels"


class OfX(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = small_net()

    def forward(self, x):
        return self.net(x)


def test_keys_that_a_model_does_not_take_are_left_out_and_named(make_loop):
    x, y = torch.randn(20, 6), torch.arange(20) % 3
    people = Population.from_datasets(
        [{"x": x, "age": y, "diagnosis": y}], num_classes=3, label="diagnosis", held_out=0
    )
    with pytest.warns(UserNotice, match="no argument age"):
        make_loop(people, ClientModule(OfX()), privacy=None)
    with pytest.raises(UserError, match="must take the keys of the records as arguments, got 'age, x'"):
        make_loop(people, ClientModule(small_net()), privacy=None)


def configured(answer) -> ClientModule:
    """A module whose optimiser is `answer(sgd)`."""
    return ClientModule(small_net(), optimizer=lambda parameters: answer(torch.optim.SGD(parameters, lr=0.3)))


@pytest.mark.e2e
@pytest.mark.parametrize(
    "answer, rates",
    [
        (
            lambda one: {"optimizer": one, "lr_scheduler": {"scheduler": StepLR(one, 1, 0.5), "interval": "epoch"}},
            {"name": "step", "every": 1, "gamma": 0.5},
        ),
        (
            lambda one: ([one], [{"scheduler": StepLR(one, 1, 0.25), "frequency": 2}]),
            {"name": "step", "every": 2, "gamma": 0.25},
        ),
        (lambda one: [one], {"name": "constant"}),
    ],
)
def test_schedules_go_on_from_round_to_round(answer, rates, make_loop, one_noise):
    """As the schedule `step` of the options does, for which one round is one epoch."""
    ours = trained(make_loop, configured(answer))
    clients = ClientOptions(4, batch_size=16, learning_rate=0.3, schedule=rates)
    expected = trained(make_loop, ClientModule(small_net()), clients=clients)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda one: {"optimizer": one, "lr_scheduler": ReduceLROnPlateau(one)}, "ReduceLROnPlateau"),
        (lambda one: [one, one], "2 optimizers"),
        (lambda one: None, "no optimizer.*remove"),
        (lambda one: torch.optim.SparseAdam(one.param_groups[0]["params"]), "dense gradients"),
        (lambda one: torch.optim.LBFGS(one.param_groups[0]["params"]), "LBFGS"),
        (lambda one: {"optimizer": one, "lr_scheduler": {"scheduler": StepLR(one, 1), "interval": "hour"}}, "hour"),
        (lambda one: ([one], [OneCycleLR(one, 0.1, total_steps=2)]), "ends after 2 steps"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_charged(answer, words, make_loop, tmp_path):
    with pytest.raises(UserError, match=f"`optimizer` must.*{words}"):
        make_loop(module=configured(answer), rounds=4, output_dir=tmp_path / "run").run()
    assert not (tmp_path / "run").exists(), "so that the corrected run may have the same folder"


def plain(self, x, y):
    return F.cross_entropy(self(x), y)


def of_init(kept):
    """Returns the optimiser that the first call keeps, as one that `__init__` makes."""

    def configure(self):
        kept.extend([] if kept else [torch.optim.SGD(self.parameters(), lr=0.1)])
        return kept[0]

    return configure


class Needing(torch.optim.SGD):
    def step(self, closure=None):
        closure()


def freezing(self):
    self.net[0].requires_grad_(False)
    return torch.optim.SGD(self.net[2].parameters(), lr=0.1)


def by_epoch(factor, of=None):
    def configure(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        rounds = self.trainer.max_epochs
        return [optimizer], [LambdaLR(of or optimizer, lambda epoch: factor(epoch, rounds))]

    return configure


@pytest.mark.parametrize(
    "configure, words",
    [
        (of_init([]), "new optimizer in every call"),
        (lambda self: torch.optim.Adam(small_net().parameters()), "parameters that the run trains"),
        (lambda self: torch.optim.SGD([torch.zeros(1)], lr=0.1), "parameters that the run trains"),
        (lambda self: Needing(self.parameters(), lr=0.1), "not callable.*test_own_model.py, line"),
        (lambda self: torch.optim.SGD(self.parameters(), lr=torch.nan), "finite.*round 1, got nan"),
        (by_epoch(lambda epoch, rounds: 1 - epoch), "round 3, got -0.1"),
        (by_epoch(lambda epoch, rounds: 0), "above 0 in some round, got 0"),
        (by_epoch(lambda epoch, rounds: 1, torch.optim.SGD([torch.zeros(1)], lr=0.1)), "a schedule of another"),
        (freezing, "leave the parameters"),
    ],
)
def test_an_optimiser_that_would_fail_or_train_nothing_is_refused(configure, words):
    with pytest.raises(UserError, match=f"configure_optimizers.*{words}"):
        check(configure)


def check(configure, rounds=4, steps=(2,)):
    ClientModule(step(plain, configure_optimizers=configure)).check_optimizer(rounds, steps)


def test_an_optimiser_is_tried_with_the_rounds_and_steps_of_each_client():
    check(by_epoch(lambda epoch, rounds: min(1.0, (epoch + 1) / int(0.2 * rounds))), rounds=10)

    def over_steps(self):
        return torch.optim.SGD(self.parameters(), lr=0.1 / (self.trainer.estimated_stepping_batches - 1))

    check(over_steps, rounds=1)
    with pytest.raises(UserError, match="ZeroDivisionError"):
        check(over_steps, rounds=1, steps=(1, 2))


def test_an_optimiser_of_some_parameters_or_a_round_without_a_step_is_a_warning(recwarn):
    def head(self):
        return torch.optim.SGD(self.net[2].parameters(), lr=0.1)

    def frozen(self):  # may be in a group
        return torch.optim.SGD([*self.parameters(), torch.zeros(1)], lr=0.1)

    for configure in (head, by_epoch(lambda epoch, rounds: epoch / rounds), frozen):
        check(configure)
    assert [str(one.message) for one in recwarn] == [
        "configure_optimizers leaves out net.0.weight, net.0.bias: freeze what is not to be trained",
        "configure_optimizers gives learning rate 0 in round 1, which costs budget and trains nothing",
    ]


def test_a_net_that_is_frozen_after_it_was_wrapped_is_refused(make_loop):
    module = ClientModule(small_net())
    module.net[0].requires_grad_(False)
    with pytest.raises(UserError, match=r"`requires_grad` must be set before.*0.bias, 0.weight"):
        make_loop(module=module)


ADAM = ClientOptions(
    4, batch_size=16, learning_rate=0.05, optimizer={"name": "adam"}, schedule={"name": "cosine", "warmup_rounds": 1}
)


@pytest.mark.e2e
def test_a_run_with_adam_is_resumed_bit_for_bit_and_with_no_other_optimiser(make_loop, tmp_path):
    whole = trained(make_loop, ClientModule(small_net()), clients=ADAM)
    options = {"clients": ADAM, "output_dir": tmp_path / "broken"}
    broken = break_off(make_loop(**options), 2)
    assert torch.equal(broken.module.flat, broken.state.models[0]), "the last complete round"
    assert not torch.equal(broken.module.flat, ClientModule(small_net()).flat)
    for key, value in (("optimizer", {"name": "adamw"}), ("schedule", {"name": "linear"})):
        other = ClientOptions(**{**vars(ADAM), key: value})
        with pytest.raises(UserError, match=f"clients.{key}"):
            make_loop(**{**options, "clients": other}).run(resume=True)
    resumed = make_loop(**options)
    resumed.run(resume=True)
    assert torch.equal(resumed.state.models[0], whole) and torch.equal(resumed.module.flat, whole)


def test_after_a_run_the_module_is_the_trained_model(make_loop, tmp_path):
    loop = make_loop(output_dir=tmp_path / "run")
    result = loop.run()
    saved = load_file(tmp_path / "run" / "model.safetensors")
    for net in (loop.module.net, result.model, loop.client_model(2)):
        assert all(torch.equal(saved[name], value) for name, value in net.state_dict().items())
    x, y = (part[loop.population.test] for part in (loop.population.x, loop.population.y))
    assert float((result.model(x).argmax(dim=1) == y).float().mean()) == pytest.approx(result.test_accuracy)
    assert "model" not in result.as_dict()


def test_a_model_is_returned_in_evaluation_mode_and_the_users_keeps_its_own(make_loop):
    """With dropout, a model in training mode would have other scores than those of the run."""
    net = nn.Sequential(small_net(), nn.Dropout(0.9)).train()
    loop = make_loop(module=ClientModule(net), rounds=1)
    result = loop.run()
    for model in (result.model, loop.client_model(1)):
        assert not any(part.training for part in model.modules())
    assert all(part.training for part in loop.module.net.modules())
    x, y = (part[loop.population.test] for part in (loop.population.x, loop.population.y))
    assert float((result.model(x).argmax(dim=1) == y).float().mean()) == pytest.approx(result.test_accuracy)


def test_a_folder_holds_the_trained_parameters_and_not_the_frozen_ones(make_loop, tmp_path, capsys):
    net = small_net()
    net[0].requires_grad_(False)
    loop = make_loop(module=ClientModule(net), rounds=1, callbacks=[Progress()])
    model = loop.run().model
    saved = load_file(loop.output_dir / "model.safetensors")
    assert saved.keys() == {"2.weight", "2.bias"}
    assert "model.safetensors', net) (in" in " ".join(capsys.readouterr().out.split())
    new = copy.deepcopy(net)
    load_trained(new, saved)
    assert all(torch.equal(*pair) for pair in zip(new.parameters(), model.parameters(), strict=True))
    with pytest.raises(RuntimeError, match=r"parameters 2\.weight instead of 2\.bias, 2\.weight"):
        load_trained(new, {"2.weight": saved["2.weight"]})


def test_clients_with_several_models_have_one_each_and_the_run_their_mean(make_loop):
    loop = make_loop(parts=[Local()], rounds=1)
    assert loop.run().model is not None
    torch.testing.assert_close(loop.module.flat, loop.state.models.mean(dim=0))
    for client, model in enumerate(loop.state.models):
        assert torch.equal(ClientModule(loop.client_model(client)).flat, model)


def test_strategies_that_need_the_noise_of_updates_refuse_adam(make_loop):
    words = r"`clients\.optimizer` must be SGD with noise_aware, got 'Adam'.* `noise: estimated`"
    with pytest.raises(UserError, match=words):
        make_loop(parts=[NoiseAware()], clients=ADAM)
    make_loop(parts=[NoiseAware("estimated")], clients=ADAM)


def test_noise_of_an_update_with_momentum():
    """The gain of each step's gradient, by torch's optimiser on unit gradients."""
    for options in ({"momentum": 0.7}, {"momentum": 0.7, "nesterov": True}, {}):
        gains = []
        for impulse in range(4):
            parameter = torch.zeros(1, requires_grad=True)
            optimizer = SGD(**options).over([parameter], 1.0)
            for step in range(4):
                parameter.grad = torch.tensor([float(step == impulse)])
                optimizer.step()
            gains.append(float(parameter.detach()))
        assert SGD(**options).independent_steps(4) == pytest.approx(sum(gain**2 for gain in gains))


def test_schedules_by_round():
    def factors(rounds=5, **options):
        schedule = build_schedule(options)
        return [round(schedule.factor(t, rounds), 3) for t in range(1, rounds + 1)]

    assert factors(name="constant", warmup_rounds=2) == [0.333, 0.667, 1, 1, 1]
    assert factors(4, name="cosine") == [1, 0.854, 0.5, 0.146]
    assert factors(name="step", every=2, gamma=0.1) == [1, 1, 0.1, 0.1, 0.01]
    assert factors(4, name="linear", final=0.5) == [1, 0.875, 0.75, 0.625]


@pytest.mark.parametrize(
    "build, options, words",
    [
        (build_optimizer, {"name": "sgd", "momentum": 1.0}, r"clients.optimizer.momentum.*\[0, 1\)"),
        (build_optimizer, {"name": "sgd", "nesterov": True}, "without momentum"),
        (build_optimizer, {"name": "adam", "betas": [0.9]}, "two numbers"),
        (build_optimizer, {"name": "adam", "momentum": 0.9}, "be an option of adam"),
        (build_optimizer, {"name": "adamm"}, "Did you mean `adam`"),
        (build_schedule, {"name": "cosine", "final": 2}, "clients.schedule.final"),
        (build_schedule, {"name": "inverse", "half_after": 0}, "> 0"),
    ],
)
def test_options_out_of_range_are_refused(build, options, words):
    with pytest.raises(UserError, match=words):
        build(options)


SOURCE = """
import lightning, torch
from torch import nn
class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    def forward(self, x):
        return self.layers(x)
class Lit(lightning.LightningModule):
    def __init__(self, hidden):
        super().__init__()
        self.net = Net(hidden)
    def forward(self, x):
        return self.net(x)
    def training_step(self, batch, batch_idx):
        return 2 * nn.functional.cross_entropy(self(batch[0]), batch[1])
"""


@pytest.mark.e2e
def test_a_lightning_module_by_class_path_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "own_lightning_module.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    options = from_mapping(
        {
            "rounds": 1,
            "data": {"name": "digits", "records_per_client": 50},
            "model": {"class_path": "own_lightning_module.Lit", "init_args": {"hidden": 8}},
            "clients": {"count": 2, "optimizer": {"name": "adam"}, "learning_rate": 0.01},
            "privacy": {"noise_multiplier": 1.0, "noise_key": FIXED_KEY},
            "engine": {"device": "cpu"},
            "tracking": None,
            "output_dir": "run",
        }
    )
    result = fit(options)
    assert type(result.model).__name__ == "Lit"
    report = evaluate_run(options, tmp_path / "run")
    assert report["test_accuracy"] == pytest.approx(result.test_accuracy)
    assert report["test_loss"] == pytest.approx(result.test_loss, rel=1e-4), "by the module's loss"


class Sloped(nn.Module):
    """It scales hidden numbers by their gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def slope(self, hidden):
        return torch.autograd.grad(hidden.tanh().sum(), hidden, create_graph=True)[0]

    def forward(self, x):
        hidden = self.first(x)
        return self.head(hidden * self.slope(hidden))


class Conditional(Sloped):
    def slope(self, hidden):
        return torch.cond(hidden.sum() > 5, lambda one: 2 * one, lambda one: one.sin(), (hidden,))


class Uneven(Sloped):
    """Its copy and it count together."""

    count = 0

    def slope(self, hidden):
        Uneven.count += 1
        return hidden / Uneven.count


def fits(net):
    x, y = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    check_fits(ClientModule(net), Population.from_datasets({"a": (x, y)}, num_classes=3))


def test_a_model_that_differentiates_fits_its_records():
    fits(Sloped())


@pytest.mark.parametrize(("kind", "words"), [(Conditional, "torch's compiler"), (Uneven, "keep nothing of a pass")])
def test_why_a_model_cannot_run_is_said(kind, words):
    with pytest.raises(UserError, match=words):
        fits(kind())
