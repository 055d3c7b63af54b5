"""Public data sets as normalised tensors: found on this machine, else fetched and checked, never unpickled.

A data set is looked for in the given folder; without one in the operating system's package of it, then in the
user's cache (`DPFL_DATA` moves it), and is else fetched into that cache: from its public addresses, and where
none answers on a Debian-like machine from Debian's package, for which no root is needed. A fetched file is
checked against its published md5 before it gets its name; a file that was already there is checked by its own
structure and is never written to.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import math
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import pooch
import torch
from torch import Tensor

from dpfl_lightning.errors import UserError, nearest, require
from dpfl_lightning.folders import cache_folder

# x, y, test_x, test_y as stored: inputs [n, C, H, W] and labels [n], uint8 in files
Raw = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
REPLACE = "It is truncated or corrupt: delete it and fetch it again."
TIMEOUT = (5, 30)  # seconds to connect to an address, and to wait for its next bytes


class DataMissing(UserError):
    """A data set that is neither on this machine nor can be fetched; whole runs depend on it, so it can be caught."""


@dataclass(frozen=True)
class Dataset:
    """One public data set in memory.

    Args:
        name: registry name.
        x: [n, *X] float32, normalised training inputs.
        y: [n] int64, labels in [0, num_classes).
        test_x: [m, *X] float32, the official test set.
        test_y: [m] int64.
        num_classes: number of classes.
    """

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    num_classes: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape X of one record."""
        return tuple(self.x.shape[1:])


def load(name: str, folder: str | None = None, download: bool = True) -> Dataset:
    """A data set by its name, normalised as (value / scale - mean) / std with constants of the literature.

    Args:
        name: `fashion_mnist`, `mnist`, `cifar10`, `cifar100` or `digits` (scikit-learn's, always there).
        folder: where the files lie: in it, or in its sub folder `name`. None: the system's package, or the cache.
        download: fetch what is not found; False never opens a connection.

    Returns:
        The training and test records; IDX and CIFAR files keep their official split.

    Raises:
        UserError: unknown name; a file that is missing, truncated or corrupt; as `DataMissing`: nothing found and
            nothing fetched.

    Privacy:
        The constants come from the literature, not from the records: nothing is charged for them.

    >>> digits = load("digits")
    >>> tuple(digits.x.shape), tuple(digits.test_x.shape), digits.num_classes
    ((1438, 1, 8, 8), (359, 1, 8, 8), 10)
    """
    require(name in names(), "data.name", f"be one of {', '.join(names())}", name, nearest(name, names()))
    if name == "digits":
        return _normalised(name, _read_digits(), num_classes=10, scale=16, mean=0.5, std=0.5)
    source = SOURCES[name]
    place = _find(name, source, None if folder is None else Path(folder), download)
    raw = source.layout.read(place)
    _check_labels(raw, source.num_classes, place)
    return _normalised(name, raw, source.num_classes, scale=255, mean=source.mean, std=source.std)


def names() -> list[str]:
    """The data sets `load` knows.

    >>> names()
    ['fashion_mnist', 'mnist', 'cifar10', 'cifar100', 'digits']
    """
    return [*SOURCES, "digits"]


def _normalised(name: str, raw: Raw, num_classes: int, scale: float, mean: float, std: float) -> Dataset:
    def inputs(stored: np.ndarray) -> Tensor:
        values = stored.astype(np.float32)
        values -= mean * scale
        values /= std * scale
        return torch.from_numpy(values)

    x, y, test_x, test_y = raw
    labels, test_labels = (torch.from_numpy(stored.astype(np.int64)) for stored in (y, test_y))
    return Dataset(name, inputs(x), labels, inputs(test_x), test_labels, num_classes)


def _read_digits() -> Raw:
    """Scikit-learn's 1,797 digits with a fixed public 80/20 split."""
    from sklearn.datasets import load_digits  # slow to import, and only this data set needs it

    bunch = load_digits()
    x, y = bunch.images[:, None], bunch.target
    order = np.random.default_rng(0).permutation(len(y))
    train, test = np.split(order, [round(0.8 * len(y))])
    return x[train], y[train], x[test], y[test]


# --- the two file formats ---


@dataclass(frozen=True)
class IdxFiles:
    """The four IDX files of the MNIST family, each plain or gzipped."""

    stems = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))

    def missing(self, folder: Path) -> list[str]:
        """Which of the four `folder` lacks."""
        return [f"{stem}[.gz]" for stem in self.stems if self._path(folder, stem) is None]

    def read(self, folder: Path) -> Raw:
        """The records of a folder that lacks nothing; images as [n, 1, 28, 28]."""
        paths = [self._path(folder, stem) or folder / stem for stem in self.stems]
        x, y, test_x, test_y = (_read_idx(path, ndim) for path, ndim in zip(paths, (3, 1, 3, 1), strict=True))
        for images, labels, path in ((x, y, paths[0]), (test_x, test_y, paths[2])):
            require(images.shape[1:] == (28, 28), str(path), "hold images of 28 x 28 pixels", images.shape[1:])
            require(len(images) == len(labels), str(path), f"hold {len(labels)} images, one a label", len(images))
        return x[:, None], y, test_x[:, None], test_y

    @staticmethod
    def _path(folder: Path, stem: str) -> Path | None:
        return next((path for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()), None)


def _read_idx(path: Path, ndim: int) -> np.ndarray:
    """One IDX file of unsigned bytes: magic 0x0800 + ndim, sizes as big-endian uint32, then the values."""
    content = _content(path)
    header, magic = 4 + 4 * ndim, (0x0800 + ndim).to_bytes(4, "big")
    start = content[:4]
    require(start == magic, str(path), f"start with the IDX magic number {magic.hex()}", start.hex(), REPLACE)
    require(len(content) >= header, str(path), f"hold an IDX header of {header} bytes", len(content), REPLACE)
    shape = struct.unpack(f">{ndim}I", content[4:header])
    size = header + math.prod(shape)
    require(len(content) == size, str(path), f"hold {size} bytes for its shape {shape}", len(content), REPLACE)
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        stored = path.read_bytes()
        return gzip.decompress(stored) if path.suffix == ".gz" else stored
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"`{path}` must be a whole gzip file, got one with: {error}. {REPLACE}") from error
    except OSError as error:
        raise UserError(f"`{path}` must be readable, got: {error.strerror}. Mend its permissions.") from error


@dataclass(frozen=True)
class CifarFiles:
    """The binary distribution of a CIFAR set, as the tar.gz or unpacked: label bytes, then 3 x 32 x 32 pixels.

    Args:
        archive: name of the tar.gz.
        folder: the folder inside it.
        train: its training files, in order.
        test: its test file.
        label_bytes: bytes before the pixels; the last of them is the label (CIFAR-100: coarse, then fine).
    """

    archive: str
    folder: str
    train: tuple[str, ...]
    test: str
    label_bytes: int

    def missing(self, folder: Path) -> list[str]:
        """Nothing, or what has to be added to `folder`."""
        found = (folder / self.archive).is_file() or self._unpacked(folder) is not None
        return [] if found else [f"{self.archive} (or the files of its folder {self.folder})"]

    def read(self, folder: Path) -> Raw:
        """The records of a folder that lacks nothing."""
        unpacked = self._unpacked(folder)
        if unpacked is not None:
            content = {name: (str(unpacked / name), _content(unpacked / name)) for name in self.files}
        else:
            content = self._unpack(folder / self.archive)
        train = [self._records(*content[name]) for name in self.train]
        x, y = (np.concatenate(parts) for parts in zip(*train, strict=True))
        return x, y, *self._records(*content[self.test])

    @property
    def files(self) -> tuple[str, ...]:
        """All of its files, the test file last."""
        return (*self.train, self.test)

    def _unpacked(self, folder: Path) -> Path | None:
        places = (folder / self.folder, folder)
        return next((place for place in places if all((place / name).is_file() for name in self.files)), None)

    def _unpack(self, path: Path) -> dict[str, tuple[str, bytes]]:
        """Every file of the archive, in memory: nothing is written, whatever paths it names."""
        content = {}
        try:
            with tarfile.open(fileobj=io.BytesIO(_content(path))) as archive:
                for member in archive:
                    name = PurePosixPath(member.name).name
                    stream = archive.extractfile(member) if name in self.files else None
                    if stream is not None:
                        content[name] = (f"{path}: {name}", stream.read())
        except tarfile.TarError as error:
            raise UserError(f"`{path}` must be a whole tar.gz, got one with: {error}. {REPLACE}") from error
        lacks = [name for name in self.files if name not in content]
        must = f"hold the files {', '.join(self.files)}"
        require(not lacks, str(path), must, f"none named {', '.join(lacks)}", REPLACE)
        return content

    def _records(self, where: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
        size = self.label_bytes + 3 * 32 * 32
        whole = len(content) > 0 and len(content) % size == 0
        require(whole, where, f"hold records of {size} bytes each", f"{len(content)} bytes", REPLACE)
        records = np.frombuffer(content, np.uint8).reshape(-1, size)
        return records[:, self.label_bytes :].reshape(-1, 3, 32, 32), records[:, self.label_bytes - 1]


def _check_labels(raw: Raw, num_classes: int, place: Path) -> None:
    for labels, part in ((raw[1], "training"), (raw[3], "test")):
        require(len(labels) > 0, str(place), f"hold at least one {part} record", 0, REPLACE)
        must = f"hold {part} labels from 0 to {num_classes - 1}"
        require(int(labels.max()) < num_classes, str(place), must, int(labels.max()), REPLACE)


# --- where they come from ---


@dataclass(frozen=True)
class DebianPackage:
    """Debian's package of a data set: its gzip files are Debian's own, so the md5 is of what is in them."""

    name: str
    folder: str
    content_md5_of: Mapping[str, str]

    def fetch(self, target: Path) -> None:
        """Put the files into `target`; neither installs anything nor needs root."""
        with tempfile.TemporaryDirectory() as scratch:
            try:
                _run("apt-get", "download", self.name, cwd=scratch)
            except subprocess.CalledProcessError:  # no package lists, as in a container: get some of our own
                settings = (f"Dir::State={scratch}", f"Dir::Cache={scratch}", "APT::Sandbox::User=root")
                own = [word for setting in settings for word in ("-o", setting)]
                _run("apt-get", *own, "update", cwd=scratch)
                _run("apt-get", *own, "download", self.name, cwd=scratch)
            (package,) = Path(scratch).glob(f"{self.name}_*.deb")
            _run("dpkg-deb", "-x", str(package), "tree", cwd=scratch)
            for file, md5 in self.content_md5_of.items():
                path = Path(scratch, "tree", self.folder.lstrip("/"), file)
                got = hashlib.md5(_content(path), usedforsecurity=False).hexdigest()
                require(got == md5, file, f"hold data of md5 {md5}", got)
                shutil.copyfile(path, target / file)


def _run(*argv: str, cwd: str) -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    subprocess.run(argv, cwd=cwd, env=environment, check=True, capture_output=True, text=True, timeout=300)


@dataclass(frozen=True)
class Source:
    """What a data set is and where the public has it.

    Args:
        layout: how its files are read.
        num_classes: number of classes.
        mean: subtracted from values in [0, 1]; every channel alike.
        std: divides the rest.
        md5_of: published files -> md5.
        mirrors: addresses that hold all of them.
        package: Debian's package of it.
    """

    layout: IdxFiles | CifarFiles
    num_classes: int
    mean: float
    std: float
    md5_of: Mapping[str, str]
    mirrors: tuple[str, ...]
    package: DebianPackage | None = None


SOURCES: Mapping[str, Source] = {
    "fashion_mnist": Source(
        layout=IdxFiles(),
        num_classes=10,
        mean=0.1307,  # MNIST's constants, as in the released code of the noise-aware paper
        std=0.3081,
        md5_of={
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        mirrors=(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        package=DebianPackage(
            name="dataset-fashion-mnist",
            folder="/usr/share/datasets/fashion-mnist",
            content_md5_of={
                "train-images-idx3-ubyte.gz": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                "train-labels-idx1-ubyte.gz": "9018921c3c673c538a1fc5bad174d6f9",
                "t10k-images-idx3-ubyte.gz": "8181f5470baa50b63fa0f6fddb340f0a",
                "t10k-labels-idx1-ubyte.gz": "15d484375f8d13e6eb1aabb0c3f46965",
            },
        ),
    ),
    "mnist": Source(
        layout=IdxFiles(),
        num_classes=10,
        mean=0.1307,
        std=0.3081,
        md5_of={
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
    ),
    "cifar10": Source(
        layout=CifarFiles(
            archive="cifar-10-binary.tar.gz",
            folder="cifar-10-batches-bin",
            train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
            test="test_batch.bin",
            label_bytes=1,
        ),
        num_classes=10,
        mean=0.5,
        std=0.5,
        md5_of={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
    ),
    "cifar100": Source(
        layout=CifarFiles(
            archive="cifar-100-binary.tar.gz",
            folder="cifar-100-binary",
            train=("train.bin",),
            test="test.bin",
            label_bytes=2,
        ),
        num_classes=100,
        mean=0.5,
        std=0.5,
        md5_of={"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
    ),
}


def _find(name: str, source: Source, folder: Path | None, download: bool) -> Path:
    """The first place that holds the whole data set; fetched if need be."""
    if folder is not None:
        return _given(name, source, folder)
    cache = cache_folder(name)
    tried = []
    installed = [Path(source.package.folder)] if source.package else []
    for place in [*installed, cache]:
        missing = source.layout.missing(place)
        if not missing:
            return place
        tried.append(f"{place}: " + (f"lacks {', '.join(missing)}" if place.is_dir() else "no such folder"))
    if download and _fetch(name, source, cache, tried):
        return cache
    install = f"`apt-get install {source.package.name}`, or " if source.package else ""
    raise DataMissing(
        f"`data.name` must be a data set that is on this machine or can be fetched, got {name!r}. Tried:\n"
        + "".join(f"  {line}\n" for line in tried)
        + ("" if download else "  the network: not allowed (download=False)\n")
        + f"Two ways out: {install}put {', '.join(source.md5_of)} into a folder and pass --data.folder FOLDER"
        + ("." if source.package else f", or into {cache}.")
    )


def _given(name: str, source: Source, folder: Path) -> Path:
    """The user's folder or its sub folder `name`. Strict: a slip must not train on data that nobody meant."""
    places = (folder, folder / name)
    lacks = [source.layout.missing(place) for place in places]
    whole = next((place for place, missing in zip(places, lacks, strict=True) if not missing), None)
    if whole is None:
        lacking = min(lacks, key=lambda missing: len(missing))
        got = f"a folder that lacks {', '.join(lacking)}" if folder.is_dir() else "no such folder"
        way_out = "Mend the path, or leave it out to use the system's package, the cache or the network."
        raise UserError(f"`data.folder` must hold the files of {name}, got {str(folder)!r}: {got}. {way_out}")
    return whole


def _fetch(name: str, source: Source, folder: Path, tried: list[str]) -> bool:
    """Fill `folder` from the first way that works: all files are checked before one of them gets its name."""
    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError as error:
        tried.append(f"{cache}: cannot write there ({error.strerror}); DPFL_DATA may name another folder")
        return False
    lock = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several ranks that begin at once, one fetches
        return not source.layout.missing(folder) or _fetch_into(folder, name, source, tried)
    finally:
        os.close(lock)


def _fetch_into(folder: Path, name: str, source: Source, tried: list[str]) -> bool:
    cache = folder.parent
    for label, fetch in _ways(source):
        try:
            with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as fresh:
                print(f"fetching {name} from {label} into {folder}", file=sys.stderr, flush=True)
                fetch(Path(fresh))
                folder.mkdir(exist_ok=True)
                for path in Path(fresh).iterdir():
                    os.replace(path, folder / path.name)
            return True
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            tried.append(f"{label}: {_reason(error)}")
    return False


def _ways(source: Source) -> Iterator[tuple[str, Callable[[Path], None]]]:
    for mirror in source.mirrors:
        yield mirror, partial(_from_mirror, mirror, source.md5_of)
    if source.package is not None:
        yield f"Debian's package {source.package.name}", source.package.fetch


def _from_mirror(mirror: str, md5_of: Mapping[str, str], target: Path) -> None:
    pooch.get_logger().setLevel("WARNING")  # our own line says what is fetched
    get = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=TIMEOUT)
    for file, md5 in md5_of.items():
        pooch.retrieve(mirror + file, known_hash=f"md5:{md5}", fname=file, path=target, downloader=get)


def _reason(error: Exception) -> str:
    """Why a way failed, in a few words."""
    if isinstance(error, subprocess.CalledProcessError) and error.stderr.strip():
        return error.stderr.strip().splitlines()[-1]
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{error.cmd[0]} took more than {error.timeout:.0f} s"
    # requests keeps urllib3's reason in its first argument
    cause = getattr(error.args[0], "reason", None) if error.args else None
    return type(cause).__name__ if cause else textwrap.shorten(str(error), 160)
