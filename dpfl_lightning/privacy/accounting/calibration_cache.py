"""Solved noise multipliers on disk, for the next command on the same plan: they may be lost, and are never believed."""

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

_MOST_BYTES = 8 << 20  # some 100,000 noises; beyond it the file begins anew
_KEY = 32  # characters


class CalibrationCache:
    """Noise multipliers by schedule, accountant, and the code and libraries that solved them.

    One text file, one line a noise. Several processes may append at once; a line that is torn or altered is no line.
    A folder that is missing, or cannot be read or written, makes the cache empty: nothing depends on it but time.

    Args:
        folder: made when the first noise is kept.

    **Privacy** Holds digests of schedules (public facts) and noise multipliers.

    >>> import tempfile
    >>> from dpfl_lightning.privacy.accounting.accountant import get_accountant
    >>> from dpfl_lightning.privacy.accounting.events import GaussianEvent
    >>> from dpfl_lightning.privacy.accounting.schedule import ClientSchedule, Planned
    >>> run = ClientSchedule(1.0, 1e-5, (Planned("train", GaussianEvent(1.0, None), 4),))
    >>> cache = CalibrationCache(Path(tempfile.mkdtemp()) / "calibration")
    >>> cache.keep({run: 7.461}, get_accountant("gdp"))
    >>> cache.noises([run], get_accountant("gdp")), cache.noises([run], get_accountant("rdp"))
    ([7.461], [None])
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "noise_multipliers.txt"

    def noises(self, schedules: Sequence[ClientSchedule], accountant: Accountant) -> list[float | None]:
        """What the file holds for each schedule, or None. It may be anything: compose it again before it is used."""
        key_of = _keys(accountant)
        return [_noise(self._lines.get(key_of(schedule), "")) for schedule in schedules]

    def keep(self, solved: Mapping[ClientSchedule, float], accountant: Accountant) -> None:
        """Append solved noises, above 0 and finite."""
        key_of = _keys(accountant)
        new = {key: _line(key, noise) for key, noise in zip(map(key_of, solved), solved.values(), strict=True)}
        with contextlib.suppress(OSError):  # no place to keep them is no error: they are solved again
            self.file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.fstat(descriptor).st_size > _MOST_BYTES:
                    os.ftruncate(descriptor, 0)
                # the first line break ends a line that a crash has torn
                os.write(descriptor, ("\n" + "\n".join(new.values()) + "\n").encode())
            finally:
                os.close(descriptor)
        self._lines.update(new)

    @functools.cached_property
    def _lines(self) -> dict[str, str]:
        """Key -> line; read once."""
        try:
            if not self.file.is_file() or self.file.stat().st_size > 2 * _MOST_BYTES:
                return {}
            text = self.file.read_text(errors="replace")
        except OSError:
            return {}
        return {line[:_KEY]: line for line in text.splitlines()}


def _keys(accountant: Accountant) -> Callable[[ClientSchedule], str]:
    """The key of a schedule: also of all that decides what this accountant says."""
    plain = str | int | float | tuple  # adjacency, orders, a time limit
    own = sorted((name, value) for name, value in vars(accountant).items() if isinstance(value, plain))
    common = f"{accountant.name} {accountant.description} {own} {_versions()} "
    return lambda schedule: _digest(f"{common}{schedule!r}")


def _line(key: str, noise: float) -> str:
    said = f"{key} {noise!r}"
    return f"{said} {_digest(said)}"


def _noise(line: str) -> float | None:
    """The noise of a line that nothing has damaged."""
    said, _, mark = line.rpartition(" ")
    if not said or mark != _digest(said):
        return None
    try:
        noise = float(said.rpartition(" ")[2])
    except ValueError:
        return None
    return noise if 0 < noise < math.inf else None


@functools.cache
def _versions() -> str:
    """Of the libraries that compute an epsilon, and of this package's private core."""
    libraries = " ".join(f"{name} {version(name)}" for name in ("opacus", "numpy", "scipy"))
    sources = [source.read_text() for source in sorted(Path(__file__).parent.glob("*.py"))]
    return f"{libraries} code {_digest(' '.join(sources))}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_KEY // 2).hexdigest()
