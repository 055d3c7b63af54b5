"""Distillation runs as their users see them: resumed, and the set with its card."""

from __future__ import annotations

import pytest
import torch
from conftest import PowerCut, cut_at
from few_digits import EQUAL, NOTICE, SMALL, a_net, digits, distilled, images_of, new_net, private

from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.reporting.distilled import load_distilled
from dpfl_lightning.strategies.distillation.distillation import Distillation


def a_loop(make_loop, batch_size=12, strategy=SMALL, **options):
    """A private run of four equal clients, not begun."""
    return make_loop(
        population=digits(EQUAL),
        module=a_net(),
        new_net=new_net,
        parts=[Distillation(**strategy)],
        clients=ClientOptions(count=4, batch_size=batch_size),
        **{"privacy": private(), **options},
    )


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [None, private()], ids=["plain", "private"])
@NOTICE
def test_resumed_equals_unbroken(privacy, make_loop):
    options = {"reinit_every": 3, "augmentation": "dsa", "participation_fraction": 0.5, **SMALL}

    def run(**more):
        return a_loop(make_loop, privacy=privacy, rounds=6, evaluate_every=6, strategy=options, **more)

    unbroken = run()
    unbroken.run()
    broken = run()
    for round in (2, 5):
        cut_at(broken, round)
        with pytest.raises(PowerCut):
            broken.run(resume=round > 2)
        broken = run(output_dir=broken.output_dir)
    broken.run(resume=True)
    ours, theirs = (loop.strategies[0].state_dict() for loop in (broken, unbroken))
    assert torch.equal(ours["images"], theirs["images"]) and torch.equal(ours["velocity"], theirs["velocity"])
    assert torch.equal(broken.state.models, unbroken.state.models) and ours["age"] == theirs["age"]


def test_a_run_leaves_its_set_and_says_how_it_was_made(make_loop):
    loop, own = distilled(make_loop, privacy=private(), rounds=2)
    left = load_distilled(loop.output_dir)
    assert torch.equal(left.x, images_of(own).flatten(0, 1)) and left.y.tolist() == [0, 0, 1, 1, 2, 2]
    card = left.card
    assert 0.98 * 8 < card["epsilon_max"] <= 8 and card["delta_max"] == 1e-3
    assert card["guarantee"].startswith("Simulated, nobody is protected: (8, 0.001)-differential privacy per record")
    assert (card["clients"], card["records"], card["rounds"]) == (4, 61, 2)
    assert card["options"]["images_per_class"] == 2 and card["ledger"] == loop.clients.budgets.ledger.head.as_dict()


def test_batches_are_those_of_what_is_released(make_loop):
    for client in a_loop(make_loop, batch_size=3, rounds=1).run().clients:
        assert client["batch_size"] == client["num_records"] > 3


@NOTICE
def test_a_set_made_without_noise_has_no_epsilon(make_loop):
    loop, _ = distilled(make_loop, rounds=1)
    card = load_distilled(loop.output_dir).card
    assert card["epsilon_max"] is None and card["guarantee"].startswith("No differential privacy")


def test_an_unfinished_run_leaves_no_set(make_loop):
    loop = a_loop(make_loop)
    cut_at(loop, 2)
    with pytest.raises(PowerCut):
        loop.run()
    with pytest.raises(UserError, match="be a folder with a distilled set"):
        load_distilled(loop.output_dir)
