"""Make cells of `distillation.private_search`: one budget pays for a search and for the final run."""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.stats import spearmanr

from dpfl_lightning.build import build_loop
from dpfl_lightning.config.load import with_values
from dpfl_lightning.config.options import Options
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.privacy.accounting.planned import ClientSchedule
from dpfl_lightning.runtime.text import markdown
from dpfl_lightning.search.budget import RemainingBudget, SharedBudget
from dpfl_lightning.search.costs import planned_cost
from dpfl_lightning.search.objectives import objective
from dpfl_lightning.search.options import SweepOptions
from dpfl_lightning.sets.distilled_set import DistilledSet
from experiments.papers.distillation.studies import Content, LastModel, RunRecorder, new_net, population_of, scored
from experiments.papers.experiment import Cells, Experiment
from experiments.papers.recorder import guarantee_of
from experiments.papers.run import CellContext, run_folder

Values = Mapping[str, Any]

#: what is chosen from: nets, as they change no release, and clipping changes which learning rate is best
CANDIDATES: list[Values] = [
    {"model.width": width, "model.norm": norm, "model.pooling": pooling}
    for width, norm, pooling in product((16, 32), ("instance", "none"), ("avg", "max"))
]
TRIALS, TRIAL_ROUNDS = 5, 2  # private trials of candidates that are drawn at random
SHARE_OF_SET, SHARE_OF_TRIAL = 0.5, 0.15  # of epsilon
_SET = {"rounds": 1, "strategies": {"feature_means": {}}}
_ON_SET = {"epochs": 100, "learning_rate": 0.1, "batch_size": 64}
_ON_PUBLIC = {**_ON_SET, "epochs": 3}
_public_scores: dict[str, list[float]] = {}  # of data and seed


def tuned_on_public(context: CellContext) -> Content:
    """The candidate that is best on public records, with the whole budget."""
    return _final(context, CANDIDATES, _on_public(context.options), _folder(context))


def tuned_on_set(context: CellContext) -> Content:
    """The candidate that is best on a private set, with the rest; `spearman` compares its order with that by public
    records."""
    options, folder = context.options, _folder(context)
    budget = SharedBudget(SweepOptions(set_share=SHARE_OF_SET, set_with=_SET), options, folder / "set")
    _run(context, budget.set_options, folder / "set", 1)
    without_public = with_values(options, {"data.public_records": 0}, "by the study")
    scores = _scores(SweepOptions(training=_ON_SET, networks=3), without_public, DistilledSet.load(folder / "set"))
    order = {"spearman": float(spearmanr(scores, _on_public(options)).statistic)}
    return _final(context, CANDIDATES, scores, folder, budget.rest, order)


def private_trials(context: CellContext) -> Content:
    """The candidate that is best in private trials, by its accuracy on public records, with the rest."""
    options, folder, population = context.options, _folder(context), population_of(context)
    assert options.privacy is not None and isinstance(options.privacy.epsilon, float)  # for mypy: so says the table
    of_trial = {"rounds": TRIAL_ROUNDS, "privacy.epsilon": SHARE_OF_TRIAL * options.privacy.epsilon}
    loop = build_loop(trial := with_values(options, of_trial, "by the study"), (), population)
    cost = planned_cost(loop)  # the same of every candidate
    rest = RemainingBudget(options, population, [_times(TRIALS, one) for one in loop.schedule.clients], [cost] * TRIALS)
    tried, scores = random.Random(options.seed).sample(CANDIDATES, TRIALS), []
    for number, values in enumerate(tried):
        candidate = with_values(trial, values, "by the study")
        _run(context, candidate, folder / f"trial{number}", number + 1, last := LastModel())
        build = new_net(candidate, population)
        scores.append(scored(build, population, last.model.to(population.x.device))["holdout_accuracy"])
    return _final(context, tried, scores, folder, rest)


def _times(count: int, one: ClientSchedule) -> ClientSchedule:
    """Return the schedule of `count` equal runs together."""
    return dataclasses.replace(one, planned=tuple(dataclasses.replace(p, count=count * p.count) for p in one.planned))


def _folder(context: CellContext) -> Path:
    """Return a new folder for the runs of the cell: they are simulations, and are made together."""
    folder = run_folder(context.cell, context.runner)[0]
    folder.mkdir(parents=True)
    return folder


def _run(context: CellContext, options: Options, folder: Path, number: int, *callbacks: Callback) -> RunResult:
    """Make one of the cell's runs, with noise of its own."""
    values = {"privacy.noise_key": f"{number:032x}"}
    options = dataclasses.replace(with_values(options, values, "by the study"), output_dir=str(folder))
    return context.runner.fit(options, False, callbacks)


def _on_public(options: Options) -> list[float]:
    """Return the accuracy of each candidate on public records, which is the same for all budgets and rows of a seed."""
    key = repr((options.data, options.seed))
    if key not in _public_scores:
        _public_scores[key] = _scores(SweepOptions(training=_ON_PUBLIC), options, None)
    return _public_scores[key]


def _scores(sweep: SweepOptions, options: Options, made: DistilledSet | None) -> list[float]:
    """Return the accuracy of each candidate on records of the set, or public ones, that did not train it."""
    score = objective(sweep, options, made)
    trials = (with_values(options, values, "by the study") for values in CANDIDATES)
    outcomes = (score(trial, Path(), lambda step, value: False, lambda costs: None) for trial in trials)
    return [outcome.mean("accuracy") for outcome in outcomes]


def _final(
    context: CellContext,
    tried: Sequence[Values],
    scores: Sequence[float],
    folder: Path,
    rest: RemainingBudget | None = None,
    values: Values | None = None,
) -> Content:
    """Make the final run of the best candidate, with what is left of the budget, and return the content of the cell."""
    best = tried[scores.index(max(scores))]
    options = with_values(context.options, best, "by the study")
    if rest is not None:
        rest.check(options)
        options = rest.of(options)
    result = _run(context, options, folder / "final", 0, recorder := RunRecorder())
    stated = {} if rest is None else {"epsilon_max": rest.weakest.epsilon, "guarantee": rest.weakest.words()}
    own = {"test_accuracy": 100 * (result.test_accuracy or 0.0)}
    chosen = {**own, "epsilon_of_final": guarantee_of(result)["epsilon_max"], **(values or {})}
    search = {"tried": [*tried], "scores": [*scores], "best": best}
    content = {**recorder.record, "values": {**recorder.record["values"], **chosen}, "search": search}
    return {**content, **guarantee_of(result), **stated}


def orders(experiment: Experiment, cells: Cells) -> str:
    """A table of Spearman's correlation between the orders of the candidates on the set and on public records."""
    rows = [
        [column.title, f"{fmean(found):.2f}", f"{min(found):.2f} to {max(found):.2f}", str(len(found))]
        for name, column in experiment.columns.items()
        if (found := [rho for cell in cells.get(("set", name), ()) if (rho := cell["values"]["spearman"]) is not None])
    ]
    return markdown(["budget", "Spearman, set and public records", "range", "seeds"], rows) if rows else ""
