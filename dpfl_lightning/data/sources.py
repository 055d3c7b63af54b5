"""Sources of public data sets: files on this machine, otherwise downloads that are verified.

A data set is searched in the given folder; without one in the operating system's package, then in the user's cache
(`DPFL_DATA` moves it). Otherwise it is downloaded into that cache from its public addresses, or, if none answers on a
Debian-like machine, from Debian's package without root. Downloads come by HTTPS and are checked by SHA-256; existing
files are checked by their structure and never changed.
"""

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

from dpfl_lightning.data.formats import CifarFiles, IdxFiles, content_of
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.runtime.files import cache_folder, locked_folder

TIMEOUT = (5, 30)  # seconds to connect to an address, and to wait for the next bytes


class DataMissing(UserError):
    """A data set is neither on this machine nor downloadable. A separate class, so that callers can catch it."""


@dataclass(frozen=True)
class DebianPackage:
    """Debian's package of a data set. Its gzip files differ from the published ones; digests are of their content."""

    name: str
    folder: str
    content_sha256_of: Mapping[str, str]

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
            for file, sha256 in self.content_sha256_of.items():
                path = Path(scratch, "tree", self.folder.lstrip("/"), file)
                actual = hashlib.sha256(content_of(path)).hexdigest()
                require(actual == sha256, file, f"hold data of SHA-256 {sha256}", actual)
                shutil.copyfile(path, target / file)


def _run(*argv: str, cwd: str) -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    subprocess.run(argv, cwd=cwd, env=environment, check=True, capture_output=True, text=True, timeout=300)


@dataclass(frozen=True)
class Source:
    """A data set: its published files with their SHA-256, and addresses (`mirrors`) that hold all of them.

    Files are public if `layout.digests` of them is `digests`; those of IDX files are of uncompressed content. `mean` is
    subtracted from values in [0, 1], for every channel; the divisor `std` follows. `licence` is that of the records,
    "not stated" if its publishers name none.
    """

    layout: IdxFiles | CifarFiles
    sha256_of: Mapping[str, str]
    digests: Mapping[str, str]
    mirrors: tuple[str, ...]
    num_classes: int = 10
    mean: float = 0.5
    std: float = 0.5
    licence: str = "not stated"
    package: DebianPackage | None = None

    def differing(self, folder: Path) -> list[str]:
        """Return which files of a folder are not known to be the published ones."""
        found = self.layout.digests(folder)
        return [name for name, digest in self.digests.items() if found.get(name) != digest]


_MNIST_FILES = tuple(f"{stem}.gz" for stem in IdxFiles.stems)


_FASHION_CONTENT = (
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888 "
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9 "
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b "
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"
)
_CIFAR_10 = {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"}
_CIFAR_100 = {"cifar-100-binary.tar.gz": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"}


def _files(digests: str) -> Mapping[str, str]:
    return dict(zip(_MNIST_FILES, digests.split(), strict=True))


def _contents(digests: str) -> Mapping[str, str]:
    return dict(zip(IdxFiles.stems, digests.split(), strict=True))


SOURCES: Mapping[str, Source] = {
    "fashion_mnist": Source(
        layout=IdxFiles(),
        mean=0.1307,  # MNIST's constants, as in the released code of the noise-aware paper
        std=0.3081,
        licence="MIT",
        sha256_of=_files(
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84 "
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845 "
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073 "
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"
        ),
        digests=_contents(_FASHION_CONTENT),
        mirrors=("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",),
        package=DebianPackage(
            name="dataset-fashion-mnist",
            folder="/usr/share/datasets/fashion-mnist",
            content_sha256_of=_files(_FASHION_CONTENT),
        ),
    ),
    "mnist": Source(
        layout=IdxFiles(),
        mean=0.1307,
        std=0.3081,
        licence="CC BY-SA 3.0",
        sha256_of=_files(
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609 "
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c "
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6 "
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
        ),
        digests=_contents(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db "
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5 "
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7 "
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
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
        sha256_of=_CIFAR_10,
        digests=_CIFAR_10,
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
    ),
    "cifar100": Source(
        layout=CifarFiles("cifar-100-binary.tar.gz", "cifar-100-binary", ("train.bin",), "test.bin", label_bytes=2),
        num_classes=100,
        sha256_of=_CIFAR_100,
        digests=_CIFAR_100,
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
        + f"Two ways out: {install}put {', '.join(source.sha256_of)} into a folder and pass --data.folder FOLDER"
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
    with locked_folder(cache):  # only one of several ranks downloads
        return not source.layout.missing(folder) or _fetch_into(folder, name, source, tried)


def _fetch_into(folder: Path, name: str, source: Source, tried: list[str]) -> bool:
    ways: list[tuple[str, Callable[[Path], None]]] = [
        (mirror, partial(_from_mirror, mirror, source.sha256_of)) for mirror in source.mirrors
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


def _from_mirror(mirror: str, sha256_of: Mapping[str, str], target: Path) -> None:
    import pooch  # of an extra: a site with records of its own downloads nothing

    pooch.get_logger().setLevel("WARNING")  # `_fetch_into` prints what is downloaded
    get = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=TIMEOUT)
    for file, sha256 in sha256_of.items():
        pooch.retrieve(mirror + file, known_hash=f"sha256:{sha256}", fname=file, path=target, downloader=get)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError) and error.stderr.strip():
        return error.stderr.strip().splitlines()[-1]
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{error.cmd[0]} took more than {error.timeout:.0f} s"
    # requests keeps urllib3's reason in its first argument
    cause = getattr(error.args[0], "reason", None) if error.args else None
    return type(cause).__name__ if cause else textwrap.shorten(str(error), 160)
