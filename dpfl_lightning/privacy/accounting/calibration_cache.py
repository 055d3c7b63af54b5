"""Cache on disk for solved noise multipliers. Entries may be lost, and are verified before they are used."""

import contextlib
import fcntl
import functools
import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from dpfl_lightning.privacy.accounting.accountant import Accountant
from dpfl_lightning.privacy.accounting.planned import ClientSchedule

_MOST_BYTES = 8 << 20  # about 100,000 noises; a larger file is emptied


class CalibrationCache:
    """Noise multipliers by schedule (public facts), accountant, and versions of code and libraries that solved them.

    A text file in `folder` holds one noise in a line. Several processes may append at once; damaged lines are ignored,
    and so is a folder that is missing, unreadable or read-only.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "noise_multipliers.txt"

    def noises(self, schedules: Sequence[ClientSchedule], accountant: Accountant) -> list[float | None]:
        """Return the cached noise of each schedule or None. It is unverified: compose it again before use."""
        return [self._noises.get(key) for key in _keys(schedules, accountant)]

    def keep(self, solved: Mapping[ClientSchedule, float], accountant: Accountant) -> None:
        """Append solved noises, each above 0 and finite."""
        new = dict(zip(_keys(solved, accountant), solved.values(), strict=True))
        texts = [f"{key} {noise!r}" for key, noise in new.items()]
        with contextlib.suppress(OSError):  # without a writable folder they are solved again next time
            self.file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.fstat(descriptor).st_size > _MOST_BYTES:
                    os.ftruncate(descriptor, 0)
                # the leading line break terminates a line that a crash left incomplete
                os.write(descriptor, "".join(["\n", *(f"{text} {_digest(text)}\n" for text in texts)]).encode())
            finally:
                os.close(descriptor)
        self._noises.update(new)

    @functools.cached_property
    def _noises(self) -> dict[str, float]:
        """Noises by key, from the undamaged lines; the file is read once."""
        noises: dict[str, float] = {}
        lines: list[str] = []
        with contextlib.suppress(OSError):
            if self.file.is_file() and self.file.stat().st_size <= 2 * _MOST_BYTES:
                lines = self.file.read_text(errors="replace").splitlines()
        for line in lines:
            text, _, digest = line.rpartition(" ")
            key, _, noise = text.partition(" ")
            if digest == _digest(text) and 0 < float(noise) < math.inf:
                noises[key] = float(noise)
        return noises


def _keys(schedules: Iterable[ClientSchedule], accountant: Accountant) -> list[str]:
    """Return a key of each schedule, which covers all settings on which the accountant's result depends."""
    simple_types = str | int | float | tuple  # adjacency, orders, time limit
    settings = sorted((name, value) for name, value in vars(accountant).items() if isinstance(value, simple_types))
    common = f"{accountant.name} {accountant.description} {settings} {_versions()} "
    return [_digest(f"{common}{schedule!r}") for schedule in schedules]


@functools.cache
def _versions() -> str:
    """Return the versions of the libraries that compute an epsilon, and the digest of this folder's code."""
    libraries = " ".join(f"{name} {version(name)}" for name in ("dp-accounting", "opacus", "numpy", "scipy"))
    sources = [source.read_text() for source in sorted(Path(__file__).parent.glob("*.py"))]
    return f"{libraries} code {_digest(' '.join(sources))}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
