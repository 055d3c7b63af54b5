"""Models as people bring them: each was refused, silently changed or a traceback once."""

import warnings

import lightning as L
import pytest
import pytorch_lightning
import torch
from conftest import private
from torch import nn
from torch.nn import functional as F

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.checks import check_fits
from dpfl_lightning.federated.client.dummy_data import dummy_batch
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.models import check_net
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum

LABELS = torch.arange(9) % 3


def people(x, y=LABELS, classes=3) -> Population:
    return Population.from_datasets([(x, y), (x, y)], num_classes=classes, held_out=0)


def engine_of(net: nn.Module, population: Population) -> str:
    """Check a model as a run does, hold its clipped sum to the loop, and return the engine's reason."""
    module = ClientModule(net)
    check_fits(module, population)
    clipped_sum, reason = clipped_sum_for(module.net, module.sample_loss, *dummy_batch(population, 4, module.device))
    params = {name: p.detach() for name, p in module.named_trainable.items()}
    request = ClipRequest(0.1, group=torch.arange(9), num_groups=9)
    x, y = dummy_batch(population, 9, module.device)
    ours, loop = (one(params, x, y, request)[0] for one in (clipped_sum, LoopClippedSum(net, module.sample_loss)))
    torch.testing.assert_close(ours, loop, rtol=1e-3, atol=1e-5)
    return reason


class OneCategory(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, category):
        return self.head(self.embedding(category))


class Entities(nn.Module):
    """Every column of the categories has a table of its own size."""

    def __init__(self, *sizes):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 4) for size in sizes)
        self.head = nn.Linear(3 + 4 * len(sizes), 3)

    def forward(self, numbers, categories):
        columns = (table(categories[:, i]) for i, table in enumerate(self.tables))
        return self.head(torch.cat([numbers, *columns], dim=1))


@pytest.mark.e2e
@pytest.mark.usefixtures("code_was_read")
@pytest.mark.parametrize("sizes", [(5, 7), (2, 40), (100, 3)])
def test_categories_are_embedded_by_tables_of_several_sizes(sizes):
    categories = torch.stack([torch.randint(size, (9,)) for size in sizes], dim=1)
    assert engine_of(Entities(*sizes), people((torch.randn(9, 3), categories))).startswith("fast: exact rules")


@pytest.mark.usefixtures("code_was_read")
def test_a_record_may_be_one_category():
    for x in ((torch.randint(5, (9,)),), {"category": torch.randint(5, (9,))}):
        assert engine_of(OneCategory(), people(x)) == "fast: exact rules for all layers"
    beyond = people((torch.tensor([0, 1, 2, 3, 4, 5, 0, 0, 0]),))
    with pytest.raises(UserError, match="must hold whole numbers that the model can take"):
        check_fits(ClientModule(OneCategory()), beyond)


class Masked(nn.Module):
    """Tokens and a mask of whole numbers; the mean of tokens is that of a record, or trimmed to the longest one."""

    def __init__(self, trims=False):
        super().__init__()
        self.embedding, self.head, self.trims = nn.Embedding(9, 4), nn.Linear(4, 3), trims

    def forward(self, tokens, mask):
        hidden = self.embedding(tokens)
        if self.trims:
            return self.head(hidden[:, : int(mask.sum(1).max())].mean(1))
        if not mask.bool().all():
            hidden = hidden * mask[..., None]
        return self.head(hidden.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))


def masked_tokens(of=1) -> Population:
    mask = (torch.arange(8) < torch.randint(1, 9, (9, 1))).long() * of
    return people({"tokens": torch.randint(9, (9, 8)), "mask": mask})


@pytest.mark.e2e
@pytest.mark.parametrize("ones", [1, 2])
def test_a_decision_by_masks_may_be_right_for_masks_of_zeros_and_ones_alone(ones):
    assert engine_of(Masked(), masked_tokens(of=ones)).startswith("vmap: ")


def test_a_model_that_trims_to_the_longest_record_mixes_records():
    with pytest.raises(UserError, match="must give a record the same loss"):
        check_fits(ClientModule(Masked(trims=True)), masked_tokens())


class PackedByLengths(nn.Module):
    """Series [B, 6, 3] and lengths [B] of 1 to 6."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, series, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(series, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


@pytest.mark.e2e
@pytest.mark.usefixtures("code_was_read")
def test_lengths_of_records_are_at_least_one(make_loop):
    lengths = torch.randint(1, 7, (40,))
    data = (torch.randn(40, 6, 3), lengths), lengths % 2
    people = Population.from_datasets([data, data], num_classes=2, held_out=0)
    loop = make_loop(
        people, ClientModule(PackedByLengths()), private([8.0, 8.0]), ClientOptions(batch_size=8), rounds=1
    )
    assert loop.run().finished


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature, self.head = nn.Parameter(torch.tensor(2.0)), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x) * self.temperature


def test_a_parameter_may_be_one_number():
    assert engine_of(Scaled(), people(torch.randn(9, 6))).startswith("vmap: ")


class Stack(nn.Module):
    """The first layer has two names."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
        self.layers = nn.ModuleList([self.first])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


class Scaling(Stack):
    """A block with a parameter of its own, whose layer has two names."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.scale * super().forward(x)


class Tied(Stack):
    """A module with two names, beside two modules with one tensor."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.back = nn.Linear(4, 6, bias=False)
        self.back.weight = nn.Parameter(self.first.weight.detach().T.clone())
        self.last = nn.Linear(3, 3)
        self.more = nn.Linear(3, 3)
        self.more.weight = self.last.weight

    def forward(self, x):
        x = self.back(self.layers[0](x).relu())
        return self.more(self.last(self.head(x)))


@pytest.mark.parametrize("net", [Stack(), Scaling(), Tied()])
def test_a_module_may_have_two_names(net):
    tensors = {name: (id(p), p.requires_grad) for name, p in net.named_parameters(remove_duplicate=False)}
    assert engine_of(net, people(torch.randn(9, 6))).startswith("vmap: ")
    left = {name: (id(p), p.requires_grad) for name, p in net.named_parameters(remove_duplicate=False)}
    assert left == tensors


class Older(pytorch_lightning.LightningModule):
    """Of the package that `lightning` was made of."""

    def __init__(self):
        super().__init__()
        self.head, self.calls = nn.Linear(6, 3), 0

    def forward(self, x):
        return self.head(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y, label_smoothing=0.5)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.123)


class Steps(nn.Module):
    """No LightningModule, though it has its methods."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x)

    training_step = Older.training_step


@pytest.mark.e2e
def test_a_module_of_pytorch_lightning_trains_by_its_own_step(make_loop):
    loop = make_loop(module=Older(), engine=ENGINES["fast"](), rounds=1)
    module = loop.module
    assert module.optimizer_from == "configure_optimizers" and module.adapted is not None
    x, y = loop.population.x[:5], loop.population.y[:5]
    expected = F.cross_entropy(module.net.head(x), y, label_smoothing=0.5, reduction="none")
    torch.testing.assert_close(module.sample_loss(module.named_trainable, x, y), expected)
    loop.run()


def test_a_training_step_outside_of_a_lightning_module_is_said_to_be_unused(make_loop):
    with pytest.warns(UserNotice, match="not used of Steps: training_step"):
        make_loop(module=Steps())


class Unused(nn.Module):
    def __init__(self, layers=1):
        super().__init__()
        self.head, self.pooler = nn.Linear(6, 3), nn.Sequential(*(nn.Linear(6, 3) for _ in range(layers)))

    def forward(self, x):
        return self.head(x)


@pytest.mark.parametrize(
    "net, words",
    [
        (
            Unused(),
            r"no loss of the random records depends on `net.pooler.0.weight`, `net.pooler.0.bias`: if",
        ),
        (Unused(4), r"`net.pooler.1.bias` and 4 more: if that"),
        (nn.Sequential(nn.Linear(6, 3), nn.Softmax(dim=1)), "gives probabilities, .* remove its last Softmax"),
    ],
)
def test_what_trains_badly_is_said(net, words):
    with pytest.warns(UserNotice, match=words):
        check_fits(ClientModule(net), people(torch.randn(9, 6)))


def test_a_loss_of_probabilities_is_no_mistake():
    def of_probabilities(output, y):
        return F.nll_loss(output.log(), y, reduction="none")

    net = nn.Sequential(nn.Linear(6, 3), nn.Softmax(dim=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserNotice)
        check_fits(ClientModule(net, of_probabilities), people(torch.randn(9, 6)))
        check_fits(ClientModule(nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(dim=1))), people(torch.randn(9, 6)))
    with pytest.warns(UserNotice, match="remove its last Softmax"):
        check_fits(ClientModule(net, nn.CrossEntropyLoss(reduction="none")), people(torch.randn(9, 6)))


@pytest.mark.e2e
def test_a_compiled_part_is_refused_by_name():
    in_place = nn.Linear(4, 3)
    in_place.compile()
    for part, kind in ((torch.compile(nn.Linear(4, 3)), "OptimizedModule"), (in_place, "Linear")):
        words = rf"`net\.1` must see one record at a time, got {kind}, which torch\.compile .* without torch\.compile\."
        with pytest.raises(UserError, match=words):
            ClientModule(nn.Sequential(nn.Linear(6, 4), part))


def test_a_refusal_names_all_layers_and_the_way_out():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.InstanceNorm2d(4))
    net[3].track_running_stats = True
    words = r"`net.1` must .* Use nn.GroupNorm.*The same holds for `net.2` \(BatchNorm2d\), `net.3` \(InstanceNorm2d\)"
    with pytest.raises(UserError, match=words + r".*ClientModule\(model, fix=True\), replaces every BatchNorm"):
        check_net(net)


class Positions(nn.Module):
    """Learnt positions, a token and a scale of the model's own, beside dropout, and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.token, self.scale = nn.Parameter(torch.zeros(1, 1, 6)), nn.Parameter(torch.ones(6))
        self.places, self.layer, self.head = nn.Embedding(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places(torch.arange(4))
        for _ in range(2):
            x = x + F.dropout(self.scale * torch.tanh(self.layer(x)), 0.1, self.training)
        return self.head(x[:, 0])


class Cells(nn.Module):
    """A cell of a recurrent network, whose last state no loss depends on."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        hidden = cell = x.new_zeros(len(x), 5)
        for step in x.unbind(1):
            hidden, cell = self.cell(step, (hidden, cell))
        return self.head(hidden)


class TiedHead(nn.Module):
    """A frozen head has the weights of a frozen table."""

    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight.requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(self.table(x)).mean(1))[:, :3]


class Narrow(nn.LayerNorm):
    """A subclass that computes the same."""


@pytest.mark.parametrize(
    "net, shape",
    [
        (Positions(), (3, 6)),
        (Cells(), (3, 6)),
        (TiedHead(), (5,)),
        (nn.Sequential(nn.Linear(6, 6), Narrow(6), nn.Flatten(), nn.Linear(18, 3)), (3, 6)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_parameters_that_no_rule_covers_get_their_own_gradients(net, shape):
    x = torch.randint(7, (9, *shape)) if isinstance(net, TiedHead) else torch.randn(9, *shape)
    net.eval()
    assert engine_of(net, people(x)).startswith("vmap: ")


class UnderTwoNames(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks, self.head = nn.ModuleList([self.first]), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.blocks[0](torch.tanh(x))))

    def training_step(self, batch, batch_idx):
        x, y = batch
        penalty = (x**2).mean() * (self.first.weight**2).sum()
        return nn.functional.cross_entropy(self(x), y) + 0.1 * penalty


@pytest.mark.e2e
def test_a_whole_training_step_may_use_a_module_under_two_names(make_loop):
    module = ClientModule(UnderTwoNames())
    loop = make_loop(module=module, rounds=1)
    assert loop.run().finished
    assert len(module.trainable) == 4 and all(isinstance(one, nn.Parameter) for one in module.net.parameters())


class RarePositives(L.LightningModule):
    """Labels of 0 and 1, of which the rare ones count five times."""

    def __init__(self):
        super().__init__()
        self.layer, self.weight = nn.Linear(4, 1), torch.tensor(5.0)

    def forward(self, x):
        return self.layer(x)[:, 0]

    def training_step(self, batch, batch_idx):
        return F.binary_cross_entropy_with_logits(self(batch[0]), batch[1], pos_weight=self.weight)


def test_pos_weight_multiplies_the_gradient_of_a_positive_record():
    x, y = torch.randn(9, 4), (LABELS == 0).float()
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(5.0), reduction="none")
    by_loss = ClientModule(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), loss, task="binary")
    for module, engine in ((ClientModule(RarePositives(), task="binary"), "vmap: "), (by_loss, "fast: exact rules")):
        check_fits(module, people(x, y, classes=None))
        clipped_sum, reason = clipped_sum_for(module.net, module.sample_loss, x[:0], y[:0])
        assert reason.startswith(engine)
        weight, bias = (p.detach() for p in module.named_trainable.values())
        of_output = (torch.sigmoid(x @ weight[0] + bias) - y) * (1 + 4 * y)
        expected = of_output[:, None] * torch.cat([x, torch.ones(9, 1)], dim=1)
        request = ClipRequest(1e6, group=torch.arange(9), num_groups=9)
        ours = clipped_sum({**module.named_trainable}, x, y, request)[0]
        torch.testing.assert_close(ours.float(), expected, rtol=1e-5, atol=1e-6)


class FilledOnce(nn.Module):
    """A table of no record, filled in the first pass."""

    def __init__(self, flag):
        super().__init__()
        self.layer, self.flag, self.ready = nn.Linear(6, 3), flag, False
        self.register_buffer("table", torch.zeros(6) if flag else None)

    def forward(self, x):
        if not self.ready if self.flag else self.table is None:
            self.table, self.ready = torch.arange(6.0), self.flag
        return self.layer(x + self.table)


@pytest.mark.usefixtures("code_was_read")
def test_a_table_that_is_filled_in_the_first_pass_is_never_a_placeholder():
    x = torch.randn(9, 6)
    with pytest.raises(UserError, match="keep nothing of its first pass, got another table and ready"):
        engine_of(FilledOnce(flag=True), people(x))
    (filled := FilledOnce(flag=True))(x)
    for net in (filled, FilledOnce(flag=False)):
        assert engine_of(net, people(x)) == "fast: exact rules for all layers"


def test_hooks_of_parameters_are_refused():
    net = nn.Linear(6, 3)
    net.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(UserError, match=r"`net.weight` must have no hooks of its gradient"):
        ClientModule(net)


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            slope = torch.autograd.grad(torch.tanh(self.layer(x)).sum(), x, create_graph=True)[0]
        return self.head(slope)


class OfSlopes(nn.Module):
    """The output and its derivative, as a network that is fitted to an equation."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        x = x.clone().requires_grad_()
        values = self.inner(x)
        return values + torch.autograd.grad(values.sum(), x, create_graph=True)[0][:, :3]


class Penalised(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x):
        return self.inner(x)

    def training_step(self, batch):
        x = batch[0].clone().requires_grad_()
        output = self(x)
        slopes = torch.autograd.grad(output.tanh().sum(), x, create_graph=True)[0]
        return nn.functional.cross_entropy(output, batch[1]) + slopes.square().sum(1).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", [Energy, OfSlopes, Penalised])
def test_code_that_differentiates_is_trained_and_scored(kind, make_loop):
    torch.manual_seed(0)
    loop = make_loop(module=ClientModule(kind()), rounds=1)
    result = loop.run()
    assert result.finished and result.test_accuracy is not None
    module, (x, y) = loop.module, (torch.randn(5, 6), torch.arange(5) % 3)
    ours = loop.clients.engine.clipped_sum(module.named_trainable, x, y, ClipRequest(0.5))[0]
    loop_sum = LoopClippedSum(module.net, module.sample_loss)(module.named_trainable, x, y, ClipRequest(0.5))[0]
    torch.testing.assert_close(ours, loop_sum, rtol=1e-4, atol=1e-6)


def test_several_targets_and_sparse_records_are_refused_with_the_way_out():
    x, y = torch.randn(9, 6), torch.arange(9) % 3
    with pytest.raises(UserError, match=r"must be one tensor, got 'tuple'\. Join several targets as columns"):
        Population.from_datasets([(x, (y, y)), (x, (y, y))], num_classes=3)
    with pytest.raises(UserError, match=r"must hold dense tensors, got 'a sparse one'. Call its .to_dense\(\)"):
        Population.from_datasets([(x.to_sparse(), y)] * 2, num_classes=3)


class Diffusing(L.LightningModule):
    """`forward` needs a time, which the step draws; `at` has a value by default if it may be scored."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(7, 6)

    def forward(self, x, at):
        return self.inner(torch.cat([x, at[:, None]], dim=1))

    def training_step(self, batch):
        at, noise = torch.rand(len(batch[0])), torch.randn_like(batch[0])
        return nn.functional.mse_loss(self(batch[0] + at[:, None] * noise, at), noise)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_forward_that_needs_more_than_the_records_is_refused_with_the_way_out():
    x = torch.randn(9, 6)
    with pytest.raises(UserError, match="`forward` must take what the records hold beside labels, got TypeError"):
        check_fits(ClientModule(Diffusing()), people(x, x, classes=None))
