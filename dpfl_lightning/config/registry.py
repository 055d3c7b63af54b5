"""Names that configurations use: their help, and calls of the functions that they stand for."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from dpfl_lightning.config.typed import converted, in_words
from dpfl_lightning.errors import UserError, nearest, require

T = TypeVar("T")


class Registry(NamedTuple):
    """The mapping `attribute` in a module of the package, whose keys are the names that a key accepts.

    `given` is the number of leading arguments that the program passes to a registered function; the others are options.
    `functions` names a function that returns name -> function, if the mapping does not hold functions.
    """

    module: str
    attribute: str
    given: int
    functions: str = ""


REGISTRIES = {
    "strategies": Registry("strategies", "STRATEGIES", 0, "classes"),
    "model": Registry("models", "MODELS", 2),
    "data.partition": Registry("data.partition", "PARTITIONS", 3),
    "data.groups": Registry("data.groups", "GROUPS", 3),
    "data.label_noise": Registry("data.groups", "UNITS", 2),
}


def names_in(registry: Registry) -> list[str]:
    """Return the names in a registry. They are read from the module's source, because importing it would import torch.

    >>> names_in(REGISTRIES["data.groups"])
    ['rotation', 'label_shift']
    """
    place = Path(__file__).parents[1].joinpath(*registry.module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id == registry.attribute:
                return [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    raise LookupError(f"{file} has no registry {registry.attribute}")


def call(key: str, known: Mapping[str, Callable[..., T]], name: str, /, *args: Any, **options: Any) -> T:
    """Return `known[name](*args, **options)`, for a name and options that a user wrote.

    The function's parameters after `args` are the options; their annotations give the types. `key` is the dotted name
    of the option that holds the name, such as `model`.

    Raises:
        UserError: an unknown name or option, a missing option, or a value of the wrong type.

    >>> call("model", {"scale": lambda x, by=2: x * by}, "scale", 3, bye=4)
    Traceback (most recent call last):
    ...
    dpfl_lightning.errors.UserError: `model.bye` must be an option of scale (by), got 4. Did you mean `by`?
    """
    require(name in known, f"{key}.name", f"be one of {', '.join(known)}", name, nearest(name, known))
    allowed = {one.name: (hint, one) for hint, one in _parameters(known[name], len(args))}
    takes = ", ".join(allowed) or "it has none"
    for option, value in options.items():
        must, advice = f"be an option of {name} ({takes})", nearest(option, allowed)
        require(option in allowed, f"{key}.{option}", must, value, advice)
        hint = allowed[option][0]
        try:
            converted(hint, value)
        except TypeError:
            raise UserError(f"`{key}.{option}` must be {in_words(hint)}, got {value!r}.") from None
    for option, (_, parameter) in allowed.items():
        given = option in options or parameter.default is not parameter.empty
        require(given, f"{key}.{option}", f"be given for {name}", None)
    return known[name](*args, **options)


def _parameters(function: Callable[..., Any], given: int) -> list[tuple[Any, inspect.Parameter]]:
    """Return annotation and parameter of each option, which follow `given` arguments."""
    hints = get_type_hints(getattr(function, "__init__") if isinstance(function, type) else function)  # noqa: B009
    parameters = list(inspect.signature(function).parameters.values())[given:]
    return [(hints.get(one.name, Any), one) for one in parameters]


# ---- help texts


def help_text(key: str, name: str | None, about: str) -> str:
    """Return the text that `--KEY.help [NAME]` prints: all names and the help of the key, or the options of one name.

    The registry is imported only here, because many registries import torch.

    Raises:
        UserError: `name` is not registered for the key.
    """
    registry = REGISTRIES[key]
    module = importlib.import_module(f"dpfl_lightning.{registry.module}")
    known = getattr(module, registry.functions)() if registry.functions else getattr(module, registry.attribute)
    if name is None:
        width = max(map(len, known))
        lines = [f"{name.ljust(width)}  {_text(one).splitlines()[0]}" for name, one in known.items()]
        return "\n".join(
            [*lines, "", textwrap.fill(f"--{key}.help NAME shows the options of NAME. {key}: {about}", 120)]
        )
    require(name in known, f"--{key}.help", f"be followed by one of {', '.join(known)}", name, nearest(name, known))
    prefix = f"--{key}.{name}" if key == "strategies" else f"--{key}"
    parameters = _parameters(known[name], registry.given)
    width = max((len(one.name) for _, one in parameters), default=0)
    lines = [f"{prefix}.{one.name.ljust(width)}  {in_words(hint)}{_default(one)}" for hint, one in parameters]
    return "\n".join([f"{key} {name}", "", _text(known[name]), "", *(lines or ["It has no options."])])


def _text(function: Callable[..., Any]) -> str:
    return inspect.getdoc(function) or "(no docstring)"


def _default(option: inspect.Parameter) -> str:
    if option.default is option.empty:
        return ", must be given"
    words = {None: "null", True: "true", False: "false"}
    value = option.default
    return f" ({words[value] if value is None or isinstance(value, bool) else value})"
