"""What batches of a model mix is said before a run, and what it keeps of records ends it."""

import copy
import dataclasses
import math
import random
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from conftest import private, small_net
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client import run_log
from dpfl_lightning.federated.client.batch_losses import check_batch_losses
from dpfl_lightning.federated.client.checks import check_fits
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest, scoring
from dpfl_lightning.privacy.clipping.restored import tensors_restored
from dpfl_lightning.privacy.ledger.ledger import read_ledger


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(self.mixed(x))

    def mixed(self, x):
        return x


class Rescaling(Small):
    def mixed(self, x):
        return torch.where(x.abs().max() > 8, x / 8, x)


class MixingInTraining(Small):
    def mixed(self, x):
        return x - x.mean(dim=0) if self.training else x


class MixingBehindDropout(Small):
    def mixed(self, x):
        return nn.functional.dropout(x, 0.5, training=True) / (1 + x.abs().max())


class MixingByAnotherGenerator(Small):
    def mixed(self, x):
        return x / (1 + x.abs().max() * random.random())


class Dropping(Small):
    def mixed(self, x):
        return nn.functional.dropout(x, 0.5, training=True)


class Refusing(Small):
    """Some records end in an error, which no check should take for a mixture."""

    def mixed(self, x):
        if not x.isfinite().all():
            raise ValueError("records must be finite")
        return x


def check(net: nn.Module) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    check_batch_losses(copy.deepcopy(ClientModule(net)), x, torch.arange(4) % 3)


MIXING = [Rescaling(), MixingInTraining(), MixingBehindDropout(), MixingByAnotherGenerator()]


def test_nets_that_mix_records_are_refused(make_loop):
    for net in MIXING:
        with pytest.raises(UserError, match="must give a record the same loss whatever the other"):
            check(net)
    mixing = nn.Sequential(nn.Linear(6, 4), nn.Identity(), Rescaling())
    with pytest.raises(UserError, match=r"`net\.2` must give a record the same loss whatever the other"):
        make_loop(module=ClientModule(mixing))


class Tokens(nn.Module):
    """The sum of embedded tokens without padding, divided by the tokens of the longest record, or of each record."""

    def __init__(self, pad=49, longest=True, **options):
        super().__init__()
        self.pad, self.longest = pad, longest
        self.types, self.words = nn.Embedding(2, 3), nn.Embedding(50, 3, **options)

    def forward(self, tokens):
        mask = (tokens != self.pad).float()[..., None]
        lengths = mask.sum(dim=1)
        lengths = lengths.max() if self.longest else lengths
        return ((self.words(tokens) + self.types(0 * tokens)) * mask).sum(dim=1) / lengths.clamp(min=1)


def longest_text(output, y):
    """Ignored labels do not count, but the mean is that of the record with most labels."""
    losses = nn.functional.cross_entropy(output.movedim(-1, 1), y, reduction="none")
    return losses.sum(dim=1) / (y != -100).sum(dim=1).max().clamp(min=1)


def rescaled(output, y):
    scale = y.abs().max().clamp(min=10)
    return ((output[:, 0] - y) / scale) ** 2


class RescaledInTheStep(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)[:, 0]

    def training_step(self, batch, batch_idx):
        x, y = batch
        scale = y.abs().max().clamp(min=10)
        return nn.functional.mse_loss(self(x) / scale, y / scale)


def people(x, y, classes=None) -> Population:
    return Population.from_datasets([(x, y), (x, y)], num_classes=classes, held_out=0)


def tokens(labels=3) -> Population:
    return people(torch.randint(5, (8, 8)), torch.randint(labels, (8,)), labels)


@pytest.mark.parametrize("longest", [True, False])
@pytest.mark.parametrize("options", [{}, {"pad": 7}, {"pad": 30, "padding_idx": 30}])
def test_whole_numbers_above_one_show_whether_padding_mixes_records(longest, options):
    with pytest.raises(UserError, match="must give a record the same loss") if longest else nullcontext():
        check_fits(ClientModule(Tokens(longest=longest, **options)), tokens())


def test_labels_that_are_ignored_or_large_show_what_mixes_records():
    mixing = [
        (ClientModule(nn.Embedding(9, 9), longest_text), people(torch.randint(9, (8, 5)), torch.randint(9, (8, 5)), 9)),
        (ClientModule(nn.Linear(4, 1), rescaled), people(torch.randn(8, 4), torch.randn(8))),
        (ClientModule(RescaledInTheStep()), people(torch.randn(8, 4), torch.randn(8))),
    ]
    for module, population in mixing:
        with pytest.raises(UserError, match=r"must give a record the same loss|depends on other records"):
            check_fits(module, population)


def of_small_labels(output, y):
    """Refuses large labels: the inputs of other records are still tried."""
    if not y.abs().max() < 5:
        raise ValueError("labels must be small")
    return (output[:, 0] - y) ** 2


def test_a_loss_that_refuses_labels_does_not_end_the_check():
    population = people(torch.randn(8, 4), torch.randn(8))
    check_fits(ClientModule(nn.Linear(4, 1), of_small_labels), population)
    with pytest.raises(UserError, match="must give a record the same loss"):
        check_fits(ClientModule(nn.Sequential(Rescaling(), nn.Linear(3, 1)), of_small_labels), population)


@pytest.mark.parametrize("function", [torch.sqrt, torch.log])
def test_a_loss_that_is_never_finite_is_refused(function):
    class OfInputs(Small):
        def mixed(self, x):
            return function(x)

    population = people(torch.rand(8, 4), torch.arange(8) % 3, 3)
    with pytest.raises(UserError, match="must give finite losses and gradients, got none"):
        net = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(dim=1))
        check_fits(ClientModule(net, loss=lambda output, y: function(output).sum(dim=1)), population)
    check_fits(ClientModule(OfInputs()), population)  # positive numbers are no error


class Standardised(Small):
    def mixed(self, x):
        return (x - x.mean(dim=0)) / x.std(dim=0)


class Doubling(Small):
    def mixed(self, x):
        return x.mul_(2)


class GrowingTable(nn.Module):
    """A table of positions that is made longer in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("table", torch.empty(0, 4), persistent=False)

    def forward(self, x):
        if len(self.table) < 2:
            self.table.resize_(2, 4).copy_(torch.ones(2, 4))
        return self.layer(x * self.table[1])


class Annealed(Small):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def mixed(self, x):
        self.steps += 1
        return x / (1 + 0.1 * self.steps)


def test_a_standard_deviation_of_the_batch_is_named_as_the_cause():
    with pytest.raises(UserError, match=r"see one record at a time, got finite losses of several.*standard deviation"):
        check_fits(ClientModule(Standardised()), people(torch.randn(8, 4), torch.arange(8) % 3, 3))


@pytest.mark.parametrize("net", [Doubling(), GrowingTable()])
def test_inputs_changed_in_place_and_tables_that_grow_are_no_error(net):
    check_fits(ClientModule(net), people(torch.randn(8, 4), torch.arange(8) % 3, 3))


@pytest.mark.parametrize(
    ("net", "state"),
    [
        (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), r"net.parametrizations.weight.0._u"),
        (Annealed(), "net.steps"),
    ],
)
def test_what_does_not_advance_in_training_is_named(net, state):
    with pytest.warns(UserWarning, match=rf"`{state}`.* keep their first values during training"):
        clipped_sum_for(net, None, torch.empty(0, 4), torch.empty(0, dtype=torch.long))


class Remembering(Small):
    """Keeps something of the records, in the way of its subclass, once it `remembers`."""

    def __init__(self, training=True, remembers=True):
        super().__init__()
        self.when, self.remembers = training, remembers
        self.register_buffer("seen", torch.zeros(4))
        self.kept = {"list": [], "queue": deque(maxlen=2), "sum": 0.0}

    def mixed(self, x):
        if self.training == self.when and self.remembers and x.numel():
            self.keep(x.detach().mean(dim=0))
        return x - self.seen.detach()

    def keep(self, mean):
        self.seen = 0.9 * self.seen + 0.1 * mean


class Reminding(Callback):
    """Lets a layer remember after the checks of a run."""

    def __init__(self, layer):
        self.layer = layer

    def on_round_start(self, view):
        self.layer.remembers = True


class InPlace(Remembering):
    def keep(self, mean):
        self.seen.mul_(0.9).add_(0.1 * mean)


class InData(Remembering):
    def keep(self, mean):
        self.seen.data.add_(mean)


class InAttribute(Remembering):
    def keep(self, mean):
        self.mean = mean


class InList(Remembering):
    def keep(self, mean):
        self.kept["list"].append(mean)


class InQueue(Remembering):
    def keep(self, mean):
        self.kept["queue"].append(mean)


class InNumber(Remembering):
    def keep(self, mean):
        self.kept["sum"] += float(mean[0])


@dataclass(slots=True)
class Slots:
    mean: object = None


class InSlots(Remembering):
    def __init__(self, training=True, remembers=True):
        super().__init__(training, remembers)
        self.kept = Slots()

    def keep(self, mean):
        self.kept.mean = mean


class InClosure(Remembering):
    def __init__(self, training=True, remembers=True):
        super().__init__(training, remembers)
        kept = []
        self.kept = partial(lambda note, mean: note(mean), lambda mean: kept.append(mean))

    def keep(self, mean):
        self.kept(mean)


class InGenerator(Remembering):
    """The number of draws tells something of the records."""

    def __init__(self, training=True, remembers=True):
        super().__init__(training, remembers)
        self.kept = torch.Generator()

    def keep(self, mean):
        torch.rand(int(1e6 * mean[0].abs()) % 100, generator=self.kept)


class InGeneratorOfNumpy(InGenerator):
    def __init__(self, training=True, remembers=True):
        super().__init__(training, remembers)
        self.kept = np.random.default_rng(0)

    def keep(self, mean):
        self.kept.random(int(1e6 * mean[0].abs()) % 100)


class InClass(Remembering):
    mean = torch.zeros(4)

    def keep(self, mean):
        InClass.mean = mean


REMEMBERING = [InSlots, InClosure, InClass, Remembering, InPlace, InData, InAttribute, InList, InQueue, InNumber]
REMEMBERING += [InGenerator, InGeneratorOfNumpy]


class KeptForEvaluation(nn.Module):
    """Keeps a table of its weights while it is evaluated, as models of timm do, and clears it with its mode."""

    def __init__(self):
        super().__init__()
        self.weight, self.head, self.table = nn.Parameter(torch.ones(4)), nn.Linear(4, 3), {}

    def train(self, mode=True):
        self.table = {}
        return super().train(mode)

    def forward(self, x):
        if self.training:
            return self.head(x * self.weight.exp())
        if not self.table:
            self.table["cpu"] = self.weight.exp()
        return self.head(x * self.table["cpu"])


def test_what_a_model_keeps_for_evaluation_and_clears_afterwards_may_stay_meanwhile():
    net, (x, y) = KeptForEvaluation(), OF_RECORDS
    module = ClientModule(net)
    with scoring(module.net, module.sample_loss):
        output = module.output(module.named_trainable, x)
        module.reported_loss(module.flat, x, torch.arange(4), output, y)
    assert module.net.training and not module.net.table
    params = {**module.named_trainable, "weight": torch.zeros(4)}  # no table of the weights before
    with scoring(module.net, module.sample_loss):
        assert not torch.equal(output, module.output(params, x))
    trained_and_scored(KeptForEvaluation())


IN_TENSORS = (Remembering, InPlace, InData, InAttribute)  # of the model: they are restored
OF_RECORDS = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(4) % 3


def trained_and_scored(net: nn.Module) -> None:
    module, (x, y) = ClientModule(net), OF_RECORDS
    clipped_sum, _ = clipped_sum_for(module.net, module.sample_loss, x[:0], y[:0])
    clipped_sum(module.named_trainable, x, y, ClipRequest(1.0))
    with scoring(module.net, module.sample_loss):
        module.output(module.named_trainable, x)


@pytest.mark.e2e
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", REMEMBERING)
def test_nothing_of_a_pass_stays_for_the_next(kind, training):
    """Of training records nothing may come into the gradients of others, nor of those that are only scored."""
    net = kind(training)
    if kind in IN_TENSORS:
        trained_and_scored(net)
        assert not net.seen.any() and not hasattr(net, "mean")
        return
    with pytest.raises(UserError, match=r"^`model` must (keep nothing of a pass|leave what it keeps)"):
        trained_and_scored(net)


@pytest.mark.e2e
def test_a_run_refuses_a_model_that_remembers_records(make_loop, tmp_path):
    with pytest.raises(UserError, match=r"^`model` must (keep nothing of a pass|leave what it keeps).*1\.kept"):
        make_loop(module=ClientModule(nn.Sequential(nn.Linear(6, 4), InList()))).run()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.e2e
def test_gradients_that_a_hook_keeps_are_noticed():
    net = Small()
    net.layer.register_full_backward_hook(lambda layer, inner, outer: setattr(layer, "slope", [outer[0].detach()]))
    with pytest.raises(UserError, match=r"layer\.(slope|attributes)"):
        trained_and_scored(net)


@pytest.mark.e2e
def test_inputs_that_a_hook_keeps_are_noticed():
    class Recorder(list):
        def hook(self, layer, inputs, output):
            self.append(inputs[0].detach())

    net = Small()
    net.layer.register_forward_hook(Recorder().hook)
    with pytest.raises(UserError, match=r"layer\._forward_hooks"):
        trained_and_scored(net)


@pytest.mark.e2e
@pytest.mark.parametrize("engine", ["serial", "fast"])
@pytest.mark.parametrize("kind, name", [(InAttribute, "mean"), (InSlots, "kept")])
def test_what_begins_to_remember_after_the_check_ends_the_run(kind, name, engine, make_loop):
    net = nn.Sequential(nn.Linear(6, 4), kind(remembers=False))
    loop = make_loop(module=ClientModule(net), engine=ENGINES[engine](), rounds=1, parts=[Reminding(net[1])])
    with pytest.raises(UserError, match=rf"must keep nothing of a pass for the next one, got `1\.{name}`"):
        loop.run()


def renormalising() -> nn.Module:
    net = Tokens(longest=False, max_norm=1.0)
    nn.init.constant_(net.words.weight, 0.01)
    return net


class Checkpointed(Tokens):
    def forward(self, tokens):
        return checkpoint(super().forward, tokens, use_reentrant=False)


class Broken(Tokens):
    def forward(self, tokens):
        out = super().forward(tokens)
        return out if not torch.is_grad_enabled() else out + torch.zeros(1, 7)


@pytest.mark.parametrize("engine", ["serial", "fast"])
def test_layers_that_cannot_run_backward_are_refused_and_leave_no_folder(engine, tmp_path, make_loop):
    options = {"privacy": private(), "clients": ClientOptions(2, batch_size=4), "output_dir": tmp_path / "run"}
    loop = make_loop(tokens(), ClientModule(Broken(longest=False)), engine=ENGINES[engine](), **options)
    words = r"`net` \(Broken\): The size of tensor"
    with pytest.raises(UserError, match=f"must run forward and backward for one record, got an error of {words}"):
        loop.run()
    assert not (tmp_path / "run").exists()


def test_a_table_that_records_change_is_refused():
    with pytest.raises(UserError, match=r"Embedding, which changes its table where a record reads it\. Use max_norm"):
        ClientModule(renormalising())


@pytest.mark.e2e
@pytest.mark.parametrize(
    "net, way",
    [(Tokens(longest=False, sparse=True), "loop: "), (Checkpointed(longest=False), "vmap: ")],
    ids=["sparse", "saved"],
)
def test_what_vmap_cannot_run_is_trained_one_record_at_a_time(net, way, make_loop):
    same = Tokens(longest=False)
    same.load_state_dict(net.state_dict())
    privacy = dataclasses.replace(private(), noise_key="0" * 32)
    options = {"privacy": privacy, "clients": ClientOptions(2, batch_size=4), "rounds": 1}
    records = tokens()
    loops = [make_loop(records, ClientModule(one), engine=ENGINES["fast"](), **options) for one in (net, same)]
    models = [loop.run() and loop.state.models for loop in loops]
    assert way in loops[0].clients.description
    torch.testing.assert_close(*models)


def test_any_error_before_there_is_a_ledger_leaves_no_folder(tmp_path, make_loop, monkeypatch):
    def fails(*args):
        assert (tmp_path / "run" / "data_key").exists()
        raise KeyError

    monkeypatch.setattr(run_log, "identity", fails)
    with pytest.raises(KeyError):
        make_loop(output_dir=tmp_path / "run").run()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [Remembering, InPlace, InData, InAttribute])
def test_tensors_that_a_pass_changes_are_restored(kind):
    net = kind()
    before, attributes = net.seen, list(vars(net))
    with pytest.raises(KeyError), tensors_restored(net):
        net(torch.randn(4, 4))
        assert net.seen.any() or net.mean.any()
        raise KeyError
    assert net.seen is before and not net.seen.any() and list(vars(net)) == attributes


class Squeezed(Small):
    def forward(self, x):
        return super().forward(x).squeeze()


def test_a_model_or_loss_that_fails_for_one_record_is_refused():
    def squeezed(output, y):
        return nn.functional.cross_entropy(output.squeeze(), y, reduction="none")

    population = people(torch.randn(8, 4), torch.arange(8) % 3, 3)
    with pytest.raises(UserError, match="`model` must take one record, and many, got"):
        check_fits(ClientModule(Squeezed()), population)
    with pytest.raises(UserError, match=r"`loss` must return one loss for each record, of shape \(1,\), got \(\)"):
        check_fits(ClientModule(Small(), squeezed), population)


def test_other_nets_are_let_through():
    layers = [nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.GroupNorm(2, 8), nn.Linear(8, 3)]
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    for net in (Small(), Dropping(), Refusing(), nn.Sequential(*layers), spectral):
        before, drawn = torch.get_rng_state(), random.getstate()
        check(net)
        assert torch.equal(torch.get_rng_state(), before) and random.getstate() == drawn, net


@pytest.mark.parametrize("engine", ["serial", "fast"])
def test_evaluation_does_not_drop_out(engine, make_loop):
    net = nn.Sequential(small_net(), nn.Dropout(0.5))
    loop = make_loop(module=ClientModule(net), engine=ENGINES[engine](), rounds=1)
    loop.run()
    rows = torch.arange(8)
    one, other = (loop.clients.engine.outputs(loop.state.models[0], rows) for _ in range(2))
    assert torch.equal(one, other) and net[1].training


def test_whole_numbers_stay_rows_of_their_table():
    net = nn.Sequential(nn.Embedding(2, 3), nn.Flatten(), nn.Linear(12, 3))
    check_batch_losses(ClientModule(net), torch.randint(2, (4, 4)), torch.arange(4) % 3)


def with_batch_norm(**changes) -> nn.Module:
    """Return a pretrained net whose BatchNorm keeps its statistics."""
    torch.manual_seed(0)
    net = nn.Sequential(
        small_net()[0], nn.BatchNorm1d(small_net()[0].out_features, **changes), nn.ReLU(), small_net()[2]
    )
    net(torch.randn(50, small_net()[0].in_features))
    net[1].eval()
    return net


@pytest.mark.e2e
@pytest.mark.parametrize("trainable", [False, True])
def test_batch_norm_with_fixed_statistics_is_trained_equally_by_every_engine(trainable, make_loop):
    expected = None
    for name, engine in ENGINES.items():
        net = with_batch_norm()
        net[1].requires_grad_(trainable)
        before = net[1].running_mean.clone()
        loop = make_loop(module=ClientModule(net), engine=engine(), rounds=1)
        loop.run()
        assert torch.equal(loop.module.net[1].running_mean, before) and not loop.module.net[1].training
        expected = loop.module.flat if expected is None else expected
        torch.testing.assert_close(loop.module.flat, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_batch_norm_that_mixes_after_all_is_refused(make_loop):
    with pytest.raises(
        UserError, match=r"got BatchNorm1d, which mixes the records of a batch. Use nn.GroupNorm.* instead\.$"
    ):
        ClientModule(with_batch_norm(track_running_stats=False))
    with pytest.raises(UserError, match=r"instead, or freeze its statistics by .eval\(\)"):
        ClientModule(with_batch_norm().train())
    module = ClientModule(with_batch_norm())
    module.net.eval()
    module.net[1].train()  # alone
    with pytest.raises(UserError, match=r"`net\.1` must see one record at a time, got BatchNorm1d"):
        make_loop(module=module)


def test_batch_norm_that_a_callback_switches_to_training_ends_the_run_uncharged(make_loop):
    class Trains(Callback):
        def on_round_end(self, view, report):
            loop.module.net.train()

    loop = make_loop(module=ClientModule(with_batch_norm()), parts=[Trains()])
    with pytest.raises(UserError, match="got BatchNorm1d, which mixes"):
        loop.run()
    assert {charge.round for charge in read_ledger(loop.output_dir / "ledger.jsonl")} == {1}


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward pass, behind a frozen table."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant, self.table = reentrant, nn.Embedding(11, 6).requires_grad_(False)
        self.blocks, self.last = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.table(x).requires_grad_()
        for block in self.blocks:
            hidden = hidden + checkpoint(lambda z, block=block: block(z).tanh(), hidden, use_reentrant=self.reentrant)
        return self.last(hidden.mean(1))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_whose_gradients_no_one_asks_for_are_refused(reentrant):
    torch.manual_seed(0)
    net, x, y = Checkpointed(reentrant), torch.randint(0, 11, (5, 7)), torch.tensor([0, 1, 2, 0, 1])
    if reentrant:
        with pytest.raises(UserError, match="use_reentrant=False"):
            clipped_sum_for(net, None, x[:1], y[:1])
        return
    params = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    sums = clipped_sum_for(net, None, x[:1], y[:1])[0](params, x, y, ClipRequest(math.inf))[0][0]
    F.cross_entropy(net(x), y, reduction="sum").backward()
    expected = torch.cat([net.get_parameter(name).grad.flatten() for name in params])
    torch.testing.assert_close(sums.float(), expected, rtol=1e-4, atol=1e-6)


class Listening(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.first(x)
        hidden.register_hook(lambda grad: 2 * grad)
        return self.last(hidden)


def test_a_hook_that_changes_a_gradient_runs_for_each_record():
    torch.manual_seed(0)
    net, x, y = Listening(), torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
    params = {name: p.detach() for name, p in net.named_parameters()}
    sums = clipped_sum_for(net, None, x[:1], y[:1])[0](params, x, y, ClipRequest(math.inf))[0][0]
    F.cross_entropy(net(x), y, reduction="sum").backward()
    torch.testing.assert_close(sums.float(), torch.cat([p.grad.flatten() for p in net.parameters()]))


class Named(list):
    pass


_count = [0]


def counted():
    _count[0] += 1
    return float(_count[0])


BY_NAME = {"counted": counted}


def drawn_by_numpy():
    import numpy

    return float(numpy.random.rand())


BY_NAME["drawn"] = drawn_by_numpy


class Hiding(nn.Module):
    """Weights turn on one of many ways to keep a number of passes, or of a record."""

    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.cells = way, nn.Linear(6, 8), nn.LSTM(8, 8, batch_first=True)
        self.tail, self.last = nn.Sequential(nn.Tanh(), nn.Identity()), nn.Linear(8, 3)
        self.gate, self.frozen = nn.Parameter(torch.zeros(())), nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("table", torch.zeros(3))
        self.constant, self.entries = torch.zeros(2), Named()

    def kept(self, x):
        one = {
            "table": self.table,
            "constant": self.constant,
            "frozen": self.frozen.weight,
            "entries": self.entries,
            "hooks": self.first._forward_hooks,
            "class": type(self),
            "method": type(self).forward,
            "cells": self.cells,
        }.get(self.way)
        name = "_flat_weight_sum" if self.way == "cells" else "noted"
        if one is not None:
            setattr(one, name, getattr(one, name, 0.0) + 1)
            return getattr(one, name)
        if self.way in BY_NAME:
            return BY_NAME[self.way]()
        if self.way in ("_parameters", "_buffers", "_modules"):
            names = getattr(self.first, self.way)
            names[f"one of {len(names)}"] = None
            return float(len(names))
        if self.way == "order":
            parts = self.tail._modules
            parts["0"] = parts.pop("0")
            return float([*parts].index("0"))
        if self.way == "document":
            type(self).__doc__ = f"{type(self).__doc__}."
            return float(len(type(self).__doc__))
        if self.way == "special":
            type(self).__noted__ = getattr(type(self), "__noted__", 0.0) + 1
            return type(self).__noted__
        type(self).kept.__name__ = f"{type(self).kept.__name__}_"
        return float(len(type(self).kept.__name__))

    def forward(self, x):
        number = self.kept(x) if self.gate > 5 else 1.0
        return self.last(self.tail(self.cells(self.first(x)[:, None])[0][:, 0])) * number + self.gate * 0


WAYS = "table constant frozen entries hooks class method cells counted drawn _parameters _buffers _modules order"


@pytest.mark.e2e
@pytest.mark.parametrize("way", [*WAYS.split(), "document", "special", "name"])
def test_what_weights_turn_on_keeps_nothing(way):
    torch.manual_seed(0)
    kind = type("Kind", (Hiding,), {"forward": lambda self, x: Hiding.forward(self, x), "__doc__": ""})
    net, x, y = kind(way), torch.randn(40, 6), torch.arange(40) % 3
    clipped_sum, reason = clipped_sum_for(net, None, x[:1] * 0, y[:1])
    assert reason.startswith("vmap")
    params = {name: p.detach().clone() for name, p in net.named_parameters() if p.requires_grad}
    params["gate"].fill_(6.0)
    name = Hiding.kept.__name__
    try:
        with pytest.raises(UserError, match="`model` must keep nothing of a pass"):
            clipped_sum(params, x, y, ClipRequest(1.0))
    finally:
        Hiding.kept.__name__ = name
