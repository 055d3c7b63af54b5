"""What importing a node and the core loads, with upper bounds: a site installs and audits this, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rooms import PACKAGE
from test_layers import ASIDE

#: what is imported -> most modules and lines of this package, which later changes may only lower
BOUNDS = {
    "dpfl_lightning": (1, 50),
    "dpfl_lightning.privacy.clipping.checked": (45, 6_700),
    "dpfl_lightning.sites.node.service, dpfl_lightning.sites.node.accept": (143, 23_700),
    "dpfl_lightning.loop": (155, 25_500),
}
#: of extras, or slow: what nobody needs who only imports
NEVER = {"mlflow", "optuna", "plotly", "sklearn", "sqlalchemy", "pooch", "numba", "opacus", "dp_accounting", "pandas"}
_SCRIPT = """
import json, sys
import {names}
files = {{name: module.__file__ for name, module in sys.modules.items() if getattr(module, "__file__", None)}}
print(json.dumps(files))
"""


def loaded(names: str) -> dict[str, str]:
    """Module name -> file, of all that a process has imported that imports these modules alone."""
    text = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(names=names)], capture_output=True, text=True, check=True
    )
    return json.loads(text.stdout)


@pytest.mark.parametrize("names", BOUNDS)
def test_imports_load_little(names):
    files = loaded(names)
    ours = {name: Path(file) for name, file in files.items() if name.partition(".")[0] == PACKAGE.name}
    lines = sum(len(file.read_text().splitlines()) for file in ours.values())
    modules, most = BOUNDS[names]
    assert len(ours) <= modules and lines <= most, f"{len(ours)} modules, {lines} lines"
    assert not NEVER & {name.partition(".")[0] for name in files}
    assert not [
        name for name in ours if name.removeprefix(f"{PACKAGE.name}.").startswith(tuple(f"{one}." for one in ASIDE))
    ]
