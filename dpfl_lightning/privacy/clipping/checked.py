"""The fastest clipped sum that is correct and private for a model, found by tests on public records."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.clipping.constant_draws import EXTREME_DRAWS, ConstantDraws
from dpfl_lightning.privacy.clipping.fast import FastClippedSum
from dpfl_lightning.privacy.clipping.inputs import Inputs as Records
from dpfl_lightning.privacy.clipping.inputs import take
from dpfl_lightning.privacy.clipping.isolation import CROWD, SMALL_CROWD, in_companies
from dpfl_lightning.privacy.clipping.passes import PASS_COST, PASS_FLOPS, SIZES, Batch, FixedPasses, Products
from dpfl_lightning.privacy.clipping.reads import Read, reads_of
from dpfl_lightning.privacy.clipping.reference import (
    ClipRequest,
    LoopClippedSum,
    Params,
    SampleLoss,
    VmapClippedSum,
    clip_factors,
    cross_entropy_of,
    evaluating,
)
from dpfl_lightning.privacy.clipping.sequence_layers import tapped_forward
from dpfl_lightning.privacy.clipping.state import contents, tensors_restored
from dpfl_lightning.privacy.clipping.vector_loops import reads_numbers
from dpfl_lightning.runtime.threads import one_thread_an_operator

_CPU_NUMBERS = 4 << 20  # numbers in the widest layer's inputs of a pass: more do not fit the caches
_CROWD_NUMBERS = 1 << 20  # numbers in the widest layer's inputs of the batch of a check: more take seconds
_FEWEST_IN_A_CROWD = 24
_KINDS = 6  # of records in a random example
_RANDOM_KINDS = 3  # the first ones, without constant stretches
_CLIP_NORM = 1e-2
_MOST_BY_VMAP = 1 << 19  # parameters: of larger models the loop is as fast, and of these up to 8 times slower

PassedSum = FastClippedSum | VmapClippedSum
Kind = Callable[[nn.Module, SampleLoss, int], PassedSum]  # the last argument is the size of passes


class CheckedSum:
    """The `ClippedSum` of a run: by rules or `vmap` in passes of a size that passed on this machine, else by the loop.

    `kind` None is the loop. An operator of the CPU uses one thread: the share of a second one would end in a pass.
    """

    def __init__(self, net: nn.Module, sample_loss: SampleLoss, passes: FixedPasses, kind: Kind | None) -> None:
        self.net, self.passes, self.kind = net, passes, kind
        self._sample_loss = sample_loss
        self._loop = LoopClippedSum(net, sample_loss)
        self._checked: dict[int, PassedSum] = {}

    @property
    def by_rules(self) -> bool:
        """Whether rules of layers are used, not `vmap` or the loop."""
        return isinstance(self.choose(), FastClippedSum)

    def choose(self, expected: float | None = None) -> PassedSum | LoopClippedSum:
        """Return what computes the sums of batches of so many records; the first call checks the size of passes."""
        size = 1 if self.kind is None else self.passes.size(self.kind, self._evidence, expected)
        if self.kind is None or size == 1:
            return self._loop
        if size not in self._checked:
            self._checked[size] = self.kind(self.net, self._sample_loss, size)
        return self._checked[size]

    def __call__(self, params: Params, x: Records, y: Tensor, request: ClipRequest) -> tuple[Tensor, Tensor]:
        with one_thread_an_operator():
            return self.choose(request.expected)(params, x, y, request)

    def _evidence(self, x: Records, y: Tensor, count: int) -> list[Tensor]:
        assert self.kind is not None
        params = moved_parameters(self.net)
        with _still(self.net, self.passes), tensors_restored(self.net), evaluating(*_dropout_of(self.net)):
            return self.kind(self.net, self._sample_loss, len(y)).evidence(params, x, y, count)

    def copy_for(self, net: nn.Module, sample_loss: SampleLoss) -> CheckedSum:
        return CheckedSum(net, sample_loss, self.passes, self.kind)

    def enter(self, x: Records) -> Records:
        return self.passes.enter(x)


def clipped_sum_for(
    net: nn.Module,
    sample_loss: SampleLoss | None,
    example_x: Records,
    example_y: Tensor,
) -> tuple[CheckedSum, str]:
    """Return the fastest clipped sum that is correct for this model, and why: "fast: ...", "vmap: ..." or "loop: ...".

    Rules of layers, or `vmap`, have to agree with the loop on random, constant, padded and extreme records, also beside
    records that try to influence them, to 1e-8 relative in float64 (1e-4 in float32 without float64), without random
    numbers. No record is read but the first of the examples `[B, ...]`, B >= 0, which has to be public: it is the
    padding. Raises UserError if a pass changes parameters, or numbers that the model keeps.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> clipped_sum_for(net, None, torch.empty(0, 2, 2), torch.empty(0, dtype=torch.long))[1]
    'fast: exact rules for all layers'
    """
    sample_loss = sample_loss or cross_entropy_of(net)
    passes = _passes_of(net, example_x, example_y)
    with _drawing_nothing(net):
        kind, reason = _kind_of(net, sample_loss, example_x, example_y, passes)
        clipped_sum = CheckedSum(net, sample_loss, passes, kind)
        if kind is not None and reason.startswith("fast") and isinstance(clipped_sum.choose(), LoopClippedSum):
            clipped_sum, _ = _vmap_or_loop(net, sample_loss, passes)
            kind = clipped_sum.kind
            reason = "vmap: on this machine the bits of a gradient by rules depend on the other records of a batch"
        if reason[:4] != "loop" and isinstance(clipped_sum.choose(), LoopClippedSum):
            reason = "loop: on this machine the bits of a gradient depend on the other records of a batch"
            _require_repeatable(net, sample_loss, passes)
    return clipped_sum, reason


def vmap_or_loop(net: nn.Module, sample_loss: SampleLoss, example_x: Records, example_y: Tensor) -> CheckedSum:
    """Return the reference of a run: `VmapClippedSum`, or the loop where `vmap` cannot run the model."""
    passes = _passes_of(net, example_x, example_y)
    with _drawing_nothing(net):
        changed = _changed_in_a_pass(net, sample_loss, passes)
        if not changed:
            return _vmap_or_loop(net, sample_loss, passes)[0]
        _require_repeatable(net, sample_loss, passes)
    return CheckedSum(net, sample_loss, passes, None)


def _vmap_or_loop(net: nn.Module, sample_loss: SampleLoss, passes: FixedPasses) -> tuple[CheckedSum, str]:
    try:
        rows = [0, _KINDS - 2, _KINDS - 1]
        some = take(passes.examples[0], rows), passes.examples[1][rows]
        VmapClippedSum(sample_loss, len(rows))(moved_parameters(net), *some, ClipRequest(1.0))
    except Exception as error:  # a user's forward pass may raise anything under `vmap`
        _require_repeatable(net, sample_loss, passes)
        return CheckedSum(net, sample_loss, passes, None), _first_line(error)
    return CheckedSum(net, sample_loss, passes, functools.partial(_by_vmap, passes.padding)), ""


@contextmanager
def _drawing_nothing(net: nn.Module) -> Iterator[None]:
    """Switch dropout off, and restore the generators of random numbers afterwards."""
    with _generators_kept(net), evaluating(*_dropout_of(net)):
        yield


def _by_vmap(padding: Batch, net: nn.Module, sample_loss: SampleLoss, size: int) -> VmapClippedSum:
    return VmapClippedSum(sample_loss, size, padding)


def _kind_of(
    net: nn.Module, sample_loss: SampleLoss, example_x: Records, example_y: Tensor, passes: FixedPasses
) -> tuple[Kind | None, str]:
    """Return how gradients are computed, and why: the first of rules and `vmap` that gives those of the loop."""
    if changed := _changed_in_a_pass(net, sample_loss, passes):
        _require_repeatable(net, sample_loss, passes)
        return None, f"loop: `{changed}` changes in every pass"
    with _still(net, passes):
        try:  # in float64, rounding cannot be mistaken for an error or push an activation across a kink
            dtype, tolerance = torch.float64, 1e-8
            loss, example, expected = _reference_answers(net, sample_loss, example_x, example_y, dtype)
        except Exception:  # a device or loss without float64; any other error is raised again
            dtype, tolerance = torch.float32, 1e-4
            loss, example, expected = _reference_answers(net, sample_loss, example_x, example_y, dtype)
        try:
            reads = reads_of(loss, *example)
        except Exception as error:  # a user's code may refuse to be watched
            kind, cause = None, _first_line(error)
        else:
            kind, cause = _by_rules_if_right(net, sample_loss, loss, example, expected, tolerance, passes, reads)
        if kind is not None:
            return kind, cause
        try:
            wrong = _apart(example[0], _answers(VmapClippedSum(loss, _KINDS // 2), *example), expected, tolerance)
        except Exception as error:  # a user's forward pass may raise anything under `vmap`
            wrong = _first_line(error)
    if wrong is None and sum(p.numel() for p in example[0].values()) <= _MOST_BY_VMAP:
        return functools.partial(_by_vmap, passes.padding), f"vmap: {cause}"
    _require_repeatable(net, sample_loss, passes)
    return None, f"loop: {cause}"


def _by_rules_if_right(
    net: nn.Module,
    sample_loss: SampleLoss,
    loss: SampleLoss,
    example: tuple[Params, Records, Tensor],
    expected: list[Tensor],
    tolerance: float,
    passes: FixedPasses,
    reads: Sequence[Read],
) -> tuple[Kind | None, str]:
    """Return the sum by rules if it is right, and how it is computed; otherwise None, and what is wrong."""
    cause, loose = "", set[str]()
    for channels_last in (True, False):
        while True:
            unit = None
            try:
                fast = FastClippedSum(net, loss, _KINDS, channels_last, reads=reads, loose=loose).planned(*example)
                wrong_parameter = _apart(example[0], _answers(fast, *example), expected, tolerance)
                if wrong_parameter is None:
                    return _used(fast, net, sample_loss, example, tolerance, passes)
                unit = next(
                    (name for name, one in fast.units_of.items() if wrong_parameter in one.names.values()), None
                )
                problem = f"the gradient of `{wrong_parameter}` differs from what the layers' rules give"
            except Exception as error:  # a user's forward pass may raise anything under hooks
                unit, problem = getattr(error, "unit", None), _first_line(error)
            cause = cause or problem
            if unit is None or unit in loose:
                break
            loose.add(unit)  # without its rule
    return None, cause


def _used(
    fast: FastClippedSum,
    net: nn.Module,
    sample_loss: SampleLoss,
    example: tuple[Params, Records, Tensor],
    tolerance: float,
    passes: FixedPasses,
) -> tuple[Kind | None, str]:
    """Return what computes right sums as they are used, and its reason; None if records depend on each other."""
    in_own_dtype = fast.copy_for(net, sample_loss)
    if reading := _reads_in_a_pass(in_own_dtype, net, *passes.examples):
        return None, f"`{reading}` reads numbers of a batch, by which a derivative of torch may decide"
    widest, on_cpu = fast.widest_input(*example), example[2].device.type == "cpu"
    if on_cpu:
        passes.most = min(passes.most, _CPU_NUMBERS // widest)
        with Products() as products:
            fast.signals(example[0], take(example[1], slice(1)), example[2][:1])
        passes.cost = min(PASS_COST, PASS_FLOPS / max(products.flops, 1))
    crowd = max(_FEWEST_IN_A_CROWD, min(CROWD, _CROWD_NUMBERS // widest))
    for number in EXTREME_DRAWS if passes.draws else EXTREME_DRAWS[:1]:
        usual = number == EXTREME_DRAWS[0]
        with nullcontext() if usual else ConstantDraws(number):
            if mixing_unit := _reached_in_company(fast, *example, crowd if usual else SMALL_CROWD, tolerance):
                return None, f"the inputs or gradients of `{mixing_unit}` depend on the other records of a batch"
    fast.sparse = frozenset(fast.sparse_layers(*example) if on_cpu else ())
    passes.enter = fast.enter
    vmap_modules = ", ".join(fast.under_vmap())
    reason = "fast: exact rules " + (f"but vmap for {vmap_modules}" if vmap_modules else "for all layers")
    return functools.partial(_by_rules, passes.padding, fast), reason


def _first_line(error: Exception) -> str:
    return re.split(r"[.\n] ", f"{error}".strip())[0].split("\n")[0] or type(error).__name__


def _by_rules(
    padding: Batch, found: FastClippedSum, net: nn.Module, sample_loss: SampleLoss, size: int
) -> FastClippedSum:
    clipped_sum = found.copy_for(net, sample_loss)
    clipped_sum.size, clipped_sum.padding = size, padding
    return clipped_sum


def _changed_in_a_pass(net: nn.Module, sample_loss: SampleLoss, passes: FixedPasses) -> str:
    """Return the name of a tensor that every pass changes; empty if there is none. Notes whether a pass draws.

    Raises UserError if a pass changes parameters or numbers that the model keeps, and what it raises in the loop.
    """
    params, rows = moved_parameters(net), [0, _KINDS - 2, _KINDS - 1]  # also a padded and an extreme record
    x, y = take(passes.examples[0], rows), passes.examples[1][rows]
    clipped_sum, drawn, kept = LoopClippedSum(net, sample_loss), _generator_state(y.device), list[dict[str, object]]()
    with one_thread_an_operator():
        for _ in range(2):  # the first pass may store what stays
            clipped_sum(params, x, y, ClipRequest(1.0))
            kept.append(contents(net))
    passes.draws = not torch.equal(drawn, _generator_state(y.device))
    others = [name for name, value in kept[1].items() if kept[0].get(name) != value]
    advice = "Counters and averages would tell how many records there were."
    require(not others, "model", "leave what it keeps as it is in a pass", ", ".join(others), advice)
    return next(iter(clipped_sum.restored), "")


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _still(net: nn.Module, passes: FixedPasses) -> Iterator[None]:
    """Within it a model that draws random numbers gets constants, and the generators stay as they are."""
    if not passes.draws:
        yield
        return
    with _generators_kept(net), ConstantDraws():
        yield


def _generators_kept(net: nn.Module) -> AbstractContextManager[Any]:
    device = next(net.parameters()).device
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _require_repeatable(net: nn.Module, sample_loss: SampleLoss, passes: FixedPasses) -> None:
    """Raise UserError if the loop gives a record other gradients in a later pass."""
    rows, params = [1, 0, *range(_KINDS), 1], moved_parameters(net)
    x, y = take(passes.examples[0], rows), passes.examples[1][rows]
    each = ClipRequest(1.0, group=torch.tensor([0, *[1] * (len(rows) - 2), 2], device=y.device), num_groups=3)
    with _still(net, passes), one_thread_an_operator():
        first, _, last = LoopClippedSum(net, sample_loss)(params, x, y, each)[0]
    if y.device.type == "cpu" and not torch.equal(first, last):  # kernels of a GPU may add in any order
        raise UserError(
            "`model` must give a record the same gradient in every pass, got another one later. Look for counters "
            "and averages that the model keeps."
        )


def _dropout_of(net: nn.Module) -> list[nn.Module]:
    """Return the layers whose dropout is switched off, which is quicker than constants for its draws."""
    return [m for m in net.modules() if isinstance(m, nn.modules.dropout._DropoutNd) or tapped_forward(m)]


def _reference_answers(
    net: nn.Module, sample_loss: SampleLoss, x: Records, y: Tensor, dtype: torch.dtype
) -> tuple[SampleLoss, tuple[Params, Records, Tensor], list[Tensor]]:
    """Return the loss with all parameters and buffers in `dtype`, a random example, and the reference's answers."""
    fixed = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    fixed = {name: t.detach().to(dtype) for name, t in fixed.items() if t.is_floating_point()}

    def loss(params: Params, x: Records, y: Tensor) -> Tensor:
        return sample_loss({**fixed, **params}, x, y)

    example = random_example(net, x, y, dtype)
    each = ClipRequest(math.inf, 2, torch.arange(_KINDS, device=y.device), _KINDS)
    rows = LoopClippedSum(net, loss)(*example, each)[0]
    factors = (clip_factors(torch.linalg.vector_norm(rows, ord=order, dim=1), _CLIP_NORM) for order in (2, 1))
    return loss, example, [rows, *(factor[None] @ rows for factor in factors)]


def moved_parameters(net: nn.Module, dtype: torch.dtype | None = None) -> Params:
    """Return the trainable parameters moved off zeros and symmetries, in `dtype` (None: their own).

    They are views of one vector, as those of a run.
    """
    gen = torch.Generator().manual_seed(0)
    params = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    moved = [(p + 0.05 * torch.randn(p.shape, generator=gen).to(p)).to(dtype or p.dtype) for p in params.values()]
    if len({one.dtype for one in moved}) > 1:
        return dict(zip(params, moved, strict=True))
    parts = torch.cat([one.reshape(-1) for one in moved]).split([one.numel() for one in moved])
    return {name: part.view(params[name].shape) for name, part in zip(params, parts, strict=True)}


def random_example(
    net: nn.Module, x: Records, y: Tensor, dtype: torch.dtype | None = None, records: int = _KINDS
) -> tuple[Params, Records, Tensor]:
    """Return parameters off zeros and symmetries, and random, constant, padded and extreme records, in turns.

    Floating numbers are of this dtype (None: their own).
    """
    gen = torch.Generator().manual_seed(1)
    device = next(net.parameters()).device
    tokens = min((m.num_embeddings for m in net.modules() if isinstance(m, nn.Embedding)), default=2)

    def like(example: Tensor, high: int) -> Tensor:
        shape = (records, *example.shape[1:])
        floating = example.is_floating_point()
        drawn = torch.randn(shape, generator=gen) if floating else torch.randint(high, shape, generator=gen)
        if drawn.dim() > 1:
            end = drawn.shape[1] // 2
            drawn[3::_KINDS] = 1
            drawn[4::_KINDS, end:] = 0
            if floating:
                drawn[5::_KINDS] *= 100
            else:
                drawn[5::_KINDS, end:] = high - 1
        return drawn.to(device, (dtype if floating else None) or example.dtype)

    return moved_parameters(net, dtype), tree_map(lambda part: like(part, tokens), x), like(y[:, None], 2)[:, 0]


def _passes_of(net: nn.Module, x: Records, y: Tensor) -> FixedPasses:
    """Return passes whose examples are random records, the first of which is that of x and y, if there is one."""
    some_x, some_y = random_example(net, x, y, records=max(SIZES) + 1)[1:]
    if all(map(len, tree_leaves((x, y)))):
        for part, given in zip(tree_leaves((some_x, some_y)), tree_leaves((x, y)), strict=True):
            part[:1] = given[:1]
    return FixedPasses((some_x, some_y))


def _answers(clipped_sum: PassedSum, params: Params, x: Records, y: Tensor) -> list[Tensor]:
    """Return what distinguishes two clipped sums: full gradients record by record, and sums of clipped ones."""
    each = ClipRequest(math.inf, 2, torch.arange(len(y), device=y.device), len(y))
    requests = [each, ClipRequest(_CLIP_NORM, 2), ClipRequest(_CLIP_NORM, 1)]
    return [clipped_sum(params, x, y, request)[0] for request in requests]


def _reads_in_a_pass(clipped_sum: FastClippedSum, net: nn.Module, x: Records, y: Tensor) -> str:
    """Return an operator that reads numbers in a backward pass in the dtypes of the model and of its records, or "".

    What a forward pass reads of records is fixed. Before that the clipped sum is computed: a model under autocast may
    raise only here, and compiled loops read numbers of their own when they are first used.
    """
    params = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
    some_x, some_y = random_example(net, x, y)[1:]
    clipped_sum(params, some_x, some_y, ClipRequest(1.0))
    both = reads_numbers(lambda: clipped_sum.signals(params, some_x, some_y))
    return next(iter(both - reads_numbers(lambda: clipped_sum.losses(params, some_x, some_y))), "")


def _apart(params: Params, answers: list[Tensor], expected: list[Tensor], tolerance: float) -> str | None:
    """Return the first parameter in which some record's gradients differ by more than rounding, or None."""
    sizes = [p.numel() for p in params.values()]
    for actual, exact in zip(answers, expected, strict=True):
        for name, a, b in zip(params, actual.split(sizes, dim=1), exact.split(sizes, dim=1), strict=True):
            # A parameter whose gradient is zero up to rounding is compared with the whole gradient.
            if not ((a - b).norm(dim=1) <= tolerance * (b.norm(dim=1) + 1e-2 * exact.norm(dim=1))).all():
                return name
    return None


def _reached_in_company(
    fast: FastClippedSum, params: Params, x: Records, y: Tensor, most: int, tolerance: float
) -> str | None:
    """Return the first unit of which what the rules read for a record of `x` changes with other records, or None.

    The gradient of an output counts for the random records only: in constant stretches max-pooling passes it to one of
    several equal numbers, and rounding decides which. The check of the sizes compares all records, bit for bit.
    """
    random = torch.arange(len(y), device=y.device) % _KINDS < _RANDOM_KINDS
    alone = [fast.signals(params, take(x, [row]), y[[row]]) for row in range(len(y))]  # the model may change copies

    def look(some_x: Records, some_y: Tensor, places: Tensor) -> str | None:
        for name, together in fast.signals(params, some_x, some_y).items():
            if any(signals.get(name, {}).keys() != together.keys() for signals in alone):
                return name
            for part, actual in together.items():
                expected = torch.cat([signals[name][part] for signals in alone]).reshape(len(places), -1)
                expected = expected.to(params_dtype)
                known = expected.isfinite().all(dim=1)  # a record that is all padding may have no number
                if part == "dy":
                    known &= random
                distance = (actual[places].reshape(len(places), -1).to(params_dtype) - expected)[known].norm(dim=1)
                size = expected[known].norm(dim=1)
                if len(size) and not (distance <= tolerance * (size + 1e-4 * size.max())).all():  # what cancels rounds
                    return name
        return None

    params_dtype = next(iter(params.values())).dtype  # inputs may be integers
    return next(filter(None, in_companies(look, x, y, most)), None)
