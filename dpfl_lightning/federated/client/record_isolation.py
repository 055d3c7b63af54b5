"""Whether a module sees one record at a time and keeps nothing of records, tried on random records before a run."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.draws import fixed_rng, generator_states
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.privacy.clipping.checked import dropout_layers
from dpfl_lightning.privacy.clipping.inputs import Inputs, floating_to, take
from dpfl_lightning.privacy.clipping.isolation import (
    CROWD,
    HOSTILE,
    PAIRS,
    SMALL_CROWD,
    beside,
    in_companies,
    in_company,
    of_copies,
)
from dpfl_lightning.privacy.clipping.reference import evaluating
from dpfl_lightning.privacy.clipping.state import contents, large_tensors, tensors_restored

_DRAWS, _DRAWS_OF_A_LARGE_MODEL = 16, 4  # of random numbers, for which losses are compared


@torch.no_grad()
def check_alone(module: ClientModule, x: Inputs, y: Tensor) -> None:
    """Refuse a model that keeps something of records or in which one moves another's loss: clipping bounds neither."""
    modes: list[Callable[[nn.Module], AbstractContextManager[object]]] = [evaluating]
    modes += [nullcontext] if any(part.training for part in module.net.modules()) else []
    if kept := _kept(module, modes, x, y):
        raise UserError(
            f"`model` must not remember records, got `{kept[0]}`, which a pass fills with something of them or of "
            "their number. Remove it: such a state would leave the client without noise. Draw random numbers by torch, "
            "without a generator of your own."
        )
    for mode in modes:
        with mode(module.net):
            isolated = (module.large and _same_bits(module, x, y)) or _isolated(copy.deepcopy(module), x, y)
        if not isolated:
            with mode(module.net):
                name = _mixing_layer(module, x, y)
            raise UserError(
                f"`{name}` must see one record at a time, got losses that change with the other records of a batch. "
                "Look for means, sums and cumulative sums over the first dimension, decisions by .item() of the whole "
                "batch and for layers that take records elsewhere (batch_first=False)."
            )


def _mixing_layer(module: ClientModule, x: Inputs, y: Tensor) -> str:
    """Return the first layer whose output for a record changes with others and whose input does not, or "model"."""

    def calls(some_x: Inputs, some_y: Tensor, places: Tensor) -> list[tuple[nn.Module, list[Tensor], list[Tensor]]]:
        found = list[tuple[nn.Module, list[Tensor], list[Tensor]]]()

        def rows(values: object) -> list[Tensor]:
            tensors = (one for one in tree_leaves(values) if isinstance(one, Tensor) and one.dim())
            return [one.detach()[places].clone() for one in tensors if len(one) == len(some_y)]

        def note(part: nn.Module, args: object, kwargs: object, output: object) -> None:
            found.append((part, rows((args, kwargs)), rows(output)))

        handles = [part.register_forward_hook(note, with_kwargs=True) for part in module.net.modules()]
        try:
            _losses(module, some_x, some_y)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
        return len(ours) == len(theirs) and all(
            torch.allclose(a, b, 1e-3, 1e-3, equal_nan=True) for a, b in zip(ours, theirs, strict=True)
        )

    names = {part: f"net.{name}" for name, part in module.net.named_modules() if name}
    for multiples in (PAIRS[0], HOSTILE):
        with suppress(Exception):  # a user's code may raise anything
            some_x, some_y, places = in_company(x, y, multiples, SMALL_CROWD)
            both = zip(calls(some_x, some_y, places), calls(*of_copies(x, y, SMALL_CROWD), places), strict=True)
            for (part, inputs, output), (_, expected_inputs, expected) in both:
                known = part in names and inputs and same(inputs, expected_inputs)
                if known and not same(output, expected):
                    return names[part]
    return "model"


def _kept(
    module: ClientModule, modes: Sequence[Callable[[nn.Module], AbstractContextManager[object]]], x: Inputs, y: Tensor
) -> list[str]:
    """Names of what differs after passes of different records, or of fewer, in one of the modes.

    What changes in the same way whatever the records are, such as a count of passes, is none of them.
    Of a large model a copy has one pass in each mode, and large tensors are shared.
    """
    shared = large_tensors(module)
    left, gradients, bits = list[dict[tuple[int, str], object]](), [one.grad for one in shared.values()], _bits(shared)
    of_one = [[row] * (1 if module.large else len(y)) for row in range(len(y))]
    for rows in (*of_one, [*range(len(y))], [0])[: -1 if module.large else None]:
        copied, index = copy.deepcopy(module, {id(one): one for one in shared.values()}), y.new_tensor(rows).long()
        kept = dict[tuple[int, str], object]()
        for number, mode in enumerate(modes):
            with mode(copied.net), fixed_rng(module.device):
                backward = not module.large or any(part.training for part in copied.net.modules())
                if not module.large or not backward:
                    copied.sample_loss(copied.named_trainable, take(x, index), y[index])
                with suppress(RuntimeError), warnings.catch_warnings(), torch.enable_grad():
                    warnings.simplefilter("ignore")  # hooks of the backward pass may keep something, too
                    if backward:
                        copied.sample_loss(copied.named_trainable, take(x, index), y[index]).sum().backward()
            kept |= {(number, name): one for name, one in contents(copied, shared.values()).items()}
        left.append(kept)
    for one, gradient in zip(shared.values(), gradients, strict=True):
        one.grad = gradient
    changed = [name for name, one in _bits(shared).items() if one != bits[name]]
    differing = (
        key for key in dict.fromkeys(key for one in left for key in one) if len({one.get(key) for one in left}) > 1
    )
    return changed + [name for _, name in differing]


def _bits(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return numbers that tell whether tensors were changed, also by what leaves no version."""
    found = {}
    for name, one in tensors.items():
        octets = one.reshape(-1).view(torch.uint8)
        whole = len(octets) // 8 * 8
        found[name] = int(octets[:whole].view(torch.int64).sum()) + int(octets[whole:].sum())
    return found


def _losses(module: ClientModule, x: Inputs, y: Tensor, seed: int = 0) -> Tensor:
    with fixed_rng(module.device, seed), tensors_restored(module.net):  # such as a count of passes
        return module.sample_loss(module.named_trainable, tree_map(torch.clone, x), y)


def _same_whatever_is_drawn(module: ClientModule, x: Inputs, y: Tensor, tolerance: float) -> bool:
    """Whether the losses of a model that draws random numbers stay beside other records, for some further draws.

    Layers with dropout are switched off: they draw for each number alone.
    """

    def same(some_x: Inputs, some_y: Tensor, places: Tensor, seed: int) -> bool:
        expected = _losses(module, *of_copies(x, y, len(some_y)), seed)[places]
        return torch.allclose(_losses(module, some_x, some_y, seed)[places], expected, tolerance, tolerance, True)

    with evaluating(*dropout_layers(module.net)):
        return not _draws(module, x, y) or all(
            beside(partial(same, seed=seed), x, y, PAIRS[0], 2 * len(y))
            for seed in range(1, 1 + (_DRAWS_OF_A_LARGE_MODEL if module.large else _DRAWS))
        )


def _draws(module: ClientModule, x: Inputs, y: Tensor) -> bool:
    with fixed_rng(module.device), tensors_restored(module.net):
        before = generator_states(module.device)
        module.sample_loss(module.named_trainable, tree_map(torch.clone, x), y)
        return generator_states(module.device) != before


def _same_bits(module: ClientModule, x: Inputs, y: Tensor) -> bool:
    """Whether no bit of a record's loss changes with the others of a small batch, and it is much the same alone.

    For large models, in their own dtype. One that draws random numbers cannot give a record the same loss alone.
    """
    records = 2 * len(y)
    beside_copies, alone, draws = _losses(module, *of_copies(x, y, records)), list[Tensor](), False
    for row in range(len(y)):
        with fixed_rng(module.device), tensors_restored(module.net):
            before = generator_states(module.device)
            one_x, one_y = take((x, y), [row])
            alone.append(module.sample_loss(module.named_trainable, one_x, one_y))
            draws |= generator_states(module.device) != before

    def like_copies(some_x: Inputs, some_y: Tensor, places: Tensor) -> bool:
        actual, expected = _losses(module, some_x, some_y)[places], beside_copies[places]
        like_alone = draws or torch.allclose(expected, torch.cat(alone), 1e-3, 1e-3, equal_nan=True)
        return like_alone and torch.allclose(actual, expected, 0.0, 0.0, equal_nan=True)

    return all(in_companies(like_copies, x, y, records)) and (not draws or _same_whatever_is_drawn(module, x, y, 0.0))


def _isolated(module: ClientModule, x: Inputs, y: Tensor) -> bool:
    """Whether the loss of each record is the same alone, among many others (few for large models) and broken ones.

    Losses are compared in float64 where model and device have it. A model that draws random numbers cannot give a
    record the same loss alone: it is compared in two batches of one size, which draw the same numbers.
    """

    def same(x: Inputs, tolerance: float) -> bool:
        draws = _draws(module, x, y)
        alone = torch.cat([_losses(module, take(x, slice(row, row + 1)), y[row : row + 1]) for row in range(len(y))])

        def like_alone(some_x: Inputs, some_y: Tensor, places: Tensor) -> bool:
            expected = _losses(module, *of_copies(x, y, len(some_y)))[places] if draws else alone
            actual = _losses(module, some_x, some_y)[places]
            return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)

        return all(in_companies(like_alone, x, y, SMALL_CROWD if module.large else CROWD)) and (
            not draws or _same_whatever_is_drawn(module, x, y, tolerance)
        )

    try:
        module.double()
        return same(floating_to(x, torch.float64), 1e-8)
    except (RuntimeError, TypeError):
        module.float()
        return same(x, 1e-3)
