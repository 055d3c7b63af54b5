"""Reading and writing the YAML of configurations."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dpfl_lightning.config.reading import read_text
from dpfl_lightning.errors import UserError, nearest, shortened

_MOST_BYTES = 4_000_000  # of a file; a list with a value for each of 100,000 clients has 1,000,000
_MOST_VALUES = 1_000_000  # counted once for each alias that repeats them
_DEEPEST = 50


class _Loader(yaml.SafeLoader):
    """YAML loader that also reads numbers such as 1e-4, and raises errors where YAML would silently drop a value."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _check_size(node, {}, 1)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise _error(node, f"a value that cannot be read ({error})") from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _error(key, "a key that is a list or a mapping")
            if key.value in seen:
                raise _error(key, f"the key {key.value} a second time")
            if key.value == "privacy" and value.value == "":
                raise _error(key, "privacy without keys (write `privacy: null` for a run without privacy)")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _check_size(node: yaml.Node, known: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """Return the numbers of values and of levels in a node, each alias of it counted; `known` has those of nodes."""
    if id(node) not in known:
        if depth > _DEEPEST:
            raise _error(node, f"more than {_DEEPEST} levels")
        known[id(node)] = (_MOST_VALUES, _DEEPEST)  # met again below itself, it has no end
        inner = [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else node.value
        below = [_check_size(one, known, depth + 1) for one in inner] if isinstance(node, yaml.CollectionNode) else []
        known[id(node)] = 1 + sum(size for size, _ in below), 1 + max((levels for _, levels in below), default=0)
    size, levels = known[id(node)]
    if size > _MOST_VALUES or levels > _DEEPEST:
        raise _error(node, f"more than {_MOST_VALUES:,} values or {_DEEPEST} levels, or an alias of what contains it")
    return size, levels


def _error(node: yaml.Node, problem: str) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes the texts that `_Loader` would read as numbers."""


for _style in (_Loader, _Dumper):
    _style.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def presets() -> dict[str, Path]:
    """Return the configurations that come with the package, by the name of their file without its ending."""
    return {one.stem: one for one in sorted((Path(__file__).parents[1] / "conf").glob("*.yaml"))}


def read_yaml(path: str) -> Any:
    """Return the content of the file or preset that `--config` names; raises UserError."""
    known = {name: one for one in presets().values() for name in (one.stem, one.name, f"conf/{one.name}")}
    file = known[path] if path in known and not Path(path).is_file() else Path(path)
    near = (
        nearest(path, [*(str(one) for one in Path(path).parent.glob("*.y*ml")), *known])
        if "\0" not in str(path)
        else ""
    )
    return parse_yaml(read_text(file, "--config", _MOST_BYTES, near), path)


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML, or raise UserError if it is not valid or has a key twice. `where` describes the text in messages.

    >>> parse_yaml("{clip_norm: 1e-1}", "--privacy")
    {'clip_norm': 0.1}
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f" on line {mark.line + 1}" if mark is not None else ""
        problem = "too many levels" if isinstance(error, RecursionError) else problem or str(error).splitlines()[0]
        raise UserError(f"`{where}` must be valid YAML, got {shortened(problem)}{line}.") from None


def dump(raw: Mapping[str, Any]) -> str:
    """Return a nested mapping of keys as YAML that `load` can read."""
    return yaml.dump(dict(raw), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110)


def inline(value: Any, unicode: bool = False) -> str:
    """Return a value as YAML on one line, for messages; `unicode` keeps letters of all scripts.

    >>> inline({"name": "iid"}), inline(None), inline(1e-4)
    ('{name: iid}', 'null', '0.0001')
    """
    style: dict[str, Any] = {"default_flow_style": True, "width": 1000, "allow_unicode": unicode}
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, **style).strip()
    return text.removesuffix("...").strip()
