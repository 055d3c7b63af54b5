"""A distilled set as a torch Dataset and as files: images, labels, and a card of their origin and privacy cost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import dpfl_lightning
from dpfl_lightning.config.reading import check_format, expecting, read_json, read_safetensors
from dpfl_lightning.errors import require
from dpfl_lightning.runtime.files import write_safetensors, write_text

#: images and labels, the card for programs, and the data card for people
TENSORS, CARD, DATA_CARD = "distilled.safetensors", "distilled.json", "distilled.md"

_FORMAT = 1  # of the two files
_OF_CARD = "card_sha256"  # key of the digest of all other keys


@dataclass(frozen=True, eq=False)
class DistilledSet(Dataset[tuple[Any, int]]):
    """Synthetic images with labels, as a map-style Dataset of pairs (image `[*X]`, label), and a card (JSON).

    Images are normalised as the records that they represent (`origin` of the card). `transform` is applied to each
    image that is read by its index, not to `x`.

    **Privacy** Post-processing of the run's releases. The guarantee is the one on the card, and nothing more.
    """

    x: Tensor  # [n, *X], floating point
    y: Tensor  # [n], int64
    card: Mapping[str, Any] = field(default_factory=dict)
    transform: Callable[[Tensor], Any] | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.card, Mapping), "card", "be a mapping", self.card)
        for name in ("origin", "data"):
            value = self.card.get(name)
            require(value is None or isinstance(value, Mapping), f"card.{name}", "be a mapping", value)
        require(len(self.x) == len(self.y), "y", f"have a label for each of {len(self.x)} images", len(self.y))

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.x[index]
        return image if self.transform is None else self.transform(image), int(self.y[index])

    @property
    def records(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def save(self, folder: str | Path, key: str = "") -> None:
        """Write `distilled.safetensors` and `distilled.json` (the card).

        `key` is that of the strategy's options, for an error.
        """
        folder = Path(folder)
        _require_finite(self.x, folder / TENSORS, key)
        folder.mkdir(parents=True, exist_ok=True)
        code = {"class_path": "dpfl_lightning.load_distilled", "dpfl_lightning": dpfl_lightning.__version__}
        path = write_safetensors(folder / TENSORS, {"x": self.x, "y": self.y}, code)
        card = {"format": _FORMAT, **json.loads(json.dumps(self.card)), "sha256": _digest(path)}
        write_text(folder / CARD, json.dumps({**card, _OF_CARD: _card_digest(card)}, indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path, transform: Callable[[Tensor], Any] | None = None) -> DistilledSet:
        """Load the set from a folder; raises UserError if a file is missing, damaged or of another set."""
        folder = Path(folder)
        path, card_path = folder / TENSORS, folder / CARD
        advice = f"A finished run of strategy distillation or feature_means writes {TENSORS} and {CARD}."
        got = f"{folder}, which is " + ("a file" if folder.is_file() else "no folder")
        require(folder.is_dir(), "distilled", "be the folder of a distilled set", got, advice)
        missing = [one.name for one in (path, card_path) if not one.is_file()]
        got = f"{folder}, which lacks {' and '.join(missing)}"
        require(not missing, "distilled", "be the folder of a distilled set", got, advice)
        again = f"Copy {TENSORS} and {CARD} of the run again."
        card = read_json(card_path, advice=again)
        is_card = {"sha256", _OF_CARD} <= card.keys()
        require(is_card, str(card_path), "be the card of a distilled set", "another file", again)
        check_format(card_path, card.get("format"), _FORMAT)
        unchanged = card.pop(_OF_CARD) == _card_digest(card)
        must = f"be the file that {CARD} describes"
        require(card.pop("sha256") == _digest(path), str(path), must, "a damaged file, or that of another set", again)
        require(unchanged, str(card_path), "be as it was written", "a changed card", again)
        del card["format"]
        with expecting(path, "hold the tensors x and y of a distilled set", again):
            tensors, _ = read_safetensors(path, advice=again)
            x, y = tensors["x"], tensors["y"]
            fits = x.is_floating_point() and y.dtype == torch.long and y.shape == x.shape[:1]
        must, got = "hold floating x [n, ...] and int64 y [n]", f"{x.dtype} {[*x.shape]} and {y.dtype} {[*y.shape]}"
        require(fits, str(path), must, got)
        _require_finite(x, path)
        return cls(x, y, card, transform)

    def grid(self, most: int = 10) -> Tensor | None:
        """Return a picture `[height, width, 1 or 3]` in [0, 1], with a row of at most `most` images for each class.

        None if there is no image, or not one or three channels.
        """
        if self.x.dim() != 4 or self.x.shape[1] not in (1, 3) or not len(self.x):
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


def _require_finite(x: Tensor, path: Path, key: str = "") -> None:
    broken = len(x) - int(x.isfinite().flatten(1).all(dim=1).sum())
    option = f"{key}.image_learning_rate" if key else "image_learning_rate of the strategy that makes them"
    advice = f"A smaller {option} keeps images finite."
    require(broken == 0, str(path), "hold finite images", f"{broken} of {len(x)} that are not finite", advice)


def _card_digest(card: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(card, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
