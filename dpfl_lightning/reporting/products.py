"""What strategies leave in the folder of a run besides models, such as distilled sets: files, figures, next steps."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: the file by which a product is found in a folder -> module with a class `Product` for it, imported only then
PRODUCTS: Mapping[str, str] = {"distilled.json": "dpfl_lightning.papers.sets.product"}


class Product(Protocol):
    """Something public that a run has made; all that it says is post-processing of the run's releases."""

    #: files of the run's folder that trackers get
    files: tuple[str, ...]

    def contents(self) -> str:
        """Return what the files are, in a line."""

    def next_steps(self, folder: Path) -> list[str]:
        """Return commands that use it, each with its purpose."""

    def figures(self, folder: Path) -> Mapping[str, Figure]:
        """Return name -> figure, which carry the guarantee of the run."""


def products_in(folder: Path) -> list[Product]:
    """Return the products of a run's folder."""
    found = [module for file, module in PRODUCTS.items() if (folder / file).is_file()]
    return [importlib.import_module(module).Product() for module in found]
