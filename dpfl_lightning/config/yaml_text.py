"""Reading and writing the YAML of configurations."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dpfl_lightning.errors import UserError, nearest


class _Loader(yaml.SafeLoader):
    """YAML loader that also reads numbers such as 1e-4, and raises errors where YAML would silently drop a value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                raise _error(key, f"the key {key.value} a second time")
            if key.value == "privacy" and value.value == "":
                raise _error(key, "privacy without keys (write `privacy: null` for a run without privacy)")
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


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
    file = known[path] if path in known and not Path(path).exists() else Path(path)
    try:
        return parse_yaml(file.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        near = nearest(path, [*(str(one) for one in Path(path).parent.glob("*.y*ml")), *known])
        message = f"`--config` must be a file that can be read, got {path!r}: {reason}. {near}"
        raise UserError(message.rstrip()) from None


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML, or raise UserError if it is not valid or has a key twice. `where` describes the text in messages.

    >>> parse_yaml("{clip_norm: 1e-1}", "--privacy")
    {'clip_norm': 0.1}
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f" on line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"`{where}` must be valid YAML, got {problem or error}{line}.") from None


def dump(raw: Mapping[str, Any]) -> str:
    """Return a nested mapping of keys as YAML that `load` can read."""
    return yaml.dump(dict(raw), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110)


def inline(value: Any) -> str:
    """Return a value as YAML on one line, for messages.

    >>> inline({"name": "iid"}), inline(None), inline(1e-4)
    ('{name: iid}', 'null', '0.0001')
    """
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=1000).strip()
    return text.removesuffix("...").strip()
