"""The papers' models by name, and a check that record-level privacy is possible for a model."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedParameter

from dpfl_lightning.config.registry import call
from dpfl_lightning.errors import UserError, require, warn_user
from dpfl_lightning.models import nets
from dpfl_lightning.models.nets import PersonalInput

__all__ = ["PersonalInput", "build", "check_net", "fixed", "named"]

OF_LOSS = ("class_priors", "per_record")  # keys of section `model` that are of the loss, not of the model
#: registry name -> function(input_shape, num_classes, **options); `names_in` reads the names from this source
MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn_small": nets.cnn_small,
    "cnn_tiny": nets.cnn_tiny,
    "cnn_femnist": nets.cnn_femnist,
    "lenet5": nets.lenet5,
    "convnet": nets.convnet,
    "resnet18": nets.resnet18,
    "resnet20": nets.resnet20,
    "resnet34": nets.resnet34,
    "logistic": nets.logistic,
    "linear": nets.linear,
}


def build(name: str, input_shape: Sequence[int], num_classes: int, /, **options: Any) -> nn.Module:
    """Return a newly initialised model of `MODELS`, a module [B, *X] -> [B, num_classes]; 1 output for a regression.

    Raises UserError if a name or option is unknown, a value is out of range, or the input shape does not fit.

    >>> sum(parameter.numel() for parameter in build("cnn_small", (1, 28, 28), 10).parameters())
    28938
    """
    one = isinstance(input_shape, Sequence) and all(isinstance(size, int) for size in input_shape)
    fits = name not in MODELS or (one and (name in ("logistic", "linear") or len(input_shape) == 3))
    advice = f"It takes {'images' if one else 'one tensor'}, not records of shape {input_shape}."
    require(fits, "model.name", "fit the data", name, advice)
    require(num_classes >= 1, "num_classes", "be at least 1", num_classes)
    return call("model", MODELS, name, tuple(input_shape), num_classes, **options)


def named(model: Mapping[str, Any], input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Return a model as section `model` of the options describes it: by `name`, with `fix`, `personal_input` and more.

    Raises UserError as `build` does.
    """
    options = dict(model)
    name, fix, personal = options.pop("name"), options.pop("fix", False), options.pop("personal_input", False)
    for key, value in (("fix", fix), ("personal_input", personal)):
        require(isinstance(value, bool), f"model.{key}", "be true or false", value)
    net = build(name, input_shape, num_classes, **options)
    net = fixed(net) if fix else net
    return PersonalInput(net, input_shape) if personal else net


def check_net(net: nn.Module) -> None:
    """Raise UserError if record-level privacy is not possible for a model; the message names the parts.

    Clipping one record's gradient bounds its influence only if the gradient depends on that record alone. BatchNorm,
    and InstanceNorm with running statistics, silently break this; BatchNorm in evaluation mode does not, and keeps this
    mode in a run. There must be a trainable parameter, and all must be floating and have a shape.

    >>> check_net(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)))
    Traceback (most recent call last):
    ...
    dpfl_lightning.errors.UserError: `net.1` must see one record at a time, got BatchNorm2d, which mixes the \
records of a batch. Use nn.GroupNorm(1, 4) instead, or freeze its statistics by .eval().
    """
    refused = {name: (layer, why) for name, layer in net.named_modules() if (why := _not_private(layer))}
    if refused:
        (name, (layer, (problem, way_out))), *others = refused.items()
        got = f"{type(layer).__name__}, which {problem}"
        also = ", ".join(f"`net.{other}` ({type(layer).__name__})" for other, (layer, _) in others)
        also = f" The same holds for {also}." if others else ""
        if any(isinstance(layer, _BatchNorm) for _, (layer, _) in others):
            also += " `model.fix: true`, or ClientModule(model, fix=True), replaces every BatchNorm by a GroupNorm."
        raise UserError(f"`net.{name}` must see one record at a time, got {got}. Use {way_out}.{also}")
    for name, layer in net.named_modules():
        advice = "Pass the module that torch.jit.script or torch.jit.trace was given."
        require(not isinstance(layer, ScriptModule), f"net.{name}".rstrip("."), "be Python code", "TorchScript", advice)
    for name, parameter in net.named_parameters():
        has_shape = not isinstance(parameter, UninitializedParameter)
        kind, advice = type(parameter).__name__, "Pass one batch through the model first."
        require(has_shape, f"net.{name}", "have a shape", kind, advice)
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        advice = "Clipped and noisy gradients do not pass them: change what `forward` computes instead."
        require(not hooks, f"net.{name}", "have no hooks of its gradient", "some", advice)
        advice = "Make the model outside of torch.device('meta'), or load its weights first."
        require(not parameter.is_meta, f"net.{name}", "hold values", "a tensor on the device meta", advice)
        advice = "Keep real and imaginary parts, and join them in forward by torch.view_as_complex."
        advice = advice if parameter.is_complex() else ""
        require(parameter.is_floating_point(), f"net.{name}", "be floating", parameter.dtype, advice)
    for name, tensor in net.named_buffers():
        fits = tensor.dtype != torch.complex128 and tensor.layout == torch.strided  # others cannot be written
        require(fits, f"net.{name}", "have a dtype of safetensors, and be dense", tensor.dtype)
    trainable = any(parameter.requires_grad for parameter in net.parameters())
    require(trainable, "net", "have a trainable parameter", "none", "Is requires_grad off?")


def fixed(net: nn.Module) -> nn.Module:
    """Return a copy in which layers that cannot be private are replaced; warns of them.

    BatchNorm becomes a new GroupNorm, followed by what a subclass has inside, such as an activation: what it has
    learned is lost. InstanceNorm keeps no statistics.
    """
    net, new, words = copy.deepcopy(net), dict[nn.Module, nn.Module](), []
    for name, layer in [*net.named_modules(remove_duplicate=False)]:
        if _not_private(layer) is None or not isinstance(layer, _BatchNorm | _InstanceNorm):
            continue
        if layer not in new:
            new[layer] = _replacement(layer)
            words.append(f"{name or 'net'}: {type(layer).__name__} by {new[layer]}")
        if name:
            net.set_submodule(name, new[layer])
        else:
            net = new[layer]
    if words:
        warn_user(f"replaced {'; '.join(words)}")
    return net


def _replacement(layer: nn.Module) -> nn.Module:
    """Return a layer of single records for a BatchNorm, or an InstanceNorm with statistics."""
    if isinstance(layer, _InstanceNorm):
        layer = copy.copy(layer)
        layer.track_running_stats, layer._buffers = False, dict.fromkeys(layer._buffers)
        return layer
    assert isinstance(layer, _BatchNorm)
    device = next((one.device for one in layer.parameters()), None)
    norm = nn.GroupNorm(_groups_of(layer), layer.num_features, layer.eps, layer.affine, device=device)
    inside = [*layer.children()]
    return nn.Sequential(norm, *inside) if inside else norm


_MOST_GROUPS, _FEWEST_IN_A_GROUP = 32, 8


def _groups_of(layer: _BatchNorm) -> int:
    """Return how many groups have at least 8 channels each: a group of few numbers has little but its signs left.

    Vectors have one group.
    """
    channels = layer.num_features
    most = 1 if isinstance(layer, nn.BatchNorm1d) else min(_MOST_GROUPS, channels // _FEWEST_IN_A_GROUP)
    return next((groups for groups in range(most, 0, -1) if channels % groups == 0), 1)


def _not_private(layer: nn.Module) -> tuple[str, str] | None:
    """Return why a layer cannot be private, and the way out; None if it can."""
    if isinstance(layer, _BatchNorm):
        if not layer.training and layer.running_mean is not None:
            return None  # public statistics, which no record changes
        way_out = f"nn.GroupNorm({_groups_of(layer)}, {layer.num_features}) instead"
        way_out += ", or freeze its statistics by .eval()" if layer.running_mean is not None else ""
        return "mixes the records of a batch", way_out
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        return "keeps statistics of records it has seen", "track_running_stats=False instead"
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
        return "changes its table where a record reads it", "max_norm=None instead"
    if type(layer).__name__ == "OptimizedModule" or layer._compiled_call_impl is not None:
        return "torch.compile compiles anew for another number of records", "the module without torch.compile"
    return None
