"""How a client answers queries: what is computed for each type of query, then bounded, summed and noised."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.query import (
    ChargedQuery,
    FeatureSums,
    LossOfOwnStep,
    LowestLoss,
    MeanLoss,
    NoMechanism,
    Query,
    ScoreCounts,
    SelectModel,
)
from dpfl_lightning.models.features import feature_row, record_features
from dpfl_lightning.models.model import FORWARD_CHUNK
from dpfl_lightning.models.tasks import class_logits
from dpfl_lightning.privacy.accounting.units import RECORD, Unit
from dpfl_lightning.privacy.clipping.convolutions import channels_last
from dpfl_lightning.privacy.clipping.inputs import Block, Inputs, take
from dpfl_lightning.privacy.clipping.passes import FixedPasses
from dpfl_lightning.privacy.clipping.reference import (
    ClipRequest,
    LoopClippedSum,
    Params,
    clip_factors,
    evaluating,
    owners_of,
    summing_dtype,
)
from dpfl_lightning.privacy.clipping.trial_records import moved_parameters
from dpfl_lightning.privacy.clipping.watched import Watch
from dpfl_lightning.privacy.mechanism import ExponentialMechanism, Mechanism
from dpfl_lightning.privacy.noise import RandomGenerator

#: computes from (query, client, module, x, y), where x and y are records and their labels
Computation = Callable[..., Tensor]
_ROWS: dict[type[Query], Computation] = {}
_PLAIN_ANSWERS: dict[type[Query], Computation] = {}


def _register(kind: type[Query], registry: dict[type[Query], Computation], function: Computation) -> Computation:
    registry[kind] = function
    return function


def rows_of(kind: type[Query]) -> Callable[[Computation], Computation]:
    """Register what clients compute for queries of a type whose mechanism adds noise or is exponential.

    The function returns a row of statistics `[b, k]` for each record of `x [b, *X]`, `y [b]`. It is called under
    `torch.func.vmap` with one record at a time (b = 1), so that no row can depend on another record.
    """
    return functools.partial(_register, kind, _ROWS)


def plain_answer_of(kind: type[Query]) -> Callable[[Computation], Computation]:
    """Register the answer `[k]` of clients without a mechanism (`NoMechanism`), from all records `x [n, *X]`, `y [n]`.

    **Privacy** None: the client's epsilon becomes infinite.
    """
    return functools.partial(_register, kind, _PLAIN_ANSWERS)


def is_answerable(kind: type[Query]) -> bool:
    """Whether a function is registered that answers queries of a type."""
    return kind in _ROWS or kind in _PLAIN_ANSWERS


def check_answerable(query: ChargedQuery, unit: Unit = RECORD) -> None:
    """Raise TypeError unless a function is registered for the type of the query itself.

    A subclass of a registered type is refused: its attributes could run other code beside the records. Raises
    UserError for a query that is about records if another `unit` is protected.
    """
    kind, advice = type(query.question), "It sums what it computes of records."
    must = f"be record with the query {kind.__name__}"
    require(not unit.is_group or kind.any_unit, "privacy.unit", must, unit.name, advice)
    for mechanism in query.mechanism_of.values():
        _computation(query, mechanism)


def _computation(query: ChargedQuery, mechanism: object) -> Computation:
    plain, kind = isinstance(mechanism, NoMechanism), type(query.question)
    function = (_PLAIN_ANSWERS if plain else _ROWS).get(kind)
    if function is None:
        register = f"{'plain_answer_of' if plain else 'rows_of'}({kind.__name__})"
        raise TypeError(f"clients cannot answer {kind.__name__}: register a function with `{register}`")
    return function


def answer(
    query: ChargedQuery,
    client: int,
    module: ClientModule,
    x: Inputs,
    y: Tensor,
    generator: RandomGenerator,
    passes: FixedPasses,
) -> Any:
    """The answer of a client from all its records `x [n, *X]`, `y [n]`: the noisy sum `[k]`, the chosen index,
    or a plain answer. ValueError if the registered function does not return one row for each record.

    **Guarantees** One record changes one row only: rows are computed under `vmap`, one record at a time, in passes in
    which their bits do not depend on other records. The norm of a row is at most `clip_norm` for a
    `Mechanism`; scores are in [0, 1] for `ExponentialMechanism`.

    **Privacy** One `event(1)` of the client's mechanism, which the caller has charged.
    """
    mechanism = query.mechanism_of[client]
    if isinstance(mechanism, NoMechanism):
        return _computation(query, mechanism)(query.question, client, module, x, y)
    if isinstance(mechanism, ExponentialMechanism):
        return mechanism.choose(_bounded_sum(query, client, module, x, y, passes, _scores), generator)
    total = _bounded_sum(query, client, module, x, y, passes, lambda rows: _clipped(rows, mechanism))
    return mechanism.privatise(total[None], generator, total.dtype)[0]


@torch.no_grad()
def _bounded_sum(
    query: ChargedQuery,
    client: int,
    module: ClientModule,
    x: Inputs,
    y: Tensor,
    passes: FixedPasses,
    bounded: Callable[[Tensor], Tensor],
) -> Tensor:
    """The sum over all records of their bounded rows, `[k]` float64 on the CPU.

    Without records a public one is computed, which does not count: whether it fails, and k, do not depend on them.
    """
    nobody = len(y) == 0
    x, y = passes.padding if nobody else (x, y)
    compute, kind = _computation(query, query.mechanism_of[client]), type(query.question).__name__

    owners = [*owners_of(module.net, module.sample_loss), compute]
    in_vmap, alone = Watch(owners, under_vmap=True), Watch(owners, under_vmap=False)

    def row(watch: Watch, x: Inputs, y: Tensor) -> Tensor:
        one = take(x, None), y[None]
        watch.enter(*one)
        with watch.calls:
            rows = compute(query.question, client, module, *one)
        if not (isinstance(rows, Tensor) and rows.ndim == 2 and len(rows) == 1 and not rows.is_complex()):
            got = f"shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
            must = "be one row of real numbers for each record, shape (1, k) for one record"
            raise ValueError(f"the rows of {kind} must {must}, got {got}")
        return rows[0].to(summing_dtype(rows))

    of_pass, total = vmap(functools.partial(row, in_vmap), randomness="different"), None

    def in_pass(x: Inputs, y: Tensor) -> Tensor:
        in_vmap.calls.forget()
        rows = of_pass(x, y)
        in_vmap.calls.require_no_error()
        return rows

    def bounded_rows(x: Inputs, y: Tensor) -> Tensor:  # of a whole pass: a GPU adds by the number of rows
        try:
            rows = in_pass(x, y)
        except UserError:
            raise
        except Exception as error:  # a user's code may raise anything under `vmap`, with the models of a server
            must = "run under vmap with all models that a server may send"
            raise UserError(
                f"`model` must {must}, got {type(error).__name__}: {error}. Nothing is released."
            ) from error
        in_vmap.check()
        return bounded(rows)

    def bounded_row(x: Inputs, y: Tensor) -> Tensor:
        found = bounded(row(alone, take(x, 0), y[0])[None])
        alone.check()
        return found

    with evaluating(module.net):
        in_vmap.begin()
        alone.begin()
        evidence = functools.partial(_evidence, module, moved_parameters(module.net), passes, of_pass)
        for rows in passes.rows(kind, bounded_rows, x, y, evidence, bounded_row):
            part = rows.sum(dim=0)
            if total is not None and part.shape != total.shape:
                raise ValueError(f"the rows of {kind} must have one length, got {len(total)} and {len(part)}")
            total = part if total is None else total + part
        in_vmap.end()
    assert total is not None  # for mypy
    return (torch.zeros_like(total) if nobody else total).cpu().double()


def _evidence(
    module: ClientModule,
    params: Params,
    passes: FixedPasses,
    rows_of: Callable[[Inputs, Tensor], Tensor],
    x: Inputs,
    y: Tensor,
    count: int,
) -> list[Tensor]:
    """What tells whether bits of rows, losses and outputs depend on other records, for public records of a pass.

    Rows of a server's models may hide it, as they are bounded: losses and outputs are those of `params`.
    """

    def forward(x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
        one = take(x, None), y[None]
        rows = one[0].rows if isinstance(x, Block) else one[0]
        return module.sample_loss(params, *one)[0], module.output(params, rows).flatten()

    x = passes.enter(x)
    return [part[:count] for part in (rows_of(x, y), *vmap(forward, randomness="different")(x, y))]


def _scores(rows: Tensor) -> Tensor:
    return torch.where(rows.isfinite(), rows, 0.0).clamp(0.0, 1.0)


def _clipped(rows: Tensor, mechanism: Mechanism) -> Tensor:
    norms = torch.linalg.vector_norm(rows, ord=mechanism.clip_order, dim=1, keepdim=True)
    return torch.where(norms.isfinite(), rows, 0.0) * clip_factors(norms, mechanism.clip_norm)


@rows_of(SelectModel)
def _fit_of_models(query: SelectModel, client: int, module: ClientModule, x: Inputs, y: Tensor) -> Tensor:
    return 1 - bounded_losses(module, query.models, x, y, query.loss_bound) / query.loss_bound


@rows_of(MeanLoss)
def _centred_loss(query: MeanLoss, client: int, module: ClientModule, x: Inputs, y: Tensor) -> Tensor:
    model = query.models[query.row_of[client]][None]
    return bounded_losses(module, model, x, y, query.loss_bound) - query.loss_bound / 2


@rows_of(FeatureSums)
def _features_of_class(query: FeatureSums, client: int, module: ClientModule, x: Tensor, y: Tensor) -> Tensor:
    own = feature_row(record_features(module, query.nets, x))
    label = y[:, None] == torch.arange(query.num_classes, device=y.device)
    return (label[:, :, None] * own[:, None, :]).flatten(1)


@rows_of(ScoreCounts)
def _bin_of(query: ScoreCounts, client: int, module: ClientModule, x: Inputs, y: Tensor) -> Tensor:
    if isinstance(x, Block):
        rows = _bin_of(query, client, module, x.rows, y.flatten(0, 1))
        return x.means(rows)
    output = module.output(_parameters(module, query.models[query.row_of[client]], x), x)
    task = module.task or module.infer_task(output, y)
    shares = class_logits(task.as_logits(output), y).flatten(1).softmax(dim=1)
    labels = y.reshape(len(y)).long()
    stated, right = task.stated(shares, labels)
    edges = torch.tensor(query.edges, dtype=stated.dtype, device=stated.device)
    place = right.long() * (len(edges) + 1) + (stated[:, None] >= edges).sum(dim=1)
    return (place[:, None] == torch.arange(query.length, device=place.device)).to(stated.dtype)


@plain_answer_of(LowestLoss)
def _lowest_loss(query: LowestLoss, client: int, module: ClientModule, x: Inputs, y: Tensor) -> Tensor:
    return summed_losses(module, query.models, x, y).argmin()


@plain_answer_of(LossOfOwnStep)
def _loss_of_own_step(query: LossOfOwnStep, client: int, module: ClientModule, x: Inputs, y: Tensor) -> Tensor:
    model, count = query.models[query.row_of[client]], max(len(y), 1)
    clipped = LoopClippedSum(module.net, module.sample_loss)
    sums, _ = clipped(module.unflatten(model), x, y, ClipRequest(query.clip_norm_of[client], query.clip_order))
    moved = model - query.learning_rate_of[client] / count * sums[0].to(model)
    return summed_losses(module, moved[None], x, y) / count


def losses_at(module: ClientModule, models: Tensor, x: Inputs, y: Tensor) -> Tensor:
    """The loss of each record with each of the models `[M, P]`, `[b, M]`."""
    return torch.stack([module.sample_loss(_parameters(module, model, x), x, y) for model in models], dim=1)


def _parameters(module: ClientModule, model: Tensor, x: Inputs) -> dict[str, Tensor]:
    """The parameters of `model` `[P]`, with the weights of convolutions in the memory format in which `x` has entered.

    Under `vmap` a convolution has the memory format of its weight, not of its input. Channels last are ten times as
    fast before max-pooling on a CPU, but not all models support them: `ClippedSum.enter` knows.
    """
    params = module.unflatten(model)
    if not isinstance(x, Tensor) or x.dim() != 4 or x.stride(1) != 1:
        return params
    layers = [name for name, layer in module.net.named_modules() if type(layer) is nn.Conv2d]
    weights = [f"{name}.weight".lstrip(".") for name in layers]
    return params | {name: channels_last(params[name]) for name in weights if name in params}


def bounded_losses(module: ClientModule, models: Tensor, x: Inputs, y: Tensor, bound: float) -> Tensor:
    """`losses_at` clipped to [0, bound], in float64 if the device has it. A loss that is NaN counts as the bound."""
    losses = losses_at(module, models, x, y)
    return losses.to(summing_dtype(losses)).nan_to_num(nan=bound, posinf=bound).clamp(0.0, bound)


def summed_losses(module: ClientModule, models: Tensor, x: Inputs, y: Tensor) -> Tensor:
    """The unbounded sum of each model's loss over all records, `[M]` float64 on the CPU; NaN counts as infinite."""
    totals = models.new_zeros(len(models), dtype=summing_dtype(models))
    with evaluating(module.net):
        for first in range(0, len(y), FORWARD_CHUNK):
            records = slice(first, first + FORWARD_CHUNK)
            losses = losses_at(module, models, take(x, records), y[records])
            totals += losses.nan_to_num(nan=math.inf, posinf=math.inf).sum(dim=0, dtype=totals.dtype)
    return totals.cpu().double()
