"""The three contestants of a case: this package, the same training without privacy, and Opacus' loop.

- All train the same model from the same parameters on the same random records with the same batch size and rate.
- Ours is a whole round of the engine: plan, Poisson sampling, per-record clipping, noise, mean. Only the ledger's disk
  write, evaluation and checkpoints are left out, which the others do not have.
- The loop without privacy is plain eager PyTorch: a deep copy of the model for each client, `torch.optim.SGD`,
  shuffled batches indexed from tensors. A `DataLoader`, as most people use, would make it slower.
- Opacus' loop is `make_private` with its hooks for every client: a `DataLoader`, Poisson batches. Its sample rate is
  1 / ceil(records / batch size), ours batch size / records: in the common round it trains on 1.3 % fewer records.
- Opacus replaces recurrent layers and attention by its own, of the same parameters.
- Both rivals run with torch's default threads and one client after the other; our engine chooses its threads.
- Our engine computes attention on a GPU by the plain kernels; the rivals have the fused ones.
- Our engine makes the process keep freed memory for the next step, from which the rivals gain as well.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from dpfl_lightning import models
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.channel import send_round
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server import aggregate
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.federated.transport.threads import Threads
from dpfl_lightning.loop import FederatedLoop
from dpfl_lightning.privacy.noise import Streams
from experiments.speed.cases import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, NUM_CLASSES, Case
from experiments.speed.sequence_nets import AdaptedBert, LSTMClassifier, Transformer

Pair = tuple[Tensor, Tensor]
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
BERTS = {"bert_base_lora": (12, 768), "small_bert_lora": (2, 64)}  # layers and width


@dataclass(frozen=True)
class Contestant:
    """A way to do the round of a case: `round` returns the mean of the clients' models `[P]` (peers return None).

    `threads` are those of torch within one operator.
    """

    name: str
    threads: int
    round: Callable[[], Tensor | None]


def contestants(case: Case, device: torch.device, engine: SerialEngine) -> list[Contestant]:
    """All three, set up, for the same model and records; `engine` is ours. Beside persons are only our own records."""
    default, other = torch.get_num_threads(), copy.copy(engine)
    net, pairs = build_net(case), random_records(case)
    ours = our_round(case, net, pairs, device, engine)
    chosen = torch.get_num_threads()  # the engine's choice is for the whole process
    if case.rows > 1:
        records = our_round(dataclasses.replace(case, rows=1), net, pairs, device, other)
        return [Contestant("ours", chosen, ours), Contestant("records", chosen, records)]
    torch.set_num_threads(default)
    there = [(x.to(device), y.to(device)) for x, y in pairs]
    plain = rivals_round(net.to(device), there, case.sizes, plain_epoch)
    # its loader collates on the CPU, record by record, so that is where its records lie
    opacus = rivals_round(ModuleValidator.fix(net), pairs, case.sizes, opacus_epoch)
    return [
        Contestant("ours", chosen, ours),
        Contestant("nonprivate", default, plain),
        Contestant("opacus", default, opacus),
    ]


def build_net(case: Case) -> nn.Module:
    """The case's model with the same initial parameters every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if case.model == "lstm":
            return LSTMClassifier(case.words, NUM_CLASSES)
        if case.model == "transformer":
            return Transformer(case.words, NUM_CLASSES, *case.input_shape)
        if case.model in BERTS:
            (places,), (layers, width) = case.input_shape, BERTS[case.model]
            return AdaptedBert(case.words, NUM_CLASSES, places, layers, width)
        return models.build(case.model, case.input_shape, NUM_CLASSES)


def random_records(case: Case) -> list[Pair]:
    """For each client x `[records, *X]`, standard normals or words, and y `[records]`, the same every time."""
    generator, shape = torch.Generator().manual_seed(0), (case.records, *case.input_shape)

    def inputs() -> Tensor:
        if case.words:
            return torch.randint(case.words, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    return [(inputs(), torch.randint(NUM_CLASSES, (case.records,), generator=generator)) for _ in range(case.clients)]


def our_loop(
    case: Case,
    net: nn.Module,
    pairs: Sequence[Pair],
    device: torch.device,
    engine: SerialEngine,
    noise_multiplier: float = NOISE_MULTIPLIER,
    rounds: int = 1,
    **options: Any,
) -> tuple[FederatedLoop, ServerState]:
    """A loop with planned rounds, whose engine is not set up yet, and the state before the first."""
    persons: list[list[str]] | None = None
    protects: dict[str, Any] = {}
    if case.rows > 1:
        persons = [[str(row // case.rows) for row in range(case.records)]] * case.clients
        protects = {"unit": "person", "rows_per_person": case.rows}
    loop = FederatedLoop(
        Population.from_datasets(pairs, held_out=0.0, num_classes=NUM_CLASSES, persons=persons),
        ClientModule(copy.deepcopy(net)),
        rounds=rounds,
        clients=ClientOptions(
            count=case.clients,
            batch_size=tuple(size // case.rows for size in case.sizes),
            learning_rate=LEARNING_RATE,
        ),
        privacy=PrivacyOptions(noise_multiplier=noise_multiplier, clip_norm=CLIP_NORM, **protects),
        engine=engine,
        device=device.type,
        **options,
    )
    loop.plan_schedule()
    return loop, ServerState(loop.module.flat[None], (0,) * case.clients)


def our_round(
    case: Case,
    net: nn.Module,
    pairs: Sequence[Pair],
    device: torch.device,
    engine: SerialEngine,
) -> Callable[[], Tensor]:
    """A whole round of the engine."""
    loop, state = our_loop(case, net, pairs, device, engine)
    channel = Threads(engine)
    channel.setup(loop.module, HeldClients(loop.population.chosen(b"")), Streams(), "poisson")

    def one_round() -> Tensor:
        equal = torch.ones(1, case.clients)  # the mean
        inbox = send_round(channel, loop.view(state).plan(), state.models, [0] * case.clients, equal)
        return state.models[0] + aggregate.combine(equal, inbox.updates())[0]

    return one_round


def rivals_round(
    net: nn.Module,
    pairs: Sequence[Pair],
    batch_sizes: Sequence[int],
    train: Callable[[nn.Module, Tensor, Tensor, int], None],
) -> Callable[[], Tensor]:
    """`train(copy of net, x, y, batch size)` for one client after the other; the mean of the copies' parameters."""

    def one_round() -> Tensor:
        total = torch.zeros_like(parameters_to_vector(net.parameters()).detach())
        for (x, y), batch_size in zip(pairs, batch_sizes, strict=True):
            local = copy.deepcopy(net)
            with sdpa_kernel(FUSED):
                train(local, x, y, batch_size)
            total += parameters_to_vector(local.parameters()).detach()
        return total / len(pairs)

    return one_round


def plain_epoch(net: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> None:
    """Plain SGD over shuffled batches, in place."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    for rows in torch.randperm(len(y), device=y.device).split(batch_size):
        optimizer.zero_grad()
        cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()


def opacus_epoch(net: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> None:
    """DPSGD by Opacus over Poisson batches, in place."""
    device = next(net.parameters()).device
    private, private_optimizer, loader = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=LEARNING_RATE),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=batch_size),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
    )
    for batch, labels in loader:
        private_optimizer.zero_grad()
        cross_entropy(private(batch.to(device)), labels.to(device)).backward()
        private_optimizer.step()
