"""File formats of public data sets: each file is checked by its structure and never unpickled."""

import hashlib
import io
import math
import struct
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np

from dpfl_lightning.config.reading import read_bytes
from dpfl_lightning.errors import UserError, require

# x, y, test_x, test_y as stored: inputs [n, C, H, W] and labels [n], uint8 in files
Raw = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
REPLACE = "It is truncated or corrupt: delete it and fetch it again."


@dataclass(frozen=True)
class IdxFiles:
    """The four IDX files of the MNIST family, each plain or gzipped."""

    stems: ClassVar[tuple[str, ...]] = tuple(
        f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    )

    def missing(self, folder: Path) -> list[str]:
        return [f"{stem}[.gz]" for stem in self.stems if self._path(folder, stem) is None]

    def read(self, folder: Path) -> Raw:
        paths = [self._path(folder, stem) or folder / stem for stem in self.stems]
        x, y, test_x, test_y = (_read_idx(path, ndim) for path, ndim in zip(paths, (3, 1, 3, 1), strict=True))
        for images, labels, path in ((x, y, paths[0]), (test_x, test_y, paths[2])):
            require(images.shape[1:] == (28, 28), str(path), "hold images of 28 x 28 pixels", images.shape[1:])
            require(len(images) == len(labels), str(path), f"hold {len(labels)} images, one per label", len(images))
        return x[:, None], y, test_x[:, None], test_y

    def digests(self, folder: Path) -> dict[str, str]:
        """Return the SHA-256 of what `read` reads, of the content of gzip files."""
        paths = {stem: self._path(folder, stem) or folder / stem for stem in self.stems}
        return {stem: hashlib.sha256(content_of(path)).hexdigest() for stem, path in paths.items()}

    @staticmethod
    def _path(folder: Path, stem: str) -> Path | None:
        return next((path for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()), None)


def _read_idx(path: Path, ndim: int) -> np.ndarray:
    """Read one IDX file of unsigned bytes: magic 0x0800 + ndim, sizes as big-endian uint32, then the values."""
    content = content_of(path)
    header, magic = 4 + 4 * ndim, (0x0800 + ndim).to_bytes(4, "big")
    start = content[:4]
    require(start == magic, str(path), f"start with the IDX magic number {magic.hex()}", start.hex(), REPLACE)
    require(len(content) >= header, str(path), f"hold an IDX header of {header} bytes", len(content), REPLACE)
    shape = struct.unpack(f">{ndim}I", content[4:header])
    size = header + math.prod(shape)
    require(len(content) == size, str(path), f"hold {size} bytes for its shape {shape}", len(content), REPLACE)
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def content_of(path: Path) -> bytes:
    return read_bytes(path, advice=REPLACE)


@dataclass(frozen=True)
class CifarFiles:
    """The binary distribution of a CIFAR set, as tar.gz or unpacked into `folder`.

    A record is `label_bytes`, of which the last is the label (CIFAR-100: coarse, then fine), and 3 x 32 x 32 pixels.
    """

    archive: str
    folder: str
    train: tuple[str, ...]
    test: str
    label_bytes: int

    def missing(self, folder: Path) -> list[str]:
        complete = (folder / self.archive).is_file() or self._unpacked(folder) is not None
        return [] if complete else [f"{self.archive} (or the files of its folder {self.folder})"]

    def read(self, folder: Path) -> Raw:
        unpacked = self._unpacked(folder)
        if unpacked is not None:
            content = {name: (str(unpacked / name), content_of(unpacked / name)) for name in self.files}
        else:
            content = self._unpack(folder / self.archive)
        train = [self._records(*content[name]) for name in self.train]
        x, y = map(np.concatenate, zip(*train, strict=True))
        return x, y, *self._records(*content[self.test])

    def digests(self, folder: Path) -> dict[str, str]:
        """Return the SHA-256 of the archive; none of unpacked files, because only that of the archive is published."""
        if self._unpacked(folder) is not None:
            return {}
        return {self.archive: hashlib.sha256((folder / self.archive).read_bytes()).hexdigest()}

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test)

    def _unpacked(self, folder: Path) -> Path | None:
        places = (folder / self.folder, folder)
        return next((place for place in places if all((place / name).is_file() for name in self.files)), None)

    def _unpack(self, path: Path) -> dict[str, tuple[str, bytes]]:
        """Read every file of the archive into memory; nothing is written, whatever paths it names."""
        content = {}
        try:
            with tarfile.open(fileobj=io.BytesIO(content_of(path))) as archive:
                for member in archive:
                    name = PurePosixPath(member.name).name
                    stream = archive.extractfile(member) if name in self.files else None
                    if stream is not None:
                        content[name] = (f"{path}: {name}", stream.read())
        except (tarfile.TarError, EOFError, ValueError, OSError) as error:
            raise UserError(f"`{path}` must be a complete tar.gz, got one with: {error}. {REPLACE}") from error
        missing = [name for name in self.files if name not in content]
        must = f"hold the files {', '.join(self.files)}"
        require(not missing, str(path), must, f"none named {', '.join(missing)}", REPLACE)
        return content

    def _records(self, where: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
        size = self.label_bytes + 3 * 32 * 32
        is_complete = len(content) > 0 and len(content) % size == 0
        require(is_complete, where, f"hold records of {size} bytes each", f"{len(content)} bytes", REPLACE)
        records = np.frombuffer(content, np.uint8).reshape(-1, size)
        return records[:, self.label_bytes :].reshape(-1, 3, 32, 32), records[:, self.label_bytes - 1]


def check_labels(raw: Raw, num_classes: int, place: Path) -> None:
    """Check that there are labels, all below `num_classes`."""
    for labels, part in ((raw[1], "training"), (raw[3], "test")):
        require(len(labels) > 0, str(place), f"hold at least one {part} record", 0, REPLACE)
        must = f"hold {part} labels from 0 to {num_classes - 1}"
        require(int(labels.max()) < num_classes, str(place), must, int(labels.max()), REPLACE)
