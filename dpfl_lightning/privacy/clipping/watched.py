"""Passes of a user's code over single records, of which nothing may stay for the next one.

A tensor that is kept, or a number of passes, would bring other records into a later pass. A pass under `vmap` is also
left by what knows all of its records: an operator, or a function of autograd, with a rule for `vmap` of its own.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from dpfl_lightning.errors import require
from dpfl_lightning.privacy.clipping.fixed_draws import begin_records
from dpfl_lightning.privacy.clipping.independent import (
    CHECKED,
    TENSORS,
    attribute_of,
    check_arguments,
    is_batched,
    is_compared,
    is_tried,
    keeps_records_apart,
    not_plain,
    shapes_alone,
    shapes_of,
)
from dpfl_lightning.privacy.clipping.inputs import Inputs
from dpfl_lightning.privacy.clipping.passes import Checksums
from dpfl_lightning.privacy.clipping.restored import large_tensors
from dpfl_lightning.privacy.clipping.state import Kept

_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
TORCHS = frozenset({"aten", "prims", "prim", "flex_lib"})  # namespaces of operators


class LeftVmap(RuntimeError):
    """Code that runs under `vmap` calls what may see all records of the pass, or goes on after an error of one."""


_by_torch = custom_function_call.functorch_table[TransformType.Vmap]
_LOCK = threading.Lock()
_watched = 0  # passes under `vmap` that run now, in any thread: autograd has threads of its own


class _Here(threading.local):
    """How many passes under `vmap` this thread watches."""

    watched = 0


_HERE = _Here()


class _Eager:
    """While passes are watched, in any thread, functions that torch compiles run as they are written.

    The compiler remembers numbers of records, and chooses code by them.
    """

    def __init__(self) -> None:
        self._passes, self._stance, self._lock = 0, None, threading.Lock()

    def begin(self) -> None:
        with self._lock:
            if self._stance is None and "torch._dynamo.eval_frame" in sys.modules:  # else nothing is compiled
                self._stance = torch.compiler.set_stance("force_eager")
            self._passes += 1

    def end(self) -> None:
        with self._lock:
            self._passes -= 1
            if self._passes == 0 and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None


_EAGER = _Eager()


def _of_function(interpreter: Any, function: Any, *operands: Any, **options: Any) -> Any:
    """Do what `vmap` does with a function of autograd, unless a user wrote it and a pass is watched.

    It has a rule of its own, or its code runs on the records of a pass at once, where no mode watches it. It stands in
    torch's table, so that it sees those that run in a backward pass, too.
    """
    own = any(function is one for one in OWN_FUNCTIONS)  # a metaclass may say that it equals another
    if _watched and not (own or _is_torchs(function)):
        raise LeftVmap(f"`{function.__name__}` is a function of autograd that sees all records of a pass")
    return _by_torch(interpreter, function, *operands, **options)


#: functions of autograd of this package, whose rules for `vmap` keep records apart
OWN_FUNCTIONS = list[type[torch.autograd.Function]]()


def _is_torchs(function: Any) -> bool:
    return _lives_in(function, "torch.")


def _lives_in(kind: Any, *packages: str) -> bool:
    """Return whether a class is in the module of one of these packages that it names."""
    home = sys.modules.get(kind.__module__) if kind.__module__.startswith(packages) else None
    return home is not None and vars(home).get(kind.__name__) is kind


def _text(tensor: Tensor, *args: Any, **options: Any) -> str:
    """Return the text of a tensor as torch does, but not of the records of a pass, wherever it is asked for."""
    if _watched and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise LeftVmap("the text of a tensor shows all records")
    return _text_by_torch(tensor, *args, **options)


def _not_within_a_pass(call: Callable[..., Any], why: str) -> Callable[..., Any]:
    """Return what calls code whose operators no mode sees, unless this thread watches a pass."""

    def called(*args: Any, **options: Any) -> Any:
        if _HERE.watched:
            raise LeftVmap(why)
        return call(*args, **options)

    return called


class _Checkpoint(checkpoint._checkpoint_hook):  # type: ignore[misc]
    """What `torch.utils.checkpoint` does around a forward pass: nothing in a watched pass, which it computes once."""

    def __enter__(self) -> Any:
        self._plain = bool(_HERE.watched)
        return None if self._plain else super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        return None if self._plain else super().__exit__(*error)


_text_by_torch = torch._tensor_str._str
torch._tensor_str._str = _text  # type: ignore[assignment]
custom_function_call.functorch_table[TransformType.Vmap] = _of_function
_COMPILED: list[tuple[Any, str]] = [(torch._C.ScriptFunction, "__call__"), (torch._C.ScriptMethod, "__call__")]
_COMPILED += [(torch._C.LiteScriptModule, name) for name in ("__call__", "forward", "run_method")]
_COMPILED += [(torch._C, "_jit_interpret_graph")]
for _kind, _name in _COMPILED:
    setattr(_kind, _name, _not_within_a_pass(getattr(_kind, _name), "code of torch.jit runs unseen"))
for _kind, _name in ((torch._C, "_dispatch_call_boxed"), (torch._C._DispatchOperatorHandle, "redispatch_boxed")):
    setattr(_kind, _name, _not_within_a_pass(getattr(_kind, _name), "the dispatcher runs operators unseen"))
_hooks, _push = torch._C._autograd, "_push_saved_tensors_default_hooks"
setattr(_hooks, _push, _not_within_a_pass(getattr(_hooks, _push), "hooks of saved tensors run unseen"))
checkpoint._checkpoint_hook = _Checkpoint  # type: ignore[misc]


def _require_no_code(func: Any, types: Any, values: Sequence[Any]) -> None:
    """Raise LeftVmap if a function of torch would run a user's code, which no mode watches within it."""
    own = [] if _is_of_torch(func) else [getattr(func, "__name__", str(func))]
    own += [kind.__name__ for kind in types if not any(kind is one for one in TENSORS)]
    if (found := not_plain(values)) is not None:
        own.append(getattr(found, "__name__", type(found).__name__))
    if own:
        raise LeftVmap(f"`{getattr(func, '__name__', func)}` runs code of `{own[0]}`")


def _is_of_torch(func: Any, seen: tuple[Any, ...] = ()) -> bool:
    """Return whether a function, and each one that it wraps or closes over, is torch's: a decorator calls another."""
    while func is not None and not any(func is one for one in seen):
        if _home_of(func).partition(".")[0] != "torch":
            return False
        seen = (*seen, func)
        if type(func) is FunctionType and func.__closure__:
            inner = (_content_of(cell) for cell in func.__closure__)
            if not all(_is_of_torch(one, seen) for one in inner if type(one) is FunctionType):
                return False
        func = getattr(func, "__wrapped__", None)
    return True


def _content_of(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _home_of(func: Any) -> str:
    """Return the module of a function, or of the class of a method of C; "" for objects and what is bound to one."""
    kind = type(func)
    if kind is FunctionType:
        return str(func.__globals__.get("__name__", ""))
    if kind is OpOverload or kind is OpOverloadPacket:
        return "torch"
    if issubclass(kind, HigherOrderOperator):
        return "torch" if _lives_in(kind, "torch.") else ""
    if kind is MethodWrapperType:  # of an attribute
        func, kind = func.__self__, type(func.__self__)
    owner = func.__self__ if kind is BuiltinFunctionType else getattr(func, "__objclass__", None)
    if kind is BuiltinFunctionType and owner is None:
        return str(func.__module__)
    if id(kind) not in _OF_C or not isinstance(owner, type | ModuleType):
        return ""
    return owner.__name__ if isinstance(owner, ModuleType) else owner.__module__


_OF_C = frozenset(map(id, (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, GetSetDescriptorType)))


def _texts(shapes: list[torch.Size] | str) -> str:
    """Return shapes of results in words, or the error in place of them."""
    return shapes if isinstance(shapes, str) else f"shape {', '.join(str([*one]) for one in shapes)}"


class WatchedCalls(TorchFunctionMode):
    """Notes the tensors that a user's code makes; within `vmap` raises LeftVmap for what sees more than one record.

    There it also gives every record its own initial state of recurrent layers, which torch's kernels need.
    """

    def __init__(self, under_vmap: bool) -> None:
        super().__init__()
        self._under_vmap = under_vmap
        self._made: list[weakref.ref[Tensor]] = []
        self._failed = ""
        self.operators: list[Hashable] = []  # of the last pass: functions, options, and shapes of results

    def __enter__(self) -> WatchedCalls:
        global _watched
        self._modes = torch._C._len_torch_dispatch_stack()
        self._below = torch._C._len_torch_function_stack()
        if self._under_vmap:
            _require_no_modes_of_users()
        with _LOCK:
            _watched += self._under_vmap
        _HERE.watched += self._under_vmap
        _EAGER.begin()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        global _watched
        with _LOCK:
            _watched -= self._under_vmap
        _HERE.watched -= self._under_vmap
        _EAGER.end()
        super().__exit__(*error)

    def note(self, *values: Any) -> None:
        self._made += [weakref.ref(one) for one in tree_leaves(values) if isinstance(one, Tensor)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            if self._under_vmap:
                func = _OF_EACH.get(func, func)
                if torch._C._len_torch_dispatch_stack() > self._modes:
                    raise LeftVmap("a mode of dispatch sees all records")
                if torch._C._len_torch_function_stack() > self._below:  # such as that of `with torch.device`
                    _require_no_modes_of_users()
                _require_inside(func, args, kwargs)
                _require_no_code(func, types, (*args, *kwargs.values()))
                if func in _RECURRENT and len(args) > 2 and isinstance(args[2], (list, tuple)):
                    args = _with_own_states(*args)
            if func in CHECKED:
                check_arguments(func, args, kwargs)
            alone = shapes_alone(func, args, kwargs) if self._under_vmap and is_compared(func) else None
            found = self.compute(func, args, kwargs)
            if alone is not None and (shapes := shapes_of(found)) and alone != shapes:
                what = f"it gives a record {_texts(shapes)}, and one alone {_texts(alone)}"
                raise LeftVmap(f"`{getattr(func, '__name__', func)}` takes the records for another dimension: {what}")
        except Exception as error:
            self._failed = self._failed or f"{type(error).__name__}: {error}"
            raise
        if func is torch.autograd.grad:  # what it returns is the caller's
            return found
        self._note_operator(func, args, kwargs, found)
        for one in (found,) if isinstance(found, Tensor) else found if isinstance(found, tuple | list) else ():
            if isinstance(one, Tensor) and self._is_new(one, (*args, *kwargs.values())):
                self._made.append(weakref.ref(one))
            if self._under_vmap and isinstance(one, Tensor) and not is_batched(one):
                self._require_of_none(func, (*args, *kwargs.values()))
        return found

    def _note_operator(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Note what decides which code of a kernel runs, but for the values of tensors."""
        given = (*args, *kwargs.values()) if kwargs else args
        options = [one for one in given if id(type(one)) in _OPTIONS] if func not in _DROPPING else ()
        results = found if isinstance(found, tuple | list) else (found,)
        shapes = [one.shape for one in results if isinstance(one, Tensor)]
        if shapes or func is Tensor.__setitem__:  # others compute nothing, such as what asks for a shape or a flag
            self.operators.append((func, *options, *shapes))

    def _require_of_none(self, func: Any, args: tuple[Any, ...]) -> None:
        """Raise LeftVmap if a result that is no record's is computed of records, perhaps of all at once."""
        name = getattr(func, "__name__", "")
        if name == "new_tensor" and not any(map(is_batched, args[1:])):
            return
        if name not in _OF_SHAPES and any(map(is_batched, args)):
            self._failed = f"`{name}` computes one number of all records"
            raise LeftVmap(self._failed)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what a call returns."""
        return func(*args, **kwargs)

    def forget(self) -> None:
        """Begin anew: the last pass may have ended with an error."""
        self._made.clear()
        self._failed = ""
        self.operators.clear()

    def require_no_error(self) -> None:
        """Raise LeftVmap if an operator of a pass has failed: if code goes on, all records feel the error of one."""
        if self._failed:
            raise LeftVmap(self._failed)

    def _is_new(self, found: Tensor, args: tuple[Any, ...]) -> bool:
        """Return whether an operator has made a tensor: it may also return an argument, such as a buffer."""
        if any(found is one for one in args):
            return False
        if self._under_vmap:
            return torch._C._functorch.is_functorch_wrapped_tensor(found)
        return not isinstance(found, nn.Parameter)

    def kept(self) -> bool:
        """Return whether a noted tensor is still alive, and forget them."""
        alive = self._some_alive()
        if alive:  # perhaps in a cycle of references
            gc.collect()
            alive = self._some_alive()
        self._made.clear()
        return alive

    def _some_alive(self) -> bool:
        return any(one() is not None for one in self._made)


def _require_no_modes_of_users() -> None:
    """Raise LeftVmap if a user's mode is below that of a watch, where it would see the records of a pass at once."""
    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        if not _lives_in(type(mode), "torch.", "dpfl_lightning."):
            raise LeftVmap(f"a mode of `{type(mode).__name__}` sees all records")


def gradients_of(loss: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients as `torch.autograd.grad`, None where there is none; a mode sees the hooks that run."""
    if not loss.requires_grad:
        return (None,) * len(inputs)
    of_loss, no = (torch.ones_like(loss),), False
    return tuple(_engine_run_backward((loss,), of_loss, no, no, tuple(inputs), True, accumulate_grad=no))


def _require_inside(func: Any, args: Any, kwargs: Any) -> None:
    if isinstance(func, OpOverload | OpOverloadPacket):
        packet = func.overloadpacket if isinstance(func, OpOverload) else func
        name = packet._qualified_op_name
        if name.partition("::")[0] not in TORCHS:
            raise LeftVmap(f"`{name}` is an operator that is not torch's")
        if not is_tried(func):
            raise LeftVmap(f"`{name}` is not known to keep records apart")
    else:
        packet = func
    name = getattr(packet, "__name__", "")
    if not keeps_records_apart(packet, name):
        raise LeftVmap(f"`{attribute_of(func) or name}` is not known to keep records apart")
    if kwargs.get("generator") is not None:
        raise LeftVmap(f"`{name}` draws by a generator of its own, which gives each place of a pass a known number")
    if name in _OF_LISTS and any(is_batched(one) and one.dim() == 0 for one in (*args, *kwargs.values())):
        raise LeftVmap(f"`{name}` of a number takes the records for a list")
    shapes = {tuple(one.shape) for one in args[:2] if isinstance(one, Tensor)} if name in _OF_ONE_SHAPE else ()
    if len(shapes) > 1 and type(func) is not FunctionType:  # functions in Python give both one shape before
        raise LeftVmap(f"`{name}` of tensors of different shapes compares records")
    tables = name in _TABLES and sum(map(is_batched, (*args, *kwargs.values()))) > 1
    if tables or (name in _FILLS and any(map(is_batched, _beside_input(args, kwargs)))):
        raise LeftVmap(f"`{name}` reaches the numbers of other records by an index beyond its own")


def _beside_input(args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments of an operator but for its first one, by place or by name."""
    return [*args[1:], *(one for name, one in kwargs.items() if name not in ("input", "self"))]


#: functions by which torch asks all records at once, and those that ask each
_OF_EACH: dict[Any, Any] = {torch._is_all_true: torch.all, torch._is_any_true: torch.any}
_OF_EACH |= {Tensor._is_all_true: torch.all, Tensor._is_any_true: torch.any}
_OPTIONS = frozenset(map(id, (bool, int, float, str)))
_DROPOUTS = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout multi_head_attention_forward"
#: functions that are told how much to drop, which is nothing while passes are watched
_DROPPING = frozenset({*(getattr(F, name) for name in _DROPOUTS.split()), F.scaled_dot_product_attention, *_RECURRENT})
#: functions of shapes and dtypes alone
_OF_SHAPES = frozenset({"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full"}) | {
    "expand_as",
    "reshape_as",
    "to",
    "type_as",
    "view_as",
}
#: operators for which torch's rules see the records as one table, if places in it are those of records, too
_TABLES = frozenset({"embedding", "embedding_renorm_"})
_OF_ONE_SHAPE = frozenset({"mse_loss", "huber_loss", "smooth_l1_loss"})
_FILLS = frozenset({"index_fill", "index_fill_"})
_OF_LISTS = frozenset({"roll", "searchsorted", "bucketize", "pad", "constant_pad_nd", "linspace", "logspace"})


def _with_own_states(x: Tensor, states: Any, *rest: Any) -> tuple[Any, ...]:
    """Return the arguments of a recurrent layer; the first of `rest` are the weights: there are no packed sequences."""
    zero = x.new_zeros(())
    own = [state + zero for state in states] if isinstance(states, (list, tuple)) else states + zero
    return x, own, *rest


class OwnDraws:
    """Gives each record of a loop random numbers of its own: none can choose those of the next by a seed.

    Within it torch's generator is that of the record. Afterwards it stands where it stood, or further if any drew.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._seeds, self._drew = torch.Generator(), False

    def __enter__(self) -> OwnDraws:
        self._first = self._states()
        self._seeds.manual_seed(torch.initial_seed()).set_state(self._first[0])
        return self

    def next(self) -> None:
        """Begin with the next record."""
        torch.manual_seed(int(torch.randint(1 << 62, (), generator=self._seeds)))
        begin_records(1)
        self._begun = self._states()

    def end(self) -> None:
        """Note whether the record drew."""
        self._drew |= any(not torch.equal(*both) for both in zip(self._begun, self._states(), strict=True))

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(self._cuda)] if self._cuda else [])]

    def __exit__(self, *error: object) -> None:
        torch.set_rng_state(self._seeds.get_state() if self._drew else self._first[0])
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._first[1], self._cuda)
            if self._drew:
                torch.cuda.manual_seed(int(torch.randint(1 << 62, ())))


class Watch:
    """The passes of one computation, after each of which `check` finds out whether a user's code kept something.

    `owners` are the model and what else of a user takes part, such as a loss.
    """

    def __init__(self, owners: Sequence[object], under_vmap: bool, calls: WatchedCalls | None = None) -> None:
        self._owners = owners
        self._recurrent = [
            part
            for owner in owners
            if isinstance(owner, nn.Module)
            for part in owner.modules()
            if isinstance(part, nn.RNNBase)
        ]
        self._before: Kept | None = None
        self._large = Checksums({})
        self.calls = calls or WatchedCalls(under_vmap)

    def follow(self, other: Watch | None) -> None:
        """Begin from what another watch of the same owners has noted, which spares a walk through them."""
        self._before = None if other is None else other._before

    def begin(self) -> None:
        """Note what is kept before the first pass of a computation: between two, other code may change a model."""
        self.calls.forget()
        self._before = Kept(self._owners) if self._before is None else self._before.again()
        self._large = self._large.again(self._large_tensors())

    def end(self) -> None:
        """Raise UserError if passes changed a large tensor of the model, which its version may not tell."""
        changed = self._large.changed() if self._large.are_of(self._large_tensors()) else ["other tensors"]
        require(not changed, "model", "leave its tensors as they are in a pass", f"another {', '.join(changed)}")

    def _large_tensors(self) -> dict[str, Tensor]:
        models = (one for one in self._owners if isinstance(one, nn.Module))
        return {name: one for model in models for name, one in large_tensors(model).items()}

    def enter(self, x: Inputs, y: Tensor) -> None:
        """Note the tensors that a pass gets."""
        self.calls.note(x, y)

    def check(self) -> None:
        """Raise UserError if something stays of the last pass. Nothing of it may be held by the caller any more."""
        assert self._before is not None
        for layer in self._recurrent:  # which list the parameters of their last pass
            layer._update_flat_weights()
        self._before.require_same("a tensor of a pass" if self.calls.kept() else "")
