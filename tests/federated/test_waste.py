"""A run that learns nothing ends before the next charge, and keeps the last models that were sound."""

import math

import pytest
import torch

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted
from dpfl_lightning.strategies.clustering.local import Local

PROTECTED = PrivacyOptions(epsilon=4.0, delta=1e-3)


def spoiled(loop, factor_of):
    """Releases of a round are multiplied by what `factor_of(round, client)` returns."""
    releases = loop.clients.engine.releases

    def broken(plan, *args):
        for row, delta in releases(plan, *args):
            yield row, delta * factor_of(plan.round, plan.clients[row])

    loop.clients.engine.releases = broken
    return loop


class SeesUpdates(Strategy):
    def needs_updates(self, plan, view):
        return True


@pytest.mark.filterwarnings("ignore:round.*not finite")
@pytest.mark.parametrize("parts", [[], [SeesUpdates()]])
@pytest.mark.parametrize("factor, got", [(math.nan, "no update .* is finite"), (1e9, "no update .* below")])
def test_a_run_that_diverges_is_not_charged_again(factor, got, parts, make_loop):
    loop = spoiled(make_loop(privacy=PROTECTED, rounds=4, parts=parts), lambda round, _: factor if round == 2 else 1.0)
    models = []
    one_round = loop.one_round
    loop.one_round = lambda state: models.append(state.models) or one_round(state)
    with pytest.raises(UserError, match=f"`training` must not diverge, got in round 2: .*{got}"):
        loop.run()
    assert {charge.round for charge in read_ledger(loop.clients.folder.ledger_file)} == {1, 2}
    saved = torch.load(loop.folder.checkpoint, weights_only=True)
    assert saved["round"] == 2 and torch.equal(saved["models"], models[1]) and bool(models[1].isfinite().all())


def test_one_client_with_a_huge_update_is_left_out(make_loop):
    loop = spoiled(make_loop(rounds=3), lambda round, client: 1e30 if client == 3 else 1.0)
    without = spoiled(make_loop(rounds=3), lambda round, client: math.nan if client == 3 else 1.0)
    with pytest.warns(UserNotice, match="round 2: left out .* not finite, or above 1e6: clients 3"):
        loop.run()
        without.run()
    assert torch.equal(loop.state.models, without.state.models)


def test_a_client_that_wrecks_the_model_that_it_has_alone_harms_no_other(make_loop):
    def with_large_updates(loop):  # each is below the limit, and the model of two is above
        releases = loop.clients.engine.releases

        def larger(plan, *args):
            for row, delta in releases(plan, *args):
                yield row, torch.full_like(delta, 9e5) if plan.clients[row] == 3 else delta

        loop.clients.engine.releases = larger
        return loop

    parts = [SizeWeighted(), Local()]
    loop, honest = with_large_updates(make_loop(rounds=3, parts=parts)), make_loop(rounds=3, parts=parts)
    with pytest.warns(UserNotice, match=r"round 2: 1 of 4 models stay .* Charged in vain: clients 3"):
        loop.run()
    honest.run()
    assert torch.equal(loop.state.models[:3], honest.state.models[:3]) and bool(
        (loop.state.models[3].abs() < 1e6).all()
    )
