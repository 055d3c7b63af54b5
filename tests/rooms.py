"""The rooms of the package and the imports between them, read from the source without importing anything."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dpfl_lightning"
#: folders that hold several rooms, one for each folder in them
DIVIDED = ("privacy", "federated", "sites", "strategies", "papers")


def sources(package: Path = PACKAGE) -> dict[str, Path]:
    """Module name -> file, of the whole package."""
    files = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join((package.name, *path.relative_to(package).with_suffix("").parts))
        files[name.removesuffix(".__init__")] = path
    return files


def room_of(module: str, package: Path = PACKAGE) -> str:
    """The room that a module of the package is in.

    >>> [room_of(f"dpfl_lightning.{name}") for name in ("data.groups", "privacy.ledger.file", "errors", "fit")]
    ['data', 'privacy.ledger', 'errors', 'commands']
    """
    parts = module.split(".")[1:]
    if not parts:
        return ""
    if parts[0] in DIVIDED and len(parts) > 1 and (package / parts[0] / parts[1]).is_dir():
        return ".".join(parts[:2])
    if (package / parts[0]).is_dir() or parts[0] in ("errors", "build", "loop"):
        return parts[0]
    return "commands"


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """Every absolute module name that a file imports, at its top, in a function or for type checkers."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level or not node.module:
                raise ValueError(f"{path} line {node.lineno}: write the whole name of the module")
            homes = _homes() if node.module == PACKAGE.name else {}
            yield from (f"{homes.get(alias.name, node.module)}.{alias.name}" for alias in node.names)


@functools.cache
def _homes() -> dict[str, str]:
    """Name that the package itself exports -> the module that it comes from."""
    assigned = (node for node in ast.parse((PACKAGE / "__init__.py").read_text()).body if isinstance(node, ast.Assign))
    homes = next(ast.literal_eval(node.value) for node in assigned if ast.unparse(node.targets[0]) == "_HOME")
    return {name: f"{PACKAGE.name}.{home}" for name, home in homes.items()}


def arrows(package: Path = PACKAGE) -> dict[tuple[str, str], list[str]]:
    """(room, room that it imports from) -> the modules that do so."""
    known = sources(package)
    users_of: dict[tuple[str, str], list[str]] = {}
    for module, path in known.items():
        for name in imported(path):
            target = name if name in known else name.rpartition(".")[0]
            if target in known and (rooms := (room_of(module, package), room_of(target, package)))[0] != rooms[1]:
                users_of.setdefault(rooms, []).append(module)
    return {rooms: users for rooms, users in users_of.items() if all(rooms)}
