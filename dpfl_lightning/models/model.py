"""A trainable model: an `nn.Module`, the loss of each record, and its parameters as one flat vector."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dpfl_lightning.errors import require
from dpfl_lightning.models import check_net
from dpfl_lightning.models.derivatives import Differentiating
from dpfl_lightning.models.tasks import Measure, Task, build_task, task_of
from dpfl_lightning.privacy.clipping.independent import CheckedOperators
from dpfl_lightning.privacy.clipping.inputs import Inputs, arguments
from dpfl_lightning.privacy.clipping.reference import Params
from dpfl_lightning.privacy.clipping.stateless import call, further_names
from dpfl_lightning.privacy.clipping.structure import code_of_users, is_known_loss

FORWARD_CHUNK = 100  # records of a forward pass without gradients, so that activations stay in the caches
DEVICE_FORWARD_CHUNK = 1000  # on other devices than a CPU: few, large kernels


def forward_chunk(device: torch.device) -> int:
    """Return the number of records of a forward pass of an evaluation."""
    return FORWARD_CHUNK if device.type == "cpu" else DEVICE_FORWARD_CHUNK


class Model(nn.Module):
    """An `nn.Module` with a loss for each record, `[B, *X]` -> the outputs of its task, such as `[B, num_classes]`.

    The arguments are those of `ClientModule`, which adds the private training step. Records that are a tuple of tensors
    are its arguments; of a dictionary it gets the keys that `forward` has, or the only tensor. Raises
    UserError if a layer mixes records (BatchNorm in training mode), no parameter is trainable, or an argument does not
    fit.

    >>> Model(nn.Linear(4, 3)).num_params
    15
    """

    #: the task that fits model and data, once a run knows both; `task_note` says where it comes from,
    #: and `task_advice` how to choose another one; `scores` are what an evaluation measures, by name, and
    #: `further_scores` the names of what it could
    task: Task | None = None
    task_note: str = ""
    task_advice: str = ""
    scores: Mapping[str, Measure] = {}
    further_scores: tuple[str, ...] = ()
    undefined_scores: tuple[str, ...] = ()  # metrics without a value on random records

    def __init__(
        self,
        net: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        personal: Sequence[str] = (),
        output: Callable[[Any], Tensor] | None = None,
        task: str | Mapping[str, Any] | Task | type[Task] | None = None,
    ) -> None:
        super().__init__()
        self._differentiating = Differentiating()
        check_net(net)
        _check_function("loss", loss, "Such as torch.nn.CrossEntropyLoss(reduction='none').")
        _check_function("output", output, "It gets what the model returns.")
        must = "be a list of names of parameters"
        require(not isinstance(personal, str), "personal", must, personal, f"Pass [{personal!r}].")
        self.net, self.named_task = net, None if task is None else build_task(task)
        self.given_loss, self.given_output = loss, output
        self.personal = tuple(personal) or tuple(getattr(net, "personal", ()))
        self._users_code = bool(code_of_users(net, None))
        self._further_names = further_names(net)  # known once, because finding them takes half of a call
        self._shapes = {name: p.shape for name, p in net.named_parameters() if p.requires_grad}
        for name in self.personal:
            require(name in self._shapes, "personal", f"name parameters of the model ({', '.join(self._shapes)})", name)
        must = "leave out a parameter of the model, as the others stay with the client"
        require({*self.personal} != {*self._shapes}, "personal", must, self.personal)

    def sample_loss(self, params: Params, x: Inputs, y: Tensor) -> Tensor:
        """Return one loss per record `[B]` for `x [B, *X]`, `y [B]`; it may depend on that record alone.

        Every engine differentiates it: the reference by `vmap` over batches of one, the fast engine by chunks.
        """
        return self.loss(self.output(params, x), y)

    def output(self, params: Params, x: Inputs) -> Tensor:
        """Return the outputs `[B, ...]` of `net` with parameters `params` for `x [B, *X]`.

        They are what it returns, its `logits` if it returns an object or a dictionary, or the first of a list.
        """
        return self._differentiating.run(lambda params: self._output(params, x), params)

    def _output(self, params: Params, x: Inputs) -> Tensor:
        with CheckedOperators() if self._users_code else nullcontext():
            returned = call(self.net, params, self._further_names, *arguments_of(self.net, x))
        if self.given_output is not None:
            tensor, advice = self.given_output(returned), "It gets what the model returns."
            require(isinstance(tensor, Tensor), "output", "return a tensor `[B, ...]`", type(tensor).__name__, advice)
            return tensor
        returned = returned[0] if isinstance(returned, list | tuple) and returned else returned
        if isinstance(returned, Tensor):
            return returned
        logits = returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", None)
        must, advice = "return a tensor, or an output with a tensor `logits`", "Pass ClientModule(model, output=...)."
        require(isinstance(logits, Tensor), "model", must, type(returned).__name__, advice)
        assert isinstance(logits, Tensor)  # for mypy
        return logits

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return one loss per record `[B]` for `output [B, ...]`, `y [B, ...]`: the given one, or that of the task."""
        if self.given_loss is None:
            return (self.task or self.infer_task(output, y)).loss(output, y)
        with CheckedOperators():
            losses = self.given_loss(output, y)
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        must = f"return one loss for each record, of shape ({len(y)},)"
        require(shape == (len(y),), "loss", must, shape, "Losses of torch do with reduction='none'.")
        return losses

    @property
    def loss_is_known(self) -> bool:
        """Whether no code of a user computes the loss from what the model returns."""
        return is_known_loss(self.given_loss) and self.given_output is None

    def infer_task(self, output: Tensor, y: Tensor, num_classes: int | None = None) -> Task:
        """Return the task by its name, or from the shapes of `output [B, ...]` and `y [B, ...]` and the dtype of y."""
        return task_of(tuple(output.shape[1:]), tuple(y.shape[1:]), y.is_floating_point(), num_classes, self.named_task)

    @property
    def num_params(self) -> int:
        """P, the number of trainable parameters of the net."""
        return sum(shape.numel() for shape in self._shapes.values())

    @property
    def named_trainable(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    @property
    def trainable(self) -> list[Tensor]:
        return list(self.named_trainable.values())

    @property
    def flat(self) -> Tensor:
        """All trainable parameters as one new vector `[P]`, detached."""
        return torch.cat([p.detach().reshape(-1) for p in self.trainable])

    @torch.no_grad()
    def load(self, flat: Tensor) -> None:
        """Set all trainable parameters from one vector `[P]`."""
        for parameter, value in zip(self.trainable, self.unflatten(flat).values(), strict=True):
            parameter.copy_(value)

    @property
    def personal_mask(self) -> Tensor:
        """Mask `[P]` (bool) of the entries of the flat vector that stay with the client."""
        parts = [torch.full((shape.numel(),), name in self.personal) for name, shape in self._shapes.items()]
        return torch.cat(parts)

    @property
    def num_sent(self) -> int:
        """Number of parameters that are not personal, so that updates change them."""
        return sum(shape.numel() for name, shape in self._shapes.items() if name not in self.personal)

    def sent(self, updates: Tensor) -> Tensor:
        """Return the entries of updates `[..., P]` that are not personal.

        The others are 0, without noise, and what a false update has there shall not count.
        """
        return updates[..., ~self.personal_mask] if self.personal else updates

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Return `flat` `[P]` as named views that share its memory."""
        parts = flat.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


def has_frozen(net: nn.Module) -> bool:
    """Whether a model has frozen parameters, which the files of a run leave out."""
    return any(not parameter.requires_grad for parameter in net.parameters())


def load_trained(net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a file `model.safetensors` of a run: all of a model, or, if it has frozen parameters, the trained ones.

    Raises RuntimeError if it has other names or shapes.
    """
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    unexpected = net.load_state_dict(state, strict=not has_frozen(net)).unexpected_keys
    if unexpected or trained - state.keys():
        raise RuntimeError(f"it has parameters {', '.join(state)} instead of {', '.join(sorted(trained))}")


def arguments_of(net: nn.Module, x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a model for `x`: of a dictionary the keys that `forward` has."""
    if not isinstance(x, dict):
        return arguments(x)
    taken = taken_by(net, x)
    if not taken and len(x) == 1:
        return tuple(x.values()), {}
    names = ", ".join(inspect.signature(net.forward).parameters)
    advice = f"Its `forward` takes {names}: rename these, or leave other keys out of the records."
    require(len(taken) > 0, "model", "take the keys of the records as arguments", ", ".join(x), advice)
    return (), {name: x[name] for name in taken}


def taken_by(net: nn.Module, x: Mapping[str, Any]) -> list[str]:
    """Return the keys of records `x` that `forward` of a model has as arguments."""
    parameters = inspect.signature(net.forward).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return [*x]
    named = {one.name for one in parameters if one.kind not in (one.POSITIONAL_ONLY, one.VAR_POSITIONAL)}
    return [name for name in x if name in named]


def _check_function(key: str, given: object, advice: str) -> None:
    fits = given is None or (callable(given) and not isinstance(given, type))
    require(fits, key, "be a function", given, advice)
    named = given.named_parameters() if isinstance(given, nn.Module) else ()
    trained = [name for name, parameter in named if parameter.requires_grad]
    require(not trained, key, "have no parameters to train", trained, "Make them parameters of the model.")
