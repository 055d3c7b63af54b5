"""Cache on disk for solved noise multipliers. Entries may be lost, and are verified before they are used."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from dpfl_lightning.privacy.accounting.accountant import Accountant
from dpfl_lightning.privacy.accounting.planned import ClientSchedule

_MOST_BYTES = 8 << 20  # about 100,000 noises; a larger file is emptied
_KEY = 32  # characters


class CalibrationCache:
    """Noise multipliers by schedule, accountant, and the versions of the code and the libraries that solved them.

    The cache is a text file with one noise per line. Several processes may append at once; damaged lines are ignored.
    If the folder is missing, unreadable or read-only, the cache is empty, which only costs time.

    Args:
        folder: folder of the file; created when the first noise is stored.

    **Privacy** Holds digests of schedules (public facts) and noise multipliers.

    >>> import tempfile
    >>> from dpfl_lightning.privacy.accounting.accountant import get_accountant
    >>> from dpfl_lightning.privacy.accounting.events import GaussianEvent
    >>> from dpfl_lightning.privacy.accounting.planned import Planned
    >>> run = ClientSchedule(1.0, 1e-5, (Planned("train", GaussianEvent(1.0, None), 4),))
    >>> cache = CalibrationCache(Path(tempfile.mkdtemp()) / "calibration")
    >>> cache.keep({run: 7.461}, get_accountant("gdp"))
    >>> cache.noises([run], get_accountant("gdp")), cache.noises([run], get_accountant("rdp"))
    ([7.461], [None])
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "noise_multipliers.txt"

    def noises(self, schedules: Sequence[ClientSchedule], accountant: Accountant) -> list[float | None]:
        """Return the cached noise of each schedule or None. It is unverified: compose it again before use."""
        key_of = _keys(accountant)
        return [_noise(self._lines.get(key_of(schedule), "")) for schedule in schedules]

    def keep(self, solved: Mapping[ClientSchedule, float], accountant: Accountant) -> None:
        """Append solved noises, each above 0 and finite."""
        key_of = _keys(accountant)
        new = {key: _line(key, noise) for key, noise in zip(map(key_of, solved), solved.values(), strict=True)}
        with contextlib.suppress(OSError):  # without a writable folder they are solved again next time
            self.file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.fstat(descriptor).st_size > _MOST_BYTES:
                    os.ftruncate(descriptor, 0)
                # the leading line break terminates a line that a crash left incomplete
                os.write(descriptor, ("\n" + "\n".join(new.values()) + "\n").encode())
            finally:
                os.close(descriptor)
        self._lines.update(new)

    @functools.cached_property
    def _lines(self) -> dict[str, str]:
        """Lines by key; the file is read once."""
        try:
            if not self.file.is_file() or self.file.stat().st_size > 2 * _MOST_BYTES:
                return {}
            text = self.file.read_text(errors="replace")
        except OSError:
            return {}
        return {line[:_KEY]: line for line in text.splitlines()}


def _keys(accountant: Accountant) -> Callable[[ClientSchedule], str]:
    """Return a function from schedule to key. The key covers all settings on which the accountant's result depends."""
    simple_types = str | int | float | tuple  # adjacency, orders, time limit
    settings = sorted((name, value) for name, value in vars(accountant).items() if isinstance(value, simple_types))
    common = f"{accountant.name} {accountant.description} {settings} {_versions()} "
    return lambda schedule: _digest(f"{common}{schedule!r}")


def _line(key: str, noise: float) -> str:
    text = f"{key} {noise!r}"
    return f"{text} {_digest(text)}"


def _noise(line: str) -> float | None:
    """Return the noise of a line, or None if the line is damaged."""
    text, _, digest = line.rpartition(" ")
    if not text or digest != _digest(text):
        return None
    try:
        noise = float(text.rpartition(" ")[2])
    except ValueError:
        return None
    return noise if 0 < noise < math.inf else None


@functools.cache
def _versions() -> str:
    """Return the versions of the libraries that compute an epsilon, and the digest of this folder's code."""
    libraries = " ".join(f"{name} {version(name)}" for name in ("opacus", "numpy", "scipy"))
    sources = [source.read_text() for source in sorted(Path(__file__).parent.glob("*.py"))]
    return f"{libraries} code {_digest(' '.join(sources))}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_KEY // 2).hexdigest()
