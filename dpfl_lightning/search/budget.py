"""One budget for a distilled set and a final run: both are planned together before anything is charged."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from dpfl_lightning.build import build_population
from dpfl_lightning.config.mapping import with_values
from dpfl_lightning.config.options import Options
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.client.local_clients import facts_of
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.loop import FederatedLoop, build_loop
from dpfl_lightning.papers.sets.distilled_set import DistilledSet
from dpfl_lightning.privacy.accounting.guarantee import Guarantee, leaks_of
from dpfl_lightning.privacy.accounting.planned import ClientSchedule
from dpfl_lightning.runtime.text import at_least, at_most
from dpfl_lightning.search.costs import Cost, composed_costs, planned_cost
from dpfl_lightning.search.options import SweepOptions

_MAKE_SETS = ("distillation", "feature_means")  # strategies
_BESIDE = "beside "  # begins the purposes of the other run
_MOST_PLANS = 5  # of the final run, if its plan does not use its epsilon as that of the whole budget


class RemainingBudget:
    """What is left of each client's budget for the run of `options` beside other releases, which are known before it.

    Noise is solved for the composition of all releases, so `epsilon` `[N]`, that of the run alone, is more than the
    difference of the epsilons. Nothing is charged. Raises UserError if no noise fits, or the run's plan may change.

    **Guarantees** `promises`, the guarantee of each client for everything `[N]`, are at most its budget.

    Args:
        others: schedule of each client `[N]` for all other releases.
        costs: of the runs that make these.
    """

    def __init__(
        self, options: Options, population: Population, others: Sequence[ClientSchedule], costs: Sequence[Cost]
    ) -> None:
        self._options, self._population = options, population
        loop = build_loop(options, [_Beside(others)], population)
        _fixed_cost(loop)  # also plans it
        budgets = [client.epsilon for client in loop.config.settings]
        own = [
            dataclasses.replace(client, planned=tuple(p for p in client.planned if not p.purpose.startswith(_BESIDE)))
            for client in loop.schedule.clients
        ]
        alone = loop.config.accountant.search([(client.events(), client.delta) for client in own])
        trains = [any(client.releases) for client in own]
        must = "leave an epsilon for every client of the final run"
        require(all(alone[trains] > 0), "sweep.set_share", must, "nothing", "Set a smaller share.")
        left = [float(epsilon) if one else budget for epsilon, budget, one in zip(alone, budgets, trains, strict=True)]
        for number in range(_MOST_PLANS):
            self.epsilon = tuple(float(at_least(epsilon, 5)) for epsilon in left)
            self._cost = self._cost_of(options)
            self.promises = tuple(composed_costs([*costs, self._cost]).values())
            over = [one.epsilon > budget for one, budget in zip(self.promises, budgets, strict=True)]
            if not any(over):
                return
            less = 1 - 1e-5 * 10**number
            left = [epsilon * less if too_much else epsilon for epsilon, too_much in zip(left, over, strict=True)]
        must, advice = "have releases that fit the budget together with the others", "Set other strategies."
        raise UserError(f"`strategies` must {must}, got {self.weakest.words()} {advice}")

    def _cost_of(self, options: Options) -> Cost:
        return _fixed_cost(build_loop(self.of(options), (), self._population))

    def of(self, options: Options) -> Options:
        """Return the options with the remaining budgets."""
        left = list(self.epsilon)
        return with_values(options, {"privacy.epsilon": left[0] if len(set(left)) == 1 else left}, "by the sweep")

    def check(self, options: Options) -> None:
        """Raise UserError unless a run with these options plans the releases that were planned before."""
        must = "plan the same releases as without a search, because they must be known before it"
        same = [line.released for line in self._cost_of(options)] == [line.released for line in self._cost]
        require(same, "sweep.space", must, "other releases", "Leave out what changes them.")

    @property
    def weakest(self) -> Guarantee:
        return max(self.promises, key=lambda promise: promise.epsilon)


class SharedBudget:
    """The epsilon of each client, divided between a distilled set and the final run.

    The run of `set_options` gets `sweep.set_share` of it, and the final run the `rest`. All checks and both plans are
    made on construction, and nothing is charged. Raises UserError if a client has no budget, or no noise fits.

    **Guarantees** The releases of both runs are planned before the set is made, so that nothing in it changes them.
    """

    def __init__(self, sweep: SweepOptions, options: Options, folder: Path) -> None:
        privacy, must = options.privacy, "be a budget for each client with sweep.set_share"
        epsilon = None if privacy is None else privacy.epsilon
        require(privacy is not None and epsilon is not None, "privacy.epsilon", must, epsilon)
        assert privacy is not None and sweep.set_share is not None  # for mypy
        given, solved = privacy.noise_multiplier, "be null with sweep.set_share: noise is solved from the budget"
        require(given is None, "privacy.noise_multiplier", solved, given)
        self._options, self._population = options, build_population(options)
        budgets = [client.epsilon for client in build_loop(options, (), self._population).config.settings]
        require(all(map(math.isfinite, budgets)), "privacy.epsilon", must, epsilon)
        share = [sweep.set_share * budget for budget in budgets]
        values = {"strategies": {"distillation": {}}, **sweep.set_with, "privacy.epsilon": share}
        if "feature_means" in (values["strategies"] or {}):
            values = {"rounds": 1, **values}
        self.set_options = dataclasses.replace(with_values(options, values, "by the sweep"), output_dir=str(folder))
        strategies = self.set_options.strategies
        made = sum(name in strategies for name in _MAKE_SETS)
        require(made == 1, "sweep.set_with.strategies", f"contain one of {' and '.join(_MAKE_SETS)}", list(strategies))
        try:
            loop = build_loop(self.set_options, (), self._population)
            cost = _fixed_cost(loop)
        except UserError as error:
            raise UserError(f"`sweep.set_with` must give a run that makes a set: there, {error}") from None
        self._largest_of_set = max(line.budget for line in cost if math.isfinite(line.budget))
        self.rest = RemainingBudget(options, self._population, loop.schedule.clients, [cost])

    def stand_in(self) -> DistilledSet:
        """Return zeros in the form of the set, to check what will train on it."""
        facts, strategies = facts_of(self._population), self.set_options.strategies
        each = next(strategies[name] or {} for name in _MAKE_SETS if name in strategies)
        y = torch.arange(facts.num_classes).repeat_interleave(each.get("images_per_class", 10))
        data = {"data": dataclasses.asdict(self._options.data), "num_classes": facts.num_classes}
        return DistilledSet(torch.zeros(len(y), *facts.input_shape), y, data)

    def words(self) -> str:
        """Describe the parts of the budget, and the guarantee of the weakest client for both runs."""
        of_set, left = at_most(self._largest_of_set), at_most(max(self.rest.epsilon))
        return (
            f"One budget: the set costs a client at most epsilon {of_set}, and the final run at most {left}. "
            f"Composed, both cost at most the budget of each client; the largest: {self.rest.weakest.words()}"
        )


class DescribedBy(Strategy):
    """Adds a sentence to the description of a run, on the terminal and in MLflow."""

    def __init__(self, words: str) -> None:
        self._words = words

    def describe(self, view: View) -> tuple[str, ...]:
        return (self._words,)


class _Beside(Strategy):
    """Plans other releases of the same clients, too, so that noise is solved for all of them together."""

    def __init__(self, others: Sequence[ClientSchedule]) -> None:
        self._others = others

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        def with_other(client: int, own: ClientSchedule) -> ClientSchedule:
            others = self._others[client].planned
            lines = (dataclasses.replace(line, purpose=f"{_BESIDE}{line.purpose}") for line in others)
            return dataclasses.replace(own, planned=(*own.planned, *lines))

        return schedule.replan(with_other)


def _fixed_cost(loop: FederatedLoop) -> Cost:
    """Return the cost of a run. UserError if it has a release without noise, or its plan may change during the run."""
    must = "plan all releases before a run with sweep.set_share"
    require(not loop.config.replans, "strategies", must, "a strategy that plans again", "Leave this strategy out.")
    cost, must = planned_cost(loop), "be null if a run releases something without noise"
    leaks = leaks_of(itertools.chain(*(line.released for line in cost)))
    require(not leaks, "sweep.set_share", must, "; ".join(leaks))
    return cost
