"""What all adapters share: names in a module of tests are replaced by ours, and upper bounds are compared."""

import importlib.util
import os
import sys
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

import pytest

from dpfl_lightning.privacy.accounting.accountant import Accountant
from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.accounting.schedule import calibrate

FOLDER = "TEST_SUITES"  # environment variable: a folder with the packages that are not dependencies of the tests
PACKAGES = "jax_privacy==2.0.0 cryptography_vectors==50.0.2"


def unpacked(path: str) -> Path:
    """Return a file of a package in the folder; skip the test if it is not there."""
    for folder in (os.environ.get(FOLDER, ""), *sys.path):
        if folder and (Path(folder) / path).exists():
            return Path(folder) / path
    command = f"pip install --no-deps --target FOLDER {PACKAGES}"
    pytest.skip(f"{path} is not installed: {command}, and set {FOLDER}=FOLDER", allow_module_level=True)


def loaded(name: str, path: Path) -> ModuleType:
    """Load one file as a module of that name, without the package around it."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


class Replaced(unittest.TestCase):
    """Replaces names in the module of the library's tests while a test runs."""

    module: ClassVar[ModuleType]
    names: ClassVar[dict[str, Any]]

    def setUp(self) -> None:
        for name, ours in self.names.items():
            patch = mock.patch.object(self.module, name, ours)
            patch.start()
            self.addCleanup(patch.stop)
        super().setUp()


class UpperBounds(Replaced):
    """Compares upper bounds: our value is not below the expected one, and above it by at most `slack` and `relative`.

    Our epsilons are rounded up to 1e-6. `below` is for expected values that are upper bounds themselves.
    """

    slack = 2e-6
    relative = 0.0
    below = 0.0
    expected_first = False

    def assertAlmostEqual(self, first, second, places=None, msg=None, delta=None):  # type: ignore[no-untyped-def]
        actual, expected = (second, first) if self.expected_first else (first, second)
        tolerance = delta if delta is not None else 0.5 * 10.0 ** -(7 if places is None else places)
        self.assertGreaterEqual(actual, expected - tolerance - self.below, msg)
        self.assertLessEqual(actual, expected * (1 + self.relative) + tolerance + self.slack, msg)

    def assertLess(self, a, b, msg=None):  # type: ignore[no-untyped-def]
        self.assertLessEqual(a, b, msg)  # a budget may be used up exactly

    def assertRaisesRegex(self, expected_exception, expected_regex, *args, **kwargs):  # type: ignore[no-untyped-def]
        if expected_exception is ValueError:  # our messages name our options
            return self.assertRaises(expected_exception, *args, **kwargs)
        return super().assertRaisesRegex(expected_exception, expected_regex, *args, **kwargs)


def calibrated(accountant: Accountant, event: NoisedEvent, epsilon: float, delta: float) -> float:
    """Return the noise multiplier that our calibration finds for an event without one."""
    schedule = ClientSchedule(epsilon, delta, (Planned("train", event, 1),))
    return calibrate([schedule], accountant)[0].noise_multiplier("train")
