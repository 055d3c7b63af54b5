"""Sources of public data sets: files on this machine, otherwise downloads that are verified.

A data set is searched in the given folder; without one in the operating system's package, then in the user's cache
(`DPFL_DATA` moves it). Otherwise it is downloaded into that cache from its public addresses, or, if none answers on a
Debian-like machine, from Debian's package without root. Downloads are checked against their md5; existing files are
checked by their structure and never changed.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pooch

from dpfl_lightning.data.formats import CifarFiles, IdxFiles, content_of
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.runtime.files import cache_folder

TIMEOUT = (5, 30)  # seconds to connect to an address, and to wait for the next bytes


class DataMissing(UserError):
    """A data set is neither on this machine nor downloadable. A separate class, so that callers can catch it."""


@dataclass(frozen=True)
class DebianPackage:
    """Debian's package of a data set. Its gzip files differ from the published ones, so the md5 is of their content."""

    name: str
    folder: str
    content_md5_of: Mapping[str, str]

    def fetch(self, target: Path) -> None:
        """Put the files into `target`; this neither installs anything nor needs root."""
        with tempfile.TemporaryDirectory() as scratch:
            try:
                _run("apt-get", "download", self.name, cwd=scratch)
            except subprocess.CalledProcessError:  # no package lists, as in a container: download them
                settings = (f"Dir::State={scratch}", f"Dir::Cache={scratch}", "APT::Sandbox::User=root")
                apt_options = [argument for setting in settings for argument in ("-o", setting)]
                _run("apt-get", *apt_options, "update", cwd=scratch)
                _run("apt-get", *apt_options, "download", self.name, cwd=scratch)
            (package,) = Path(scratch).glob(f"{self.name}_*.deb")
            _run("dpkg-deb", "-x", str(package), "tree", cwd=scratch)
            for file, md5 in self.content_md5_of.items():
                path = Path(scratch, "tree", self.folder.lstrip("/"), file)
                actual_md5 = hashlib.md5(content_of(path), usedforsecurity=False).hexdigest()
                require(actual_md5 == md5, file, f"hold data of md5 {md5}", actual_md5)
                shutil.copyfile(path, target / file)


def _run(*argv: str, cwd: str) -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    subprocess.run(argv, cwd=cwd, env=environment, check=True, capture_output=True, text=True, timeout=300)


@dataclass(frozen=True)
class Source:
    """A data set: its published files with their md5, and addresses (`mirrors`) that hold all of them.

    `mean` is subtracted from values in [0, 1], for every channel; the divisor `std` follows. `licence` is that of the
    records, "not stated" if its publishers name none.
    """

    layout: IdxFiles | CifarFiles
    md5_of: Mapping[str, str]
    mirrors: tuple[str, ...]
    num_classes: int = 10
    mean: float = 0.5
    std: float = 0.5
    licence: str = "not stated"
    package: DebianPackage | None = None


_MNIST_FILES = tuple(f"{stem}.gz" for stem in IdxFiles.stems)


def _files(md5s: str) -> Mapping[str, str]:
    return dict(zip(_MNIST_FILES, md5s.split(), strict=True))


SOURCES: Mapping[str, Source] = {
    "fashion_mnist": Source(
        layout=IdxFiles(),
        mean=0.1307,  # MNIST's constants, as in the released code of the noise-aware paper
        std=0.3081,
        licence="MIT",
        md5_of=_files(
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d 25c81989df183df01b3e8a0aad5dffbe "
            "bef4ecab320f06d8554ea6380940ec79 bb300cfdad3c16e7a12a480ee83cd310"
        ),
        mirrors=(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        package=DebianPackage(
            name="dataset-fashion-mnist",
            folder="/usr/share/datasets/fashion-mnist",
            content_md5_of=_files(
                "f4a8712d7a061bf5bd6d2ca38dc4d50a 9018921c3c673c538a1fc5bad174d6f9 "
                "8181f5470baa50b63fa0f6fddb340f0a 15d484375f8d13e6eb1aabb0c3f46965"
            ),
        ),
    ),
    "mnist": Source(
        layout=IdxFiles(),
        mean=0.1307,
        std=0.3081,
        licence="CC BY-SA 3.0",
        md5_of=_files(
            "f68b3c2dcbeaaa9fbdd348bbdeb94873 d53e105ee54ea40749a09fcbcd1e9432 "
            "9fb629c4189551a2d022fa330f9573f3 ec29112dd5afa0611ce80d1b7f02629c"
        ),
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
        md5_of={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
    ),
    "cifar100": Source(
        layout=CifarFiles("cifar-100-binary.tar.gz", "cifar-100-binary", ("train.bin",), "test.bin", label_bytes=2),
        num_classes=100,
        md5_of={"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
    ),
}


def find(name: str, source: Source, folder: Path | None, download: bool) -> Path:
    """Return the first folder that holds the whole data set, downloading it if necessary."""
    if folder is not None:
        return _given(name, source, folder)
    cache = cache_folder(name)
    tried = []
    for place in [*([Path(source.package.folder)] if source.package else []), cache]:
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
    """Return the user's folder or its subfolder `name`. It is strict, so that a typo never selects other data."""
    missing_of = {place: source.layout.missing(place) for place in (folder, folder / name)}
    nearest_place = min(missing_of, key=lambda place: len(missing_of[place]))
    if missing_of[nearest_place]:
        got = f"a folder that lacks {', '.join(missing_of[nearest_place])}" if folder.is_dir() else "no such folder"
        advice = "Correct the path, or leave it out to use the system's package, the cache or the network."
        raise UserError(f"`data.folder` must hold the files of {name}, got {str(folder)!r}: {got}. {advice}")
    return nearest_place


def _fetch(name: str, source: Source, folder: Path, tried: list[str]) -> bool:
    """Fill `folder` from the first source that works; all files are checked before any gets its final name."""
    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError as error:
        tried.append(f"{cache}: not writable ({error.strerror}); DPFL_DATA may name another folder")
        return False
    lock = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of several ranks downloads
        return not source.layout.missing(folder) or _fetch_into(folder, name, source, tried)
    finally:
        os.close(lock)


def _fetch_into(folder: Path, name: str, source: Source, tried: list[str]) -> bool:
    ways: list[tuple[str, Callable[[Path], None]]] = [
        (mirror, partial(_from_mirror, mirror, source.md5_of)) for mirror in source.mirrors
    ]
    if source.package is not None:
        ways.append((f"Debian's package {source.package.name}", source.package.fetch))
    for label, fetch in ways:
        try:
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as fresh:
                print(f"fetching {name} from {label} into {folder}", file=sys.stderr, flush=True)
                fetch(Path(fresh))
                folder.mkdir(exist_ok=True)
                for path in Path(fresh).iterdir():
                    os.replace(path, folder / path.name)
            return True
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            tried.append(f"{label}: {_reason(error)}")
    return False


def _from_mirror(mirror: str, md5_of: Mapping[str, str], target: Path) -> None:
    pooch.get_logger().setLevel("WARNING")  # `_fetch_into` prints what is downloaded
    get = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=TIMEOUT)
    for file, md5 in md5_of.items():
        pooch.retrieve(mirror + file, known_hash=f"md5:{md5}", fname=file, path=target, downloader=get)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError) and error.stderr.strip():
        return error.stderr.strip().splitlines()[-1]
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{error.cmd[0]} took more than {error.timeout:.0f} s"
    # requests keeps urllib3's reason in its first argument
    cause = getattr(error.args[0], "reason", None) if error.args else None
    return type(cause).__name__ if cause else textwrap.shorten(str(error), 160)
