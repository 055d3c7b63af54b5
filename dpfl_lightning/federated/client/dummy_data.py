"""Random records of a population's public shape, the whole numbers that a module takes, and timing on them."""

import copy
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dpfl_lightning.data import Population
from dpfl_lightning.federated.client.channel import Channel
from dpfl_lightning.federated.client.draws import fixed_rng
from dpfl_lightning.federated.client.engines.engine import Batch
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.models.tasks import IGNORED
from dpfl_lightning.privacy.clipping.inputs import Block, take
from dpfl_lightning.privacy.clipping.reference import ClipRequest, evaluating
from dpfl_lightning.privacy.clipping.restored import large_tensors, tensors_restored


@dataclass(frozen=True)
class Numbers:
    """Whole numbers that a module takes: from `low` to below `high`; the `special` ones may stand for padding.

    If no table bounds them, every second record, or each, is a mask: ones, and then zeros.
    """

    low: int
    high: int
    special: tuple[int, ...]
    masks_every: int | None = None

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return random numbers `[records, ...]`, each record of which ends in runs of some of the special ones."""
        values = torch.randint(max(0, self.low), self.high, shape, generator=generator)
        inside = (one for one in self.special if self.low <= one < self.high)
        special = list(dict.fromkeys((self.low, self.high - 1, *inside)))
        for row, record in enumerate(values.view(len(values), -1)):
            runs = special[row :: len(values)]
            for number, run in zip(runs, record.tensor_split(len(runs) + 1)[1:], strict=True):
                run.fill_(number)
        if self.masks_every and len(shape) > 1:
            rows, last = values.view(len(values), -1), torch.arange(len(values), 0, -1)[:, None]
            masks = torch.arange(rows.shape[1]) * len(rows) < last * rows.shape[1]  # the first one is full
            rows[self.masks_every - 1 :: self.masks_every] = masks[self.masks_every - 1 :: self.masks_every].long()
        return values


def dummy_batch(
    population: Population, records: int, device: torch.device, numbers: Sequence[Numbers | None] = ()
) -> Batch:
    """Return random `[records, *X]`, `[records, ...]`; whole numbers are 0 or 1 where `whole_numbers` gave none."""
    generator, ranges = torch.Generator().manual_seed(0), iter(numbers)

    def like(example: Tensor) -> Tensor:
        if known := next(ranges, None):
            return known.draw((records, *example.shape[1:]), generator).to(device, example.dtype)
        values = torch.randn(records, *example.shape[1:], generator=generator)
        if not example.is_floating_point():
            values = (values > 0).float()  # whole numbers may be rows of a table
            values.view(records, -1)[:, :1] = 1  # or a mask, which must not be empty, or a length
        return values.to(device, example.dtype)

    x = tree_map(like, population.empty_batch[0])
    if known := next(ranges, None):
        return x, known.draw((records, *population.y.shape[1:]), generator).to(device, population.y.dtype)
    return x, dummy_labels(population, records, generator).to(device)


def dummy_units(population: Population, units: int, device: torch.device) -> Batch:
    """Return what a step of training draws, on random data: records, or blocks of rows of other units."""
    rows = population.unit.rows
    if rows is None or not population.unit.is_group:
        return dummy_batch(population, units, device)
    x, y = dummy_batch(population, units * rows, device)
    present = torch.ones(units, rows, dtype=torch.bool, device=device)
    return Block.of(x, present), y.unflatten(0, (units, rows))


def dummy_labels(population: Population, records: int, generator: torch.Generator) -> Tensor:
    """Return random labels `[records, ...]` on the CPU; 0 and 1, which every task knows, if a record has several."""
    shape, dtype = (records, *population.y.shape[1:]), population.y.dtype
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(2 if len(shape) > 1 else population.num_classes, shape, generator=generator).to(dtype)


@torch.no_grad()
def whole_numbers(module: ClientModule, population: Population) -> list[Numbers | None]:
    """Return the whole numbers that a module takes in each tensor of x, and in y if a record has several labels.

    It tries public numbers, such as the rows of tables of tokens, on random records, and takes the largest for which
    the losses are finite, and which may stand everywhere in a record. It runs on the CPU, as `_check_whole_numbers`.
    Elsewhere there is None.
    """
    inputs, y = tree_leaves(population.empty_batch[0]), population.y
    whole = [part.dtype == torch.long for part in inputs] + [y.dtype == torch.long and y.dim() > 1]
    found: list[Numbers | None] = [None] * len(whole)
    if not any(whole):
        return found
    module, cpu = on_cpu(module), torch.device("cpu")
    rows = {len(parameter) for parameter in module.net.parameters() if parameter.dim()}
    attributes = {value for part in module.net.modules() for value in vars(part).values() if type(value) is int}
    attributes = {number for number in attributes if 1 < number < 2**31}  # sizes of vocabularies, or padding
    special = (0, 1, *sorted(attributes))
    for place in (place for place, is_whole in enumerate(whole) if is_whole):
        lows = (IGNORED, 0) if place == len(inputs) else (0, 1)  # lengths are at least 1
        bounds = {*rows, *attributes, 256, population.num_classes}
        beyond = max(bounds) + (place < len(inputs))
        for high, low in product(sorted(bounds | {beyond}, reverse=True), lows):
            free = 2 if high not in bounds else None
            tried = [*found[:place], Numbers(low, high, special, free), *found[place + 1 :]]
            with suppress(Exception), evaluating(module.net), fixed_rng(cpu):  # a user's code may raise anything
                some_x, some_y = dummy_batch(population, 1 if module.large else 4, cpu, tried)
                finite = module.sample_loss(module.named_trainable, some_x, some_y).isfinite().all()
                some_x, some_y = take((some_x, some_y), [0, -1])
                part = [*tree_leaves(some_x), some_y][place]
                part[::2], part[1::2] = low, high - 1
                module.sample_loss(module.named_trainable, some_x, some_y)  # raises where a table is smaller
                if finite:
                    found = tried
                    break
    return found


@torch.no_grad()
def seconds_per_record(channel: Channel, module: ClientModule, population: Population, batch_size: int) -> float:
    """An estimate of the time of one record in one step, from three steps on random data, of a large model from one."""
    x, y = dummy_units(population, 4 if module.large else batch_size, module.device)
    params, times = module.unflatten(module.flat), []
    for _ in range(1 if module.large else 3):
        begun = time.perf_counter()
        with tensors_restored(module.net):
            float(channel.engine.clipped_sum(params, x, y, ClipRequest(1.0))[0].sum())
        times.append(time.perf_counter() - begun)
    return min(times) / len(y) / channel.workers


def on_cpu(module: ClientModule) -> ClientModule:
    """Return a copy on the CPU, which shares large tensors with a module there."""
    shared = large_tensors(module).values() if module.device.type == "cpu" else ()
    return copy.deepcopy(module, {id(one): one for one in shared}).cpu()
