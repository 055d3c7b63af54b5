"""Where the noise and the batches of a run come from, and so whether they protect anybody.

Only this file, the options and what reads or writes the option `privacy.noise_key` say which sources there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.errors import require

_FRESH = "AES-256 in counter mode, keyed afresh by the operating system for every release"


@dataclass(frozen=True)
class NoiseSource:
    """Where the noise and the batches of a run come from.

    Args:
        name: in `run.json`.
        repeats: whether a release that a crash interrupted is repeated bit for bit, so that it is charged once.
        option: by which nobody is protected; empty if the noise protects.
        must: what the option must be to protect.
        label: of every mention of the run and its epsilon; empty if there is none.
        caveats: sentences that every guarantee must contain.
        warning: of an installation that uses it; empty if there is none.
    """

    name: str
    repeats: bool = False
    option: str = ""
    must: str = ""
    label: str = ""
    caveats: tuple[str, ...] = ()
    warning: str = ""

    @property
    def protects(self) -> bool:
        """Whether epsilon protects anybody."""
        return not self.option

    @property
    def heading(self) -> str:
        """What stands before an epsilon."""
        return f"{self.label.capitalize()}, nobody is protected: " if self.label else ""

    @property
    def badge(self) -> str:
        """What every mention of a run has to carry."""
        return f"{self.label}: nobody is protected" if self.label else ""

    def named(self, name: str) -> str:
        """Add the label to a run's name that a user has chosen.

        >>> KEYED.named("main job"), FRESH.named("main job")
        ('main job (simulated)', 'main job')
        """
        return f"{name} ({self.label})" if self.label and self.label not in name else name

    def words(self, device: str) -> str:
        """Describe the source for reports, given the type of the device that draws."""
        if not self.protects:
            return f"{self.label}: it follows from {self.option}" if self.label else "none"
        return f"the GPU's generator (Philox), seeded for every release by {_FRESH}" if device == "cuda" else _FRESH


FRESH = NoiseSource("fresh")
NO_NOISE = NoiseSource("none", repeats=True, option="privacy", must="be set")
KEYED = NoiseSource(
    "simulated",
    repeats=True,
    option="privacy.noise_key",
    must="be null",
    label="simulated",
    caveats=(
        "a simulation: its noise follows from privacy.noise_key, so nobody is protected, and epsilon is that of the "
        "simulated mechanism",
    ),
    warning="test key: noise can be computed by everyone who knows the key, so that nobody is protected",
)
SOURCES = {source.name: source for source in (FRESH, KEYED, NO_NOISE)}


def source_of(privacy: PrivacyOptions | Mapping[str, Any] | None) -> NoiseSource:
    """Return the source that options of the section privacy name."""
    if privacy is None:
        return NO_NOISE
    given = privacy if isinstance(privacy, Mapping) else vars(privacy)
    return FRESH if given.get("noise_key") is None else KEYED


def require_simulated(source: NoiseSource, key: str, got: object, why: str) -> None:
    """Raise UserError about the option `key` if noise of this source protects records, which the option would not."""
    must = "be left out where noise protects records"
    others = " or ".join(f"{one.option}: {given}" for one, given in ((KEYED, "KEY"), (NO_NOISE, "null")))
    require(not source.protects, key, must, got, f"{why} A simulation may have it: set {others}.")


def key_of(privacy: PrivacyOptions | None) -> str | None:
    """Return the key from which noise that repeats follows; None for fresh noise."""
    return "" if privacy is None else privacy.noise_key


def source_in(caveats: Iterable[str]) -> NoiseSource:
    """Return the source of a guarantee with these caveats."""
    stated = {*caveats}
    return next((source for source in SOURCES.values() if stated.intersection(source.caveats)), FRESH)


def with_key(section: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """Return a section privacy of a configuration with a key from which noise follows; None for fresh noise."""
    return {**section, "noise_key": key}
