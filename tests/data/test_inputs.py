"""Records that are whole numbers, tuples or dictionaries of tensors, and records that are read when they are drawn."""

import random

import numpy as np
import pytest
import torch
from conftest import private
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data import Dataset as TorchDataset

from dpfl_lightning.auditing.run import audit
from dpfl_lightning.build import build_engine
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.papers.distillation.distillation import Distillation
from dpfl_lightning.privacy.clipping.inputs import take

SIZES = {"berlin": 40, "rome": 70, "oslo": 30}


class Words(nn.Module):
    """The mean of embedded words, which a mask may leave out; a second input is an image."""

    def __init__(self, channels: int = 0):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 6), nn.Linear(6 + channels, 2)
        self.conv = nn.Conv2d(1, channels, 3) if channels else None

    def forward(self, input_ids, image=None, attention_mask=None):
        weight = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weight = weight[..., None].to(self.head.weight.dtype)
        words = (self.embedding(input_ids) * weight).sum(1) / weight.sum(1)
        parts = [words] if self.conv is None else [words, self.conv(image).relu().mean((2, 3))]
        return self.head(torch.cat(parts, dim=1))


def drawn(count: int, generator: torch.Generator) -> dict:
    y = torch.randint(2, (count,), generator=generator)
    mask = torch.ones(count, 5, dtype=torch.long)
    mask[:, 3:] = 0
    ids = torch.randint(10, (count, 5), generator=generator) + 10 * y[:, None]
    return {"y": y, "ids": ids, "mask": mask, "image": torch.randn(count, 1, 5, 5, generator=generator)}


#: kind -> inputs of a client's records, and the number of channels of the net for the image
KINDS = {
    "words": (lambda one: one["ids"], 0),
    "tuple": (lambda one: (one["ids"], one["image"]), 3),
    "dictionary": (lambda one: {"input_ids": one["ids"], "image": one["image"], "attention_mask": one["mask"]}, 3),
}


def clients_of(kind: str) -> dict:
    generator = torch.Generator().manual_seed(0)
    records = {name: drawn(count, generator) for name, count in SIZES.items()}
    return {name: (KINDS[kind][0](one), one["y"]) for name, one in records.items()}


def population_of(kind: str, **options) -> Population:
    clients = clients_of(kind)
    return Population.from_datasets(clients, test=clients["rome"], num_classes=2, **options)


def module_of(kind: str) -> ClientModule:
    torch.manual_seed(0)
    return ClientModule(Words(KINDS[kind][1]))


def trained(make_loop, kind: str, engine: str, population=None, **options):
    clients = ClientOptions(batch_size=16, learning_rate=1.0)
    population = population or population_of(kind)
    usual = {"engine": build_engine(engine), "rounds": 4, "clients": clients, "privacy": None}
    return make_loop(population, module_of(kind), **{**usual, **options})


@pytest.mark.e2e
@pytest.mark.usefixtures("code_was_read")
@pytest.mark.parametrize("kind", KINDS)
def test_every_engine_trains_on_every_kind_of_inputs(kind, make_loop, one_noise):
    loops = {name: trained(make_loop, kind, name) for name in ("serial", "fast")}
    results = {name: loop.run() for name, loop in loops.items()}
    assert results["fast"].test_accuracy > 0.8 and "exact rules for all layers" in loops["fast"].clients.description
    torch.testing.assert_close(loops["fast"].state.models, loops["serial"].state.models, rtol=1e-4, atol=1e-5)
    assert [row["name"] for row in results["fast"].clients] == list(SIZES)


@pytest.mark.e2e
def test_what_needs_one_tensor_refuses_other_inputs_before_anything_is_charged(make_loop, tmp_path):
    for kind in ("words", "dictionary"):
        loop = trained(make_loop, kind, "fast", parts=[Distillation()], privacy=private(), rounds=1)
        with pytest.raises(UserError, match="must have records that are one floating tensor"):
            loop.run()
    assert not list(tmp_path.glob("run*/ledger.jsonl"))


def test_an_audit_refuses_records_that_it_cannot_scale(make_loop):
    with pytest.raises(UserError, match=r"`data` must be one floating tensor a record to audit, .*got \(5,\)"):
        audit(trained(make_loop, "words", "fast", privacy=private()))


class Mixing(Words):
    def forward(self, input_ids, image, attention_mask):
        return super().forward(input_ids, image, attention_mask * attention_mask.float().mean(0))


def test_a_net_that_mixes_records_through_one_of_its_inputs_is_refused(make_loop):
    with pytest.raises(UserError, match="must give a record the same loss"):
        make_loop(population_of("dictionary"), ClientModule(Mixing(3)))


def test_facts_state_the_shape_of_every_input():
    assert population_of("words").input_shape == (5,)
    assert population_of("tuple").input_shape == ((5,), (1, 5, 5))
    assert population_of("dictionary").input_shape == {"attention_mask": (5,), "image": (1, 5, 5), "input_ids": (5,)}


def test_inputs_of_another_structure_are_refused():
    one, other = clients_of("words")["berlin"], clients_of("tuple")["rome"]
    with pytest.raises(UserError, match=r"`client b: x` must have records of shape \(5,\), as client a, got"):
        Population.from_datasets({"a": one, "b": other}, num_classes=2)
    with pytest.raises(UserError, match=r"`client a: x` must hold tensors of one number of records, got \[1, 40\]"):
        Population.from_datasets({"a": ((one[0], one[0][:1]), one[1])}, num_classes=2)


# ---- labels, images and loaders


def test_labels_that_are_names_need_the_public_classes():
    x, names = torch.randn(4, 2), ["benign", "malignant", "benign", "benign"]
    with pytest.raises(UserError, match=r'`client 0: y` must hold numbers .*classes=\["benign", "malignant"\]'):
        Population.from_datasets([(x, names)])
    for labels in (names, np.array(names)):
        population = Population.from_datasets([(x, labels)], held_out=0, classes=("benign", "malignant", "unsure"))
        assert population.y.tolist() == [0, 1, 0, 0] and population.num_classes == 3
    with pytest.raises(UserError, match=r"`client rome: y` must hold the given classes only, .*got 'malignant'"):
        Population.from_datasets({"rome": (x, names)}, classes=("benign", "healthy"))


class Pictures(TorchDataset):
    reads = 0

    def __init__(self, count: int, mode: str = "RGB"):
        self.count, self.mode = count, mode

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        from PIL import Image

        type(self).reads += 1
        return Image.new(self.mode, (3, 2), 0 if row % 2 else "white"), row % 2


def test_images_become_floats_and_a_loader_is_its_dataset():
    loader = DataLoader(Pictures(4), batch_size=3, shuffle=True, collate_fn=default_collate)
    with pytest.warns(UserNotice, match="batch_size 3 of the loaders is ignored"):
        colours = Population.from_datasets([loader], num_classes=2, held_out=0)
    assert colours.input_shape == (3, 2, 3) and colours.x[0].eq(1).all() and colours.x[1].eq(0).all()
    assert Population.from_datasets([Pictures(4, "L")], num_classes=2).input_shape == (1, 2, 3)


def doubled(samples):
    """A collate function that treats each sample alone and gives a dictionary."""
    return {"x": 2 * torch.stack([x for x, _ in samples]), "y": [int(y) for _, y in samples]}


def mixed(samples):
    x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
    return (x + x.flip(0)) / 2, y


NUMBERS = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6) % 2)


@pytest.mark.parametrize("lazy", [True, False])
def test_a_collate_function_makes_the_records(lazy):
    loader = DataLoader(NUMBERS, 32, shuffle=True, collate_fn=doubled)
    people = Population.from_datasets([loader], loader, num_classes=2, held_out=0, lazy=lazy)
    x = take(people.x, torch.arange(12))["x"]
    assert torch.equal(x, 2 * NUMBERS.tensors[0].repeat(2, 1)) and people.form.label == "y"
    assert people.y.tolist() == [0, 1] * 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"collate_fn": mixed}, r"collate_fn` must treat each sample alone.*public length"),
        (
            {"collate_fn": lambda samples: (torch.rand(len(samples), 2), torch.zeros(len(samples)).long())},
            "collate_fn` must treat each sample alone",
        ),
        ({"collate_fn": list}, "collate_fn` must return tensors with one row for each sample"),
        (
            {"collate_fn": lambda samples: tuple(zip(*samples, strict=True))},
            "collate_fn` must return tensors with one row",
        ),
        (
            {"collate_fn": lambda samples: samples[0].secret},
            r"collate_fn` must make a batch .*got AttributeError for 1\.",
        ),
        ({"sampler": SubsetRandomSampler(range(3))}, "sampler` must be left out.*'SubsetRandomSampler'.*Subset"),
        ({"sampler": RandomSampler(NUMBERS, num_samples=3)}, "sampler` must be left out, or draw each sample once"),
        ({"sampler": WeightedRandomSampler([1.0] * 6, 6)}, "sampler` must be left out.*weigh records in the loss"),
        (
            {"batch_sampler": BatchSampler(SubsetRandomSampler(range(3)), 2, False)},
            "sampler` must be left out.*'SubsetRandomSampler'.*Subset",
        ),
        ({"batch_sampler": [[0], [1]]}, "batch_sampler` must be left out, with a batch_size, got 'list'"),
    ],
)
def test_a_loader_that_chooses_or_mixes_samples_is_refused(options, words):
    with pytest.raises(UserError, match=f"`client rome: {words}"):
        Population.from_datasets({"rome": DataLoader(NUMBERS, **options)}, num_classes=2)
    with pytest.raises(UserError, match=f"`test: {words}"):
        Population.from_datasets([NUMBERS], DataLoader(NUMBERS, **options), num_classes=2)


class Drawn(TorchDataset):
    """Records that `draw` changes."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 30

    def __getitem__(self, row):
        return self.draw(torch.tensor([row, 0.5])), row % 2


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x + torch.randn(2),
        lambda x: x + np.random.default_rng().normal(),
        lambda x: x.flip(0) if random.random() < 0.5 else x,
    ],
)
def test_a_data_set_that_draws_at_random_is_refused(draw, lazy):
    random.seed(0)
    words = "`{}` must return the same records at each reading.*Leave random transforms out"
    for client, test, where in ((Drawn(draw), None, "client rome"), (NUMBERS, Drawn(draw), "test")):
        with pytest.raises(UserError, match=words.format(where)):
            Population.from_datasets({"rome": client}, test, num_classes=2, lazy=lazy)


# ---- lazy


class Records(TorchDataset):
    """Returns single records, as a Dataset does that reads files."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, row):
        x = self.x
        return {name: part[row] for name, part in x.items()} if isinstance(x, dict) else x[row], int(self.y[row])


@pytest.mark.e2e
@pytest.mark.parametrize("kind, form", [("words", tuple), ("dictionary", lambda pair: Records(*pair))])
def test_lazy_inputs_change_no_bit(kind, form, make_loop, one_noise):
    clients = {name: form(pair) for name, pair in clients_of(kind).items()}
    lazy, eager = (
        Population.from_datasets(clients, test=clients["rome"], num_classes=2, lazy=lazy) for lazy in (True, False)
    )
    for part in ("train_of", "held_out_of"):
        assert all(map(torch.equal, getattr(lazy, part), getattr(eager, part)))
    loops = [trained(make_loop, kind, "fast", population, rounds=2) for population in (lazy, eager)]
    first, second = (loop.run() for loop in loops)
    assert torch.equal(loops[0].state.models, loops[1].state.models)
    assert first.clients == second.clients and first.test_loss == second.test_loss


def test_lazy_inputs_are_read_once_before_the_run_and_checked_again(tmp_path):
    Pictures.reads = 0
    population = Population.from_datasets([Pictures(300), Pictures(7)], num_classes=2, lazy=True)
    assert Pictures.reads == 307 + 2 + 3 * (8 + 7)  # the form is that of the first record; some are read again
    batch = population.x[torch.tensor([306, 0, 301, 1])]
    assert batch.shape == (4, 3, 2, 3) and batch[:, 0, 0, 0].tolist() == [1, 1, 0, 0] and Pictures.reads == 313 + 45
    values = np.memmap(tmp_path / "x", dtype=np.float16, mode="w+", shape=(9, 4))
    values[:] = np.arange(36).reshape(9, 4)
    lazy = Population.from_datasets([(values, np.arange(9) % 2)], num_classes=2, lazy=True)
    assert (
        lazy.x[torch.tensor([2])].tolist() == [[8.0, 9.0, 10.0, 11.0]]
        and lazy.x[torch.tensor([2])].dtype == torch.float32
    )
    values[3] = np.nan
    with pytest.raises(UserError, match="`client 0: x` must be finite"):
        lazy.x[torch.tensor([3])]


@pytest.mark.parametrize("token", [20, -1])
def test_tokens_beyond_the_embedding_are_refused_before_anything_is_charged(token, make_loop, tmp_path):
    clients = clients_of("words")
    clients["rome"][0][5, 2] = token
    people = Population.from_datasets(clients, num_classes=2, held_out=0)
    with pytest.raises(UserError, match=r"got a record of client rome that it cannot.*num_embeddings"):
        make_loop(people, ClientModule(Words()))
    assert not list(tmp_path.iterdir())
    test = clients.pop("rome")
    with pytest.raises(UserError, match="a record of the test set"):
        make_loop(Population.from_datasets(clients, test, num_classes=2, held_out=0), ClientModule(Words()))


@pytest.mark.parametrize(("records", "words"), [(["a b", "c"], "Tokenise text"), ([[1, 2], [3]], "pad or cut")])
def test_text_and_ragged_tokens_say_what_to_do(records, words):
    with pytest.raises(UserError, match=f"`client berlin` must hold numbers.*{words}"):
        Population.from_datasets({"berlin": (records, [0, 1])}, num_classes=2)
