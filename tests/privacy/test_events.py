"""Every kind of release keeps the same promises; a new one is covered by its place in `RELEASES`."""

import json
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from dpfl_lightning.federated.messages import wire
from dpfl_lightning.privacy.accounting.accountant import ADJACENCIES, get_accountant
from dpfl_lightning.privacy.accounting.events import (
    NOISED,
    RELEASES,
    Caveat,
    GaussianEvent,
    NoisedEvent,
    Release,
    event_of,
)
from dpfl_lightning.privacy.accounting.guarantee import guarantee
from dpfl_lightning.privacy.ledger.export import as_dp_event
from dpfl_lightning.privacy.mechanism import MECHANISMS, mechanism_of
from dpfl_lightning.privacy.sampling import SAMPLERS, OfEachClass

DELTA = 1e-5
OF_NUMBERS = [kind for kind in RELEASES if kind.private]


def example(kind: type[Release], steps: int = 3) -> Release:
    if issubclass(kind, NoisedEvent):
        return kind.of(1.0, 9.0, steps)
    return kind(0.2, steps) if kind.private else kind("losses")


@pytest.mark.parametrize("kind", RELEASES, ids=lambda kind: kind.kind)
def test_a_release_is_stored_and_sent_unchanged(kind):
    event = example(kind)
    assert event_of(json.loads(json.dumps(event.as_dict()))) == event
    assert wire.decode(kind, wire.encode(event)) == event


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("kind", OF_NUMBERS, ids=lambda kind: kind.kind)
def test_costs_grow_with_steps_and_their_sum_is_that_of_all_steps(kind, adjacency):
    for name in ("rdp", "pld"):
        accountant = get_accountant(name, adjacency)
        once, thrice = accountant.epsilon([example(kind, 1)], DELTA), accountant.epsilon([example(kind)], DELTA)
        assert 0 < once < thrice == accountant.epsilon([example(kind, 1)] * 3, DELTA)
        assert example(kind, 1).repeated(3) == example(kind)
        assert get_accountant("pld", adjacency).epsilon([example(kind)], DELTA) <= thrice
    assert thrice >= get_accountant("pld").epsilon([example(kind)], DELTA)
    found = guarantee([example(kind)], DELTA, get_accountant("rdp", adjacency))
    assert len(found.covers) == 1 and found.covers[0].startswith("3 ") and not found.unprotected


@pytest.mark.parametrize("kind", NOISED.values(), ids=list(NOISED))
def test_a_mechanism_is_accounted_as_the_event_that_it_is_made_from(kind):
    event = kind.of(1.0, 2.5, 4)
    mechanism = mechanism_of(event, 2.0, 40)
    assert mechanism.event(4) == event and mechanism.clip_order == event.clip_order
    assert [one.accounted for one in MECHANISMS].count(kind) == 1


@dataclass(frozen=True)
class Unfinished(NoisedEvent):
    """A mechanism that states its RDP only, below."""

    kind: ClassVar = "unfinished"
    protection: ClassVar = "triangular noise"
    sample_rate: ClassVar = 1.0
    noise_multiplier: float | None
    steps: int = 1


class Finished(Unfinished):
    needs_delta: ClassVar = True

    @classmethod
    def rdp(cls, parameters, orders, adjacency):
        return GaussianEvent.rdp(np.array([[1.0, noise] for (noise,) in parameters]), orders, adjacency)


def test_what_a_mechanism_does_not_define_makes_its_epsilon_infinite():
    for name in ("rdp", "pld"):
        assert get_accountant(name).epsilon([Unfinished(5.0)], DELTA) == math.inf
    _, event = as_dp_event([Unfinished(5.0)], DELTA, "add_remove")
    assert event["events"][0]["event"]["class_name"] == "NonPrivateDpEvent"


def test_a_mechanism_needs_its_rdp_alone():
    rdp, gaussian = get_accountant("rdp"), [GaussianEvent(1.0, 5.0, 4)]
    assert rdp.epsilon([Finished(5.0, 4)], DELTA) == pytest.approx(rdp.epsilon(gaussian, DELTA), rel=1e-6)
    epsilon, how = get_accountant("pld").bound([Finished(5.0, 4)], DELTA)
    assert epsilon == rdp.epsilon([Finished(5.0, 4)], DELTA)
    assert how.endswith("because no tight bound is known for triangular noise")


def test_a_caveat_is_no_release():
    assert event_of(Caveat("sizes are public").as_dict()) == Caveat("sizes are public")
    assert not isinstance(Caveat("sizes are public"), Release) and Caveat.kind not in {one.kind for one in RELEASES}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_draws_at_the_rate_and_as_often_as_its_event_says(name):
    from dpfl_lightning.privacy.noise import RandomGenerator

    sampler = SAMPLERS[name](mechanism_of(GaussianEvent(0.2, 1.0), 1.0, 500), 40)
    drawn = [len(rows) for rows in sampler.draws(500, RandomGenerator(bytes(32)))]
    assert (sampler.event.steps, sampler.event.sample_rate) == (len(drawn), 0.2)
    assert abs(np.mean(drawn) - 100) < 10 and sampler.clip_norm == 1.0


def test_draws_of_each_class_are_not_amplified_and_move_two_records():
    full = mechanism_of(GaussianEvent(1.0, 1.0), 1.0, 500)
    assert OfEachClass(full, most=4).clip_norm == 0.5 and OfEachClass(full, most=4).event == GaussianEvent(1.0, 1.0)
    with pytest.raises(ValueError, match="not amplified"):
        OfEachClass(mechanism_of(GaussianEvent(0.5, 1.0), 1.0, 500))
