"""Clients choose among the server's models by their losses; the choices are planned with the run and charged."""

import dataclasses
import math
from typing import Annotated, Any, Literal

from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import LowestLoss, NoMechanism, SelectModel
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.accounting.events import NonPrivateEvent, SelectionEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.mechanism import ExponentialMechanism

#: text of a guarantee for `paper_argmin`
PLAIN_CHOICES = "which model each client chooses is released without noise"

Selection = Literal["exponential_frozen", "exponential", "paper_argmin"]
Positive = Annotated[float, Interval(gt=0, lt=math.inf)]
_PURPOSE = "select"
_SHARE = 0.03  # default bounded range of one selection, as a share of the client's budget


class ModelSelection:
    """Selects which of M models each client uses, by the client's loss on its training records.

    The arguments are the options `selection`, `selection_epsilon`, `selection_rounds` and `loss_bound` of the strategy
    with this key: see `Ifca`. With `paper_argmin` training gets the noise that its budget requires, as in the papers.

    **Guarantees** Every selection is in the schedule before noise is solved, so training and selections together fit
    one budget. A client is asked only if the models differ, and only such a question counts as a selection. A client
    that cannot pay, or whose answer is lost, keeps its last answer; if a resumed run charges a round again, the client
    has one selection less.

    **Privacy** Each choice is a `SelectionEvent`. It is a `NonPrivateEvent` with `paper_argmin`, and for clients that
    train without noise.

    Reference: Liu, Hu, Wu, Smith (2022), by accuracies and with a separate budget; Ghosh et al. (2020), without noise.
    """

    def __init__(
        self,
        selection: str = "exponential_frozen",
        epsilon: float | None = None,
        rounds: int | None = None,
        loss_bound: float | None = None,
        key: str = "strategies",
    ) -> None:
        if selection != "exponential_frozen":
            refuse_unused(key, f"selection {selection}, which chooses in every round", selection_rounds=rounds)
        if selection == "paper_argmin":
            beside = f"selection {selection}, which neither adds noise nor clips"
            refuse_unused(key, beside, selection_epsilon=epsilon, loss_bound=loss_bound)
        self._selection, self._epsilon, self._rounds, self._key = selection, epsilon, rounds, key
        self._loss_bound = loss_bound
        self._left: list[int] = []  # remaining selections of each client
        self._last: dict[int, int] = {}  # client -> its last answer

    @property
    def answered(self) -> set[int]:
        """The clients that have chosen at least once."""
        return set(self._last)

    def plan_run(self, schedule: RunSchedule, view: View, most_rounds: int) -> RunSchedule:
        """Return the schedule with every client's selections, in at most `most_rounds` rounds."""
        count = most_rounds
        if self._selection == "exponential_frozen":
            count = min(self._rounds or max(1, schedule.rounds // 10), most_rounds)
        self._left, self._last = [count] * len(schedule.clients), {}
        if count == 0:
            return schedule
        events = [self._event(client, one) for client, one in enumerate(schedule.clients)]
        if any(event.private for event in events):
            self._bound_of(view)
        lines = [Planned(_PURPOSE, event, count) for event in events]
        return schedule.replan(lambda client, one: dataclasses.replace(one, planned=(*one.planned, lines[client])))

    def choose(self, plan: RoundPlan, view: View, models: Tensor) -> dict[int, int]:
        """Return the row of `models` `[M, P]` that each client of the plan chooses now, or chose last.

        Clients that have never chosen are left out: they have no selection left, or all models have been the same.
        """
        asked = [client for client in plan.clients if self._left[client] > 0]
        if asked and bool((models[1:] != models[:1]).any()):
            answers = self._ask(asked, view, models)
            for client in asked:
                self._left[client] -= 1
            self._last |= answers
        return {client: self._last[client] for client in plan.clients if client in self._last}

    def models_of(self, plan: RoundPlan, view: View, models: Tensor) -> tuple[int, ...]:
        """Return the model of each client of the plan: the one that it chooses, or its model in the plan."""
        chosen = self.choose(plan, view, models)
        return tuple(chosen.get(client, row) for client, row in zip(plan.clients, plan.model_of, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self._left), "last": dict(self._last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left, self._last = list(state["left"]), dict(state["last"])

    def _event(self, client: int, schedule: ClientSchedule) -> SelectionEvent | NonPrivateEvent:
        """Return the event of one choice of the client."""
        if not schedule.adds_noise:
            return NonPrivateEvent("updates and choices of models are released without noise")
        if self._selection == "paper_argmin":
            return NonPrivateEvent(PLAIN_CHOICES)
        given = self._epsilon is not None or math.isfinite(schedule.target_epsilon)
        must = "be a number if a client has noise but no budget"
        advice = f"Client {client} has no budget (privacy.epsilon); the default is {_SHARE} of the budget."
        require(given, f"{self._key}.selection_epsilon", must, None, advice)
        return SelectionEvent(_SHARE * schedule.target_epsilon if self._epsilon is None else self._epsilon)

    def _ask(self, clients: list[int], view: View, models: Tensor) -> dict[int, int]:
        events = {client: view.schedule.planned(client, _PURPOSE).event for client in clients}
        noised = {c: ExponentialMechanism(e.epsilon) for c, e in events.items() if isinstance(e, SelectionEvent)}
        plain = {client: NoMechanism(e.words) for client, e in events.items() if isinstance(e, NonPrivateEvent)}
        answers: dict[int, int] = {}
        if noised:
            bound = self._bound_of(view)
            answers |= view.ask(SelectModel(purpose=_PURPOSE, mechanism_of=noised, models=models, loss_bound=bound))
        if plain:
            answers |= view.ask(LowestLoss(purpose=_PURPOSE, mechanism_of=plain, models=models))
        return answers

    def _bound_of(self, view: View) -> float:
        classes, advice = view.facts.num_classes, "Losses of a regression have no default bound."
        given = self._loss_bound is not None or classes > 1
        require(given, f"{self._key}.loss_bound", "be a number for a regression", None, advice)
        return 2 * math.log(classes) if self._loss_bound is None else self._loss_bound


def refuse_unused(key: str, beside: str, **options: object) -> None:
    """Raise UserError if one of the options is not None although `beside` makes it ineffective."""
    for name, got in options.items():
        require(got is None, f"{key}.{name}", f"not be set with {beside}", got)
