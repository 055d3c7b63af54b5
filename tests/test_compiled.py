"""Compiled loops are cached on disk, and a broken cache is never a reason to fail."""

import errno
import gc
import importlib.util
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from dpfl_lightning.errors import UserNotice
from dpfl_lightning.privacy.clipping.compiled import compiled

LOOP = """
def outer(factor):
    def loop(x):
        for k in range(len(x)):
            x[k] *= factor
    return loop
"""


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """A function of a file, as a new process would see it: nothing is left of what was compiled before."""
    path = tmp_path / "loops.py"
    path.write_text(LOOP)

    def made(factor: int):
        gc.collect()
        spec = importlib.util.spec_from_file_location("loops", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "loops", module)
        spec.loader.exec_module(module)
        return compiled(module.outer(factor))

    return made


def times(dispatcher) -> float:
    x = np.ones(3)
    dispatcher(x)
    return float(x[0])


def from_disk(dispatcher) -> bool:
    assert sum(dispatcher.stats.cache_hits.values()) + sum(dispatcher.stats.cache_misses.values()) == 1
    return bool(dispatcher.stats.cache_hits)


def files(folder: Path, kind: str) -> list[Path]:
    return sorted((folder / "__pycache__").glob(f"*.{kind}"))


@pytest.mark.e2e
def test_compiled_loops_are_loaded_again_for_the_same_outer_variables_alone(loop, tmp_path):
    cached = []
    for factor in (2, 2, 3, 2, 3):
        dispatcher = loop(factor)
        assert times(dispatcher) == factor
        cached.append(from_disk(dispatcher))
    assert cached == [False, True, False, True, True] and len(files(tmp_path, "nbc")) == 2


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [b"", b"half of"])
def test_a_file_that_was_cut_off_is_written_anew(kind, left, loop, tmp_path):
    times(loop(2))
    (file,) = files(tmp_path, kind)
    file.write_bytes(left)
    with pytest.warns(UserNotice, match="broken file of compiled loops .* compiled again"):
        assert times(loop(2)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = loop(2)
        assert times(again) == 2 and from_disk(again)


@pytest.mark.e2e
def test_a_full_disk_ends_nothing(loop, monkeypatch):
    def full(*what):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._save_data", full)
    with pytest.warns(UserNotice, match=r"cannot be cached \(.*No space left"):
        assert times(loop(2)) == 2
