"""Readers on small files in the true formats, every way a file can be bad, and every way one can be fetched."""

import functools
import gzip
import hashlib
import http.server
import io
import os
import shutil
import socketserver
import struct
import tarfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dpfl_lightning.data import formats, load, sources
from dpfl_lightning.errors import UserError, UserNotice

TRAIN_X, TRAIN_Y, TEST_X, TEST_Y = formats.IdxFiles.stems


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """No test reads or writes the user's cache, and loopback never goes through a proxy."""
    monkeypatch.setenv("DPFL_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


def idx_files(train: int = 12, test: int = 5) -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    images = {TRAIN_X: rng.integers(0, 256, (train, 28, 28)), TEST_X: rng.integers(0, 256, (test, 28, 28))}
    labels = {TRAIN_Y: np.arange(train) % 10, TEST_Y: np.arange(test) % 10}
    return {stem: idx(values) for stem, values in (images | labels).items()}


def write(folder: Path, files: dict[str, bytes], gz: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / (f"{name}.gz" if gz else name)
        path.write_bytes(gzip.compress(content, mtime=0) if gz else content)
    return folder


def cifar_layout(name: str) -> formats.CifarFiles:
    layout = sources.SOURCES[name].layout
    assert isinstance(layout, formats.CifarFiles)
    return layout


def cifar_files(name: str, per_file: int = 3) -> dict[str, bytes]:
    """Random records in the true layout; the label bytes are (7, 42) for CIFAR-100 and 7 for CIFAR-10."""
    layout, rng = cifar_layout(name), np.random.default_rng(1)
    labels = bytes([7, 42][: layout.label_bytes])
    return {
        file: b"".join(labels + rng.integers(0, 256, 3072, dtype=np.uint8).tobytes() for _ in range(per_file))
        for file in layout.files
    }


def tar_gz(files: dict[str, bytes], inside: str) -> bytes:
    stored = io.BytesIO()
    with tarfile.open(fileobj=stored, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{inside}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stored.getvalue()


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name, place, gz",
    [
        ("mnist", "given", False),
        ("fashion_mnist", "given", True),
        ("mnist", "above/mnist", False),
        ("mnist", "cache/mnist", True),
    ],
)
def test_idx_files_are_read_from_a_folder_its_sub_folder_or_the_cache(tmp_path, name, place, gz):
    files = idx_files()
    write(tmp_path / place, files, gz)
    data = load(name, None if "cache" in place else str(tmp_path / place.split("/")[0]), download=False)
    stored = np.frombuffer(files[TRAIN_X], np.uint8, offset=16).reshape(12, 1, 28, 28)
    np.testing.assert_allclose(data.x.numpy(), (stored / 255 - 0.1307) / 0.3081, rtol=0, atol=1e-5)
    assert data.x.dtype == torch.float32 and data.y.dtype == torch.int64
    assert data.y.tolist() == [*range(10), 0, 1] and data.test_y.tolist() == [0, 1, 2, 3, 4]
    assert data.input_shape == (1, 28, 28) and data.num_classes == 10 and data.name == name


@pytest.mark.parametrize("form", ["archive", "unpacked", "its files"])
@pytest.mark.parametrize("name, label, parts", [("cifar10", 7, 5), ("cifar100", 42, 1)])
def test_cifar_files_are_read_and_normalised(tmp_path, name, label, parts, form):
    layout, files = cifar_layout(name), cifar_files(name)
    if form == "archive":
        (tmp_path / layout.archive).write_bytes(tar_gz(files, layout.folder))
    else:
        write(tmp_path / (layout.folder if form == "unpacked" else ""), files)
    data = load(name, str(tmp_path), download=False)
    assert data.x.shape == (3 * parts, 3, 32, 32) and data.test_x.shape == (3, 3, 32, 32)
    assert set(data.y.tolist()) == {label}
    first = np.frombuffer(files[layout.train[0]], np.uint8)[layout.label_bytes :][:3072].reshape(3, 32, 32)
    np.testing.assert_allclose(data.x[0].numpy(), (first / 255 - 0.5) / 0.5, rtol=0, atol=1e-6)


def published(monkeypatch, name: str, digests: dict[str, str]) -> None:
    monkeypatch.setitem(sources.SOURCES, name, replace(sources.SOURCES[name], digests=digests))


@pytest.mark.parametrize("gz", [False, True])
def test_idx_files_are_public_if_their_content_has_the_published_digests(tmp_path, monkeypatch, recwarn, gz):
    """However they were compressed; one other label makes them records of the user's own."""
    files = idx_files()
    folder = str(write(tmp_path / "given", files, gz))
    with pytest.warns(UserNotice, match=r"given does not hold mnist as published .*train-images-idx3-ubyte, .*charged"):
        assert load("mnist", folder).origin == {}
    published(monkeypatch, "mnist", {stem: hashlib.sha256(content).hexdigest() for stem, content in files.items()})
    recwarn.clear()
    assert load("mnist", folder).origin["name"] == "mnist" and not recwarn
    write(tmp_path / "given", {TEST_Y: files[TEST_Y][:-1] + b"\0"}, gz)
    with pytest.warns(UserNotice, match=f"SHA-256 of {TEST_Y}[)]: its records count as your own"):
        assert load("mnist", folder).origin == {}


def test_cifar_files_are_public_as_the_published_archive(tmp_path, monkeypatch, recwarn):
    layout, files = cifar_layout("cifar10"), cifar_files("cifar10")
    (tmp_path / layout.archive).write_bytes(content := tar_gz(files, layout.folder))
    with pytest.warns(UserNotice, match=r"not hold cifar10 as published .SHA-256 of cifar-10-binary.tar.gz"):
        assert load("cifar10", str(tmp_path)).origin == {}
    published(monkeypatch, "cifar10", {layout.archive: hashlib.sha256(content).hexdigest()})
    recwarn.clear()
    assert load("cifar10", str(tmp_path)).origin["name"] == "cifar10" and not recwarn
    write(tmp_path / layout.folder, files)  # they are read instead, and may be any
    with pytest.warns(UserNotice, match="records count as your own"):
        assert load("cifar10", str(tmp_path)).origin == {}


def test_each_published_file_has_a_digest():
    for source in sources.SOURCES.values():
        of_files = getattr(source.layout, "stems", tuple(source.sha256_of))
        assert tuple(source.digests) == of_files and all(len(digest) == 64 for digest in source.digests.values())


def test_digits_split_is_fixed_and_disjoint():
    data, again = load("digits"), load("digits")
    assert torch.equal(data.x, again.x) and len(data.y) + len(data.test_y) == 1797
    assert data.x.min() == -1 and data.x.max() == 1
    rows = {tuple(row) for row in data.x.flatten(1).tolist()}
    assert not any(tuple(row) in rows for row in data.test_x.flatten(1).tolist())


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flip(content: bytes) -> bytes:
    """One bit of the stored checksum of a gzip file, or of a plain file's magic number."""
    place = -6 if content[:2] == b"\x1f\x8b" else 2
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


BAD_IDX = {
    "truncated gz": (TRAIN_X, True, cut, "must be a complete gzip file"),
    "checksum": (TEST_X, True, flip, "must be a complete gzip file, got one with: CRC check failed"),
    "magic": (TRAIN_Y, False, flip, "must start with the IDX magic number 00000801"),
    "empty": (TRAIN_Y, False, lambda content: b"", "must start with the IDX magic number"),
    "longer": (TEST_Y, False, lambda content: content + b"\0", "must hold 13 bytes for its shape"),
    "labels beyond": (TEST_Y, False, lambda content: idx(np.full(5, 10)), "must hold test labels from 0 to 9, got 10"),
    "fewer labels": (TRAIN_Y, False, lambda content: idx(np.zeros(11)), "must hold 11 images, one per label, got 12"),
    "other size": (TEST_X, False, lambda content: idx(np.zeros((5, 32, 32))), "images of 28 x 28 pixels"),
}


@pytest.mark.parametrize("stem, gz, spoil, message", BAD_IDX.values(), ids=BAD_IDX)
def test_bad_idx_file_is_named_and_left_alone(tmp_path, stem, gz, spoil, message):
    for place in ("given", "cache/mnist"):
        folder = write(tmp_path / place, idx_files(), gz)
        path = folder / (f"{stem}.gz" if gz else stem)
        path.write_bytes(spoil(path.read_bytes()))
        before = snapshot(tmp_path)
        with pytest.raises(UserError, match=message) as error:
            load("mnist", str(folder) if place == "given" else None)
        assert str(folder) in str(error.value) and snapshot(tmp_path) == before


def archived(name: str, spoil=lambda content: content, lacks: str = "") -> dict[str, bytes]:
    layout = cifar_layout(name)
    files = {file: content for file, content in cifar_files(name).items() if file != lacks}
    return {layout.archive: spoil(tar_gz(files, layout.folder))}


def changed_cifar(name: str, file: str, change) -> dict[str, bytes]:
    files = cifar_files(name)
    return files | {file: change(files[file])}


CUT_RECORD = changed_cifar("cifar100", "train.bin", lambda content: content[:-1])
BAD_FILES = {
    "no records": ("mnist", idx_files(train=0), "must hold at least one training record"),
    "a cut archive": ("cifar10", archived("cifar10", cut), "cifar-10-binary.tar.gz.*must be a complete gzip file"),
    "a checksum": ("cifar10", archived("cifar10", flip), "cifar-10-binary.tar.gz.*CRC check failed"),
    "a file less": ("cifar10", archived("cifar10", lacks="data_batch_3.bin"), r"none named data_batch_3\.bin"),
    "no tar": ("cifar100", archived("cifar100", lambda _: gzip.compress(b"not a tar" * 100)), r"a complete tar\.gz"),
    "a cut record": ("cifar100", CUT_RECORD, r"train.bin` must hold records of 3074 bytes each, got '9221 bytes'"),
    "a label": (
        "cifar10",
        changed_cifar("cifar10", "test_batch.bin", lambda content: bytes([200]) + content[1:]),
        "must hold test labels from 0 to 9, got 200",
    ),
}


@pytest.mark.parametrize("name, files, message", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_are_named(tmp_path, name, files, message):
    with pytest.raises(UserError, match=message):
        load(name, str(write(tmp_path, files)), download=False)


def test_name_and_folder_must_exist_and_be_whole(tmp_path):
    with pytest.raises(UserError, match=r"`data.name` must be one of .*Did you mean `fashion_mnist`"):
        load("fashon_mnist")
    write(tmp_path / "cache" / "mnist", idx_files())  # found only where no folder was named
    with pytest.raises(UserError, match=r"`data\.folder` must hold the files of mnist, got .*no such folder"):
        load("mnist", str(tmp_path / "typo"))
    files = {stem: content for stem, content in idx_files().items() if stem != TEST_Y}
    with pytest.raises(UserError, match=rf"a folder that lacks {TEST_Y}\[.gz\]\. Correct the path"):
        load("mnist", str(write(tmp_path / "given", files)))


@pytest.fixture
def server(tmp_path):
    """Mirrors on loopback: the folders in `files`; of the paths in `broken` half is sent, `asked` are all requests."""
    asked, broken, files = [], set(), tmp_path / "mirrors"

    class Handler(http.server.SimpleHTTPRequestHandler):
        def copyfile(self, source, outputfile):
            content = source.read()
            outputfile.write(cut(content) if self.path in broken else content)

        def log_message(self, *args):
            asked.append(self.path)

    handler = functools.partial(Handler, directory=files)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as http_server:
        threading.Thread(target=http_server.serve_forever, args=(0.05,), daemon=True).start()
        address = f"http://127.0.0.1:{http_server.server_address[1]}"
        yield SimpleNamespace(address=address, files=files, broken=broken, asked=asked)
        http_server.shutdown()


@pytest.fixture
def mirrored(server, monkeypatch):
    """MNIST as a small set on the second of two mirrors; the first knows nothing."""
    files = {f"{stem}.gz": gzip.compress(content, mtime=0) for stem, content in idx_files().items()}
    write(server.files / "good", files)
    source = replace(
        sources.SOURCES["mnist"],
        mirrors=(f"{server.address}/empty/", f"{server.address}/good/"),
        sha256_of={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    )
    monkeypatch.setitem(sources.SOURCES, "mnist", source)
    return files


def test_fetched_once_from_the_mirror_that_has_it(tmp_path, server, mirrored):
    with pytest.raises(UserError, match="not allowed"):
        load("mnist", download=False)
    assert server.asked == []
    assert len(load("mnist").y) == 12
    assert snapshot(tmp_path / "cache") == {f"mnist/{name}": content for name, content in mirrored.items()}
    asked = len(server.asked)
    assert len(load("mnist").y) == 12 and len(server.asked) == asked


@pytest.mark.parametrize("how", ["other content", "interrupted"])
def test_bad_download_leaves_nothing(tmp_path, server, mirrored, how):
    if how == "interrupted":
        server.broken.add(f"/good/{TEST_Y}.gz")
    else:
        (server.files / "good" / f"{TEST_Y}.gz").write_bytes(b"something else")
    with pytest.raises(UserError) as error:
        load("mnist")
    lines = str(error.value).splitlines()
    assert "cache/mnist: no such folder" in lines[1]
    assert "/empty/: 404" in lines[2] and "/good/: " in lines[3]
    assert lines[-1].startswith("Two ways out: put train-images-idx3-ubyte.gz") and "--data.folder FOLDER" in lines[-1]
    assert snapshot(tmp_path / "cache") == {} and os.listdir(tmp_path / "cache") == []


def test_cache_that_cannot_be_written(tmp_path, monkeypatch, mirrored):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPFL_DATA", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match=r"not writable .*DPFL_DATA may name another folder"):
        load("mnist")


FAKE_APT = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in
  *update*) ;;
  *Dir::State*|"download {package}") {first}; cp "$DEB" ./{package}_1_all.deb ;;
esac
"""


@pytest.fixture
def debian(tmp_path, server, monkeypatch):
    """Fashion-MNIST with no mirror that answers, on a machine whose apt-get and dpkg-deb are scripts of ours."""
    root = tmp_path / "tree"
    sha256_of = {f"{stem}.gz": hashlib.sha256(content).hexdigest() for stem, content in idx_files().items()}
    folder = str(tmp_path / "nowhere")
    here = replace(sources.SOURCES["fashion_mnist"].package, folder=folder, content_sha256_of=sha256_of)
    write(root / folder.lstrip("/"), idx_files(), gz=True)
    source = replace(sources.SOURCES["fashion_mnist"], mirrors=(f"{server.address}/empty/",), package=here)
    monkeypatch.setitem(sources.SOURCES, "fashion_mnist", source)
    with tarfile.open(tmp_path / "package.deb", "w") as archive:
        archive.add(root, ".")
    tools = tmp_path / "tools"
    for variable, value in {"DEB": tmp_path / "package.deb", "LOG": tmp_path / "log"}.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")

    def install(first: str = "true") -> None:
        scripts = {
            "apt-get": FAKE_APT.format(package=here.name, first=first).encode(),
            "dpkg-deb": b'#!/bin/sh\nmkdir "$3" && tar -xf "$2" -C "$3"\n',
        }
        for path in write(tools, scripts).iterdir():
            path.chmod(0o755)

    return install


def test_debian_package_is_the_last_resort(tmp_path, debian):
    debian()
    assert len(load("fashion_mnist").y) == 12
    cache = tmp_path / "cache" / "fashion_mnist"
    assert sorted(os.listdir(cache)) == sorted(f"{stem}.gz" for stem in idx_files())
    assert (tmp_path / "log").read_text() == "download dataset-fashion-mnist\n"
    shutil.rmtree(cache), (tmp_path / "log").unlink()
    debian(first='case "$*" in *Dir::State*) ;; *) exit 100;; esac')  # a machine without package lists
    assert len(load("fashion_mnist").y) == 12
    plain, update, again = (tmp_path / "log").read_text().splitlines()
    assert plain == "download dataset-fashion-mnist"
    assert update.endswith("update") and again.endswith("download dataset-fashion-mnist")
    assert all("-o Dir::State=" in line for line in (update, again)), "the system's package lists are not changed"


def test_debian_package_with_other_content_is_refused(tmp_path, monkeypatch, debian):
    debian()
    source = sources.SOURCES["fashion_mnist"]
    other = dict.fromkeys(source.package.content_sha256_of, "0" * 32)
    package = replace(source.package, content_sha256_of=other)
    monkeypatch.setitem(sources.SOURCES, "fashion_mnist", replace(source, package=package))
    with pytest.raises(UserError, match="must hold data of SHA-256 0000"):
        load("fashion_mnist")
    assert os.listdir(tmp_path / "cache") == []
