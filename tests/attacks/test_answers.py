"""An answer of a client that no mechanism protects makes its epsilon infinite."""

from __future__ import annotations

import json

import pytest
from conftest import blobs, parts_of, small_net

from dpfl_lightning.build import FederatedLoop
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.plan import main as plan
from dpfl_lightning.strategies.clustering.ifca import Ifca


@pytest.mark.parametrize("selection", ["paper_argmin", "exponential_frozen"])
def test_choices_without_noise_are_covered_by_no_epsilon(selection, tmp_path, capsys):
    loop = FederatedLoop(
        blobs(),
        ClientModule(small_net()),
        rounds=2,
        clients=ClientOptions(count=4, batch_size=16),
        privacy=PrivacyOptions(epsilon=8.0, delta=1e-3),
        **parts_of([Ifca(num_clusters=2, selection=selection)]),
        output_dir=tmp_path / "run",
        device="cpu",
        new_net=lambda seed: small_net(seed=seed),
    )
    result = loop.run()
    bare = selection == "paper_argmin"
    assert [one["epsilon_spent"] is None for one in result.clients] == [bare] * 4
    promises = json.loads((tmp_path / "run" / "guarantees.json").read_text())["clients"]
    assert [one["epsilon"] is None for one in promises] == [bare] * 4
    assert plan(["--ledger", str(tmp_path / "run"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [one["epsilon"] is None for one in again["clients"]] == [bare] * 4
