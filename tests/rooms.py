"""The rooms of the package and the imports between them, read from the source without importing anything.

`python tests/rooms.py --page docs/architecture.md` draws them into that page.
"""

import argparse
import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dpfl_lightning"
#: folders that hold several rooms, one for each folder in them
DIVIDED = ("privacy", "federated", "sites", "strategies")


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
    if (package / parts[0]).is_dir() or parts[0] in ("errors", "build", "distilled"):
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


def drawing(floors: tuple[tuple[str, ...], ...]) -> str:
    """A Mermaid drawing: floors from top to bottom, and every arrow that no other path of arrows implies."""
    below: dict[str, set[str]] = {}
    for user, used in arrows():
        below.setdefault(user, set()).add(used)

    def reach(room: str) -> set[str]:
        return set().union(*({one} | reach(one) for one in below.get(room, ())))

    lines = ["```mermaid", "flowchart TD"]
    for number, floor in enumerate(floors):
        lines += [f"  subgraph floor{number}[ ]", *(f'    {_id(room)}["{room}"]' for room in floor), "  end"]
    for room in (one for floor in floors for one in floor):
        direct = below.get(room, set())
        implied = set().union(*(reach(one) for one in direct)) if direct else set()
        lines += [f"  {_id(room)} --> {_id(used)}" for used in sorted(direct - implied)]
    return "\n".join([*lines, "```"])


def _id(room: str) -> str:
    return room.replace(".", "_")


def main() -> int:
    """Draw the rooms into a page."""
    sys.path.insert(0, str(ROOT))  # a script's path holds its folder only
    from test_layers import FLOORS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, required=True)
    page = parser.parse_args().page
    before, opening, rest = page.read_text().partition("<!-- rooms: written by the command -->\n")
    _, closing, after = rest.partition("<!-- /rooms -->")
    page.write_text(f"{before}{opening}{drawing(FLOORS)}\n{closing}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
