"""An answer of a client that no mechanism protects makes its epsilon infinite."""

from __future__ import annotations

import json

import pytest
from conftest import small_loop

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.plan import main as plan
from dpfl_lightning.strategies.clustering.ifca import Ifca


@pytest.mark.parametrize("selection", ["paper_argmin", "exponential_frozen"])
def test_choices_without_noise_are_covered_by_no_epsilon(selection, tmp_path, capsys):
    result = small_loop(
        rounds=2,
        privacy=PrivacyOptions(epsilon=8.0, delta=1e-3),
        parts=[Ifca(num_clusters=2, selection=selection)],
        output_dir=tmp_path / "run",
    ).run()
    bare = selection == "paper_argmin"
    assert [one["epsilon_spent"] is None for one in result.clients] == [bare] * 4
    promises = json.loads((tmp_path / "run" / "guarantees.json").read_text())["clients"]
    assert [one["epsilon"] is None for one in promises] == [bare] * 4
    assert plan(["--ledger", str(tmp_path / "run"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [one["epsilon"] is None for one in again["clients"]] == [bare] * 4
