"""Images of PIL as tensors in [0, 1], by the largest number that a pixel can hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfl_lightning.errors import require

_EIGHT_BITS = ("1", "L", "P", "RGB", "LA", "PA", "RGBA", "RGBX", "CMYK", "YCbCr")
_LARGEST = 65535  # of 16 bits


def pixels_of(image: Any, where: str, channels: int | None = None, size: Sequence[int] | None = None) -> Tensor:
    """Return an image of PIL as `[C, H, W]` in [0, 1], resized to `size` (height, width).

    `channels` are 3 or 1; None: those of the image. Raises UserError for several frames, for transparency, and for
    pixels that are neither of 8 nor of 16 bits: their largest number is not known.
    """
    frames = 1 if getattr(image, "format", None) == "MPO" else getattr(image, "n_frames", 1)
    require(frames == 1, where, "hold one image", f"{frames} frames", "Save each frame as an image of its own.")
    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and getattr(image, "format", None) in ("PNG", "PPM"))
    advice = "Save it with 8 or 16 bits for each number, or let a Dataset return tensors."
    require(sixteen or image.mode in _EIGHT_BITS, where, "have 8 or 16 bits a number", f"mode {image.mode}", advice)
    if "A" in image.getbands() or "transparency" in getattr(image, "info", {}):
        advice = "Paste it on a background: what lies behind it is not known."
        fits = image.convert("RGBA").getextrema()[3][0] == 255
        require(fits, where, "be opaque", "transparent pixels", advice)
    image = _upright(image)
    colours = len(image.getbands()) > 1 or image.mode == "P"
    if sixteen:
        scaled = np.asarray(image).astype(np.float32) / _LARGEST
        image = _from_array(scaled)
    else:
        image = image.convert("RGB" if (channels or (3 if colours else 1)) == 3 else "L")
    if size is not None:
        image = image.resize((size[1], size[0]))
    pixels = torch.from_numpy(np.array(image)).float() / (1 if sixteen else 255)
    if pixels.ndim == 3:
        return pixels.permute(2, 0, 1).contiguous()
    return pixels[None].expand(channels or 1, -1, -1).contiguous()


def read(path: Path, channels: int, size: Sequence[int] | None) -> Tensor:
    """Return an image of a file, as `pixels_of`. Raises OSError if it is not complete."""
    from PIL import Image

    with Image.open(path) as stored:
        return pixels_of(stored, str(path), channels, size)


def extensions() -> Collection[str]:
    """Return the endings of files of images, in all formats that PIL knows."""
    from PIL import Image

    return Image.registered_extensions()


def _upright(image: Any) -> Any:
    """Return the image as a camera says that it is to be seen."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _from_array(values: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(values)
