"""A distilled set as an artefact: images, labels, and a card: how they were made, from whom and at what cost."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.runtime.files import write_atomically

TENSORS, CARD = "distilled.pt", "distilled.json"


@dataclass(frozen=True, eq=False)
class DistilledSet:
    """Synthetic records that whoever has them may train on and pass on.

    Args:
        x: `[n, *X]` floating, normalised as the records were that it stands for.
        y: `[n]` int64.
        card: how it was made, from whom, and what the clients were promised; ready for JSON.

    **Privacy** Post-processing of the run's releases: what the card's guarantee says, and nothing more.
    """

    x: Tensor
    y: Tensor
    card: Mapping[str, Any] = field(default_factory=dict)

    @property
    def records(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def save(self, folder: str | Path) -> None:
        """`distilled.pt` (tensors alone, for `torch.load(weights_only=True)`) and `distilled.json` (the card).

        Raises:
            UserError: an image is not finite.
        """
        folder = Path(folder)
        _require_finite(self.x, folder / TENSORS)
        tensors = {"x": self.x.cpu().contiguous(), "y": self.y.cpu().contiguous()}
        path = write_atomically(folder / TENSORS, lambda partial: torch.save(tensors, partial))
        card = {**self.card, "sha256": _digest(path)}
        write_atomically(folder / CARD, lambda partial: partial.write_text(json.dumps(card, indent=2) + "\n"))

    @classmethod
    def load(cls, folder: str | Path) -> DistilledSet:
        """The set of a run's folder, or of any other folder with the two files.

        Raises:
            UserError: there is none, it is damaged, card and images are not of one set, or an image is not finite.
        """
        path, card_path = Path(folder) / TENSORS, Path(folder) / CARD
        must = "be a folder with a distilled set"
        advice = f"A finished run of strategy distillation leaves {TENSORS} and {CARD}."
        require(path.is_file() and card_path.is_file(), "distilled", must, str(folder), advice)
        try:
            tensors, card = torch.load(path, weights_only=True), json.loads(card_path.read_text())
            x, y = tensors["x"], tensors["y"]
            fits = x.is_floating_point() and y.dtype == torch.long and y.shape == x.shape[:1] and card.pop("sha256")
        except (
            RuntimeError,
            EOFError,
            pickle.UnpicklingError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            raise UserError(f"`{path}` must be a distilled set, got a damaged file: {error}.") from None
        require(fits == _digest(path), str(card_path), f"be the card of the {TENSORS} beside it", "that of another set")
        _require_finite(x, path)
        return cls(x, y, card)

    def grid(self, most: int = 10) -> Tensor | None:
        """A picture with a row for each class and at most `most` images in it, `[height, width, 1 or 3]` in [0, 1].

        None for records that are no images of one or three channels. The darkest and the lightest hundredth of all
        values are cut off.
        """
        if self.x.dim() != 4 or self.x.shape[1] not in (1, 3):
            return None
        rows = [self.x[self.y == label][:most] for label in self.y.unique()]
        low, high = torch.quantile(torch.cat(rows).flatten()[: 1 << 24], torch.tensor([0.01, 0.99]).to(self.x)).tolist()
        width = max(map(len, rows))
        lines = []
        for own in rows:
            framed = torch.nn.functional.pad((own - low) / max(high - low, 1e-12), (0, 1, 0, 1), value=1.0)
            blank = framed.new_ones(width - len(framed), *framed.shape[1:])
            lines.append(torch.cat([*framed, *blank], dim=2))
        return torch.cat(lines, dim=1).clamp(0, 1).permute(1, 2, 0).cpu()


def _require_finite(x: Tensor, path: Path) -> None:
    broken = len(x) - int(x.isfinite().flatten(1).all(dim=1).sum())
    advice = "A smaller strategies.distillation.image_learning_rate keeps images finite."
    require(broken == 0, str(path), "hold finite images", f"{broken} of {len(x)} that are not", advice)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
