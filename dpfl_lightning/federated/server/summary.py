"""Metrics of a round, and the summary of a run."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

import torch
from torch import Tensor

from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.server.callback import answer_of
from dpfl_lightning.federated.server.group_metrics import MATCHES, clustering, true_groups
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.guarantee import NOT_COVERED, Guarantee
from dpfl_lightning.privacy.accounting.planned import ClientSchedule

# names of metrics that the run itself reports
_TAKEN = ("epsilon", "accuracy", "clip_fraction", "gradients_not_finite", *MATCHES)


def of_all(clients: Sequence[int], values: Sequence[float] | Tensor, num_clients: int) -> Tensor:
    """Spread `values` `[C]` of a round's `clients` over all N clients: float64, NaN for absent clients.

    >>> of_all((2, 0), [7, 8], 3)
    tensor([8., nan, 7.], dtype=torch.float64)
    """
    spread = torch.full((num_clients,), math.nan, dtype=torch.float64)
    spread[list(clients)] = torch.as_tensor(values, dtype=torch.float64)
    return spread


def round_metrics(
    strategies: Sequence[Strategy], view: View, plan: RoundPlan, weights: Tensor, sent: Mapping[str, float]
) -> dict[str, float | Tensor]:
    """Return the metrics of a round beside accuracy and epsilon: numbers, or `[N]` with NaN for absent clients.

    `weight` is a client's weight in the model that it changes most, `effective_clients` is `sum_k 1 / sum_i w_ki^2`. If
    a strategy reports each client's `group`, `clustering` compares them with true groups. Post-processing.

    Args:
        view: after the round.
        plan: of the C clients whose updates arrived, with `weights` `[K, C]`.
        sent: `Traffic.metrics`.
    """
    num_clients = view.facts.num_clients
    squares = weights.square().sum(dim=1)
    values: dict[str, float | Tensor] = {"weight": of_all(plan.clients, weights.amax(dim=0), num_clients)}
    if bool(squares.any()):
        values["largest_weight"] = float(weights.max())
        values["effective_clients"] = float((1 / squares[squares > 0]).sum())
    values |= sent
    for strategy in strategies:
        for name, value in answer_of(strategy, "metrics", view).items():
            reported = f"{type(strategy).__name__} reports {name!r}"
            if name in values or name in _TAKEN:
                raise RuntimeError(f"{reported}, which is reported already: rename it")
            if isinstance(value, Tensor) and value.shape != (num_clients,):
                raise RuntimeError(f"{reported} of shape {tuple(value.shape)}, not one for each client")
            values[name] = value.to("cpu", torch.float64) if isinstance(value, Tensor) else float(value)
    groups, clusters = true_groups(view.facts), values.get("group")
    return values | (clustering(clusters.tolist(), groups) if groups and isinstance(clusters, Tensor) else {})


def for_json(metrics: Mapping[str, float | Tensor]) -> dict[str, float | list[float | None] | None]:
    """Convert tensors to lists, and infinity and NaN to None.

    >>> for_json({"converged": 1.0, "weight": torch.tensor([0.5, math.nan])})
    {'converged': 1.0, 'weight': [0.5, None]}
    """
    return {
        name: [finite_or_none(one) for one in value.tolist()] if isinstance(value, Tensor) else finite_or_none(value)
        for name, value in metrics.items()
    }


def accuracy_over_clients(accuracies: Sequence[float | None]) -> dict[str, float]:
    """Mean, population standard deviation, worst, and best - worst of the clients' accuracies.

    >>> accuracy_over_clients([0.5, None, 0.75])
    {'accuracy_mean': 0.625, 'accuracy_std': 0.125, 'accuracy_worst': 0.5, 'accuracy_gap': 0.25}
    """
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    if not known:
        return {}
    worst, gap = min(known), max(known) - min(known)
    return dict(accuracy_mean=fmean(known), accuracy_std=pstdev(known), accuracy_worst=worst, accuracy_gap=gap)


def noise_multiplier(schedule: ClientSchedule) -> float | None:
    """Return the noise multiplier of the client's most frequent noised sum; None if no release is planned."""
    return (schedule.main.noise_multiplier or 0.0) if any(schedule.releases) else None


def in_words(guarantees: Sequence[Guarantee]) -> str:
    """Return the guarantee of the weakest client, and what holds for all clients."""
    weakest = max(guarantees, key=lambda guarantee: guarantee.epsilon)
    bare = sum(math.isinf(guarantee.epsilon) for guarantee in guarantees)
    whose = (
        f"This is the largest epsilon; each of the {len(guarantees)} clients has its own, for its own records, against "
        "everyone who sees its updates."
    )
    if bare:
        whose = f"So it is for {bare} of {len(guarantees)} clients."
    return f"{weakest.words()} {whose} Not covered: {'; '.join(NOT_COVERED)}."
