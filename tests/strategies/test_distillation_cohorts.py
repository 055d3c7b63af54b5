"""Rounds of distillation that have fewer clients than `min_participants`."""

from __future__ import annotations

import warnings

import pytest
import torch
from conftest import PowerCut, cut_at
from few_digits import EQUAL, NOTICE, SMALL, a_net, digits, new_net, private

from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.errors import UserNotice
from dpfl_lightning.federated.client.budgets import Budgets
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.strategies.distillation.distillation import PURPOSE, Distillation


class Away(Strategy):
    """Leaves clients out of some rounds."""

    def __init__(self, away):
        self._away = away  # round -> clients

    def plan_round(self, plan, view):
        return plan.only(lambda client: client not in self._away.get(view.round, ()))


def asked(loop) -> list[int]:
    """How many clients were asked in each round that anybody was asked in: filled when the loop runs."""
    found, train = [], loop.clients.engine.train

    def spy(plan, state, charge_numbers, raw_weights):
        found.append(len(plan.clients))
        return train(plan, state, charge_numbers, raw_weights)

    loop.clients.engine.train = spy
    return found


def few(make_loop, privacy, parts, **more):
    """A run over four clients."""
    return make_loop(
        population=digits(EQUAL),
        module=a_net(),
        new_net=new_net,
        parts=parts,
        privacy=privacy,
        clients=ClientOptions(count=4, batch_size=12),
        **more,
    )


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [None, private()], ids=["plain", "private"])
@pytest.mark.parametrize("before", [True, False])
@NOTICE
def test_a_round_of_too_few_clients_is_left_out(privacy, before, make_loop):
    """Whoever leaves them out, before or after it: nobody is asked or charged, and the set stays."""
    own, away = Distillation(**SMALL | {"min_participants": 3}), Away({2: (0, 3), 3: (1,)})
    loop = few(make_loop, privacy, [away, own] if before else [own, away], rounds=3)
    seen = asked(loop)
    with pytest.warns(UserNotice, match="round 2: 2 clients could take part, fewer than the 3"):
        assert loop.run().rounds == 3
    assert seen == [4, 3]
    charged = [charge.round for charge in read_ledger(loop.clients.folder.ledger_file)]
    assert [charged.count(round) for round in (1, 2, 3)] == [4, 0, 3]


@pytest.mark.slow
def test_a_run_ends_when_too_few_clients_can_pay(make_loop):
    """Two budgets pay for fewer rounds than the others: what is left of those is not spent on rounds of two."""
    privacy = private([3.0, 3.0, 9.0, 9.0], noise_multiplier=2.0)
    loop = few(make_loop, privacy, [Distillation(**SMALL | {"min_participants": 3})], rounds=40)
    seen = asked(loop)
    result = loop.run()
    least, most = (loop.schedule.clients[client].count_of(PURPOSE) for client in (0, 2))
    assert seen == [4] * least and least < most and result.rounds == least
    assert result.finished and result.reason == (
        f"budgets pay for fewer than 3 clients in every round after {least} (strategies.distillation.min_participants)"
    )


@pytest.mark.slow
def test_rounds_go_on_while_a_later_one_has_enough(make_loop):
    """Cohorts of two: some have a client that cannot pay, and those are left out."""
    privacy = private([3.0, 9.0, 9.0, 9.0], noise_multiplier=3.0)
    own = Distillation(**SMALL | {"min_participants": 2, "participation_fraction": 0.5})
    loop = few(make_loop, privacy, [own], rounds=30)
    seen = asked(loop)
    with pytest.warns(UserNotice, match="1 client could take part, fewer than the 2"):
        result = loop.run()
    assert set(seen) == {2} and len(seen) < result.rounds


@pytest.mark.slow
@NOTICE
def test_clients_whose_charge_is_refused_count_as_absent(make_loop, monkeypatch):
    charge = Budgets.charge_round

    def refusing(self, plan):
        plan, numbers = charge(self, plan)
        return (plan.only(lambda client: client < 2), numbers[:2]) if plan.round == 2 else (plan, numbers)

    monkeypatch.setattr(Budgets, "charge_round", refusing)
    loop = few(make_loop, None, [Distillation(**SMALL | {"min_participants": 3})], rounds=3)
    seen = asked(loop)
    with pytest.warns(UserNotice, match="round 2: 2 clients could take part"):
        loop.run()
    assert seen == [4, 4]


@pytest.mark.slow
def test_a_resumed_run_leaves_out_the_same_rounds(make_loop):
    """Also where the round that was broken off was the last that a client pays for."""
    privacy = private([3.0, 9.0, 9.0, 9.0], noise_multiplier=3.0)
    options = SMALL | {"min_participants": 2, "participation_fraction": 0.5}

    def run(**more):
        return few(make_loop, privacy, [Distillation(**options)], rounds=12, evaluate_every=12, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserNotice)
        unbroken = run()
        unbroken.run()
        charges = read_ledger(unbroken.clients.folder.ledger_file)
        last = max(one.round for one in charges if one.client == 0)
        for round in {last, max(one.round for one in charges)}:
            broken = run(output_dir=unbroken.output_dir.parent / f"broken{round}")
            cut_at(broken, round)
            with pytest.raises(PowerCut):
                broken.run()
            again = run(output_dir=broken.output_dir)
            again.run(resume=True)
            assert torch.equal(again.state.models, unbroken.state.models)
            assert again.state.round == unbroken.state.round
