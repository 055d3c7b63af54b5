"""The fastest clipped sum that is correct and private for a model, found by tests on public records."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from dpfl_lightning.errors import UserError, require, shortened, warn_user
from dpfl_lightning.privacy.clipping.fast import FastClippedSum
from dpfl_lightning.privacy.clipping.fixed_draws import FixedDraws, generators_kept
from dpfl_lightning.privacy.clipping.gradient_sums import ChunkGradients, Totals
from dpfl_lightning.privacy.clipping.inputs import Inputs as Records
from dpfl_lightning.privacy.clipping.inputs import take
from dpfl_lightning.privacy.clipping.kernels import kernel
from dpfl_lightning.privacy.clipping.layer_rules import ByName
from dpfl_lightning.privacy.clipping.operations import SMALL_CROWD, operations_of
from dpfl_lightning.privacy.clipping.passes import PASS_COST, PASS_FLOPS, SIZES, Batch, FixedPasses
from dpfl_lightning.privacy.clipping.reference import (
    ClippedSum,
    ClipRequest,
    LoopClippedSum,
    Params,
    SampleLoss,
    VmapClippedSum,
    cross_entropy_of,
    evaluating,
    owners_of,
)
from dpfl_lightning.privacy.clipping.repeated import Repeated
from dpfl_lightning.privacy.clipping.restored import large_tensors, tensors_restored
from dpfl_lightning.privacy.clipping.sequence_layers import tapped_forward
from dpfl_lightning.privacy.clipping.state import contents, names_of_changes
from dpfl_lightning.privacy.clipping.structure import beside_records, code_of_users, leaves_vmap
from dpfl_lightning.privacy.clipping.taps import OtherOperators, Script, TappedSum
from dpfl_lightning.privacy.clipping.trial_records import (
    FEW_KINDS,
    KINDS,
    MASKS,
    RANDOM_KINDS,
    Reference,
    TrialRecords,
    moved_parameters,
    passes_of,
)
from dpfl_lightning.privacy.clipping.walk import Key
from dpfl_lightning.privacy.clipping.watched import LeftVmap, Watch
from dpfl_lightning.runtime.devices import products_vary
from dpfl_lightning.runtime.threads import one_thread_an_operator

_CPU_NUMBERS = 4 << 20  # numbers in the widest layer's inputs of a pass: more do not fit the caches
_COPIES = 32  # of a public record that show whether code decides by random numbers
_TURNS = 3  # of public records of all kinds that show what code reads
_OTHERS = 4  # one of so many records may differ from the most frequent script; how many do is private
_MOST_SCRIPTS = 4  # ways through a model that records take together
_MOST_BY_VMAP = 1 << 19  # parameters without a rule: of more the loop is as fast, and of these up to 8 times slower

PassedSum = FastClippedSum | TappedSum | VmapClippedSum
Kind = Callable[[nn.Module, SampleLoss, int], PassedSum]  # the last argument is the size of passes


class CheckedSum:
    """The `ClippedSum` of a run: by rules or `vmap` in passes of a size that passed on this machine, else by the loop.

    `kind` None is the loop. An operator of the CPU uses one thread: the share of a second one would end in a pass.
    """

    def __init__(self, net: nn.Module, sample_loss: SampleLoss, passes: FixedPasses, kind: Kind | None) -> None:
        self.net, self.passes, self.kind = net, passes, kind
        self._sample_loss = sample_loss
        self._loop = LoopClippedSum(net, sample_loss)
        self._sizes: dict[tuple[float | None, bool], int] = {}  # by the expected number of records, and if wide
        self._checked: dict[tuple[int, bool], PassedSum] = {}
        self._watch: Watch | None = None  # of the last check of a size
        self._repeated = Repeated(functools.partial(_still, net, draws=True))
        self._graphs: dict[int, ClippedSum] = {}  # by the size of passes, on a GPU

    @property
    def by_rules(self) -> bool:
        """Whether rules of layers are used, not `vmap` or the loop."""
        return isinstance(self.choose(), FastClippedSum)

    def choose(self, expected: float | None = None, wide: bool = False) -> PassedSum | LoopClippedSum:
        """Return what computes the sums of batches of so many records; the first call checks the size of passes.

        It is `wide` for weights with which code of a user calls other operators than in the check.
        """
        if self.kind is None or (wide and products_vary()):
            return self._loop
        size = self._size(expected, wide)
        if size == 1:
            return self._loop
        if (size, wide) not in self._checked:
            used = self._checked[size, wide] = self.kind(self.net, self._sample_loss, size)
            if isinstance(used, TappedSum):
                used.known = None if wide else used.known
                few = None if expected is None else max(1.0, expected / _OTHERS)
                used.size_of_few = self._size(few, wide) if len(used.scripts) > 1 else size
        return self._checked[size, wide]

    def _size(self, expected: float | None, wide: bool) -> int:
        assert self.kind is not None
        if (expected, wide) not in self._sizes:
            evidence = functools.partial(self._evidence, moved_parameters(self.net))
            tapped = isinstance(self.kind(self.net, self._sample_loss, 1), TappedSum)
            of_any = wide if tapped else None
            self._sizes[expected, wide] = self.passes.size(self.kind, evidence, expected, of_any)
        return self._sizes[expected, wide]

    def __call__(self, params: Params, x: Records, y: Tensor, request: ClipRequest) -> tuple[Tensor, Tensor]:
        with one_thread_an_operator():
            used = self.choose(request.expected)
            if isinstance(used, FastClippedSum) and y.is_cuda and not self.passes.draws:
                return self._graphed(used)(params, x, y, request)
            if isinstance(used, FastClippedSum):  # its layers keep nothing
                return used(params, x, y, request)
            try:
                found = self._sum_of(params, x, y, request)
                if request.released:
                    size = 1 if isinstance(used, LoopClippedSum) else used.size
                    self._repeated.check(functools.partial(self._sum_of, params), x, y, request, size)
                return found
            except UserError:
                raise
            except Exception as error:  # a user's code may raise anything, with the weights of a server or for a record
                way = "for each record alone" if isinstance(used, LoopClippedSum) else "under vmap"
                raise UserError(
                    f"`model` must run {way} with all weights that a server may send, got {type(error).__name__}: "
                    f"{_first_line(error)}. Nothing is released. Look for code that decides by weights."
                ) from error

    def _sum_of(self, params: Params, x: Records, y: Tensor, request: ClipRequest) -> tuple[Tensor, Tensor]:
        try:
            return self.choose(request.expected)(params, x, y, request)
        except OtherOperators:
            return self.choose(request.expected, wide=True)(params, x, y, request)

    def _graphed(self, used: FastClippedSum) -> ClippedSum:
        graphs = kernel("graphs")
        if graphs is None:
            return used
        return self._graphs.setdefault(used.size, graphs.GraphedSum(used, self.passes.examples))

    def _evidence(self, params: Params, x: Records, y: Tensor, count: int) -> list[Tensor]:
        assert self.kind is not None
        with _still(self.net, self.passes.draws), tensors_restored(self.net), evaluating(*dropout_layers(self.net)):
            used = self.kind(self.net, self._sample_loss, len(y))
            if not isinstance(used, FastClippedSum):
                used.watch.follow(self._watch)
                self._watch = used.watch
            norms, *sums = used.evidence(params, x, y, count)
        finite = norms.isfinite()  # others contribute nothing
        return [norms.where(finite, math.inf), *(one.where(finite, 0) for one in sums)]

    def copy_for(self, net: nn.Module, sample_loss: SampleLoss) -> CheckedSum:
        copied = CheckedSum(net, sample_loss, self.passes, self.kind)
        copied._sizes = self._sizes
        return copied

    def enter(self, x: Records) -> Records:
        return self.passes.enter(x)


def clipped_sum_for(
    net: nn.Module,
    sample_loss: SampleLoss | None,
    example_x: Records,
    example_y: Tensor,
) -> tuple[CheckedSum, str]:
    """Return the fastest clipped sum that is correct for this model, and why: "fast: ...", "vmap: ..." or "loop: ...".

    Rules of layers, or `vmap`, have to agree with the loop on random, constant, padded and extreme records, to 1e-8
    relative in float64 (1e-4 in float32 without float64), without random numbers. No record is read but the first of
    the examples `[B, ...]`, B >= 0, which has to be public: it is the padding. Raises UserError if a pass changes
    parameters, or numbers that the model keeps.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> clipped_sum_for(net, None, torch.empty(0, 2, 2), torch.empty(0, dtype=torch.long))[1]
    'fast: exact rules for all layers'
    """
    users_code, sample_loss = code_of_users(net, sample_loss), sample_loss or cross_entropy_of(net)
    with _drawing_nothing(net):
        passes, trials = passes_of(net, sample_loss, example_x, example_y)
        users_code = users_code or beside_records(net, sample_loss, moved_parameters(net), passes.examples)
        passes.any_operator = bool(users_code)
        kind, reason = _kind_of(net, sample_loss, trials, passes, users_code)
        clipped_sum = CheckedSum(net, sample_loss, passes, kind)
        if reason.startswith("fast") and isinstance(clipped_sum.choose(), LoopClippedSum):
            clipped_sum = _vmap_or_loop(net, sample_loss, passes)
            reason = "vmap: on this machine the bits of a gradient by rules depend on the other records of a batch"
        if reason[:4] != "loop" and isinstance(clipped_sum.choose(), LoopClippedSum):
            reason = "loop: on this machine the bits of a gradient depend on the other records of a batch"
    if refused := _refused_draws(clipped_sum):
        clipped_sum, reason = CheckedSum(net, sample_loss, passes, None), f"loop: {refused}"
    _require_own_places(net, sample_loss, passes)
    return clipped_sum, reason


def vmap_or_loop(net: nn.Module, sample_loss: SampleLoss, example_x: Records, example_y: Tensor) -> CheckedSum:
    """Return the reference of a run: `VmapClippedSum`, or the loop where `vmap` cannot run the model."""
    with _drawing_nothing(net):
        passes, _ = passes_of(net, sample_loss, example_x, example_y)
        passes.any_operator = bool(code_of_users(net, sample_loss))
        loop = CheckedSum(net, sample_loss, passes, None)
        changed = _changed_in_a_pass(net, sample_loss, passes)
        clipped_sum = loop if changed else _vmap_or_loop(net, sample_loss, passes)
    if _refused_draws(clipped_sum):
        clipped_sum = loop
    _require_own_places(net, sample_loss, passes)
    return clipped_sum


def _refused_draws(clipped_sum: CheckedSum) -> str:
    """Return why `vmap` cannot run with the random numbers of training, which no other check draws; or ""."""
    if clipped_sum.kind is None:
        return ""
    net, (x, y) = clipped_sum.net, take(clipped_sum.passes.examples, [0])
    used = clipped_sum.kind(net, clipped_sum._sample_loss, SIZES[0])
    if isinstance(used, FastClippedSum):
        return ""
    if isinstance(used, TappedSum):
        used.known = None  # with its draws it may call other operators, in wide passes
    try:
        with generators_kept(net), tensors_restored(net):
            used(moved_parameters(net), x, y, ClipRequest(1.0))
            if isinstance(used, TappedSum) and any(used.scripts):
                copies = take(used.public, [0] * _COPIES)
                if used.decides_by_draws(moved_parameters(net), *copies):
                    return "code decides by random numbers"
    except Exception as error:  # such as draws for what no record has a part in
        return _first_line(error)
    return ""


def _vmap_or_loop(net: nn.Module, sample_loss: SampleLoss, passes: FixedPasses) -> CheckedSum:
    params, kind = moved_parameters(net), None
    with suppress(Exception):  # a user's forward pass may raise anything under `vmap`
        if not leaves_vmap(net, sample_loss) and sum(p.numel() for p in params.values()) <= _MOST_BY_VMAP:
            x, y = take(passes.examples, [0, *FEW_KINDS])
            VmapClippedSum(sample_loss, len(y))(params, x, y, ClipRequest(1.0))
            kind = functools.partial(_by_vmap, passes.padding)
    return CheckedSum(net, sample_loss, passes, kind)


@contextmanager
def _drawing_nothing(net: nn.Module) -> Iterator[None]:
    """Switch dropout off, and restore the generators of random numbers afterwards."""
    with generators_kept(net), evaluating(*dropout_layers(net)):
        yield


def _by_vmap(padding: Batch, net: nn.Module, sample_loss: SampleLoss, size: int) -> VmapClippedSum:
    return VmapClippedSum(sample_loss, size, padding, owners_of(net, sample_loss))


def _by_taps(
    padding: Batch,
    scripts: Sequence[Script],
    public: Batch,
    known: set[tuple[Hashable, ...]],
    own_constants: bool,
    net: nn.Module,
    sample_loss: SampleLoss,
    size: int,
) -> TappedSum:
    return TappedSum(net, sample_loss, size, padding, scripts, public, known, own_constants)


def _kind_of(
    net: nn.Module, sample_loss: SampleLoss, trials: TrialRecords, passes: FixedPasses, users_code: str
) -> tuple[Kind | None, str]:
    """Return how gradients are computed, and why: the first of rules and `vmap` that gives those of the loop.

    There are no rules for `users_code`, which gets single records.
    """
    kinds = FEW_KINDS
    if users_code and _reads_numbers(net, sample_loss, passes):
        kinds = MASKS if _is_large(passes) else [*range(KINDS)]
    of_dtype = functools.partial(Reference, net, sample_loss, trials, kinds)
    in_own_dtype = of_dtype(None) if _is_large(passes) else None
    if changed := _changed_in_a_pass(net, sample_loss, passes, in_own_dtype):
        return None, f"loop: `{changed}` changes in every pass"
    with _still(net, passes.draws):
        try:  # in float64, rounding cannot be mistaken for an error or push an activation across a kink
            reference = in_own_dtype or of_dtype(torch.float64)
            reference.row(0)
        except Exception:  # a device or loss without float64; any other error is raised again
            reference = of_dtype(torch.float32)
        kind, cause = None, users_code
        if not cause:
            kind, cause = _by_rules_if_right(reference, passes)
        if kind is not None:
            return kind, cause
        by_vmap, stopped = _by_vmap_if_right(reference, passes)
    return by_vmap, f"vmap: {cause}" if by_vmap is not None else f"loop: {cause}, and under vmap {stopped}"


def _reads_numbers(net: nn.Module, sample_loss: SampleLoss, passes: FixedPasses) -> bool:
    """Return whether code reads numbers of a public record, or cannot run under `vmap`."""
    try:
        with tensors_restored(net), _still(net, passes.draws):
            return bool(TappedSum(net, sample_loss, 1).script_of(moved_parameters(net), *take(passes.examples, [0])))
    except Exception:  # a user's code may raise anything
        return True


def _by_vmap_if_right(
    reference: Reference, passes: FixedPasses, own_constants: bool = False
) -> tuple[Kind | None, str]:
    """Return the sum by `vmap`, with taps if the model lets them be, if it is right; otherwise None, and what it does.

    It is no way for a model that reads other numbers of most public records than those of a few others.
    """
    net, (params, x, y) = reference.net, reference.example
    if operator := leaves_vmap(net, reference.sample_loss):
        return None, f"`{operator}` sees all records"
    sum_of = functools.partial(TappedSum, net, own_constants=own_constants)
    try:
        scripts, rows, _ = _scripts(sum_of(reference.loss, 1), params, x, y)
        tapped = sum_of(reference.loss, len(y), None, scripts, take((x, y), rows))
        if wrong := _wrong_by_taps(reference, tapped):
            return None, wrong
        public = take(passes.examples, [*range(1, 1 + KINDS * (1 if _is_large(passes) else _TURNS))])
        found, rows, texts = _scripts(sum_of(reference.sample_loss, 1), moved_parameters(net), *public)
    except LeftVmap as error:
        return None, f"{error}"
    except Exception as error:  # a user's forward pass may raise anything, such as where it writes into a constant
        found_later, later = (None, "") if own_constants else _by_vmap_if_right(reference, passes, own_constants=True)
        return found_later, later or f"raises {type(error).__name__}: {shortened(_first_line(error), 100)}"
    random = [text for row, text in texts.items() if (row + 1) % KINDS < RANDOM_KINDS]
    if 2 * sum(text in {texts[row] for row in rows} for text in random) < len(random):
        return None, "it reads other numbers of most records"
    if not _is_large(passes) and y.device.type == "cpu":
        passes.most = min(passes.most, _CPU_NUMBERS // tapped.widest)
        passes.cost = _cost_of_a_pass(reference)
    if not (tapped.tapped or any(found) or own_constants):
        if passes.any_operator and products_vary():
            return None, "bits of products vary: import dpfl_lightning before the first product of matrices"
        return functools.partial(_by_vmap, passes.padding), ""
    known = set[tuple[Hashable, ...]]()
    return functools.partial(_by_taps, passes.padding, found, take(public, rows), known, own_constants), ""


def _wrong_by_taps(reference: Reference, tapped: TappedSum) -> str:
    """Return what is wrong with gradients by taps, in words; "" if nothing is."""
    params, x, y = reference.example
    for number in range(len(tapped.scripts)):
        one_x, one_y = take((x, y), [0])
        tapped.record_gradients(params, one_x, one_y, 1, number)
        if sum(params[name].numel() for name in tapped.direct) > _MOST_BY_VMAP:
            return "too many parameters have no rule"
        grads, differ = tapped.record_gradients(params, x, y, len(y), number)
        norms = {order: _norms(grads, order) for order in (2, 1)}
        wrong = reference.without(differ).wrong_parameter(_in_turn(grads, params, len(y)), norms)
        if wrong is not None:
            return f"the gradient of `{wrong}` is another one"
    return ""


def _scripts(
    tapped: TappedSum, params: Params, x: Records, y: Tensor
) -> tuple[list[Script], list[int], dict[int, str]]:
    """Return the most frequent scripts of public records, records that have them, and those of all records in words."""
    scripts: dict[int, Script] = {}
    for row in range(len(y)):
        with nullcontext() if row == 0 else suppress(Exception):  # for an unusual record code may raise anything
            scripts[row] = tapped.script_of(params, *take((x, y), [row]))
            if not scripts[row]:  # all records are alike
                return [()], [row], {}
    texts = {row: repr([(one.place, one.value) for one in script]) for row, script in scripts.items()}
    first = {text: row for row, text in reversed(texts.items())}
    rows = [first[text] for text, _ in Counter(texts.values()).most_common(_MOST_SCRIPTS)]
    return [scripts[row] for row in rows], rows, texts


def _by_rules_if_right(reference: Reference, passes: FixedPasses) -> tuple[Kind | None, str]:
    """Return the sum by rules if it is right, and how it is computed; otherwise None, and what is wrong."""
    net = reference.net

    def by_rules(reference: Reference) -> tuple[FastClippedSum, str | None]:
        params, x, y = reference.example
        fast = FastClippedSum(net, reference.loss, len(y))
        grads = fast.record_gradients(params, take(x, [*range(len(y))]), y, len(y))
        norms = {order: _norms(grads, order) for order in (2, 1)}
        return fast, reference.wrong_parameter(_in_turn(grads, params, len(y)), norms)

    try:
        fast, wrong_parameter = by_rules(reference)
        if wrong_parameter is not None and _is_large(passes):  # rounding, perhaps
            wrong_parameter = by_rules(reference.exact)[1]
    except Exception as error:  # of a layer that a rule does not cover, or that a loss uses otherwise
        return None, _first_line(error)
    if wrong_parameter is not None:
        return None, f"the gradient of `{wrong_parameter}` differs from what the layers' rules give"
    params, x, y = reference.example
    if y.device.type == "cpu":
        if not _is_large(passes):
            passes.most = min(passes.most, _CPU_NUMBERS // fast.widest_input(params, x, y))
            passes.cost = _cost_of_a_pass(reference)
        fast.sparse = frozenset(fast.sparse_layers(params, x, y))
    passes.enter = fast.enter
    return functools.partial(_by_rules, passes.padding, fast), "fast: exact rules for all layers"


def _cost_of_a_pass(reference: Reference) -> float:
    """Return the fixed cost of a pass, in records."""
    params, x, y = reference.example
    work = 3 * operations_of(lambda: reference.loss(params, *take((x, y), [0])))
    return min(PASS_COST, PASS_FLOPS / max(work, 1))


def _norms(grads: ByName, order: int) -> Tensor:
    """Return the norms of gradients, `[B]`, of which those of one parameter at a time take a form that has norms."""
    return torch.stack([form.measurable(order).norms(order) for form in grads.values()]).norm(order, dim=0)


def _in_turn(grads: ByName, params: Params, records: int) -> Iterator[Tensor]:
    """Yield the gradient of each record, `[1, P]`, in the same memory."""
    zeros = ClipRequest(math.inf).zeros(params)
    one_of = torch.eye(records, dtype=zeros.dtype, device=zeros.device)
    for row in range(records):
        totals = Totals(params, zeros.zero_())
        totals.add(ChunkGradients(grads, order=2), one_of[row], None)
        yield totals.result()


def _first_line(error: Exception) -> str:
    return re.split(r"[.\n] ", f"{error}".strip())[0].split("\n")[0] or type(error).__name__


def _by_rules(
    padding: Batch, found: FastClippedSum, net: nn.Module, sample_loss: SampleLoss, size: int
) -> FastClippedSum:
    clipped_sum = found.copy_for(net, sample_loss)
    clipped_sum.size, clipped_sum.padding = size, padding
    return clipped_sum


def _changed_in_a_pass(
    net: nn.Module, sample_loss: SampleLoss, passes: FixedPasses, reference: Reference | None = None
) -> str:
    """Return the name of a tensor that every pass changes; empty if there is none. Notes whether a pass draws.

    Of a large model the first pass has one record, and the second one is that of the `reference`. Raises UserError if
    a pass changes parameters or numbers that the model keeps, and what it raises in the loop.
    """
    params = moved_parameters(net) if reference is None else reference.example[0]
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    with torch.enable_grad(), tensors_restored(net):  # UserError if it leaves others in the places of parameters
        _require_one_backward_pass(sample_loss(leaves, *take(passes.examples, [0])))
    device, large = passes.examples[1].device, large_tensors(net).values()
    clipped_sum, drawn = LoopClippedSum(net, sample_loss), _generator_state(device)

    def kept_after(rows: list[int]) -> Mapping[Key, object]:
        x, y = take(passes.examples, rows)
        clipped_sum(params, x, y, ClipRequest(1.0))
        passes.draws |= not torch.equal(drawn, _generator_state(device))
        return contents(net, large)

    with one_thread_an_operator():
        rows = [0, 4, 5] if reference is None else [0]
        try:
            before = kept_after(rows)  # the first pass may store what stays
        except UserError:
            raise
        except Exception:  # for an unusual record code may raise anything, and for that of the examples not
            rows = [0] * len(rows)
            before = kept_after(rows)
        if reference is None:
            after = kept_after(rows)
        else:
            with _still(net, passes.draws):
                clipped_sum, after = reference.computed(), contents(net, large)
    others = names_of_changes(before, after)
    advice = "Counters and averages would tell how many records there were."
    require(not others, "model", "leave what it keeps as it is in a pass", ", ".join(others), advice)
    buffers = dict(net.named_buffers())  # an attribute may be computed anew in each pass
    if names := ", ".join(f"`net.{name}`" for name in dict.fromkeys(clipped_sum.restored) if name in buffers):
        warn_user(
            f"what a pass changes is restored after each record: {shortened(names)} keep their first values during "
            "training. A count of steps does not advance, and estimates from weights, such as those of spectral_norm, "
            "do not follow them. Use what keeps no state: weight_norm for spectral_norm, an optimizer with a schedule "
            "for a count"
        )
    return next(iter(clipped_sum.restored), "")


def _require_one_backward_pass(losses: Tensor) -> None:
    """Raise UserError if a part of a model has a backward pass of its own, whose gradients no one would ask for."""
    advice = "Its gradients would be 0. Set use_reentrant=False; in transformers, of gradient_checkpointing_kwargs."
    got, must = "torch.utils.checkpoint with use_reentrant=True", "be differentiated as a whole"
    waiting, seen = [losses.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [one for one, _ in node.next_functions]
        require(node.name() != "CheckpointFunctionBackward", "model", must, got, advice)


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _still(net: nn.Module, draws: bool) -> Iterator[None]:
    """Within it a model that draws random numbers gets the same for each record, and generators stay as they are."""
    if not draws:
        yield
        return
    with generators_kept(net), FixedDraws():
        yield


def _require_own_places(net: nn.Module, sample_loss: SampleLoss, passes: FixedPasses) -> None:
    """Raise UserError if the model reads parameters elsewhere than in its modules, such as in a list or a closure.

    There they would stay what they are at the start. They get other signs meanwhile, which a gradient would show.
    """
    params, clipped_sum = moved_parameters(net), LoopClippedSum(net, sample_loss)
    own = [p for p in net.parameters() if p.requires_grad]

    def gradients() -> list[Tensor]:
        x, y = take(passes.examples, [1])
        with _drawing_nothing(net), _still(net, passes.draws), one_thread_an_operator():
            return next(clipped_sum.each(params, x, y, ClipRequest(math.inf)))

    usual, before = gradients(), [p.detach().clone() for p in own]
    try:
        with torch.no_grad():
            for p in own:
                p.data.neg_().sub_(1.0)
        changed = gradients()
    finally:
        for p, values in zip(own, before, strict=True):
            p.data.copy_(values)
    if not _same_numbers(usual, changed):
        if not _same_numbers(usual, gradients()):
            raise _not_repeatable()
        raise UserError(
            "`model` must read its parameters where its modules hold them, got a gradient that depends on others. Look "
            "for parameters in lists, dictionaries, closures or default arguments: use nn.ParameterList, or methods."
        )


def _same_numbers(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether gradients are equal where they are numbers; kernels of a GPU may add in any order."""
    for one, other in zip(ones, others, strict=True):
        same = ((one == other) | (one.isnan() & other.isnan())).all() if one.device.type == "cpu" else None
        if not (torch.allclose(one, other, rtol=1e-3, atol=1e-6, equal_nan=True) if same is None else bool(same)):
            return False
    return True


def _not_repeatable() -> UserError:
    return UserError(
        "`model` must give a record the same gradient in every pass, got another one later. Look for counters "
        "and averages that the model keeps, and for random numbers that are not drawn by torch."
    )


def dropout_layers(net: nn.Module) -> list[nn.Module]:
    """Return the layers whose dropout is switched off, which is quicker than constants for its draws."""
    return [m for m in net.modules() if isinstance(m, nn.modules.dropout._DropoutNd) or tapped_forward(m)]


def _is_large(passes: FixedPasses) -> bool:
    return passes.crowd < SMALL_CROWD
