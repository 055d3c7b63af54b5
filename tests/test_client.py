"""The client module alone: its seam, its parameters as a vector, and what it refuses."""

import copy
import pickle
from functools import partial
from operator import itemgetter

import lightning as L
import pytest
import torch
from conftest import blobs, small_net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.module import ClientModule


def test_a_bare_trainer_is_refused_for_it_has_no_ledger(tmp_path):
    data = DataLoader(TensorDataset(torch.randn(8, 6), torch.randint(3, (8,))), batch_size=4)
    trainer = L.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu", default_root_dir=tmp_path
    )
    with pytest.raises(UserError, match="FederatedLoop, got a bare Trainer, which has no privacy ledger"):
        trainer.fit(ClientModule(small_net()), data)


def test_an_unknown_personal_name_is_refused():
    with pytest.raises(UserError, match="personal"):
        ClientModule(small_net(), personal=["nope"])
    every = [name for name, _ in small_net().named_parameters()]
    with pytest.raises(UserError, match="`personal` must leave out a parameter of the model"):
        ClientModule(small_net(), personal=every)


def test_flat_and_named_views_are_one_memory():
    module = ClientModule(small_net())
    flat = module.flat
    assert flat.shape == (module.num_params,) and not flat.requires_grad
    views = module.unflatten(flat)
    assert list(views) == [name for name, _ in module.net.named_parameters()]
    assert all(torch.equal(views[name], p) for name, p in module.net.named_parameters())
    views["0.bias"].zero_()
    assert int((flat == 0).sum()) >= views["0.bias"].numel()


def test_frozen_parameters_are_neither_trained_nor_counted():
    net = small_net()
    net[0].weight.requires_grad_(False)
    module = ClientModule(net)
    assert module.num_params == sum(p.numel() for p in net.parameters()) - net[0].weight.numel()
    x, y = torch.randn(5, 6), torch.randint(3, (5,))
    torch.testing.assert_close(
        module.sample_loss(module.named_trainable, x, y), nn.functional.cross_entropy(net(x), y, reduction="none")
    )


def halved(output, y):
    return 0.5 * nn.functional.cross_entropy(output, y, reduction="none")


class Pair(nn.Module):
    """A model that returns a tuple."""

    def __init__(self):
        super().__init__()
        self.net = small_net()

    def forward(self, x):
        return x.sum(dim=1), self.net(x)


@pytest.mark.e2e
@pytest.mark.parametrize("engine", ["fast", "serial", "trainer"])
def test_every_engine_trains_by_the_given_loss_output_and_optimizer(engine, make_loop):
    """Against plain gradient descent: without noise, on full batches."""
    module = ClientModule(
        Pair(),
        loss=halved,
        optimizer=partial(torch.optim.SGD, lr=0.2, momentum=0.9),
        personal=["net.0.bias"],
        output=itemgetter(1),
    )
    clients = ClientOptions(1, batch_size=None, local_epochs=2)
    options = {"population": blobs(1), "clients": clients, "rounds": 1, "privacy": None}
    loop = make_loop(module=pickle.loads(pickle.dumps(copy.deepcopy(module))), engine=ENGINES[engine](), **options)
    assert (loop.module.task.name, loop.module.users_loss) == ("multiclass", True)
    loop.run()
    x, y = loop.population.records(0, torch.arange(loop.population.num_records[0]))
    expected = Pair()
    torchs = torch.optim.SGD(expected.parameters(), lr=0.2, momentum=0.9)
    for _ in range(2):
        torchs.zero_grad()
        halved(expected(x)[1], y).mean().backward()
        torchs.step()
    torch.testing.assert_close(ClientModule(loop.client_model(0)).flat, ClientModule(expected).flat)
    assert torch.equal(loop.state.models[0][module.personal_mask], module.flat[module.personal_mask])


def test_a_client_module_is_final():
    with pytest.raises(UserError, match=r"must not be derived from, got class Own. Pass loss=.*wrap a LightningModule"):
        type("Own", (ClientModule,), {})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"loss": "cross_entropy"}, r"`loss` must be a function, got 'cross_entropy'\. Such as"),
        ({"loss": nn.MSELoss}, r"`loss` must be a function, got <class '.*MSELoss'>\. Such as"),
        ({"loss": nn.BatchNorm1d(3)}, r"`loss` must have no parameters to train, got \['weight', 'bias'\]\. Make them"),
        ({"output": 1}, r"`output` must be a function, got 1\. It gets what the model returns"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], 0.1)}, r"`optimizer` must be a .* got 'SGD'\. Such as"),
        ({"personal": "0.bias"}, r"`personal` must be a list of names of parameters, got '0.bias'\. Pass \['0.bias'\]"),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused_at_once(arguments, message):
    with pytest.raises(UserError, match=message):
        ClientModule(small_net(), **arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"loss": nn.CrossEntropyLoss()}, r"`loss` must return .*, of shape \(2,\), got \(\)\. .*reduction='none'"),
        ({"loss": lambda output, y: 1.0}, r"`loss` must return one loss for each record, of shape \(2,\), got 'float'"),
        ({"loss": lambda output, y: output}, r"`loss` must return .*, of shape \(2,\), got \(2, 3\)"),
        ({"output": lambda output: [output]}, r"`output` must return a tensor `\[B, ...\]`, got 'list'\. It gets"),
        ({"optimizer": lambda parameters: parameters}, r"`optimizer` must return one torch optimizer .* got"),
        ({"optimizer": lambda parameters: torch.optim.SGD(small_net().parameters(), 0.1)}, "`optimizer` must use the"),
    ],
)
def test_a_function_that_returns_something_else_is_refused_before_a_run(arguments, message, make_loop):
    with pytest.raises(UserError, match=message):
        make_loop(module=ClientModule(small_net(), **arguments))


@pytest.mark.e2e
def test_given_functions_replace_those_of_a_lightning_module(make_loop):
    class Lit(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            raise AssertionError

        configure_optimizers = training_step

    module = ClientModule(Lit(), loss=halved, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    with pytest.warns(UserNotice) as caught:
        make_loop(module=module, rounds=1, clients=ClientOptions(4, learning_rate=0.3)).run()
    assert [str(one.message) for one in caught] == [
        "not used of Lit: training_step, configure_optimizers",
        "optimizer replaces clients.learning_rate",
    ]
