"""Imports point from higher floors to lower ones, and each third-party library is imported in one place."""

import ast
from graphlib import TopologicalSorter

import pytest
from rooms import PACKAGE, ROOT, arrows, imported, sources

#: rooms from top to bottom; a room imports from floors below its own only
FLOORS = (
    ("commands",),
    ("search", "auditing"),
    ("sites.node", "sites.server"),
    ("loop", "papers"),
    ("build", "papers.baselines"),
    ("papers.clustered", "papers.distillation", "papers.robust_hdp", "papers.selection"),
    ("papers.sets",),
    ("federated.transport", "reporting", "strategies"),
    ("federated.client", "strategies.clustering", "strategies.selection"),
    ("data", "strategies.aggregation"),
    ("federated.server", "algorithms", "sites"),
    ("federated.messages",),
    ("models",),
    ("privacy.ledger",),
    ("privacy",),
    ("kernels",),
    ("privacy.accounting", "privacy.clipping"),
    ("config",),
    ("errors",),
    ("runtime",),
)
#: rooms that a reader of a run may ignore; what is in them is found by a name, and imported by nothing else
ASIDE = ("papers", "search", "auditing", "kernels")
#: the server's side sees messages only
SERVER_SIDE = ("strategies", "papers.", "federated.server", "reporting")
CLIENT_SIDE = ("federated.client", "federated.transport", "sites", "data", "privacy.ledger")
ONLY_IN = {
    "mlflow": {"reporting.mlflow.store", "reporting.mlflow.models"},
    "jinja2": {"reporting.guarantee_page", "reporting.report_page", "reporting.site_page", "papers.sets.cards"},
    "matplotlib": {"reporting.charts", "reporting.figures", "reporting.products", "papers.sets.product"},
    "optuna": {"search.study", "search.samplers", "search.storage"},
    "numba": {
        "privacy.clipping.compiled",
        "kernels.dense_loops",
        "kernels.pool_loops",
        "privacy.clipping.product_loops",
        "kernels.windows",
    },
    "llvmlite": {"kernels.dense_loops", "kernels.pool_loops", "kernels.windows"},
    "opacus": {"privacy.accounting.events", "models"},
    "dp_accounting": {"privacy.accounting.losses"},
    "pandas": {"data.columns", "data.frames", "data.look", "data.own_files"},
    "PIL": {"data.pixels"},
    "cryptography": {"privacy.noise", "sites.receipt"},
    "pooch": {"data.sources", "runtime.files"},
    "rich": {"reporting.progress", "reporting.terminal"},
    "torchmetrics": {
        "federated.client.metrics",
        "federated.client.own_metrics",
        "federated.client.lightning_hooks",
        "federated.client.lightning_loss",
    },
    "lightning": {
        "loop",
        "papers.distilled_data",
        "reporting.loggers",
        "federated.client.module",
        "federated.client.identity",
        "federated.client.lightning_hooks",
        "federated.client.lightning_loss",
        "federated.client.engines.trainer",
        "federated.transport.ranks",
    },
}


@pytest.mark.e2e
def test_every_room_has_its_floor():
    rooms = {room for pair in arrows() for room in pair}
    assert rooms == {room for floor in FLOORS for room in floor}


def test_imports_point_down():
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    upward = {pair: users for pair, users in arrows().items() if floor_of[pair[0]] >= floor_of[pair[1]]}
    assert upward == {}


def test_the_core_imports_no_room_aside():
    users = {pair: found for pair, found in arrows().items() if pair[1].startswith(ASIDE)}
    assert {pair for pair in users if not pair[0].startswith((*ASIDE, "commands"))} == set()


def test_the_servers_side_does_not_import_the_clients_side():
    crossing = {
        pair: users
        for pair, users in arrows().items()
        if pair[0].startswith(SERVER_SIDE) and pair[1].startswith(CLIENT_SIDE)
    }
    assert crossing == {}


#: registries, whose tables name modules of this package
BY_TEXT = {f"{PACKAGE.name}.{name}" for name in ("strategies", "reporting.products")}


def test_the_servers_side_imports_nothing_by_a_text():
    for name, path in sources().items():
        if name.removeprefix(f"{PACKAGE.name}.").startswith(SERVER_SIDE) and name not in BY_TEXT:
            names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
            by_text = {"importlib", "importlib.import_module", f"{PACKAGE.name}.config.registry.imported"}
            assert not by_text & set(imported(path)) and "__import__" not in names, name


def test_names_that_the_package_exports_count_as_imports_of_their_modules(tmp_path):
    file = tmp_path / "some.py"
    file.write_text("from dpfl_lightning import Population")
    assert imported(file) == ("dpfl_lightning.data.Population",)
    (other := tmp_path / "other.py").write_text("from .data import Population")
    with pytest.raises(ValueError, match="whole name"):
        imported(other)


@pytest.mark.parametrize("folder", ["dpfl_lightning", "experiments"])
def test_no_modules_import_each_other_in_a_circle(folder):
    modules = {name: path for top in ("dpfl_lightning", "experiments") for name, path in sources(ROOT / top).items()}
    sorter = TopologicalSorter()
    for name, path in modules.items():
        used = {one if one in modules else one.rpartition(".")[0] for one in imported(path)}
        if name.startswith(folder):
            sorter.add(name, *(one for one in used if one.startswith(folder) and one in modules and one != name))
    sorter.prepare()  # raises CycleError


def test_each_library_is_imported_in_one_place():
    libraries = {name: {one.split(".")[0] for one in imported(path)} for name, path in sources().items()}
    for library, places in ONLY_IN.items():
        users = {name for name, used in libraries.items() if library in used}
        assert users <= {f"{PACKAGE.name}.{place}" for place in places}, library
    core = {name: used for name, used in libraries.items() if name.startswith(f"{PACKAGE.name}.privacy")}
    assert core and not {name for name, used in core.items() if used & {"lightning", "sklearn", "mlflow"}}


def test_the_page_lists_the_floors():
    lines = [f"{number}. `{'`, `'.join(floor)}`" for number, floor in enumerate(FLOORS, 1)]
    floors = "\n".join(lines)
    assert floors in (ROOT / "docs" / "architecture.md").read_text(), f"write the list anew:\n{floors}"
