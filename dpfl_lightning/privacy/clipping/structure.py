"""Models whose code is known, so that no record sees another one of a batch, whatever the weights are.

All other code may decide by weights, which the server chooses, and no trial shows what it does with the next ones: it
gets one record at a time, under `vmap` or in a loop.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.clipping.files import names_in
from dpfl_lightning.privacy.clipping.inputs import rows_each, take
from dpfl_lightning.privacy.clipping.passes import Batch
from dpfl_lightning.privacy.clipping.reference import Params, SampleLoss
from dpfl_lightning.privacy.clipping.restored import tensors_restored
from dpfl_lightning.privacy.clipping.watched import TORCHS

_MODULES = """
    Identity Sequential ModuleList ModuleDict ParameterList ParameterDict Flatten Unflatten
    Linear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Embedding
    LayerNorm GroupNorm RMSNorm LocalResponseNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d
    BatchNorm1d BatchNorm2d BatchNorm3d RNN GRU LSTM MultiheadAttention TransformerEncoder TransformerEncoderLayer
    CELU ELU GELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid LogSoftmax Mish PReLU ReLU ReLU6
    RReLU SELU SiLU Sigmoid Softmax Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold
    Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout
    MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d LPPool1d LPPool2d LPPool3d
    AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d
    ConstantPad1d ConstantPad2d ConstantPad3d ZeroPad1d ZeroPad2d ZeroPad3d ReflectionPad1d ReflectionPad2d
    ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d CircularPad1d CircularPad2d CircularPad3d
    Upsample UpsamplingNearest2d UpsamplingBilinear2d PixelShuffle PixelUnshuffle ChannelShuffle Fold Unfold
"""
#: layers of torch, in the versions that the constraints allow; BatchNorm only with frozen statistics (`check_net`)
LAYERS: frozenset[type[nn.Module]] = frozenset(
    {*(getattr(nn, name) for name in _MODULES.split()), nn.modules.linear.NonDynamicallyQuantizableLinear}
)
#: losses of torch that give one number for each record with reduction="none"
LOSSES: frozenset[type[nn.Module]] = frozenset(
    {nn.BCELoss, nn.BCEWithLogitsLoss, nn.CrossEntropyLoss, nn.GaussianNLLLoss, nn.HuberLoss, nn.KLDivLoss, nn.L1Loss}
    | {nn.MSELoss, nn.MultiLabelSoftMarginLoss, nn.MultiMarginLoss, nn.NLLLoss, nn.PoissonNLLLoss, nn.SmoothL1Loss}
    | {nn.SoftMarginLoss}
)
#: modules of this package with a `forward` of their own
_OWN = frozenset({"BasicBlock", "InputTransform", "PersonalInput"})
_FUNCTIONS = frozenset({F.relu, F.gelu, torch.relu})  # activations that a layer is given


def code_of_users(net: nn.Module, sample_loss: SampleLoss | None) -> str:
    """Return what of a model or its loss runs code that nobody has read, in words; "" if there is none.

    Types have to match exactly: a subclass, a hook, a parametrization or another `forward` of an instance is such code.
    """
    if any(_global_hooks()):
        return "a hook of all modules"
    for name, part in net.named_modules():
        if not (_is_known(part) and _is_plain(part)):
            return f"`{name or 'net'}` ({type(part).__name__}) has a forward pass of its own"
    of_model = getattr(sample_loss, "__self__", None)
    if sample_loss is None or (_is_ours(of_model) and of_model.loss_is_known):
        return ""
    return "the loss has code of its own"


def _is_ours(model: Any) -> TypeGuard[Any]:
    """Return whether a model is of a class of this package, of which no instance has functions of its own."""
    of_instance = getattr(model, "__dict__", {})
    own = any(callable(one) and not isinstance(one, nn.Module) for name, one in of_instance.items() if name in _LOSSES)
    return type(model).__module__.startswith("dpfl_lightning.") and not own


_LOSSES = ("loss", "sample_loss", "output", "batch_loss", "forward")


def beside_records(net: nn.Module, sample_loss: SampleLoss, params: Params, examples: Batch) -> str:
    """Return a known layer that acts on other dimensions than those of a record, in words; "" if there is none.

    Shapes decide it: a layer keeps records apart if its inputs and outputs have them in the first dimension, and all
    dimensions that its kind needs. Shapes of known layers follow from shapes of records, not from numbers or weights.
    """
    wrong: list[str] = []
    counts, handles = [0], []

    def hook(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        outputs = [one for one in (output if isinstance(output, tuple) else (output,)) if isinstance(one, Tensor)]
        sizes = {one.shape[:1] for one in (*inputs, *outputs[:1])}
        if not (inputs and _keeps_apart(layer, inputs[0].dim()) and sizes == {(counts[-1],)}):
            wrong.append(f"`{name or 'net'}` ({type(layer).__name__}) acts on other dimensions than those of a record")

    for name, layer in net.named_modules():
        if type(layer) in LAYERS and type(layer) not in _CONTAINERS:
            handles.append(layer.register_forward_hook(functools.partial(hook, name), with_kwargs=True))
    try:
        for count in _COUNTS:
            x, y = take(examples, [*range(count)])
            counts.append(count * rows_each(x))
            with tensors_restored(net):
                sample_loss(params, x, y)
    except UserError:
        raise
    except Exception as error:  # such as shapes that fit single records alone
        wrong.append(f"a batch of {count} records gives {type(error).__name__}")
    finally:
        for handle in handles:
            handle.remove()
    return next(iter(wrong), "")


#: layers of one number at a time, which may have no other dimension than that of the records
_ELEMENTWISE = frozenset(
    {nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid}
    | {nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh}
    | {nn.Tanhshrink, nn.Threshold, nn.Dropout}
)
_CONTAINERS = frozenset({nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict}) | {
    nn.modules.linear.NonDynamicallyQuantizableLinear  # within attention, which does not call it
}
_PADDINGS = ("zeros", "reflect", "replicate", "circular")
_COUNTS = (2, 3)  # records of a batch, of which not both can be another dimension by chance
_DIMENSIONS = re.compile(r"([123])d$")


def _keeps_apart(layer: nn.Module, dims: int) -> bool:
    """Return whether a layer keeps records apart that are the first of so many dimensions of its input."""
    kind, given = type(layer), vars(layer)
    if kind in (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU):
        return isinstance(given["dim"], int) and given["dim"] % dims != 0
    if kind in (nn.Flatten, nn.Unflatten):  # numbers stay in their order, so that the number of records tells all
        return True
    if kind in (nn.RNN, nn.GRU, nn.LSTM, nn.MultiheadAttention):
        return dims == 3 and bool(given["batch_first"])
    if kind in (nn.TransformerEncoder, nn.TransformerEncoderLayer):
        parts = [one for one in layer.modules() if isinstance(one, nn.MultiheadAttention)]
        return dims == 3 and all(one.batch_first for one in parts)
    if kind in (nn.LayerNorm, nn.RMSNorm):
        return dims > len(given["normalized_shape"])
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return not layer.training and layer.running_mean is not None
    if kind in (nn.Softmax2d, nn.PixelShuffle, nn.PixelUnshuffle, nn.Unfold):
        return dims == 4
    if kind in (nn.ChannelShuffle, nn.Fold, nn.LocalResponseNorm, nn.Upsample, nn.UpsamplingNearest2d):
        return dims >= 3
    if kind is nn.UpsamplingBilinear2d:
        return dims == 4
    if (found := _DIMENSIONS.search(kind.__name__)) is not None:  # convolutions, pooling, padding, norms, dropout
        padded = given.get("_reversed_padding_repeated_twice", given.get("padding", 0))  # two for each dimension
        fits = not isinstance(padded, tuple | list) or len(padded) <= 2 * int(found[1])
        return fits and dims == int(found[1]) + 2 and given.get("padding_mode", "zeros") in _PADDINGS
    return dims >= 2 or kind in (nn.Embedding, nn.Identity) or kind in _ELEMENTWISE


def is_known_loss(loss: object) -> bool:
    """Return whether a loss is none, or one of torch's with reduction="none"."""
    plain = isinstance(loss, nn.Module) and type(loss) in LOSSES and _is_plain(loss)
    return loss is None or (plain and getattr(loss, "reduction", "") == "none")


def _is_known(part: nn.Module) -> bool:
    kind = type(part)
    if any(kind is one for one in LAYERS):  # a metaclass may say that it equals another
        return True
    own = "dpfl_lightning.models.nets"
    return kind.__module__ == own and kind.__name__ in _OWN and getattr(sys.modules[own], kind.__name__) is kind


def _is_plain(part: nn.Module) -> bool:
    """Return whether a module has no hooks, no functions of its instance, and values of plain types alone."""
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    given = vars(part)
    if any(hooks) or "forward" in given or not all(type(given[name]) is dict for name in _TABLES):
        return False
    padded, dims = given.get("_reversed_padding_repeated_twice", ()), _DIMENSIONS.search(type(part).__name__)
    if dims is not None and isinstance(padded, tuple | list) and len(padded) > 2 * int(dims[1]):
        return False  # it would pad the dimension of records, or of channels
    of_torch = any(type(part) is one for one in (*LAYERS, *LOSSES))
    for one in given.values():
        function = inspect.isroutine(one) and one in _FUNCTIONS
        if not function and (callable(one) or (of_torch and type(one) not in _PLAIN)):
            return False
    tensors = (one for one in (*part._parameters.values(), *part._buffers.values()) if one is not None)
    return all(type(one) in (Tensor, nn.Parameter) for one in tensors)


_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN = frozenset({bool, int, float, str, type(None), tuple, list, dict, set, OrderedDict, torch.Size, torch.dtype})


def _global_hooks() -> Iterator[object]:
    """Yield the hooks of all modules of the process."""
    of_torch = vars(torch.nn.modules.module)
    yield from (of_torch[name] for name in of_torch if name.startswith("_global_") and name.endswith("_hooks"))


def leaves_vmap(net: nn.Module, sample_loss: SampleLoss | None) -> str:
    """Return what of a user would see all records of a pass under `vmap`; "" if there is nothing.

    That is a function that refers to torch's internals of `vmap`, unless it hides this, or an operator of a library
    with a rule for `vmap`, which could be called by compiled code.
    """
    if operator := next(_operators_with_rules(), ""):
        return operator
    owner = getattr(sample_loss, "__self__", None)
    given = [getattr(owner, name, None) for name in ("given_loss", "given_output")] if owner else [sample_loss]
    parts = [*net.modules(), *(part for one in given if isinstance(one, nn.Module) for part in one.modules())]
    waiting: list[Any] = [one for part in parts for one in (*type(part).__mro__, *vars(part).values())]
    waiting += [*parts, *(one for one in given if one is not None and not isinstance(one, nn.Module))]
    if compiled := next((one for one in waiting if isinstance(one, _COMPILED)), None):
        return type(compiled).__name__
    seen = set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or not _is_users(one):
            continue
        seen.add(id(one))
        if isinstance(one, type):
            waiting += vars(one).values()
            continue
        for function in _functions_of(one):
            referred = [*_referred(function)]
            if any(_is_internal(value) for value in referred) or _INTERNAL & {*names_in(function.__code__)}:
                return function.__qualname__
            waiting += referred
    return ""


def _operators_with_rules() -> Iterator[str]:
    for name in torch._C._dispatch_get_all_op_names():
        if name.partition("::")[0] not in TORCHS and torch._C._dispatch_has_kernel_for_dispatch_key(
            name, "FuncTorchBatched"
        ):
            yield name


_INTERNAL = frozenset({"_functorch", "get_unwrapped", "DisableTorchFunction", "saved_tensors_hooks"}) | {
    "debug_unwrap",
    "_pop_mode_temporarily",
    "_pop_mode",
    "_pop_torch_function_stack",
}
_LIBRARIES = frozenset({"torch", "lightning", "pytorch_lightning", "numpy", "builtins", "dpfl_lightning"})


def _is_users(value: Any) -> bool:
    if not isinstance(value, type | types.FunctionType | types.MethodType | staticmethod | classmethod | property):
        return False
    owner = getattr(value, "fget", value) if isinstance(value, property) else value
    return str(getattr(owner, "__module__", "")).partition(".")[0] not in _LIBRARIES


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    candidates: Iterable[Any] = (value,)
    if isinstance(value, property):
        candidates = (value.fget, value.fset)
    elif isinstance(value, types.MethodType | staticmethod | classmethod):
        candidates = (value.__func__,)
    yield from (one for one in candidates if isinstance(one, types.FunctionType))


def _referred(function: Callable[..., Any]) -> Iterator[Any]:
    """Yield what the names in the code of a function stand for, its defaults, and what it closes over."""
    names, module = {*names_in(function.__code__)}, function.__globals__
    yield from (module[name] for name in names if name in module)
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue


_COMPILED = (torch.jit.ScriptFunction, torch.jit.ScriptModule)  # whose calls no mode watches
_SEES_ALL = (torch.func.debug_unwrap,)  # public, and returns the records behind a tensor


def _is_internal(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", ""))
    internal = name.startswith(("torch._C._functorch", "torch._functorch")) or isinstance(value, _COMPILED)
    return internal or any(value is one for one in _SEES_ALL)
