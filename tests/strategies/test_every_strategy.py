"""Every strategy, by registration, in runs that do not go as planned: broken off, and with clients that are away."""

import dataclasses
import math

import pytest
import torch
from conftest import blobs, break_off
from contracts.test_strategies import LOOPS, NAMES, OPTIONS
from fakes import Absent, Recorder, changed_releases

from dpfl_lightning import strategies
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted

#: the quick tests take one of each kind: sums of rounds, clusters, two stages
QUICK = ("clustered", "noise_aware", "two_stage_selection")
EVERY = [pytest.param(name, marks=[pytest.mark.e2e] * (name not in QUICK)) for name in NAMES]
#: whose clients train; those of feature_means only answer
TRAINING = [one for one in EVERY if one.values != ("feature_means",)]

pytestmark = [
    pytest.mark.filterwarnings("ignore::dpfl_lightning.errors.UserNotice"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture
def loop_with(make_loop):
    """`loop_with(name, *others)`: a loop of four rounds over clients with true groups."""
    population = dataclasses.replace(blobs(), groups=(0, 1, 0, 1))

    def make(name, *others, **options):
        (strategy,) = strategies.build({name: OPTIONS.get(name)})
        base = [] if strategy.role == "base" else [SizeWeighted()]
        return make_loop(
            population, parts=[*base, *others, strategy], **{"rounds": 4, **LOOPS.get(name, {}), **options}
        )

    return make


@pytest.mark.e2e
@pytest.mark.parametrize("name", TRAINING)
def test_a_resumed_run_equals_the_unbroken_one(name, loop_with):
    """Broken off in its first and, after it went on, in its last round."""
    unbroken, broken = loop_with(name), loop_with(name)
    whole = unbroken.run()
    for round in (1, unbroken.config.rounds):
        break_off(broken, round, resume=round > 1)
        broken = loop_with(name, output_dir=broken.output_dir)
    result = broken.run(resume=True)
    assert torch.equal(broken.state.models, unbroken.state.models)
    assert broken.state.model_of == unbroken.state.model_of and result.metrics == whole.metrics
    ledgers = [read_ledger(loop.clients.folder.ledger_file) for loop in (broken, unbroken)]
    assert ledgers[0] == ledgers[1]


@pytest.mark.parametrize("name", EVERY)
def test_absent_clients_a_round_without_any_and_an_update_that_is_not_finite(name, loop_with):
    loop = loop_with(name, Absent({1: (0, 2), 2: (0, 1, 2, 3), 3: (3,)}), seen := Recorder())
    changed_releases(loop, lambda round, client, delta: delta * math.nan if (client, round) == (1, 3) else delta)
    assert loop.run().finished
    for report in seen.reports:
        sums = report.weights.sum(dim=1)
        assert bool(((sums - 1).abs().lt(1e-6) | sums.eq(0)).all())
    assert bool(loop.state.models.isfinite().all())
