"""Traffic and costs of a distillation run, the paper's formula for epsilon, and the card of a distilled set."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import dpfl_lightning
from dpfl_lightning.errors import require
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.traffic import BYTES
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.runtime.text import at_most, data_size
from dpfl_lightning.strategies.distillation.artefact import data_of_card

_OF_CLIENTS = ("name", "num_records", "epsilon_spent", "delta")


class Sent(NamedTuple):
    """Numbers sent to all clients together (`down`) and by all clients together (`up`)."""

    down: int
    up: int

    @property
    def total(self) -> int:
        return self.down + self.up


def traffic(participations: int, num_params: int, release: int) -> Sent:
    """Return what is sent in all rounds: in each participation one model down and one `release` of this size up."""
    return Sent(participations * num_params, participations * release)


def participations(cohorts: Iterable[Collection[int]], releases: Sequence[int], fewest: int) -> int:
    """Return the number of clients of a round that have releases left, summed over the `cohorts` of all rounds.

    A round with fewer than `fewest` of them is skipped.
    """
    taken = [0] * len(releases)
    for cohort in cohorts:
        able = [client for client in cohort if taken[client] < releases[client]]
        for client in able if len(able) >= fewest else ():
            taken[client] += 1
    return sum(taken)


def traffic_words(distillation: Sent, training_round: Sent, clients: int) -> str:
    """Describe what a run sends in total, and from how many trainings it sends less.

    `training_round` is sent in one round of federated training of the same model with this number of clients.
    """
    rounds = f"{distillation.total / training_round.total:,.1f}".removesuffix(".0")
    down, up = (data_size(BYTES * floats) for floats in distillation)
    return (
        f"The run sends {down} to clients and {up} back, as much as {rounds} rounds of training this model with "
        f"{clients} clients. One distilled set and one training after it therefore send less than n trainings of R "
        f"rounds each if n is above 1 + {rounds} / R."
    )


def paper_epsilon(noise_multiplier: float, delta: float, clip_norm: float = 1.0) -> float:
    """Return eq. 41 of the paper, `sqrt(2 ln(1.25 / delta)) 2 clip_norm / noise_multiplier`, for comparison only.

    It is not a valid epsilon: it counts one release of the whole run, uses the noise multiplier (noise std / clip norm)
    as a standard deviation, and rests on a formula that holds only below 1.

    Reference: Wang and Wang (2024), eqs. 40 and 41; Dwork and Roth (2014), theorem A.1.
    """
    require(noise_multiplier > 0, "noise_multiplier", "be above 0", noise_multiplier)
    require(0 < delta < 1, "delta", "be in (0, 1)", delta)
    require(clip_norm > 0, "clip_norm", "be above 0", clip_norm)
    return math.sqrt(2 * math.log(1.25 / delta)) * 2 * clip_norm / noise_multiplier


def paper_epsilon_words(noise_multiplier: float, delta: float, clip_norm: float) -> str:
    """Describe the epsilon of eq. 41 for comparison with the run's epsilon."""
    epsilon = paper_epsilon(noise_multiplier, delta, clip_norm)
    setting = f"noise multiplier {noise_multiplier:.3g}, a record's clip norm of {clip_norm:.3g} and delta"
    return (
        f"For comparison only: the paper's eq. 41 gives epsilon {at_most(epsilon)} for {setting} {at_most(delta)}. It "
        "counts one release of the whole run, and uses the multiplier as a standard deviation: it is not this run's "
        "epsilon."
    )


def card(view: View, result: RunResult, what: str, options: Mapping[str, Any], sampling: str) -> dict[str, Any]:
    """Return the card of a distilled set: `what` it is, with which `sampling` it was made, and its privacy cost."""
    facts, run = view.facts, view.run.options
    largest = max(view.guarantees(), key=lambda promise: promise.epsilon)
    spent = [client["epsilon_spent"] for client in result.clients]
    return {
        "what": f"a distilled set: {what}",
        "strategy": view.run.strategies,
        "origin": facts.origin,
        "images_per_class": options["images_per_class"],
        "num_classes": facts.num_classes,
        "shape": list(facts.input_shape),
        "options": dict(options),
        "sampling": sampling,
        "data": data_of_card(run.get("data")),
        "model": run.get("model"),
        "seed": view.seed,
        "rounds": result.rounds,
        "clients": facts.num_clients,
        "records": sum(facts.num_records),
        "guarantee": result.guarantee,
        "privacy": {
            **{name: getattr(largest, name) for name in ("unit", "adjacency", "sampling", "accountant")},
            "noise": view.run.noise,
            "clients": [{name: client[name] for name in _OF_CLIENTS} for client in result.clients],
        },
        "epsilon_max": None if None in spent else max(spent),
        "delta_max": max(client["delta"] for client in result.clients),
        "ledger": result.ledger,
        "test_accuracy": result.test_accuracy,
        "test_set": result.test_set,
        "dpfl_lightning": dpfl_lightning.__version__,
    }
