"""Base of strategies whose weights come from estimates of each client, which may be kept for several rounds."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.mechanism import Mechanism


@dataclass(frozen=True)
class _Known:
    """The last estimate: its round, and tensors `[N]`; `mechanism` is `[N, 4]`."""

    round: int
    estimates: Mapping[str, Tensor]  # float64, NaN for clients that were not in it
    steps: Tensor  # int64; 0 for clients that were not in the round
    group: Tensor  # int64
    mechanism: Tensor  # the numbers of each mechanism, float64; 0 if unknown


class EstimatedWeights(Strategy):
    """A base rule of aggregation that estimates something of each client from the updates of a round.

    Subclasses define `_estimated` and `_share`. In a round without a new estimate the server keeps no single update. If
    a client of such a round was not in the last estimate, or has another number of local steps, noise, batch size or
    group, the whole round is estimated anew.
    """

    role = "base"

    def __init__(self, key: str, reestimate_every: int | str) -> None:
        every = 0 if reestimate_every == "first_round" else reestimate_every
        number = isinstance(every, int) and not isinstance(every, bool) and every >= 0
        require(number, f"{key}.reestimate_every", "be a number of rounds or `first_round`", reestimate_every)
        self._every = int(every)
        self._known: _Known | None = None

    def _estimated(
        self, updates: ClientUpdates, models: Sequence[list[int]], view: View
    ) -> tuple[Mapping[str, Tensor], Sequence[Sequence[int]]]:
        """Return name -> estimates `[C]`, float64, with `noise_var`, and the rows that were judged together."""
        raise NotImplementedError

    def _share(self, estimates: Mapping[str, Tensor], clients: list[int], view: View) -> Tensor:
        """Return the weights `[C]` of the clients of one model, from their estimates."""
        raise NotImplementedError

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        known, clients = self._known, list(plan.clients)
        return (
            known is None
            or (self._every > 0 and view.round >= known.round + self._every)
            or known.steps[clients].tolist() != list(plan.steps)
            or known.mechanism[clients].tolist() != [_numbers(mechanism) for mechanism in plan.mechanism_of]
            or len({*zip(plan.model_of, known.group[clients].tolist(), strict=True)}) > len({*plan.model_of})
        )

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor:
        models, clients = updates.rows_by_model, list(updates.clients)
        if updates.deltas is not None or self._known is None:
            self._known = self._of_round(updates, models, view)
        share = torch.zeros(len(clients), dtype=torch.float64)
        for rows in models:
            members = [clients[row] for row in rows]
            estimates = {name: of_clients[members] for name, of_clients in self._known.estimates.items()}
            share[rows] = self._share(estimates, members, view)
        return share

    def _of_round(self, updates: ClientUpdates, models: Sequence[list[int]], view: View) -> _Known:
        clients, count = list(updates.clients), view.facts.num_clients
        found, groups = self._estimated(updates, models, view)
        estimates = {name: torch.full((count,), torch.nan, dtype=torch.float64) for name in found}
        for name, values in found.items():
            estimates[name][clients] = values
        steps, group = torch.zeros(2, count, dtype=torch.long)
        steps[clients] = torch.tensor(updates.steps)
        for number, rows in enumerate(groups):
            group[[clients[row] for row in rows]] = number
        mechanism = torch.zeros(count, len(dataclasses.fields(Mechanism)), dtype=torch.float64)
        if updates.mechanism_of:
            mechanism[clients] = torch.tensor([_numbers(one) for one in updates.mechanism_of], dtype=torch.float64)
        return _Known(view.round, estimates, steps, group, mechanism)

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        if self._known is None:
            return {}
        age = view.state.round - self._known.round
        return {"estimated_noise_std": self._known.estimates["noise_var"].sqrt(), "rounds_since_estimate": age}

    def state_dict(self) -> dict[str, Any]:
        return {"known": None if self._known is None else vars(self._known).copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (known := state["known"]) is None:
            self._known = None
            return
        estimates = {name: values.cpu() for name, values in known["estimates"].items()}
        others = {name: known[name].cpu() for name in ("steps", "group", "mechanism")}
        self._known = _Known(known["round"], estimates, **others)


def _numbers(mechanism: Mechanism) -> list[float]:
    return [float(number) for number in dataclasses.astuple(mechanism)]
