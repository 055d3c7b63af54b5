"""Whether the losses of a batch are those of its records alone, tried on random records before a run.

Gradients are those of single records, whatever a model computes of a batch. A model that compares the records of a
batch would train without what it compares.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.draws import fixed_rng, generator_states
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.privacy.clipping.checked import dropout_layers
from dpfl_lightning.privacy.clipping.fixed_draws import FixedDraws, begin_records
from dpfl_lightning.privacy.clipping.inputs import Inputs, take
from dpfl_lightning.privacy.clipping.reference import evaluating
from dpfl_lightning.privacy.clipping.restored import tensors_restored
from dpfl_lightning.runtime.dispatch import Rounding

Rows = Callable[[Inputs, Tensor], Tensor]  # of records `[B, *X]`, `[B, ...]`: what each of them gets, `[B, ...]`
_FACTOR = 1e3  # of the numbers of a second batch, by which code may decide
_SEEDS = 3
_WITHIN = 1e-3  # relative and absolute: losses that are equal
_ROUNDINGS = 4  # rounding errors of results in bfloat16 or float16, of which more are allowed


@torch.no_grad()
def check_batch_losses(module: ClientModule, x: Inputs, y: Tensor) -> None:
    """Raise UserError if losses, or outputs in evaluation mode, change with the other records of a batch.

    It names the first layer that mixes them. Nothing is checked if the module has `per_record`.
    """
    if module.per_record:
        return
    modes: list[tuple[Callable[[nn.Module], AbstractContextManager[object]], Rows]] = [
        (evaluating, lambda x, y: module.output(module.named_trainable, x)),
        (evaluating, lambda x, y: module.sample_loss(module.named_trainable, x, y)),
    ]
    if any(part.training for part in module.net.modules()):
        modes.append((nullcontext, modes[-1][1]))
    for mode, rows_of in modes:
        with mode(module.net), evaluating(*dropout_layers(module.net)):
            usual, changed = _batches(x, y)
            separate = _separate(module, rows_of, *usual)
            with suppress(Exception):  # a user's code may refuse unusual records
                separate = separate and _separate(module, rows_of, *changed)
            if separate:
                continue
            name = _mixing_layer(module, x, y)
            with fixed_rng(module.device), tensors_restored(module.net) as restore:
                module.sample_loss(module.named_trainable, tree_map(torch.clone, x), y)
                restored = restore()
        if restored:
            raise UserError(
                f"`{name}` must give a record the same loss whatever the other records of a batch are, got another one "
                f"by `{', '.join(restored)}`, which a pass changes. Training restores it after each record, so that it "
                "would keep its first values. Compute such statistics from public data before, or leave them out."
            )
        raise UserError(
            f"`{name}` must give a record the same loss whatever the other records of a batch are, got another one. "
            "Training takes the loss of each record alone, so that what compares records, such as a contrastive loss "
            "or MixUp, would train nothing. Look for means and sums over the first dimension, decisions by .item() of "
            "the whole batch, layers with batch_first=False, and random numbers whose count depends on values, as in "
            "torch.randn(int(mask.sum())); or set per_record: true to train so."
        )


def _batches(x: Inputs, y: Tensor) -> list[tuple[Inputs, Tensor]]:
    """Return the records, and the same with every second one, and label, a thousand times as large or turned."""

    def changed(part: Tensor) -> Tensor:
        part = part.clone()
        if part.is_floating_point():
            part[1::2] *= _FACTOR
        elif part.dim() > 1:
            part[1::2] = part[1::2].roll(1, dims=1)
        return part

    return [(x, y), (tree_map(changed, x), changed(y))]


def _separate(module: ClientModule, rows_of: Rows, x: Inputs, y: Tensor) -> bool:
    """Return whether each record gets the same alone, with the same random draws.

    Where a batch draws other numbers than its records, as one noise for weights, batches of one size are compared.
    """

    def rows(x: Inputs, y: Tensor, seed: int = 0) -> Tensor:
        with fixed_rng(module.device, seed), tensors_restored(module.net):
            return rows_of(tree_map(torch.clone, x), y)

    def rows_without_chance(x: Inputs, y: Tensor) -> Tensor:
        with FixedDraws():
            begin_records(len(y))
            return rows(x, y)

    with fixed_rng(module.device), tensors_restored(module.net), Rounding() as rounding:
        before = generator_states(module.device)
        rows_of(*take((x, y), [0]))
        draws = generator_states(module.device) != before
    within = max(_WITHIN, _ROUNDINGS * rounding.largest)
    with suppress(Exception) if draws else nullcontext():  # of draws that only happen to be equal for records
        alone = torch.cat([rows_without_chance(*take((x, y), [row])) for row in range(len(y))])
        if _close(rows_without_chance(x, y), alone, within):
            return True
    if not draws:
        return False
    for seed in range(_SEEDS):
        together = rows(x, y, seed)
        for row in range(len(y)):
            copies_x, copies_y = take((x, y), [row] * len(y))
            if not _close(together[row], rows(copies_x, copies_y, seed)[row], within):
                return False
    return True


def _close(one: Tensor, other: Tensor, within: float = _WITHIN) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=within, atol=within, equal_nan=True)


def _mixing_layer(module: ClientModule, x: Inputs, y: Tensor) -> str:
    """Return the first layer whose output for a record changes with others and whose input does not, or "model"."""
    names = {part: f"net.{name}" for name, part in module.net.named_modules() if name}

    def calls(x: Inputs, y: Tensor) -> list[tuple[nn.Module, list[Tensor], list[Tensor]]]:
        found = list[tuple[nn.Module, list[Tensor], list[Tensor]]]()

        def first(values: object) -> list[Tensor]:
            tensors = (one for one in tree_leaves(values) if isinstance(one, Tensor) and one.dim())
            return [one.detach()[0].clone() for one in tensors if len(one) == len(y)]

        def note(part: nn.Module, args: object, kwargs: object, output: object) -> None:
            found.append((part, first((args, kwargs)), first(output)))

        handles = [part.register_forward_hook(note, with_kwargs=True) for part in module.net.modules()]
        try:
            with fixed_rng(module.device), tensors_restored(module.net):
                module.sample_loss(module.named_trainable, tree_map(torch.clone, x), y)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
        return len(ours) == len(theirs) and all(map(_close, ours, theirs))

    for batch in _batches(x, y):
        with suppress(Exception):  # a user's code may raise anything
            both = zip(calls(*batch), calls(*take(batch, [0] * len(y))), strict=True)
            for (part, inputs, output), (_, copies, expected) in both:
                if part in names and inputs and same(inputs, copies) and not same(output, expected):
                    return names[part]
    return "model"
