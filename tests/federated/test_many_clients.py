"""What grows with the number of clients, and what does not: counted, not timed."""

import json
import sys
from collections import Counter

import pytest
import torch
from conftest import private

from dpfl_lightning import ClientOptions, Population
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import read_guarantees
from dpfl_lightning.papers.baselines.uniform_selection import UniformSelection

COHORT, BUDGETS = 5, (2.0, 8.0)


class CountedRounds(Callback):
    """Counts the calls of Python functions in each round, by name, and the bytes of its checkpoint."""

    def __init__(self):
        self._calls, self._bytes, self._view = [], [], None

    def on_round_start(self, view):
        self._calls.append(Counter())
        sys.setprofile(self._count)

    def on_round_end(self, view, report):
        sys.setprofile(None)
        self._bytes.append((view.run.output_dir / "checkpoint.pt").stat().st_size)
        self._view = view

    def _count(self, frame, event, _):
        if event == "call":
            self._calls[-1][frame.f_code.co_qualname] += 1


@pytest.fixture
def many(make_loop):
    """`many(count)`: a finished run of clients that share ten records and two budgets, and what was counted."""

    def run(count):
        generator = torch.Generator().manual_seed(0)
        rows = [torch.arange(10)] * count
        x, y = torch.randn(10, 6, generator=generator), torch.randint(3, (10,), generator=generator)
        loop = make_loop(
            Population(x, y, rows, [rows[0][:0]] * count, None, 3),
            clients=ClientOptions(count=count, batch_size=5),
            privacy=private([BUDGETS[client % 2] for client in range(count)], clip_norm=1.0),
            parts=[UniformSelection(clients_per_round=COHORT), counted := CountedRounds()],
            evaluate_every=9,
        )
        loop.run()
        return loop, counted

    return run


@pytest.mark.e2e
def test_a_round_does_the_same_work_for_any_number_of_clients(many):
    """No function is called once a client, neither for a mechanism nor for an event, a plan or an epsilon."""
    (_, few), (loop, counted) = many(40), many(400)
    more = {name: calls - few._calls[1][name] for name, calls in counted._calls[1].items()}
    assert {name: calls for name, calls in more.items() if calls >= 50} == {}
    assert (counted._bytes[1] - few._bytes[1]) / 360 < 100, "bytes of the checkpoint for each further client"
    assert len(set(map(id, counted._view.plan().mechanism_of))) <= 4 == 2 * len(BUDGETS)
    assert len(set(map(id, loop.config.settings))) == len(BUDGETS)


@pytest.mark.e2e
def test_equal_guarantees_are_one_object_and_written_once(many):
    loop, _ = many(40)
    promises = loop.clients.guarantees()
    took_part = [bool(loop.clients.account(client).releases) for client in range(40)]
    kinds = {(client % 2, took_part[client]): promises[client] for client in range(40)}
    assert all(promises[client] is kinds[client % 2, took_part[client]] for client in range(40))
    written = json.loads((loop.output_dir / "guarantees.json").read_text())
    assert read_guarantees(loop.output_dir) == [json.loads(json.dumps(one.as_dict())) for one in promises]
    assert len(written["guarantees"]) == len(set(promises)) <= len(kinds) == 4
