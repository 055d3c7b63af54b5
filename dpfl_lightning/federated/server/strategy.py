"""The table of hooks a server strategy or watcher may fill, and how answers are folded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from torch import Tensor

from dpfl_lightning.errors import UserError, nearest, require
from dpfl_lightning.federated.messages.plan import (
    ClientUpdates,
    Delivered,
    RoundPlan,
    RoundReport,
    RunResult,
    RunSchedule,
    ServerState,
    Sketch,
    View,
)

T = TypeVar("T")


class ServerCallback:
    """Fill any of these hooks. Verbs return values; `on_*` hooks watch and return nothing.

    A callback sees releases and public facts (`View`), never data and never the loop. Public methods other than the
    hooks are refused at registration, so a misspelt hook is heard; name helpers with a leading underscore.

    Attributes:
        needs: "facts", or "deltas" if single updates must be read: in every round, unless `sees` says in which.
        role: of `weigh`: "base" (exactly one in a run), "correction" or "mask" (multiplied in), or "route" (`[K, C]`,
            replaces `model_of` in the aggregation).
        default_base: the base rule that it goes with, for runs that name none.
        caveats: what every guarantee of a run with it must say, in words.
        trains_on_server: whether the server's own work may take longer than the clients' records: the time of a run is
            then not foretold before the first round.
        needs_training: whether it is about the updates of local training, or who gives them: such a one cannot stand
            beside a strategy that asks clients for something else.
        in_place_of_training: what clients do in all rounds instead, in words, where the strategy asks for something
            else; empty: they train.
    """

    needs: Literal["facts", "deltas"] = "facts"
    role: Literal["base", "correction", "mask", "route"] = "correction"
    default_base: type[ServerCallback] | None = None
    caveats: tuple[str, ...] = ()
    trains_on_server: bool = False
    needs_training: bool = False
    in_place_of_training: str = ""

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        """Before round 1 and before noise is solved: budgets, purposes, counts."""
        return schedule

    def initialise(self, state: ServerState, view: View) -> ServerState | None:
        """The models that the run begins with, and who has which, in place of `state`, where all have the net as it is.

        Two answers are an error. Not asked again on resume.
        """
        return None

    def outline(self, view: View) -> tuple[str, ...]:
        """What it has planned for the run, when all noise is solved: sentences that `plan`, the start of `fit` and the
        tracking page show.
        """
        return ()

    def replan(self, schedule: RunSchedule, view: View) -> RunSchedule:
        """Before each round: another schedule for what is left, its noise solved anew; usually the same one.

        Lines that were paid for stay, with at least the count that was paid. On resume it is asked again, and must give
        what it gave.

        **Guarantees** The schedule still fits the budget. If it follows from released values, the budget is what holds
        (a privacy filter); what was spent is a reading.
        """
        return schedule

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        """Who, from which model, which job and mechanism. What it asks through `view.ask` is charged."""
        return plan

    def sees(self, plan: RoundPlan, view: View) -> bool:
        """Whether this round's single updates must be kept and shown; they are streamed if nobody sees them.

        Asked when it is settled who takes part, and again when it is known whose updates arrived. Who combines sees
        them, unless it says otherwise here.
        """
        return self.needs == "deltas" or type(self).combine is not ServerCallback.combine

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor | None:
        """Factors >= 0, `[C]` or `[K, C]`; None is no say."""
        return None

    def combine(self, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor | None:
        """`[K, P]` instead of `weights @ deltas`. Two answers in one round are an error."""
        return None

    def step(self, state: ServerState, combined: Tensor, view: View) -> ServerState | None:
        """The new state instead of `models + combined`. Two answers in one round are an error; K may change."""
        return None

    def refine(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        """After the step: re-cluster, warm start; K may change."""
        return state

    def tell(self, view: View) -> Mapping[str, float | Tensor]:
        """Values of the round that has just ended, to be charted: numbers, and `[N]` with NaN for absent clients.

        **Privacy** A callback has released and public values only: so has what it tells.
        """
        return {}

    def sketch(self, view: View) -> Sketch | None:
        """The clients as points of a plane, asked once, when all rounds are done. Two answers are an error.

        **Privacy** Drawn from released and public values only.
        """
        return None

    def deliver(self, state: ServerState, view: View) -> Delivered | None:
        """The models to evaluate and export instead of the server's."""
        return None

    def stop(self, view: View) -> str | None:
        """The reason to end the run now, logged as is."""
        return None

    def on_run_start(self, view: View) -> None: ...

    def on_round_end(self, view: View, report: RoundReport) -> None: ...

    def on_run_end(self, view: View, result: RunResult) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


HOOKS = frozenset(name for name in vars(ServerCallback) if not name.startswith("_"))
_IN_A_ROUND = ("stop", "replan", "plan_round", "sees", "weigh", "combine", "step", "refine")
#: attribute -> the words it may be
_WORDS = {name: get_args(kind) for name, kind in get_type_hints(ServerCallback).items() if get_origin(kind) is Literal}


def register(callbacks: Iterable[ServerCallback]) -> list[ServerCallback]:
    """The callbacks, checked.

    Raises:
        UserError: an unknown public method (a misspelt hook), a `role` or `needs` that there is not, not exactly one
            base rule, or strategies that need local training beside one that has something else in its place.
    """
    checked = list(callbacks)
    for callback in checked:
        public = {name for kind in type(callback).__mro__[:-1] for name in vars(kind) if not name.startswith("_")}
        methods = {name for name in public if callable(getattr(callback, name, None))}
        for name in sorted(methods - HOOKS):
            raise UserError(
                f"`{type(callback).__name__}.{name}` must be a hook ({', '.join(sorted(HOOKS))}), got an unknown name. "
                f"{nearest(name, HOOKS)} A helper? Begin its name with an underscore.".replace("  ", " ")
            )
        for name, words in _WORDS.items():
            value = getattr(callback, name)
            key, must = f"{type(callback).__name__}.{name}", f"be one of {', '.join(words)}"
            require(value in words, key, must, value, nearest(value, words))
    bases = [type(callback).__name__ for callback in checked if callback.role == "base"]
    if len(bases) != 1:
        raise UserError(
            f"`strategies` must hold exactly one base rule (size_weighted, uniform, ...), got {bases or 'none'}. "
            "Keep one; corrections and masks multiply onto it."
        )
    _check_training(checked)
    return checked


def _check_training(callbacks: Sequence[ServerCallback]) -> None:
    """Refuse strategies of local training where clients do not train: nothing else would tell of all of them."""
    for other in filter(lambda callback: callback.in_place_of_training, callbacks):
        for one in filter(lambda callback: callback.needs_training, callbacks):
            raise UserError(
                f"`strategies` must not hold {type(one).__name__} beside {type(other).__name__}, got both. The former "
                f"is for local training; with the latter {other.in_place_of_training}. Remove one of them."
            )


def answer_of(callback: ServerCallback, hook: str, *given: object) -> Any:
    """The hook's answer; what it raises says below its traceback whose hook it was, and when."""
    try:
        return getattr(callback, hook)(*given)
    except Exception as error:
        view = next(one for one in given if isinstance(one, View))
        when = f"in round {view.round}" if hook in _IN_A_ROUND else f"after round {view.round - 1}"
        error.add_note(f"This came from the hook `{hook}` of {type(callback).__qualname__}, {when}.")
        raise


def fold(callbacks: Sequence[ServerCallback], hook: str, value: T, *context: object) -> T:
    """Pass `value` through every callback's `hook(value, *context)`, in order."""
    for callback in callbacks:
        value = answer_of(callback, hook, value, *context)
    return value


def one_of(callbacks: Sequence[ServerCallback], hook: str, *context: object) -> Any:
    """The one answer of `hook(*context)` that is not None, or None.

    Raises:
        UserError: two callbacks answered.
    """
    asked = [(callback, answer_of(callback, hook, *context)) for callback in callbacks]
    answers = [(callback, answer) for callback, answer in asked if answer is not None]
    if len(answers) > 1:
        names = " and ".join(type(callback).__name__ for callback, _ in answers)
        raise UserError(f"`{hook}` must be answered by one strategy, got {names}. Remove one of them.")
    return answers[0][1] if answers else None


def watch(callbacks: Sequence[ServerCallback], hook: str, *context: object) -> None:
    """Tell every callback."""
    for callback in callbacks:
        answer_of(callback, hook, *context)
