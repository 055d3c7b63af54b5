"""Choices among models: private in the exact sense, planned, charged when they happen, remembered."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from conftest import FIXED_KEY, blobs, cut_at, small_net
from torch import nn

from dpfl_lightning import strategies
from dpfl_lightning.client import FORWARD_CHUNK, ClientModule
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.callback import ServerCallback
from dpfl_lightning.federated.query import LowestLoss, SelectModel, summed_losses
from dpfl_lightning.options import ClientOptions, PrivacyOptions
from dpfl_lightning.privacy.events import Caveat, SelectionEvent, Unprotected
from dpfl_lightning.privacy.ledger import read_ledger
from dpfl_lightning.strategies.loss_choice import NOT_COVERED, LossChoice
from dpfl_lightning.strategies.size_weighted import SizeWeighted


class Choosing(ServerCallback):
    """Two models, from the second round on different; clients choose in each round from `first` on."""

    def __init__(self, first=2, **options):
        self._choice, self._first, self._seen = LossChoice(**options, key="strategies.choosing"), first, []
        self.caveats = self._choice.caveats

    def plan_run(self, schedule, view):
        return self._choice.plan_run(schedule, view, schedule.rounds - self._first + 1)

    def plan_round(self, plan, view):
        models = torch.cat([view.state.models, torch.zeros_like(view.state.models[:1])])
        if view.round >= self._first:
            self._seen.append(self._choice.choose(plan, view, models))
        return plan

    def state_dict(self):
        return {"choice": self._choice.state_dict(), "seen": [dict(one) for one in self._seen]}

    def load_state_dict(self, state):
        self._choice.load_state_dict(state["choice"])
        self._seen = list(state["seen"])


def selections(loop, client=0):
    """Rounds in which the client paid for a selection."""
    return [one.round for one in read_ledger(loop.folder.ledger_file) if (one.client, one.purpose) == (client, "select")]


def test_the_first_rounds_choose_and_the_answer_stays(make_loop):
    own = Choosing(rounds=2)
    loop = make_loop(callbacks=[SizeWeighted(), own], rounds=6)
    result = loop.run()
    assert selections(loop) == [2, 3]
    assert own._choice.done and own._seen[1] == own._seen[2] == own._seen[4] and set(own._seen[0]) == {0, 1, 2, 3}
    for client in result.clients:
        assert 0.98 * client["epsilon_budget"] < client["epsilon_spent"] <= client["epsilon_budget"]


def test_a_share_of_each_budget_pays_for_each_choice(make_loop):
    loop = make_loop(callbacks=[SizeWeighted(), Choosing()], rounds=20)
    schedule = loop.plan_schedule()
    assert [own.count_of("select") for own in schedule.clients] == [2] * 4
    events = [schedule.planned(client, "select").event for client in range(4)]
    assert events == [SelectionEvent(0.03 * epsilon) for epsilon in (4.0, 6.0, 8.0, 10.0)]
    alone = make_loop(callbacks=[SizeWeighted()], rounds=20).plan_schedule()
    for own, without in zip(schedule.clients, alone.clients, strict=True):
        assert own.noise_multiplier("train") > without.noise_multiplier("train")
