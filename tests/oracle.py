"""A second accounting library (dp-accounting) as the oracle of tests: bounds of the tight epsilon from both sides."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from dpfl_lightning.privacy.accounting.events import Event, GaussianEvent, LaplaceEvent, SelectionEvent


def lower_bound(events: Sequence[Event], delta: float, adjacency: str = "add_remove") -> float:
    """An epsilon that is not above the tight one; selections are left out (the library has no bounded range)."""
    return _epsilon(events, delta, adjacency, pessimistic=False)


def upper_bound(events: Sequence[Event], delta: float, adjacency: str = "add_remove") -> float:
    """An epsilon that is not below the tight one, by less than 1e-4 a release or so."""
    return _epsilon(events, delta, adjacency, pessimistic=True)


def _epsilon(events: Sequence[Event], delta: float, adjacency: str, pessimistic: bool) -> float:
    total = _loss(tuple(events), adjacency, pessimistic)
    return 0.0 if total is None else total.get_epsilon_for_delta(delta)


@functools.lru_cache(maxsize=4)  # it takes seconds, and answers for every delta; some are large
def _loss(events: tuple[Event, ...], adjacency: str, pessimistic: bool) -> Any:
    """The privacy loss of all that is composed; None for nothing."""
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    from dp_accounting.privacy_accountant import NeighboringRelation

    replaced = adjacency == "replace_one"
    relation = NeighboringRelation.REPLACE_ONE if replaced else NeighboringRelation.ADD_OR_REMOVE_ONE
    total = None
    for event in events:
        if isinstance(event, GaussianEvent):
            loss = pld.from_gaussian_mechanism(
                event.noise_multiplier,
                sampling_prob=event.sample_rate,
                pessimistic_estimate=pessimistic,
                neighboring_relation=relation,
                use_connect_dots=pessimistic,
            )
        elif isinstance(event, LaplaceEvent):
            loss = pld.from_laplace_mechanism(
                event.noise_multiplier / (2 if replaced else 1),
                pessimistic_estimate=pessimistic,
                use_connect_dots=pessimistic,
            )
        else:
            assert isinstance(event, SelectionEvent)
            continue
        composed = loss.self_compose(event.steps)
        total = composed if total is None else total.compose(composed)
    return total
