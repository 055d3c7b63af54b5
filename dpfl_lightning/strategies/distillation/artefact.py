"""A distilled set as an artefact: images, labels, and a card that describes their origin and privacy cost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.config.reading import read_json, read_tensors
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.runtime.files import save_tensors, write_atomically, write_text

TENSORS, CARD = "distilled.pt", "distilled.json"


@dataclass(frozen=True, eq=False)
class DistilledSet:
    """Synthetic images, normalised as the records that they represent, with labels and a card (JSON).

    **Privacy** Post-processing of the run's releases. The guarantee is the one on the card, and nothing more.
    """

    x: Tensor  # [n, *X], floating point
    y: Tensor  # [n], int64
    card: Mapping[str, Any] = field(default_factory=dict)

    @property
    def records(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def save(self, folder: str | Path) -> None:
        """Write `distilled.pt` (only tensors, for `torch.load(weights_only=True)`) and `distilled.json` (the card)."""
        folder = Path(folder)
        _require_finite(self.x, folder / TENSORS)
        tensors = {"x": self.x.cpu().contiguous(), "y": self.y.cpu().contiguous()}
        path = write_atomically(folder / TENSORS, lambda partial: save_tensors(tensors, partial))
        card = {**self.card, "sha256": _digest(path)}
        write_text(folder / CARD, json.dumps(card, indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> DistilledSet:
        """Load the set from a folder; raises UserError if a file is missing, damaged or of another set."""
        path, card_path = Path(folder) / TENSORS, Path(folder) / CARD
        must = "be a folder with a distilled set"
        advice = f"A finished run of strategy distillation writes {TENSORS} and {CARD}."
        require(path.is_file() and card_path.is_file(), "distilled", must, str(folder), advice)
        try:
            tensors, card = read_tensors(path), read_json(card_path)
            x, y = tensors["x"], tensors["y"]
            fits = x.is_floating_point() and y.dtype == torch.long and y.shape == x.shape[:1] and card.pop("sha256")
        except (KeyError, AttributeError, TypeError) as error:
            raise UserError(f"`{path}` must be a distilled set, got a damaged file: {error}.") from None
        must = f"be the card of {TENSORS} in this folder"
        require(fits == _digest(path), str(card_path), must, "that of another set")
        _require_finite(x, path)
        return cls(x, y, card)

    def grid(self, most: int = 10) -> Tensor | None:
        """Return a picture `[height, width, 1 or 3]` in [0, 1], with a row of at most `most` images for each class.

        None if there are not one or three channels.
        """
        if self.x.dim() != 4 or self.x.shape[1] not in (1, 3):
            return None
        rows = [self.x[self.y == label][:most] for label in self.y.unique()]
        low, high = torch.quantile(torch.cat(rows).flatten()[: 1 << 24], torch.tensor([0.01, 0.99]).to(self.x)).tolist()
        width = max(map(len, rows))
        lines = []
        for images in rows:
            framed = torch.nn.functional.pad((images - low) / max(high - low, 1e-12), (0, 1, 0, 1), value=1.0)
            blank = framed.new_ones(width - len(framed), *framed.shape[1:])
            lines.append(torch.cat([*framed, *blank], dim=2))
        return torch.cat(lines, dim=1).clamp(0, 1).permute(1, 2, 0).cpu()


def _require_finite(x: Tensor, path: Path) -> None:
    broken = len(x) - int(x.isfinite().flatten(1).all(dim=1).sum())
    advice = "A smaller strategies.distillation.image_learning_rate keeps images finite."
    require(broken == 0, str(path), "hold finite images", f"{broken} of {len(x)} that are not finite", advice)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
