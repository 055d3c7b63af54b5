"""Random public records on which ways to a clipped sum are tried, and their gradients by the reference."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpfl_lightning.privacy.clipping.fixed_draws import generators_kept
from dpfl_lightning.privacy.clipping.float64_sums import row_norms
from dpfl_lightning.privacy.clipping.inputs import Block, rows_each, take
from dpfl_lightning.privacy.clipping.inputs import Inputs as Records
from dpfl_lightning.privacy.clipping.operations import crowd_of, operations_of
from dpfl_lightning.privacy.clipping.passes import OF_ANY_WIDTH, SIZES, Batch, FixedPasses
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum, Params, SampleLoss
from dpfl_lightning.privacy.clipping.restored import tensors_restored

#: kinds of records after three random ones: ones; zeros in the second half; large numbers; padded on the right, where
#: whole numbers are masks; padded on the left, where all parts but the first are masks, or only the first; and zeros
ONES, HALF, EXTREME, RIGHT, LEFT, LEFT_FIRST, EMPTY = range(3, 10)
RANDOM_KINDS, KINDS = 3, 10
FEW_KINDS = [0, ONES, RIGHT]  # for code that reads no numbers of records
MASKS = [ONES, EXTREME, RIGHT, LEFT, LEFT_FIRST, EMPTY]  # of a large model that does; masks of ones and padded ones
_UNUSUAL = (LEFT, LEFT_FIRST, EMPTY)  # for which a model may raise an error, or give no finite loss
_QUICKER_ON_A_GPU = 256  # times as many operations of a pass take no longer there
_MOST_KEPT = 1 << 22  # numbers of the gradients that the reference keeps


class Reference:
    """Gradients of random records of some `kinds`, by the loop, with all parameters and buffers in `dtype`.

    None is the model's own dtype, without copies of what is frozen. Few numbers are kept, so that they are computed
    once; a caller that needs many of them gets them record by record.
    """

    def __init__(
        self,
        net: nn.Module,
        sample_loss: SampleLoss,
        trials: TrialRecords,
        kinds: list[int],
        dtype: torch.dtype | None,
    ) -> None:
        self.net, self.sample_loss, self._trials, self._kinds = net, sample_loss, trials, kinds
        self.tolerance = 1e-8 if dtype == torch.float64 else 1e-4
        self.rounding = 64 * torch.finfo(dtype or torch.float32).eps
        fixed = {**dict(net.named_parameters()), **dict(net.named_buffers())} if dtype else {}
        fixed = {name: t.detach().to(dtype) for name, t in fixed.items() if t.is_floating_point()}
        self.loss = lambda params, x, y: sample_loss({**fixed, **params}, x, y)
        some_x, some_y = take(trials.draw(dtype), kinds)
        self.example = moved_parameters(net, dtype), some_x, some_y
        self._loop = LoopClippedSum(net, self.loss)
        self._left_out: Tensor | None = None
        self._kept, self._totals = dict[int, list[Tensor]](), dict[int, Tensor]()

    @functools.cached_property
    def exact(self) -> Reference:
        """The same in float64."""
        return Reference(self.net, self.sample_loss, self._trials, self._kinds, torch.float64)

    def computed(self) -> LoopClippedSum:
        """Return the loop, which has computed all rows."""
        for number in range(len(self.example[-1])):
            self.row(number)
        return self._loop

    def row(self, number: int) -> list[Tensor]:
        """Return the gradient of a record, `[p]` for each parameter."""
        if number in self._kept:
            return self._kept[number]
        params, x, y = self.example
        (row,) = self._loop.each(params, take(x, [number]), y[[number]], ClipRequest(math.inf))
        self._totals[number] = row_norms(torch.cat([row_norms(one[None]) for one in row])[None])[0]
        if sum(one.numel() for one in row) <= _MOST_KEPT:
            self._kept[number] = row
        return row

    def total(self, number: int) -> Tensor:
        """Return the norm of the whole gradient of a record."""
        if number not in self._totals:
            self.row(number)
        return self._totals[number]

    def without(self, records: Tensor) -> Reference:
        """Return the same, which compares nothing of some records, `[B]`."""
        other = copy.copy(self)
        other._left_out = records
        return other

    def wrong_parameter(self, rows: Iterable[Tensor], norms: Mapping[int, Tensor] | None = None) -> str | None:
        """Return the first parameter in which a record's gradient `[1, P]` differs by more than rounding, or None.

        It is the first of all if only `norms`, `[B]` by their order, are wrong: rules may enlarge them by rounding. A
        gradient that is zero up to rounding is compared with the record's whole gradient, and this with the others. One
        of an unusual record that is not finite contributes nothing, and must not be finite by the other way either.
        """
        params, enlarged = self.example[0], 1e-8 if self.tolerance == 1e-8 else 1e-2
        sizes = [p.numel() for p in params.values()]
        totals = torch.stack([self.total(number) for number in range(len(self.example[-1]))])
        random = [number for number, kind in enumerate(self._kinds) if kind < RANDOM_KINDS]
        usual = totals[random] if random else totals
        least = self.rounding * usual[usual.isfinite()].nanmedian().nan_to_num()
        for number, actual in enumerate(rows):
            if self._left_out is not None and self._left_out[number]:
                continue
            exact = self.row(number)
            if not totals[number].isfinite() and self._kinds[number] in _UNUSUAL:
                found = [norm[number] for norm in (norms or {}).values()] or [actual.norm()]
                if torch.stack(found).isfinite().any():
                    return next(iter(params))
                continue
            of_each = torch.cat([row_norms(one[None]) for one in exact])
            zero = self.tolerance * 1e-2 * self.total(number) + least
            for name, a, b, size in zip(params, actual[0].split(sizes), exact, of_each, strict=True):
                if not (a - b).norm() <= self.tolerance * size + zero:
                    return name
            for order, norm in (norms or {}).items():
                right = row_norms(torch.cat([row_norms(one[None], order) for one in exact])[None], order)
                if not (1 - self.tolerance) * right - least <= norm[number] <= (1 + enlarged) * right + least:
                    return next(iter(params))
        return None


@dataclass(frozen=True)
class TrialRecords:
    """Random public records `[n, *X]`, `[n, ...]` in turns of all kinds; those of a unit are of one kind.

    Args:
        like: x `[B, *X]` and y `[B, ...]`, B >= 0, of this shape and on this device.
        highs: whole numbers of each part of x, in its order, are below these.
        least: whole numbers that stand alone in a record, such as a length, are from this one on.
        without: kinds that are ones instead, because the model raises an error for them.
    """

    like: Batch
    highs: tuple[int, ...]
    least: int = 0
    without: frozenset[int] = frozenset()

    def draw(self, dtype: torch.dtype | None = None, records: int = KINDS) -> Batch:
        """Return records, the same ones every time, of which floating numbers are in this dtype (None: their own)."""
        (x, y), gen, numbers = self.like, torch.Generator().manual_seed(1), enumerate(self.highs)
        in_blocks, each = isinstance(x, Block), rows_each(x)

        def drawn(example: Tensor, number: int, high: int) -> Tensor:
            shape, floating = (records, *example.shape[1:]), example.is_floating_point()
            low = self.least if len(shape) == 1 + in_blocks else 0
            high = max(high, low + 1)
            part = torch.randn(shape, generator=gen) if floating else torch.randint(low, high, shape, generator=gen)
            rows = part.flatten(0, 1) if in_blocks else part
            rows = rows.view(len(rows), *(size for size in rows.shape[1:] if size != 1))
            turn, kind = torch.arange(len(rows)) // each // KINDS, torch.arange(len(rows)) // each % KINDS
            if not floating:
                rows[kind == EMPTY] = low
            if rows.dim() > 1:
                masks = (kind == RIGHT) & (not floating) | (kind == (LEFT if number else LEFT_FIRST))
                _shape(rows, kind, turn, None if floating else high - 1, masks)
                for one in self.without:
                    rows[kind == one] = 1
            return part.to(example.device, (dtype if floating else None) or example.dtype)

        labels = drawn(y[..., None], 1, 2)[..., 0] if in_blocks else drawn(y[:, None], 1, 2)[:, 0]
        return tree_map(lambda part: drawn(part, *next(numbers)), x), labels


def _shape(rows: Tensor, kind: Tensor, turn: Tensor, largest: int | None, masks: Tensor) -> None:
    """Give records `[n, T, ...]` the stretches of their kinds along their first dimension; some are `masks` `[n]`."""
    length, quarter = rows.shape[1], (rows.shape[1] // 2 + 1) // 2
    rows[kind == ONES] = 1
    rows[kind == HALF, length // 2 :] = 0
    if largest is None:
        rows[kind == EXTREME] *= 100
    else:
        rows[kind == EXTREME, length // 2 :] = largest
    rows[masks] = 1
    left = (kind == LEFT) | (kind == LEFT_FIRST)
    for number, part in enumerate((length - quarter, quarter, length - 1)):
        rows[(kind == RIGHT) & (turn % 3 == number), length - part :] = 0
        rows[left & (turn % 3 == number), :part] = 0
    if largest is not None:
        rows[left, -1:] = rows[left, -1:].clamp(min=1)  # not empty
    rows[kind == EMPTY] = 0


def trial_records(net: nn.Module, sample_loss: SampleLoss, x: Records, y: Tensor) -> TrialRecords:
    """Return random records for which the model raises no error. What is not finite for them is tried, too."""
    tokens = min((m.num_embeddings for m in net.modules() if isinstance(m, nn.Embedding)), default=2)
    parts, params = tree_leaves(x), own_parameters(net)
    trials = TrialRecords((x, y), (tokens,) * len(parts), without=frozenset(_UNUSUAL))

    @torch.no_grad()
    def takes(trials: TrialRecords, kind: int) -> bool:
        with suppress(Exception), generators_kept(net), tensors_restored(net):  # a user's code may raise anything
            sample_loss(params, *take(trials.draw(), [kind]))
            return True
        return False

    if not takes(trials, 0):  # perhaps a part is a mask of 0 and 1
        masks = [tuple(2 if place == mask else tokens for place in range(len(parts))) for mask in range(len(parts))]
        highs = (*masks, (2,) * len(parts))
        others = (replace(trials, highs=one, least=least) for least in (0, 1) for one in highs)
        trials = next((one for one in others if takes(one, 0)), trials)
    alone = 1 + isinstance(x, Block)
    if any(one.dim() == alone and not one.is_floating_point() for one in parts) and not takes(trials, EMPTY):
        trials = replace(trials, least=1)
    refused = {kind for kind in _UNUSUAL if not takes(replace(trials, without=trials.without - {kind}), kind)}
    return replace(trials, without=frozenset(refused))


def passes_of(net: nn.Module, sample_loss: SampleLoss, x: Records, y: Tensor) -> tuple[FixedPasses, TrialRecords]:
    """Return passes whose examples are random records, the first of which is that of x and y, if there is one."""
    trials = trial_records(net, sample_loss, x, y)
    some_x, some_y = trials.draw(records=max(SIZES) + 1)
    if all(map(len, tree_leaves((x, y)))):
        for part, given in zip(tree_leaves((some_x, some_y)), tree_leaves((x, y)), strict=True):
            part[:1] = given[:1]
    own, one, operations = own_parameters(net), take((some_x, some_y), [0]), 0
    with suppress(Exception), torch.no_grad(), tensors_restored(net):  # what a user's code raises is raised again
        operations = operations_of(lambda: sample_loss(own, *one))
    fitting = crowd_of(operations // (_QUICKER_ON_A_GPU if some_y.is_cuda else 1))
    fitting = max(fitting, OF_ANY_WIDTH) if 2 * fitting >= OF_ANY_WIDTH else fitting
    passes = FixedPasses((some_x, some_y), [size for size in SIZES if size <= fitting] or [fitting])
    passes.crowd = crowd_of(operations, sum(p.numel() for p in net.parameters()))
    return passes, trials


def moved_parameters(net: nn.Module, dtype: torch.dtype | None = None) -> Params:
    """Return the trainable parameters moved off zeros and symmetries, in `dtype` (None: their own).

    They are views of one vector, as those of a run.
    """
    gen = torch.Generator().manual_seed(0)
    params = own_parameters(net)
    moved = [(p + 0.05 * torch.randn(p.shape, generator=gen).to(p)).to(dtype or p.dtype) for p in params.values()]
    if len({one.dtype for one in moved}) > 1:
        return dict(zip(params, moved, strict=True))
    parts = torch.cat([one.reshape(-1) for one in moved]).split([one.numel() for one in moved])
    return {name: part.view(params[name].shape) for name, part in zip(params, parts, strict=True)}


def own_parameters(net: nn.Module) -> Params:
    return {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
