"""What a run says of its clients at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpfl_lightning.federated.budgets import Budgets
from dpfl_lightning.federated.evaluation import Evaluation
from dpfl_lightning.federated.settings import ClientSettings
from dpfl_lightning.privacy.guarantee import NOT_COVERED, Guarantee


def client_rows(
    settings: Sequence[ClientSettings],
    budgets: Budgets,
    guarantees: Sequence[Guarantee],
    scores: Evaluation | None,
    model_of: Sequence[int],
) -> tuple[dict[str, Any], ...]:
    """The `clients` of `result.json`, ready for JSON: None where an epsilon is infinite or nothing was evaluated."""
    return tuple(
        {
            "client": client,
            "epsilon_spent": _finite(guarantees[client].epsilon),
            "epsilon_budget": _finite(own.epsilon),
            "delta": own.delta,
            "noise_multiplier": budgets.noise_multiplier(client),
            "batch_size": own.batch_size,
            "num_records": own.num_records,
            "releases": budgets.releases(client),
            "steps": budgets.steps(client),
            "accuracy": None if scores is None else scores.clients[client].accuracy,
            "model": model_of[client],
        }
        for client, own in enumerate(settings)
    )


def summary(guarantees: Sequence[Guarantee]) -> str:
    """The run's guarantee in words: the weakest client's, and what holds for all."""
    weakest = max(guarantees, key=lambda one: one.epsilon)
    bare = sum(math.isinf(one.epsilon) for one in guarantees)
    whose = (
        f"So it is for {bare} of {len(guarantees)} clients."
        if bare
        else f"This is the largest epsilon; each of the {len(guarantees)} clients has its own, for its own records, "
        "against everyone who sees its updates."
    )
    return f"{weakest.words()} {whose} Not covered: {'; '.join(NOT_COVERED)}."


def _finite(epsilon: float) -> float | None:
    """JSON has no infinity: None is "no bound"."""
    return epsilon if math.isfinite(epsilon) else None
