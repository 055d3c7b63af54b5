"""Names that configurations use: their help, and calls of the functions that they stand for."""

import ast
import contextlib
import functools
import importlib
import inspect
import os
import pkgutil
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from dpfl_lightning.config.typed import in_words, options_of, valid
from dpfl_lightning.errors import UserError, nearest, require, require_one_of, shortened

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
    "clients.optimizer": Registry("models.optimizers", "OPTIMIZERS", 0),
    "clients.schedule": Registry("models.learning_rates", "SCHEDULES", 0),
    "data.partition": Registry("data.partition", "PARTITIONS", 3),
    "data.groups": Registry("data.groups", "GROUPS", 3),
    "data.label_noise": Registry("data.groups", "UNITS", 2),
    "evaluation.fairness": Registry("federated.client.fairness", "FAIRNESS", 0, "classes"),
}
#: other keys that accept names -> module and attribute of the mappings whose keys are the names
NAMES = {
    "data.name": [("data.sources", "SOURCES"), ("data.datasets", "BUILT_IN"), ("data.own_files", "READERS")],
    "engine.name": [("build", "ENGINES")],
    "task": [("models.tasks", "TASKS")],
    "evaluation.metrics": [("federated.client.metrics", "METRICS")],
    "privacy.mechanism": [("privacy.accounting.events", "NOISED")],
    "privacy.accountant": [("privacy.accounting.accountant", "ACCOUNTANTS")],
    "privacy.unit": [("privacy.accounting.units", "UNITS")],
    "sweep.sampler": [("search.samplers", "SAMPLERS")],
    "sweep.pruner": [("search.samplers", "PRUNERS")],
}


#: keys that accept a user's class as package.module.Class beside names -> what the class derives from
USERS = {"strategies": "Strategy", "evaluation.metrics": "torchmetrics.Metric"}


@functools.cache
def names_of(key: str) -> list[str]:
    """Return the names that a key accepts; empty if it accepts no names.

    They are read from the source of the registries, because importing these would import torch.

    >>> names_of("data.groups")
    ['rotation', 'label_shift']
    """
    registries = [REGISTRIES[key][:2]] if key in REGISTRIES else NAMES.get(key, [])
    return [name for module, attribute in registries for name in _keys_in(module, attribute)]


def check_names(key: str, value: Any) -> None:
    """Raise UserError if the value of a key contains an unknown name. The registries themselves are not imported.

    >>> check_names("data.partition", {"name": "idd"})
    Traceback (most recent call last):
    ...
    dpfl_lightning.errors.UserError: `data.partition.name` must be one of iid, stratified, dirichlet, shards, sizes, \
overlapping, got 'idd'. Did you mean `iid`?
    """
    known = names_of(key)
    if key in USERS:
        must = f"name one of {', '.join(known)}, or a user-defined {USERS[key]} as package.module.Class"
        for name in (given for given in value if isinstance(given, str)):
            require(name in known or "." in name, key, must, name, nearest(name, known))
    elif known and isinstance(value, Mapping) and "name" in value:
        require_one_of(known, f"{key}.name", value["name"])


def _keys_in(module: str, attribute: str) -> list[str]:
    place = Path(__file__).parents[1].joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id == attribute:
                return [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    raise LookupError(f"{file} has no registry {attribute}")


def call(key: str, known: Mapping[str, Callable[..., T]], name: str, /, *args: Any, **options: Any) -> T:
    """Return `known[name](*args, **options)`, for a name and options that a user wrote below the dotted `key`.

    The function's parameters after `args` are the options; their annotations give types and bounds. Raises UserError.

    >>> call("model", {"scale": lambda x, by=2: x * by}, "scale", 3, bye=4)
    Traceback (most recent call last):
    ...
    dpfl_lightning.errors.UserError: `model.bye` must be an option of scale (by), got 4. Did you mean `by`?
    """
    require_one_of(known, f"{key}.name", name)
    allowed = {one.name: (hint, one) for hint, one in _parameters(known[name], len(args))}
    for option, value in options.items():
        _require_known(key, option, value, f"option of {name}", allowed)
        valid(f"{key}.{option}", value, allowed[option][0])
    for option, (_, parameter) in allowed.items():
        given = option in options or parameter.default is not parameter.empty
        require(given, f"{key}.{option}", f"be given for {name}", None)
    return known[name](*args, **options)


def _require_known(key: str, name: str, value: object, what: str, known: Iterable[str]) -> None:
    """Raise UserError unless the option or argument `name` below `key` is one of the `known` ones."""
    listed = list(known)
    must = f"be an {what} ({', '.join(listed) or 'it has none'})"
    require(name in listed, f"{key}.{name}", must, value, nearest(name, listed))


def build_object(key: str, given: Mapping[str, Any], base: type[T], **usual: Any) -> T:
    """Return the object of `{class_path, init_args}` below `key`, of a class that derives from `base`.

    `usual` are arguments that the class gets if it takes them. Raises UserError.
    """
    keys = "have a class_path and init_args alone"
    require("class_path" in given and given.keys() <= {"class_path", "init_args"}, key, keys, dict(given))
    path, arguments = str(given["class_path"]), given.get("init_args") or {}
    require(isinstance(arguments, Mapping), f"{key}.init_args", "be a mapping", arguments)
    takes = inspect.signature(imported(f"{key}.class_path", path, base)).parameters
    try:
        made: T = made_by(key, path, {**{name: one for name, one in usual.items() if name in takes}, **arguments})
    except UserError:
        raise
    except (ImportError, TypeError, ValueError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        raise UserError(f"`{key}` must work, got from {path}: {type(error).__name__}: {reason}.") from None
    return made


def imported(key: str, class_path: str, base: type[T]) -> type[T]:
    """Return the class package.module.Class that `key` names, or raise UserError unless it derives from `base`."""
    kind = _imported(key, class_path)
    fits = inspect.isclass(kind) and issubclass(kind, base)
    require(fits, key, f"be a class that derives from {base.__name__}", class_path)
    return kind


def made_by(section: str, class_path: str, init_args: Mapping[str, Any]) -> Any:
    """Return what the class, function or class method `class_path` returns for the arguments `init_args`.

    Raises UserError if it cannot be imported or does not take these arguments.
    """
    function, key = function_of(f"{section}.class_path", class_path), f"{section}.init_args"
    signature = inspect.signature(function)
    takes = {name: one for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD}
    others = [name for name in init_args if name not in takes]
    for name in others if len(takes) == len(signature.parameters) else ():
        _require_known(key, name, init_args[name], f"argument of {class_path}", takes)
    for name, one in takes.items():
        given = name in init_args or one.default is not one.empty or one.kind is one.VAR_POSITIONAL
        near = nearest(name, others)
        advice = f"Is it {near.split('`')[1]!r}?" if near else ""
        require(given, f"{key}.{name}", f"be given for {class_path}", None, advice)
    try:
        signature.bind(**init_args)
    except TypeError as error:
        raise UserError(f"`{key}` must fit {class_path}, got {shortened(repr(dict(init_args)))}: {error}.") from None
    with users_code(f"{section}.class_path", class_path):
        return function(**init_args)


@contextlib.contextmanager
def users_code(key: str, class_path: str) -> Iterator[None]:
    """Turn an exception in the user's code, which `class_path` names, into a UserError with its file and line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        frame = users_frame(error)
        if frame is None and not isinstance(error, SyntaxError):
            raise  # not an error of the user's code
        where = "" if frame is None else f" ({frame.filename}, line {frame.lineno})"
        words = f"{type(error).__name__}: {error}".rstrip(".")
        raise UserError(f"`{key}` must work, got from {class_path}: {words}{where}.") from error


def users_frame(error: Exception) -> traceback.FrameSummary | None:
    """Return the last line of the user's code that an exception went through."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if _is_users(one.filename)]
    return frames[-1] if frames else None


def _is_users(file: str) -> bool:
    libraries = [str(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    libraries.append(str(Path(__file__).parents[1]))
    return not any(Path(file).is_relative_to(folder) for folder in libraries) and not file.startswith("<")


def function_of(key: str, path: str) -> Callable[..., Any]:
    """Return the class or function that `key` names. Raises UserError if it cannot be imported, or is neither."""
    function = _imported(key, path)
    require(callable(function), key, "be a class or a function", path)
    return function  # type: ignore[no-any-return]


def _imported(key: str, path: str) -> Any:
    if os.getcwd() not in sys.path:  # where `python -m` finds modules, and the command `dpfl` does not
        sys.path.insert(0, os.getcwd())
    try:
        with users_code(key, path):
            return pkgutil.resolve_name(path)
    except UserError:
        raise
    except (ImportError, AttributeError, ValueError) as error:
        module, _, name = path.rpartition(".")
        near = nearest(name, vars(sys.modules[module])) if module in sys.modules else ""
        advice = near or "Is it in the working directory or on PYTHONPATH?"
        got = f"{shortened(repr(path))}: {shortened(str(error))}"
        raise UserError(f"`{key}` must be importable, got {got}. {advice}") from None


def _parameters(function: Callable[..., Any], given: int) -> list[tuple[Any, inspect.Parameter]]:
    """Return annotation and parameter of each option, which follow `given` arguments."""
    owner: Any = function
    if isinstance(function, type):
        owner = next(kind for kind in function.__mro__ if "__init__" in vars(kind))
    if "__dataclass_fields__" in getattr(owner, "__dict__", ()):
        hints = options_of(owner)
    else:
        hints = get_type_hints(vars(owner)["__init__"] if isinstance(owner, type) else owner, include_extras=True)
    parameters = list(inspect.signature(function).parameters.values())[given:]
    return [(hints.get(one.name, Any), one) for one in parameters]


# ---- help texts


def help_text(key: str, name: str | None, about: str) -> str:
    """Return the text of `--KEY.help [NAME]`: all names and the help of the key, or the options of one name."""
    registry = REGISTRIES[key]  # imported only here, because many registries import torch
    module = importlib.import_module(f"dpfl_lightning.{registry.module}")
    known = getattr(module, registry.functions)() if registry.functions else getattr(module, registry.attribute)
    given, prefix = registry.given, f"--{key}"
    if name is not None and "." in name and key in ("strategies", "model"):
        known, given = {name: function_of(f"{key}.help", name)}, 0
        prefix = f"--{key}" if key == "strategies" else f"--{key}.init_args"
    if name is None:
        width = max(map(len, known))
        lines = [
            textwrap.fill(f"{name.ljust(width)}  {_text(one).splitlines()[0]}", 80, subsequent_indent=" " * (width + 2))
            for name, one in known.items()
        ]
        about = textwrap.fill(f"--{key}.help NAME shows the options of NAME. {key}: {about}", 80)
        return "\n".join([*lines, "", about])
    require(name in known, f"--{key}.help", f"be followed by one of {', '.join(known)}", name, nearest(name, known))
    prefix += f".{name}" if key == "strategies" else ""
    options = options_in_words(known[name], given)
    width = max(map(len, options), default=0)
    texts = [f"{prefix}.{option.ljust(width)}  {words}" for option, words in options.items()]
    lines = [textwrap.fill(text, 80, subsequent_indent=" " * 8, break_on_hyphens=False) for text in texts]
    return "\n".join([f"{key} {name}", "", _refilled(_text(known[name])), "", *(lines or ["It has no options."])])


def options_in_words(function: Callable[..., Any], given: int = 0) -> dict[str, str]:
    """Return name -> type, bounds and default of each option, which follow `given` arguments."""
    return {one.name: f"{in_words(hint)}{_default(one)}" for hint, one in _parameters(function, given)}


def _text(function: Callable[..., Any]) -> str:
    """Return the docstring. Options that only base classes of a class describe come first in its `Args`."""
    text = inspect.getdoc(function) or "(no docstring)"
    here = described(text)
    options = {one.name for _, one in _parameters(function, 0)} - here.keys()
    bases = reversed(function.__mro__[1:]) if isinstance(function, type) else ()
    there = {name: words for base in bases for name, words in described(inspect.getdoc(base) or "").items()}
    args = [words for name, words in there.items() if name in options]
    if args and not here:
        text += "\n\nArgs:\n"
    return text.replace("Args:\n", "\n".join(["Args:", *args, ""]), 1).rstrip()


def _refilled(text: str, width: int = 80) -> str:
    """Wrap the paragraphs, lists and `Args` of a docstring again; examples and tables stay as they are.

    >>> print(_refilled("One two\\nthree.\\n\\nArgs:\\n    a: four five\\n        six.\\n    b: seven.", 14))
    One two three.
    <BLANKLINE>
    Args:
        a: four
            five
            six.
        b: seven.
    """
    blocks = []
    for block in text.split("\n\n"):
        if not re.search(r"^\s*(>>>|\|)", block, re.MULTILINE):
            lines = re.sub(r"\n( {8,}|  )?(?=[^\s*])", " ", block).splitlines()
            block = "\n".join(_wrapped(line, width) for line in lines)
        blocks.append(block)
    return "\n\n".join(blocks)


def _wrapped(line: str, width: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    hanging = indent + "    " if indent else "  " if line.startswith("* ") else ""
    return textwrap.fill(line.strip(), width, initial_indent=indent, subsequent_indent=hanging)


def described(text: str) -> dict[str, str]:
    """Return the lines of a docstring's `Args` that describe each argument."""
    section = text.partition("Args:\n")[2].partition("\n\n")[0]
    return {match[1]: match[0] for match in re.finditer(r"^    (\w+): .*(?:\n {8}.*)*", section, re.MULTILINE)}


def _default(option: inspect.Parameter) -> str:
    if option.default is option.empty:
        return ", must be given"
    words = {None: "null", True: "true", False: "false"}
    value = option.default
    return f" ({words[value] if value is None or isinstance(value, bool) else value})"
