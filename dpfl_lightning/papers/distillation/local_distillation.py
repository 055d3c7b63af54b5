"""Local gradient matching: each client has a set of its own, and the server pools them.

The baseline of Wang and Wang (2024), section 4 and Figs. 2, 3 and 7 to 10. What differs from `distillation` is that no
gradient is averaged over clients: a client's images, and the model on which its gradients are taken, follow from its
own releases alone. So they are what the client would make by itself, and as private as its releases are.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.papers.distillation.distillation import Distillation, Heard
from dpfl_lightning.papers.distillation.sets import Records


@dataclass
class LocalDistillation(Distillation):
    """Local gradient matching: a set for each client from its own class gradients, and the union of all sets.

    It shows what a federation adds to `distillation`, whose gradients are averaged over clients. `images_per_class` is
    of each client: for a union of ten images a class of 10 clients set 1. Without noise a client has images of the
    classes that it holds; with noise of all, because which classes it holds is private. `distilled.safetensors` is the
    union.

    Args:
        final: `union` trains one model on the images of all clients; `own` trains a model for each client on its own
            images, and the test accuracy is their mean.

    **Privacy** That of `distillation`: clients release the same noisy sums, and all else is post-processing of them.

    Reference: Wang and Wang (2024), "local gradient matching".
    """

    final: Literal["union", "own"] = "union"

    what = "synthetic images whose gradients match those of single clients' records"

    def __post_init__(self) -> None:
        super().__post_init__()
        must = "be sum, because no gradient is averaged over clients"
        require(self.aggregation == "sum", self._key("aggregation"), must, self.aggregation)
        self._held: dict[int, Tensor] = {}  # client -> whether a class was ever matched, `[G]` bool

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        self._held = {}
        return super().plan_run(schedule, view)

    def initialise(self, state: ServerState, view: View) -> ServerState:
        count = view.facts.num_clients
        return dataclasses.replace(state, models=state.models[:1].repeat(count, 1), model_of=tuple(range(count)))

    def _check_models(self, weights: Tensor) -> None:
        """Accept one model for each client."""

    def _numbers(self, row: int) -> tuple[int, ...]:
        return (row,)

    def _one_step(
        self, row: int, theta: Tensor, combined: Tensor, heard: Heard, view: View
    ) -> tuple[Tensor, dict[str, float]]:
        _, present = self._target(combined, heard)
        self._held[row] = present.cpu() | self._held.get(row, torch.zeros(len(present), dtype=torch.bool))
        return super()._one_step(row, theta, combined, heard, view)

    def _records_of(self, client: int, view: View) -> Records:
        """Return the client's images of the classes that it was heard to hold."""
        x, y = self._synthetic(view, client).records
        held = self._held.get(client, torch.zeros(view.facts.num_classes, dtype=torch.bool)).to(y.device)
        return x[held[y]], y[held[y]]

    def _records(self, view: View) -> Records:
        parts = [self._records_of(client, view) for client in range(view.facts.num_clients)]
        x, y = (torch.cat(column) for column in zip(*parts, strict=True))
        return x, y

    def on_fit_end(self, view: View, result: RunResult) -> None:
        must, fewest = "be so low that a client has as many records of a class", self.min_records_per_target
        matched = not result.finished or any(bool(held.any()) for held in self._held.values())
        require(matched, self._key("min_records_per_target"), must, fewest, "No class was matched, so no set is made.")
        super().on_fit_end(view, result)

    def _training_sets(self, view: View) -> list[Records]:
        if self.final == "union":
            return [self._records(view)]
        return [self._records_of(client, view) for client in range(view.facts.num_clients)]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "held": dict(self._held)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state.items() if key != "held"})
        self._held = dict(state["held"])
