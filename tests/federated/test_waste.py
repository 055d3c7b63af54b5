"""A run that learns nothing ends before the next charge, and keeps the last models that were sound."""

import math

import pytest
import torch
from fakes import Recorder, changed_releases

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted
from dpfl_lightning.strategies.aggregation.uniform import Uniform
from dpfl_lightning.strategies.clustering.local import Local

PROTECTED = PrivacyOptions(epsilon=4.0, delta=1e-3)


@pytest.mark.filterwarnings("ignore:round.*not finite")
@pytest.mark.parametrize("parts", [[], [Recorder(updates=True)]])
@pytest.mark.parametrize("factor, got", [(math.nan, "no update .* is finite"), (1e9, "no update .* below")])
def test_a_run_that_diverges_is_not_charged_again(factor, got, parts, make_loop):
    loop = make_loop(privacy=PROTECTED, rounds=4, parts=[*parts, seen := Recorder()])
    changed_releases(loop, lambda round, client, delta: delta * factor if round == 2 else delta)
    with pytest.raises(UserError, match=f"`training` must not diverge, got in round 2: .*{got}"):
        loop.run()
    assert {charge.round for charge in read_ledger(loop.clients.folder.ledger_file)} == {1, 2}
    saved = torch.load(loop.folder.checkpoint, weights_only=True)
    assert saved["round"] == 2 and torch.equal(saved["models"], seen.models[0])


@pytest.mark.e2e
def test_one_client_with_a_huge_update_is_left_out(make_loop):
    loop, without = (
        changed_releases(make_loop(rounds=3), lambda round, client, delta, by=by: delta * by if client == 3 else delta)
        for by in (1e30, math.nan)
    )
    with pytest.warns(UserNotice, match="round 2: left out .* not finite, or above 1e6: clients 3"):
        loop.run()
        without.run()
    assert torch.equal(loop.state.models, without.state.models)


@pytest.mark.e2e
def test_a_client_that_wrecks_the_model_that_it_has_alone_harms_no_other(make_loop):
    loop, honest = (make_loop(rounds=3, parts=[SizeWeighted(), Local()]) for _ in range(2))
    # each is below the limit, and the model of two is above
    changed_releases(loop, lambda round, client, delta: torch.full_like(delta, 9e5) if client == 3 else delta)
    with pytest.warns(UserNotice, match=r"round 2: 1 of 4 models stay .* Charged in vain: clients 3"):
        loop.run()
    honest.run()
    assert torch.equal(loop.state.models[:3], honest.state.models[:3]) and bool(
        (loop.state.models[3].abs() < 1e6).all()
    )


class ZerosInRoundTwo(Uniform):
    """Weights of zeros in round 2, which are known before the training, or after it with `reads`."""

    def __init__(self, reads: bool) -> None:
        self.reads = reads

    def needs_updates(self, plan, view):
        return self.reads

    def weigh(self, updates, view):
        return super().weigh(updates, view) * (view.round != 2)


def test_weights_of_zeros_are_refused_before_the_charge(make_loop):
    loop = make_loop(privacy=PROTECTED, rounds=3, parts=[ZerosInRoundTwo(reads=False)])
    with pytest.raises(UserError, match=r"weigh of .* must give a client of round 2 a weight above 0, got 'zeros for"):
        loop.run()
    assert {charge.round for charge in read_ledger(loop.clients.folder.ledger_file)} == {1}


def test_weights_of_zeros_that_follow_from_updates_are_said_and_reported(make_loop):
    loop = make_loop(privacy=PROTECTED, rounds=2, parts=[ZerosInRoundTwo(reads=True), seen := Recorder()])
    with pytest.warns(UserNotice, match="is charged and changes no model, because all aggregation weights are 0"):
        result = loop.run()
    assert torch.equal(seen.models[0], seen.models[1]) and result.metrics["effective_clients"] == 0
