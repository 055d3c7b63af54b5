"""Distillation runs: resumed, the set with its card, and rounds of fewer clients than `min_participants`."""

import warnings

import pytest
import torch
from conftest import PowerCut, cut_at, private
from fakes import Absent
from few_digits import NOTICE, SMALL, distilled, few, images_of, made_of

from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.budgets import Budgets
from dpfl_lightning.papers.distillation.distillation import PURPOSE, Distillation
from dpfl_lightning.papers.distilled_data import load_distilled
from dpfl_lightning.papers.sets.distilled_set import DATA_CARD
from dpfl_lightning.privacy.ledger.ledger import read_ledger

pytestmark = NOTICE


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [None, private()], ids=["plain", "private"])
def test_a_resumed_run_equals_the_unbroken_one(privacy, make_loop):
    options = {"reinit_every": 3, "augmentation": "dsa", "participation_fraction": 0.5, **SMALL}

    def again(**more):
        return few(make_loop, Distillation(**options), privacy=privacy, rounds=6, evaluate_every=6, **more)

    unbroken, broken = again(), again()
    unbroken.run()
    for round in (2, 5):
        cut_at(broken, round)
        with pytest.raises(PowerCut):
            broken.run(resume=round > 2)
        broken = again(output_dir=broken.output_dir)
    broken.run(resume=True)
    ours, theirs = (made_of(loop.config.strategies[0]) for loop in (broken, unbroken))
    assert torch.equal(ours["images"], theirs["images"]) and torch.equal(ours["velocity"], theirs["velocity"])
    assert torch.equal(broken.state.models, unbroken.state.models) and ours["age"] == theirs["age"]


# ---- the set


@pytest.mark.e2e
def test_a_run_leaves_its_set_and_a_card(make_loop):
    loop, strategy = distilled(make_loop, privacy=private(), rounds=2)
    left = load_distilled(loop.output_dir)
    assert torch.equal(left.x, images_of(strategy).flatten(0, 1)) and left.y.tolist() == [0, 0, 1, 1, 2, 2]
    card = left.card
    assert 0.98 * 8 < card["epsilon_max"] <= 8 and card["delta_max"] == 1e-3
    assert card["guarantee"]["words"].startswith(
        "Simulated, nobody is protected: (8, 0.001)-differential privacy per record"
    )
    assert (card["clients"], card["records"], card["rounds"]) == (4, 61, 2)
    assert card["options"]["images_per_class"] == 2 and card["ledger"] == loop.clients.budgets.ledger.head.as_dict()
    text = " ".join((loop.output_dir / DATA_CARD).read_text().split())
    for words in (
        "# Data card: 6 synthetic images made from records of the clients",
        "| largest delta | 0.001 |",
        "| neighbouring data sets | add or remove one record |",
        f"| 0 | {loop.config.facts.num_records[0]} | ",
        "- other runs on the same records",
        "A further set, model or run",
        "built in Python",
    ):
        assert words in text, words
    without = distilled(make_loop, rounds=1)[0].output_dir
    assert "**This set has no guarantee.**" in (without / DATA_CARD).read_text()
    plain = load_distilled(without).card
    assert plain["epsilon_max"] is None and plain["guarantee"]["words"].startswith("No differential privacy")


def test_batches_are_those_of_what_is_released(make_loop):
    loop = few(make_loop, Distillation(**SMALL), batch_size=3, privacy=private(), rounds=1)
    for client in loop.run().clients:
        assert client["batch_size"] == client["num_records"] > 3


def test_an_unfinished_run_leaves_no_set(make_loop):
    loop = few(make_loop, Distillation(**SMALL), privacy=private())
    cut_at(loop, 2)
    with pytest.raises(PowerCut):
        loop.run()
    with pytest.raises(UserError, match="be the folder of a distilled set"):
        load_distilled(loop.output_dir)


# ---- rounds of too few clients


def asked(loop) -> list[int]:
    """How many clients were asked in each round that anybody was asked in: filled when the loop runs."""
    counts, train = [], loop.clients.train

    def spy(plan, models, raw_weights):
        counts.append(len(plan.clients))
        return train(plan, models, raw_weights)

    loop.clients.train = spy
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [None, private()], ids=["plain", "private"])
@pytest.mark.parametrize("before", [True, False])
def test_a_round_of_too_few_clients_is_left_out(privacy, before, make_loop):
    """Clients left out before or after it: nobody is asked or charged, and the set stays."""
    parts = [Absent({2: (0, 3), 3: (1,)}), Distillation(**SMALL | {"min_participants": 3})]
    loop = few(make_loop, *(parts if before else reversed(parts)), privacy=privacy, rounds=3)
    counts = asked(loop)
    with pytest.warns(UserNotice, match="round 2: 2 clients could take part, fewer than the 3"):
        assert loop.run().rounds == 3
    assert counts == [4, 3]
    charged = [charge.round for charge in read_ledger(loop.clients.folder.ledger_file)]
    assert [charged.count(round) for round in (1, 2, 3)] == [4, 0, 3]


@pytest.mark.slow
def test_a_run_ends_when_too_few_clients_can_pay(make_loop):
    """Two budgets pay for fewer rounds than the others: the rest of those is not spent on rounds of two."""
    privacy = private([3.0, 3.0, 9.0, 9.0], noise_multiplier=2.0)
    loop = few(make_loop, Distillation(**SMALL | {"min_participants": 3}), privacy=privacy, rounds=40)
    counts = asked(loop)
    result = loop.run()
    least, most = (loop.schedule.clients[client].count_of(PURPOSE) for client in (0, 2))
    assert counts == [4] * least and least < most and result.rounds == least
    assert result.finished and result.reason == (
        f"budgets pay for fewer than 3 clients in every round after {least} (strategies.distillation.min_participants)"
    )


PAIRS = SMALL | {"min_participants": 2, "participation_fraction": 0.5}
ONE_SMALL_BUDGET = private([3.0, 9.0, 9.0, 9.0], noise_multiplier=3.0)


@pytest.mark.slow
def test_rounds_continue_while_a_later_one_has_enough(make_loop):
    """Cohorts of two: some have a client that cannot pay, and those are left out."""
    loop = few(make_loop, Distillation(**PAIRS), privacy=ONE_SMALL_BUDGET, rounds=30)
    counts = asked(loop)
    with pytest.warns(UserNotice, match="1 client could take part, fewer than the 2"):
        result = loop.run()
    assert set(counts) == {2} and len(counts) < result.rounds


@pytest.mark.slow
def test_clients_whose_charge_is_refused_count_as_absent(make_loop, monkeypatch):
    charge = Budgets.charge_round

    def refusing(self, plan):
        plan, numbers = charge(self, plan)
        return (plan.only(lambda client: client < 2), numbers[:2]) if plan.round == 2 else (plan, numbers)

    monkeypatch.setattr(Budgets, "charge_round", refusing)
    loop = few(make_loop, Distillation(**SMALL | {"min_participants": 3}), rounds=3)
    counts = asked(loop)
    with pytest.warns(UserNotice, match="round 2: 2 clients could take part"):
        loop.run()
    assert counts == [4, 4]


@pytest.mark.slow
def test_a_resumed_run_leaves_out_the_same_rounds(make_loop):
    """Also where the round that was broken off was the last that a client pays for."""

    def again(**more):
        options = {"privacy": ONE_SMALL_BUDGET, "rounds": 12, "evaluate_every": 12, **more}
        return few(make_loop, Distillation(**PAIRS), **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserNotice)
        unbroken = again()
        unbroken.run()
        charges = read_ledger(unbroken.clients.folder.ledger_file)
        last = max(one.round for one in charges if one.client == 0)
        for round in {last, max(one.round for one in charges)}:
            broken = again()
            cut_at(broken, round)
            with pytest.raises(PowerCut):
                broken.run()
            resumed = again(output_dir=broken.output_dir)
            resumed.run(resume=True)
            assert torch.equal(resumed.state.models, unbroken.state.models)
            assert resumed.state.round == unbroken.state.round
