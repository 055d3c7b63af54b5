"""Arrows point down, and each heavy third-party import lives in its one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dpfl_lightning"
FILES = sorted(PACKAGE.rglob("*.py"))

#: part -> parts it may import at run time
ALLOWED = {
    "launcher": set(),
    "stopping": {"launcher"},
    "errors": {"launcher", "stopping"},
    "folders": set(),
    "notice": set(),
    "registry": {"errors"},
    "pages": {"errors"},
    "published": set(),
    "per_client": {"errors", "published", "registry"},
    "options": {"errors", "per_client"},
    "yaml_text": {"errors"},
    "option_help": {"errors", "options", "registry"},
    "config": {"errors", "option_help", "options", "yaml_text"},
    "compiled": {"errors"},
    "privacy": {"compiled", "errors"},
    "client_plan": {"errors", "folders", "notice", "privacy"},
    "data": {"errors", "folders", "registry"},
    "models": {"errors", "registry"},
    "client": {"errors", "privacy", "models"},
    "federated": {
        "errors",
        "launcher",
        "folders",
        "notice",
        "options",
        "per_client",
        "yaml_text",
        "privacy",
        "data",
        "models",
        "client",
        "stopping",
        "strategies",
    },
    "strategies": {"compiled", "errors", "registry", "tables", "privacy", "data", "client", "federated"},
    "watchers": {"errors", "privacy", "federated", "tables"},
    "figures": {"federated"},
    "distilled": {"federated", "tracking"},
    "tables": set(),
    "ledger_report": {"errors", "privacy", "tables"},
    "auditing": {"errors", "options", "tables", "privacy", "data", "client", "federated"},
    "benchmark": {
        "errors",
        "options",
        "pages",
        "tables",
        "privacy",
        "data",
        "models",
        "client",
        "federated",
        "strategies",
    },
    "reproduction": {
        "errors",
        "config",
        "options",
        "pages",
        "published",
        "privacy",
        "data",
        "client",
        "federated",
        "strategies",
        "stopping",
        "tables",
    },
    "search": {
        "errors",
        "config",
        "options",
        "registry",
        "stopping",
        "tables",
        "privacy",
        "data",
        "client",
        "federated",
        "strategies",
        "distilled",
        "yaml_text",
    },
    "tracking": {"errors", "privacy", "federated", "figures"},
}
COMMANDS = {"fit", "evaluate", "plan", "bench", "audit", "reproduce", "sweep"}
ONLY_IN = {
    "mlflow": {"tracking/store.py"},
    "matplotlib": {"figures.py"},
    "optuna": {"search/study.py", "search/samplers.py", "search/storage.py"},
    "numba": {"compiled.py", "privacy/product_loops.py", "privacy/windows.py"},
    "llvmlite": {"privacy/windows.py"},
    "opacus": {
        "privacy/accountant.py",
        "privacy/prv.py",
        "benchmark/contestants.py",
        "benchmark/peer_scripts/flower.py",
    },
    "flwr": {"benchmark/peer_scripts/flower.py"},
    "pfl": {"benchmark/peer_scripts/pfl_research.py"},
    "jsonargparse": {"config.py", "plan.py"},
    "pooch": {"data/sources.py", "folders.py"},
    "rich": {"watchers/progress.py"},
    "torchmetrics": {"federated/evaluation.py"},
    "lightning": {"client.py", "federated/engine.py", "federated/ranks.py"},
}


def imports(path: Path) -> set[str]:
    """Every absolute module name that a file imports, type-checking blocks aside."""
    found = set()
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_down(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part in COMMANDS | {"__init__", "__main__"}:
        return
    used = {name.split(".")[1] for name in imports(path) if name.startswith("dpfl_lightning.")} - {part, "__version__"}
    assert used <= ALLOWED[part], f"{path.name} imports {used - ALLOWED[part]}"


@pytest.mark.parametrize("library", ONLY_IN)
def test_each_library_is_imported_in_its_one_place(library):
    users = {str(p.relative_to(PACKAGE)) for p in FILES if any(n.split(".")[0] == library for n in imports(p))}
    assert users <= ONLY_IN[library]


def test_the_private_core_knows_neither_lightning_nor_data():
    for path in (PACKAGE / "privacy").glob("*.py"):
        heads = {name.split(".")[0] for name in imports(path)}
        assert not heads & {"lightning", "sklearn", "mlflow"}, path.name
