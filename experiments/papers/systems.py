"""Every system, baseline and mode that the papers name: as options of a run, and one round of each."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfl_lightning.commands.fit import fit
from dpfl_lightning.config.load import load
from dpfl_lightning.config.options import Options
from dpfl_lightning.config.yaml_text import inline, read_yaml
from dpfl_lightning.errors import UserError, UserNotice, require, require_one_of
from experiments.pages import markdown

FILE = Path(__file__).parent / "systems.yaml"
PACKAGE = Path(__file__).parents[2] / "dpfl_lightning"
STEPS = ("printed", "released", "sound", "ours")


@dataclass(frozen=True)
class System:
    """A system of a paper; see the head of `systems.yaml`. `base` are options that all systems share."""

    paper: str
    name: str
    where: str
    file: str
    steps: str
    options: Mapping[str, Any]
    base: Mapping[str, Any]
    differs: str = ""

    def loaded(self, folder: Path) -> Options:
        """Return the options of its run. Raises UserError for an option or strategy that does not exist."""
        keys = {**self.base, **self.options, "output_dir": str(folder)}
        return load([f"--{key}={inline(value)}" for key, value in keys.items()])[0]


def systems() -> list[System]:
    """Return the systems of `systems.yaml`. Raises UserError for a field, a kind of steps or a file that is unknown."""
    text = read_yaml(str(FILE))
    listed = [System(base=text["base"], **one) for one in text["systems"]]
    for one in listed:
        require_one_of(STEPS, f"{one.name}.steps", one.steps)
        require((PACKAGE / one.file).is_file(), f"{one.name}.file", "be a file of dpfl_lightning", one.file)
    return listed


def trained(listed: Sequence[System]) -> Iterator[tuple[System, str]]:
    """Yield each system with the first sentence of its guarantee after a run, or with FAILED and the reason."""
    for one in listed:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserNotice)
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    result = fit(one.loaded(Path(folder) / "run"), detail="silent")
                yield one, str(result.guarantee).partition(". ")[0]
            except UserError as error:
                yield one, f"FAILED: {error}"


def section(paper: str) -> str:
    """Return the systems of a paper as a table of docs/papers.md."""
    rows = [
        [one.name, one.where, one.steps, f"`{_named(one)}`", f"`{one.file}`", one.differs or "-"]
        for one in systems()
        if one.paper == paper
    ]
    return markdown(
        ["system", "in the paper", "steps", "options", "below `dpfl_lightning/`", "other than printed"], rows
    )


def _named(system: System) -> str:
    """The options that make it this system."""
    shown = {key: value for key, value in system.options.items() if key not in ("rounds", "data.groups")}
    return inline(shown)[1:-1]
