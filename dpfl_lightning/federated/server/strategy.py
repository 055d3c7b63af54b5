"""The hooks of a server strategy, and how the answers of several strategies are combined."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from dpfl_lightning.config.typed import options_of, valid
from dpfl_lightning.errors import UserError, nearest, require, require_one_of
from dpfl_lightning.federated.messages.evaluation import ClientModels
from dpfl_lightning.federated.messages.jobs import Job, Work
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.callback import Callback, answer_of
from dpfl_lightning.federated.server.results import ClientEmbedding
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.runtime.digests import object_digest

T = TypeVar("T")


class Strategy:
    """Decides what the server does: override any of these hooks, which return values.

    A strategy receives releases and public facts (`View`), never data. Names of helper methods begin with an
    underscore. One strategy of a run may override each exclusive hook. Derive from `Callback`, too, to watch the run.
    Options are the fields of a dataclass, as in `pull: Annotated[float, Interval(ge=0)] = 0.01`, or the arguments of
    `__init__`, whose values the strategy then checks itself.

    Attributes:
        role: what `weigh` returns: "base" (exactly one strategy of a run), "correction" or "mask" (multiplied with it),
            or "route" (`[K, C]`, replaces `model_of` in the aggregation). "selection" (at most one) is a correction
            that limits how often each client trains.
        default_base: aggregation rule that is added to a run that names none.
        caveats: sentences that every guarantee of the run must contain.
        jobs: what clients may do beside the strategy, as classes of `Job` or `Query`; empty: anything.
        needs_noise_std: whether it reads `ClientUpdates.noise_std`, which is not known for every optimiser of clients.
    """

    role: str = "correction"
    default_base: type[Strategy] | None = None
    caveats: tuple[str, ...] = ()
    jobs: tuple[type[Work], ...] = ()
    needs_noise_std: bool = False

    def __post_init__(self) -> None:
        """Check the options of a strategy that is a dataclass: the types and bounds of its fields. Raises UserError."""
        for name, hint in options_of(type(self)).items():
            object.__setattr__(self, name, valid(self._key(name), getattr(self, name), hint))

    @property
    def config_name(self) -> str:
        """The name of the strategy in a configuration, for messages."""
        kind = type(self)
        room, _, file = kind.__module__.rpartition(".")
        ours = room.startswith("dpfl_lightning.")  # where a file has the name of its strategy
        return file if ours else f"{kind.__module__}.{kind.__qualname__}"

    def _key(self, option: str) -> str:
        """The key of an option in a configuration, for messages."""
        return f"strategies.{self.config_name}.{option}"

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        """The schedule of all releases, before noise is solved: budgets, purposes and counts."""
        return schedule

    def initialise(self, state: ServerState, view: View) -> ServerState | None:
        """The models at the start, instead of one for all clients. Exclusive. Not called on resume."""
        return None

    def describe(self, view: View) -> tuple[str, ...]:
        """Sentences about the plan of the run, which `plan`, the start of `fit` and the tracking page show."""
        return ()

    def replan(self, schedule: RunSchedule, view: View) -> RunSchedule:
        """The schedule for the rest of the run, before each round; usually the same. Its noise is solved again.

        What was paid for must stay. On resume the hook must return the same again. If the schedule depends on released
        values, the guarantee states the whole budget (privacy filter).
        """
        return schedule

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        """Who takes part, from which model, with which job and mechanism. Queries (`view.ask`) are charged."""
        return plan

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        """Whether the strategy reads the single updates of this round. If no strategy does, they are only added up."""
        return False

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor | None:
        """Factors >= 0 for each client, `[C]` or `[K, C]`; None changes no weight."""
        return None

    def combine(self, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor | None:
        """The combined update `[K, P]` instead of `weights @ deltas`. Exclusive."""
        return None

    def scale(self, combined: Tensor, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        """The weighted sum `[K, P]`, scaled; `weights` `[K, C]` of the clients that arrived are those of the sum.

        All strategies are called in order, unless one overrides `combine`.
        """
        return combined

    def step(self, state: ServerState, combined: Tensor, view: View) -> ServerState | None:
        """The new state instead of `models + combined`, for example of a server optimiser. Exclusive; K may change."""
        return None

    def after_step(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        """The state, changed after the step, for example by new clusters; K may change."""
        return state

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        """Values of the last round to be logged: numbers, or `[N]` with NaN for absent clients. Post-processing."""
        return {}

    def client_embedding(self, view: View) -> ClientEmbedding | None:
        """The clients as points of a plane, for a figure at the end of the run. The first answer counts."""
        return None

    def remarks(self, view: View) -> tuple[str, ...]:
        """Sentences beside the scores of a finished run. Post-processing."""
        return ()

    def final_models(self, state: ServerState, view: View) -> ClientModels | None:
        """The models to evaluate and export instead of the server's. Exclusive."""
        return None

    def stop(self, view: View) -> str | None:
        """The reason to end the run now, if there is one. Guarantees of a run with this hook state all that is planned.

        When a run ends may follow from its releases; if it follows from the plan alone, override `exhausted`.
        """
        return None

    def exhausted(self, view: View) -> str | None:
        """The reason why no later round can take place, by the plan and by what is paid for alone."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


HOOKS = frozenset(name for name in vars(Strategy) if not name.startswith("_"))
_WATCHING = frozenset(name for name in vars(Callback) if not name.startswith("_"))
#: hooks that decide nothing
_REPORTING = {"describe", "needs_updates", "metrics", "remarks", "client_embedding", "state_dict", "load_state_dict"}
#: hook that one strategy may override -> what it does then
_EXCLUSIVE = {
    "initialise": "gives clients their models",
    "combine": "combines updates",
    "step": "moves models",
    "final_models": "chooses the final models",
}


def _done(strategy: Strategy) -> str:
    """Return what clients do beside a strategy, in words."""
    return " or ".join(dict.fromkeys(job.does for job in strategy.jobs))


def _way_out(given: object) -> str:
    """Return what to write instead of something that is no strategy and no callback."""
    if isinstance(given, str):
        return f'Write strategies=dpfl_lightning.strategies.build({{"{given}": {{}}}}), or import its class.'
    return f"Write {given.__name__}(...)." if isinstance(given, type) else ""


def register(strategies: Iterable[Strategy], callbacks: Iterable[Callback] = ()) -> tuple[list, list]:
    """Return strategies and callbacks as lists, after checking names of methods, roles, and that they fit together."""
    strategies, callbacks = list(strategies), list(callbacks)
    for strategy in strategies:
        kind = type(strategy).__name__
        advice = _way_out(strategy) or "Pass callbacks as `callbacks`."
        require(isinstance(strategy, Strategy), "strategies", "hold instances of Strategy", strategy, advice)
        _check_names(strategy, HOOKS | _WATCHING if isinstance(strategy, Callback) else HOOKS)
        require_one_of(("base", "correction", "mask", "route", "selection"), f"{kind}.role", strategy.role)
        declared = overrides(strategy, "needs_updates") or not overrides(strategy, "combine")
        must = "be overridden by a strategy that overrides `combine`"
        require(declared, f"{kind}.needs_updates", must, "the default")
    for callback in callbacks:
        must = "hold instances of Callback or Strategy"
        require(isinstance(callback, Callback), "callbacks", must, callback, _way_out(callback))
        _check_names(callback, _WATCHING)
    bases = [strategy.config_name for strategy in strategies if strategy.role == "base"]
    if len(bases) != 1:
        raise UserError(
            f"`strategies` must hold exactly one aggregation rule (size_weighted, uniform, ...), got "
            f"{' and '.join(bases) or 'none'}. Keep one; corrections and masks multiply onto it."
        )
    selecting = " and ".join(strategy.config_name for strategy in strategies if strategy.role == "selection")
    must = "hold at most one strategy that limits how often clients train"
    require(" and " not in selecting, "strategies", must, selecting, "Remove one of them.")
    with_jobs = [strategy for strategy in strategies if strategy.jobs]
    for first, second in itertools.combinations(with_jobs, 2):
        if not {*first.jobs} & {*second.jobs}:
            raise UserError(
                f"`strategies` must hold strategies for one job of the clients, got {first.config_name}, for which "
                f"{_done(first)}, beside {second.config_name}, for which {_done(second)}. Remove one of them."
            )
    for hook, does in _EXCLUSIVE.items():
        names = [strategy.config_name for strategy in strategies if overrides(strategy, hook)]
        must = f"hold at most one strategy that {does} (`{hook}`)"
        require(len(names) < 2, "strategies", must, " and ".join(names), "Remove one of them.")
    for part, same in itertools.combinations([*strategies, *callbacks], 2):
        must = "hold each object once, because it would act twice"
        require(part is not same, "strategies and callbacks", must, type(part).__name__)
    return strategies, callbacks


def _check_names(part: Strategy | Callback, hooks: frozenset[str]) -> None:
    """Check that all public methods are hooks; others, such as misspelt ones, would never be called."""
    kinds = [kind for kind in type(part).__mro__[:-1] if kind not in (Strategy, Callback)]
    public = {name for kind in kinds for name in vars(kind) if not name.startswith("_")}
    for name in sorted(name for name in public - hooks if callable(getattr(part, name, None))):
        raise UserError(
            f"`{type(part).__name__}.{name}` must be a hook ({', '.join(sorted(hooks))}), got an unknown name. "
            f"{nearest(name, hooks)} A helper? Begin its name with an underscore.".replace("  ", " ")
        )


def overrides(strategy: Strategy, hook: str) -> bool:
    return getattr(type(strategy), hook) is not getattr(Strategy, hook)


def clients_train(strategies: Sequence[Strategy]) -> bool:
    """Whether clients train beside these strategies, and do not do other work."""
    return all(not strategy.jobs or any(job.trains for job in strategy.jobs) for strategy in strategies)


def check_job(strategies: Sequence[Strategy], job: Job) -> None:
    """Raise UserError if a strategy does not work with the job of a round; without a proximal term it is the same."""
    for strategy in strategies:
        fits = not strategy.jobs or any(issubclass(kind, type(job)) for kind in strategy.jobs)
        must = f"give a job with which {strategy.config_name} works: {_done(strategy)}"
        require(fits, "plan_round", must, type(job).__name__, "Remove one of the strategies.")


def fold(strategies: Sequence[Strategy], hook: str, value: T, *context: object) -> T:
    """Pass `value` through every strategy's hook, in order."""
    for strategy in strategies:
        value = answer_of(strategy, hook, value, *context)
    return value


def sole_answer(strategies: Sequence[Strategy], hook: str, *context: object) -> Any:
    """The first answer that is not None of the strategies that override a hook; of an exclusive one only one does."""
    answers = (answer_of(strategy, hook, *context) for strategy in strategies if overrides(strategy, hook))
    return next((answer for answer in answers if answer is not None), None)


def strategy_digests(strategies: Sequence[Strategy]) -> dict[str, str]:
    """A digest of the settings and sources of each strategy that decides anything; taken before the first round."""
    deciding = [one for one in strategies if any(overrides(one, hook) for hook in HOOKS - _REPORTING)]
    return {f"{number} {type(one).__qualname__}": object_digest(one) for number, one in enumerate(deciding)}
