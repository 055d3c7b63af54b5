"""Every kind of release keeps the same promises; a new one is covered by its place in `RELEASES`."""

import itertools
import json
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.rdp import RdpAccountant
from scipy.special import logsumexp

from dpfl_lightning.config.options import all_keys
from dpfl_lightning.config.registry import names_of
from dpfl_lightning.config.typed import in_words
from dpfl_lightning.privacy.accounting.accountant import ADJACENCIES, get_accountant
from dpfl_lightning.privacy.accounting.events import (
    NOISED,
    RELEASES,
    SENSITIVITY,
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
from dpfl_lightning.sites import wire

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


def test_options_and_help_texts_name_every_mechanism():
    assert names_of("privacy.mechanism") == list(NOISED) and all(name == one.kind for name, one in NOISED.items())
    assert in_words(all_keys()["privacy.mechanism"].hint) == f"one of {', '.join(NOISED)}"


@dataclass(frozen=True)
class Pair:
    """What a noisy sum reveals at worst, integrated from the density of its noise, without the accountants' formulas.

    A record moves one coordinate by 1 / noise; with `sample_rate` below 1 it takes part with that probability.
    """

    event: NoisedEvent
    adjacency: str

    def logs(self, order: float = 1.0) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the log densities of both data sets on a grid that holds the peaks of this order, and its step."""
        (kind,) = (one for one in MECHANISMS if one.accounted is type(self.event))
        density, rate = kind.distribution.log_density, self.event.sample_rate
        moved = SENSITIVITY[self.adjacency] / self.event.noise
        if self.adjacency == "replace_one" and rate < 1:
            moved /= 2  # the other record moves the sum the other way
        step = moved / math.ceil(moved / 2e-3)  # kinks at 0 and at the move lie on the grid
        x = step * np.arange(-round((30 + 2 * order * moved) / step), round((30 + 2 * order * moved) / step) + 1)

        def mixed(shift: float) -> np.ndarray:
            with np.errstate(divide="ignore"):
                return np.logaddexp(np.log1p(-rate) + density(x), np.log(rate) + density(x - shift))

        return mixed(moved), mixed(-moved) if self.adjacency == "replace_one" and rate < 1 else density(x), step

    def renyi(self, order: float) -> float:
        first, second, step = self.logs(order)
        ways = [logsumexp(order * p + (1 - order) * q) for p, q in ((first, second), (second, first))]
        return (max(ways) + math.log(step)) / (order - 1)

    def delta(self, epsilon: float) -> float:
        first, second, step = self.logs()
        ways = [np.maximum(np.exp(p) - np.exp(epsilon + q), 0).sum() for p, q in ((first, second), (second, first))]
        return float(max(ways) * step)

    def log_ratios(self) -> np.ndarray:
        first, second, _ = self.logs()
        return first - second


def exported(event: NoisedEvent, delta: float, adjacency: str) -> float:
    """Return the epsilon that dp_accounting computes from RDP; infinite where it has none."""

    def built(value):
        if isinstance(value, list):
            return [built(one) for one in value]
        if not isinstance(value, dict):
            return value
        fields = {key: built(one) for key, one in value.items() if key not in ("module_name", "class_name")}
        return getattr(dp_event, value["class_name"])(**fields)

    relation, found = as_dp_event([event], delta, adjacency)
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation[relation])
    return accountant.compose(built(found)).get_epsilon(delta) if accountant.supports(built(found)) else math.inf


def pairs() -> list[Pair]:
    events = [(kind, rate) for kind in NOISED.values() for rate in ((1.0, 0.1) if kind.amplified else (1.0,))]
    return [
        Pair(kind.of(rate, noise, 1), adjacency)
        for (kind, rate), noise, adjacency in itertools.product(events, (0.5, 1.0, 4.0), ADJACENCIES)
    ]


@pytest.mark.parametrize(
    "pair", pairs(), ids=lambda pair: f"{pair.event.kind}-{pair.event.cells()[:2]}-{pair.adjacency}"
)
def test_no_cost_is_below_what_the_noise_reveals(pair):
    """The integrals are exact to 1e-4."""
    event, sensitivity, orders = pair.event, SENSITIVITY[pair.adjacency], (1.5, 2.0, 5.0, 32.0)
    stated = event.rdp(np.array([event.parameters()]), orders, pair.adjacency)[0]
    assert np.all(stated >= [(1 - 1e-4) * pair.renyi(order) for order in orders])
    for name, delta in itertools.product(("rdp", "pld"), (1e-2, 1e-5)):
        found = get_accountant(name, pair.adjacency).epsilon([event], delta)
        assert pair.delta(min(found, exported(event, delta, pair.adjacency))) <= (1 + 1e-4) * delta
    ratios = pair.log_ratios()
    assert event.pure(sensitivity) >= (1 - 1e-9) * np.abs(ratios).max()
    assert event.loss_range(sensitivity) >= (1 - 1e-9) * np.ptp(ratios)


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
