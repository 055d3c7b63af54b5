"""Checks before a run that a module fits the records, on random data of their public shape."""

import copy
import math
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map

from dpfl_lightning.config.registry import users_frame
from dpfl_lightning.data import Population
from dpfl_lightning.data.lazy import LazyInputs
from dpfl_lightning.errors import UserError, in_one_line, require, warn_user
from dpfl_lightning.federated.client.batch_losses import check_batch_losses
from dpfl_lightning.federated.client.draws import fixed_rng
from dpfl_lightning.federated.client.dummy_data import dummy_batch, dummy_labels, on_cpu, whole_numbers
from dpfl_lightning.federated.client.evaluation import MOST_NUMBERS, of_records
from dpfl_lightning.federated.client.metrics import (
    METRICS,
    Metrics,
    check_metrics,
    chosen_metrics,
    measures_of,
    metrics_of,
)
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.models import check_net
from dpfl_lightning.models.model import taken_by
from dpfl_lightning.models.tasks import CUSTOM, Classification, Task, described, other_tasks
from dpfl_lightning.privacy.clipping.inputs import Inputs, take
from dpfl_lightning.privacy.clipping.operations import SMALL_CROWD, crowd_of, operations_of
from dpfl_lightning.privacy.clipping.reference import evaluating, scoring
from dpfl_lightning.privacy.clipping.restored import large_tensors, tensors_restored
from dpfl_lightning.privacy.clipping.state import contents, names_of_changes
from dpfl_lightning.privacy.clipping.trial_records import moved_parameters

_RECORDS_OF_METRICS = 32  # random ones, with which metrics are tried
_SLOW_VMAP = "There is a performance drop because we have not yet implemented the batching rule"


@contextmanager
def naming_layers(net: nn.Module) -> Iterator[None]:
    """Turn an error of torch in passes on random records into a UserError that names the layer."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        layers = {module: name for name, module in net.named_modules()}
        frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
        sparse = [module for module in layers if getattr(module, "sparse", False)]  # it fails in the backward pass
        layer = [net, *sparse, *(one for one in frames if isinstance(one, nn.Module) and one in layers)][-1]
        reason = re.split(r"[.\n] ", f"{str(error).strip()}\n ")[0] or type(error).__name__
        raise UserError(
            "`model` must run forward and backward for one record, got an error of "
            f"`{layers[layer] or 'net'}` ({type(layer).__name__}): {reason}. Replace this layer, or change its options."
        ) from error


def check_fits(module: ClientModule, population: Population) -> None:
    """Check that a module can take the population's records one by one, before a run begins.

    Raises UserError if its task is unknown or does not fit, its `sample_loss` raises, does not give one loss for each
    record, or gives a record another loss among other records; if it keeps something of an evaluation; and if it cannot
    take the smallest and the largest whole numbers of the records, such as tokens beyond an embedding.

    From here on torch does not warn that `vmap` is slow for a layer, which no user can change.
    """
    check_net(module.net)  # again: the modes of its layers may have changed
    if not any(one[1] is not None and one[1].pattern == _SLOW_VMAP for one in warnings.filters):
        warnings.filterwarnings("ignore", _SLOW_VMAP, UserWarning)
    module.check_parameters()
    x, y = dummy_batch(population, records=2, device=module.device)
    _check_first_pass(module, take(x, slice(1)))
    with suppress(Exception), torch.no_grad(), fixed_rng(module.device), tensors_restored(module.net):
        operations = operations_of(lambda: module.output(module.named_trainable, take(x, slice(1))))
        module.large = crowd_of(operations, sum(one.numel() for one in module.parameters())) < SMALL_CROWD
    records = 2 if module.large else min(max(8, population.num_classes), 32)  # most classes
    with tensors_restored(module.net):
        module.prepare(*dummy_batch(population, records, module.device), population.num_classes, population.form)
    outputs = f"{population.num_classes} output{'s' * (population.num_classes != 1)}"
    must = f"take records of shape {population.input_shape} and give {outputs} for each"
    advice = "Choose another model or shape of data, or give further arguments of `forward` values by default."
    with _users_errors(must, advice), torch.no_grad():
        with fixed_rng(module.device):
            output = module.output(module.named_trainable, x)
        task = module.infer_task(output, y, population.num_classes)
        inferred = task.name
        if task.shifted is not None and module.named_task is None and _shifts_labels(module, x, y):
            task = task.shifted
        if isinstance(task, Classification):
            if _gives_probabilities(module, task, population):
                task = replace(task, probabilities=True)
        else:
            of_classes = f"be left out for task {task.name}, whose outputs are no probabilities"
            require(not module.probabilities, "probabilities", of_classes, module.probabilities)
        module.task = task
        if y.is_floating_point() and not task.real and task is not CUSTOM:
            y = (y > 0).to(y.dtype)
        if not y.is_floating_point():  # out of range if there are too few outputs
            y = torch.full_like(y, task.largest_label(population.num_classes))
        losses = module.sample_loss(module.named_trainable, x, y)
        if losses.shape != (2,):
            raise ValueError(f"losses of shape {tuple(losses.shape)} for 2 records")
    shapes = tuple(output.shape[1:]), tuple(y.shape[1:])
    module.task_note = described(task, *shapes, module.named_task is not None)
    if module.named_task is None and task.note:
        module.task_advice = task.note
        if not module.users_loss:
            module.task_advice += f". If labels are shifted already, name task {inferred}"
    if isinstance(x, dict) and not module.users_loss and (left := x.keys() - {*taken_by(module.net, x)}) and len(x) > 1:
        warn_user(f"the model takes no argument {', '.join(sorted(left))}: these parts of the records are not used")
    if module.named_task is None and (others := other_tasks(task, *shapes)):
        module.task_advice = (
            f"task {task.name} is inferred from floating labels. Name it, or, for labels of 0 and 1, "
            f"{' or '.join(others)}: `task` in YAML, ClientModule(model, task=...) in Python"
        )
    if task.surplus(shapes[0], population.num_classes):
        warn_user(f"the model gives {output.shape[1]} outputs for {population.num_classes} classes")
    _check_labels(task, population)
    check_metrics(module.metrics, task)
    _try_metrics(module, task, population, tuple(output.shape[1:]))
    module.scores = measures_of(chosen_metrics(module.metrics, task), task)
    module.further_scores = tuple(name for name in metrics_of(task) if name not in module.scores)
    _check_scores(module, task, x, output, y, population.num_classes)
    with _users_errors("take one record, and many", "Look for squeeze() without a dimension."):
        records = 2 if module.large else 4
        numbers = whole_numbers(module, population)
        x, y = dummy_batch(population, records, module.device, numbers)
        _check_finite(module, x, y)
        copied = _copied(module, x, y)
        try:
            check_batch_losses(copied, x, y)
        except UserError:  # perhaps only for masks of other numbers than 0 and 1
            masks = [one and replace(one, masks_every=one.masks_every and 1) for one in numbers]
            if masks == numbers:
                raise
            check_batch_losses(copied, *dummy_batch(population, records, module.device, masks))
    _check_whole_numbers(module, population)


def _check_first_pass(module: ClientModule, x: Inputs) -> None:
    """Refuse a model whose first pass fills a tensor and notes that it has: the tensor is restored, the note is not."""
    large, changed = large_tensors(module).values(), list[str]()
    before = contents(module.net, large)
    with suppress(Exception), torch.no_grad(), fixed_rng(module.device), tensors_restored(module.net) as restore:
        module.output(module.named_trainable, x)
        changed = restore()
    after = contents(module.net, large) if changed else before
    noted = names_of_changes(before, after)
    if changed and noted:
        raise UserError(
            f"`model` must keep nothing of its first pass, got another {', '.join(changed)} and {', '.join(noted)}. "
            "Make them in __init__, or pass one batch through the model before: model(x)."
        )


def _check_labels(task: Task, population: Population) -> None:
    """Refuse labels that the task cannot have.

    **Privacy** An error of one record names its client, and no value.
    """
    task.check(population.y)
    names = [str(one) for one in population.schema.get("label") or ()]
    for wrong, must, advice in task.wrong_labels(population.y, population.num_classes, names):
        _require_no(wrong, population, must, advice)


def _require_no(wrong: Tensor, population: Population, must: str, advice: str) -> None:
    """Raise UserError that names whose label is the first wrong one, `wrong [n]`."""
    if bool(wrong.any()):
        require(False, f"y of {_whose(population, int(wrong.nonzero()[0]))}", must, "another number", advice)


def _whose(population: Population, row: int) -> str:
    """Return whose record a row is, for messages."""
    owned = zip(population.train_of, population.held_out_of, strict=True)
    owner = next((i for i, parts in enumerate(owned) if any((part == row).any() for part in parts)), None)
    if owner is not None:
        return f"client {population.name_of(owner)}"
    tested = population.test is not None and bool((population.test == row).any())
    return "the test set" if tested else "the records of no client"


def _shifts_labels(module: ClientModule, x: Inputs, y: Tensor) -> bool:
    """Whether a language model compares outputs with the next token: by its class, or if its own loss skips the first.

    The class is that of Hugging Face's models, whose labels are the tokens themselves.
    """
    if not module.users_loss:
        names = {kind.__name__ for part in module.net.modules() for kind in type(part).__mro__}
        return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    first = y.clone()
    first[:, 0] = 1 - first[:, 0]  # labels are 0 or 1
    with evaluating(module.net):
        losses = [module.sample_loss(module.named_trainable, x, labels) for labels in (y, first)]
    return torch.equal(*losses)


@torch.no_grad()
def _check_whole_numbers(module: ClientModule, population: Population) -> None:
    """Refuse whole numbers in the records that the model cannot take: run it on the extremes of each position.

    It runs on the CPU, because on a GPU a number beyond a table would be no error but the end of the process. Records
    that are read lazily are not checked.

    **Privacy** The error names the client whose record does not fit, and no value.
    """
    x, y = population.x, population.y
    if isinstance(x, LazyInputs):
        return
    whole = [leaf.reshape(len(leaf), -1) for leaf in tree_leaves(x) if leaf.dtype == torch.long and len(leaf)]
    if not whole:
        return
    rows = torch.cat([end for leaf in whole for end in (leaf.argmin(dim=0), leaf.argmax(dim=0))]).unique()
    module = on_cpu(module)

    def fits(rows: Tensor, inputs: Inputs = x) -> bool:
        try:
            inputs = tree_map(lambda part: part.cpu(), take(inputs, rows))
            module.sample_loss(module.named_trainable, inputs, y[rows].cpu())
        except (RuntimeError, ValueError, IndexError):
            return False
        return True

    with evaluating(module.net), fixed_rng(module.device):
        if module.large and len(y) > 1:  # at first two records with the extremes of all positions
            extremes = tree_map(lambda part: torch.stack([part.amin(dim=0), part.amax(dim=0)]), x)
            rows = rows[: 0 if fits(rows.new_tensor([0, 1]), extremes) else None]
        row = next((row for some in rows.split(64) if not fits(some) for row in some if not fits(row[None])), None)
    if row is not None:
        whose = _whose(population, int(row))
        raise UserError(
            f"`data` must hold whole numbers that the model can take, got a record of {whose} that it cannot. Tokens "
            "are from 0 to below the num_embeddings of nn.Embedding, the public size of the vocabulary: enlarge it, or "
            "map other tokens into this range."
        )


def _check_finite(module: ClientModule, x: Inputs, y: Tensor) -> None:
    """Refuse a module that gives no record a finite loss and gradient, also if all numbers are positive, or below 1.

    Warns of parameters that no loss depends on.
    """
    reached: set[str] = set()

    def finite(x: Inputs, y: Tensor) -> bool:
        params = {name: p.detach().requires_grad_() for name, p in module.named_trainable.items()}
        try:
            with fixed_rng(module.device), tensors_restored(module.net), torch.enable_grad():
                losses = module.sample_loss(params, x, y)
                grads = torch.autograd.grad(losses.sum(), list(params.values()), allow_unused=True)
            reached.update(name for name, grad in zip(params, grads, strict=True) if grad is not None)
            return all(part is None or bool(part.isfinite().all()) for part in (losses, *grads))
        except RuntimeError:  # another check names the cause
            reached.update(params)
            return True

    for change in (torch.clone, torch.abs, torch.sigmoid, torch.exp):
        changed_x, changed_y = tree_map(lambda part, to=change: to(part) if part.is_floating_point() else part, (x, y))
        found, row = False, 0
        while row < len(y) and not (found and len(reached) == len(module.named_trainable)):  # some may reach more
            found |= finite(take(changed_x, slice(row, row + 1)), changed_y[row : row + 1])
            row += 1
        if found:
            break
    else:
        if finite(x, y):
            raise UserError(
                "`model` must see one record at a time, got finite losses of several records together and none of one. "
                "Look for a standard deviation or another statistic over the first dimension, such as x.std(0)."
            )
        raise UserError(
            "`model` must give finite losses and gradients, got none on random records, so nothing would be learned. "
            "Look for logarithms and roots of negative numbers, and for divisions by zero."
        )
    if idle := [f"`net.{name}`" for name in module.named_trainable if name not in reached]:
        named = ", ".join(idle[:4]) + f" and {len(idle) - 4} more" * (len(idle) > 4)
        means = "if that holds for all records, noise alone moves them, and requires_grad_(False) freezes them"
        warn_user(f"no loss of the random records depends on {named}: {means}")


def _check_scores(module: ClientModule, task: Task, x: Inputs, output: Tensor, y: Tensor, num_classes: int) -> None:
    """Compute all that an evaluation computes, before anything is charged."""
    chosen = chosen_metrics(module.metrics, task)
    metrics = Metrics({name: one for name, one in chosen.items() if name in METRICS}, task, num_classes)
    must = f"give outputs that an evaluation of task {task.name} can score"
    advice = "Change its loss or `evaluation.metrics`."
    with _users_errors(must, advice), scoring(module.net, module.sample_loss), torch.no_grad():
        output = module.output(module.named_trainable, x)
        rows = torch.arange(len(y), device=y.device)
        of_records(module.reported_loss(module.flat, x, rows, output, y), task, output, y)
        metrics.update(output, y)
        metrics.values()
        for error in metrics.failed.values():
            raise error


def _try_metrics(module: ClientModule, task: Task, population: Population, shape: Sequence[int]) -> None:
    """Compute the metrics on random outputs of this shape of one record and labels, before anything is charged."""
    records = max(2, min(_RECORDS_OF_METRICS, MOST_NUMBERS // max(1, math.prod(shape))))
    generator, metrics = torch.Generator().manual_seed(0), Metrics(module.metrics, task, population.num_classes)
    output, y = torch.randn(records, *shape, generator=generator), dummy_labels(population, records, generator)
    y = (y > 0).to(y.dtype) if y.is_floating_point() and task.takes_floats else y
    metrics.update(output.to(module.device), y.to(module.device))
    module.undefined_scores = tuple(name for name, value in metrics.values().items() if value is None)
    for name, error in metrics.failed.items():
        frame = users_frame(error)
        where = "" if frame is None else f" ({frame.filename}, line {frame.lineno})"
        got = f"from {name}: {in_one_line(error)}{where}"
        raise UserError(f"`evaluation.metrics` must work on random outputs and labels, got {got}.") from error
    for name in module.undefined_scores:
        warn_user(f"metric {name} has no finite value on {records} random records: is that so for all records?")


@contextmanager
def _users_errors(must: str, advice: str) -> Iterator[None]:
    """Turn an error of the user's model on random records into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a user's code may raise anything
        if type(error).__module__.startswith("torch._dynamo"):
            must, advice = "run without torch's compiler", "It hides operators: choose by torch.where, not torch.cond."
        raise UserError(f"`model` must {must}, got: {in_one_line(error)}. {advice}") from error


@torch.no_grad()
def _gives_probabilities(module: ClientModule, task: Classification, population: Population) -> bool:
    """Whether outputs stay in [0, 1] for random records and parameters of several sizes (classes: and sum to 1).

    Raises UserError if a default loss, which takes logits, gets them for labels of 0 and 1. Warns if cross entropy of
    logits gets them.
    """
    if module.probabilities is not None or task.probabilities:
        return task.probabilities or bool(module.probabilities)
    if not task.kind:
        return False
    x, y = dummy_batch(population, records=8, device=module.device)
    outputs, losses, generator = [], [], torch.Generator().manual_seed(0)
    with evaluating(module.net):
        for size in (1.0, 30.0):
            params = {
                name: size * (p + 0.1 * torch.randn(p.shape, generator=generator).to(p))
                for name, p in module.named_trainable.items()
            }
            large = tree_map(lambda one, size=size: one * size if one.is_floating_point() else one, x)
            few = module.output(params, take(large, slice(2)))
            if ((few < 0) | (few > 1)).logical_and(few.isfinite()).any():  # as of most models
                return False
            outputs.append(module.output(params, large))
            losses.append(module.sample_loss(params, large, y))
    finite = torch.cat(outputs)
    finite = finite[finite.isfinite().reshape(len(finite), -1).all(dim=1)]
    if not len(finite) or finite.min() < 0 or finite.max() > 1 or finite.min() == finite.max():
        return False
    if task.gives_each_class(tuple(finite.shape[1:])):
        sums = finite.sum(dim=1)
        probable = torch.allclose(sums, torch.ones_like(sums), atol=1e-3)
        if probable:
            of_logits = cross_entropy(outputs[0], y, reduction="none").reshape(len(y), -1).mean(dim=1)
            if torch.allclose(losses[0], of_logits, atol=1e-6):
                warn_user("the model gives probabilities, and its cross entropy takes logits: remove its last Softmax")
        return module.users_loss and probable
    advice = "Remove its last Sigmoid, or pass ClientModule(model, loss=...)."
    require(module.users_loss, "model", "give logits for the default loss", "outputs in [0, 1]", advice)
    return True


@torch.no_grad()
def _copied(module: ClientModule, x: Inputs, y: Tensor) -> ClientModule:
    """Return a copy, as threads use them, if it computes with its own parameters."""
    with _users_errors("allow copy.deepcopy", "Remove attributes that keep tensors of a pass, or objects in chains."):
        copied = copy.deepcopy(module)
    params = moved_parameters(module.net)
    x, y = take((x, y), slice(1 if module.large else None))

    def losses(one: ClientModule) -> Tensor:
        with fixed_rng(module.device), tensors_restored(one.net):
            return one.sample_loss(params, tree_map(torch.clone, x), y).nan_to_num()  # a model may change its inputs

    first = losses(module)
    if not torch.equal(first, losses(copied)):
        if not torch.equal(first, losses(module)):
            raise UserError(
                "`model` must give a record the same loss in every pass, got another one later. Look for counters and "
                "averages in variables and attributes, and for random numbers that are not drawn by torch."
            )
        raise UserError(
            "`model` must be copied by copy.deepcopy, got a copy that computes with layers of the original. Look "
            "for functions in attributes, such as self.block = lambda x: self.layer(x): write methods instead."
        )
    return copied
