"""Names and options that users write: see also the tables of wrong options in tests/data and tests/models."""

import importlib
from collections.abc import Sequence

import pytest

from dpfl_lightning.config.registry import NAMES, call, names_of
from dpfl_lightning.errors import UserError


def scale(x: float, by: float, times: int = 1, unit: str = "", steps: Sequence[int] = ()) -> tuple:
    return x, by, times, unit, steps


def test_call_passes_arguments_and_options():
    assert call("thing", {"scale": scale}, "scale", 2.0, by=3, steps=[1]) == (2.0, 3, 1, "", [1])


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "`thing.by` must be given for scale, got None"),
        ({"by": "3"}, "`thing.by` must be a number, got '3'"),
        ({"by": True}, "`thing.by` must be a number, got True"),
        ({"by": 3, "times": 1.0}, "`thing.times` must be a whole number, got 1.0"),
        ({"by": 3, "unit": 5}, "`thing.unit` must be text, got 5"),
        ({"by": 3, "steps": [1, 2.5]}, "`thing.steps` must be a whole number, got 2.5. It is value 2 of the list."),
        ({"by": 3, "steps": "12"}, "`thing.steps` must be a list of whole numbers, got '12'"),
        ({"by": 3, "x": 1}, r"`thing.x` must be an option of scale \(by, times, unit, steps\), got 1"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(UserError, match=message):
        call("thing", {"scale": scale}, "scale", 2.0, **options)


@pytest.mark.parametrize("key", NAMES)
def test_names_are_those_of_the_imported_registry(key):
    registries = [
        getattr(importlib.import_module(f"dpfl_lightning.{module}"), attribute) for module, attribute in NAMES[key]
    ]
    assert names_of(key) == [name for registry in registries for name in registry]
