"""What a search came to: a line for each trial, a table, and what it cost the clients."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dpfl_lightning.config.options import Options, departures
from dpfl_lightning.config.yaml_text import dump
from dpfl_lightning.privacy.accounting.accountant import delta_text, rounded_up
from dpfl_lightning.privacy.accounting.accountant import epsilon_text as epsilon
from dpfl_lightning.runtime.text import columns, duration
from dpfl_lightning.search.trial import Trial

_MOST_ROWS = 10
_MOST_CLIENTS = 30
_SPENT = {"epsilon": "epsilon_spent", "delta": "delta"}


def line(trial: Trial, done: int, wanted: int, best: Trial | None, seconds_left: float) -> str:
    """One trial that ended, for the terminal."""
    many = len(str(wanted))
    told = f"trial {trial.number:{many}} ({done:{many}} of {wanted})"
    if trial.state == "failed":
        said = f"failed: {trial.reason}" + ("; it is made again" if trial.again else "")
    else:
        said = ", ".join(_shown(name, value) for name, value in trial.scores.items())
        said += f", pruned {trial.reason}" if trial.state == "pruned" else ""
    parts = [f"{told} {said}", ", ".join(f"{key} {value_text(value)}" for key, value in trial.found.items())]
    if best is not None:
        name, value = next(iter(best.scores.items()))
        parts.append(f"best: {_shown(name, value)} (trial {best.number})")
    if done < wanted:
        parts.append(f"{duration(seconds_left)} left")
    return " | ".join(parts)


def table(trials: Sequence[Trial], best: Sequence[Trial], better: Mapping[str, bool]) -> str:
    """The best complete trials, or a whole Pareto front, in order of the first score.

    Args:
        better: score -> whether more is better.
    """
    name = next(iter(better))
    complete = [one for one in trials if one.state == "complete"]
    if len(better) > 1:
        chosen, title = list(best), f"Pareto front of {', '.join(better)}: {len(best)} of {len(complete)} trials"
    else:
        chosen = sorted(complete, key=lambda one: one.scores[name], reverse=better[name])[:_MOST_ROWS]
        title = f"The best {len(chosen)} of {len(complete)} complete trials"
    keys = list(dict.fromkeys(key for one in chosen for key in one.found))
    head = ["trial", "accuracy", "parameters", "seconds", *keys]
    rows = [
        [one.number, *_measured(one), *(value_text(one.found[key]) if key in one.found else "-" for key in keys)]
        for one in chosen
    ]
    return f"{title}:\n{columns([head, *rows])}"


def counted(trials: Sequence[Trial]) -> str:
    """How many trials ended in which way."""
    states = Counter("made again" if one.again else one.state for one in trials)
    return ", ".join(f"{count} {state}" for state, count in states.items())


def reasons(trials: Sequence[Trial]) -> list[str]:
    """Why trials failed: each reason once, with how many had it."""
    failed = Counter(one.reason for one in trials if one.state == "failed" and not one.again)
    return [f"{count} failed: {reason}" for reason, count in failed.most_common()]


def total_cost(begun: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]] | None:
    """Each client's epsilon and delta over all trials that began, by addition (None: no bound); None if none cost any.

    With them go the caveats of all trials, each once.

    A trial counts with its whole budget, also if it was pruned, failed or died: how far trials go, the trials decide.
    """
    costs = [noted["cost"] for noted in begun if "cost" in noted]
    if not costs:
        return None
    epsilons = [[math.inf if one is None else one for one in cost["epsilon"]] for cost in costs]
    totals = [rounded_up(math.fsum(column), 6) for column in zip(*epsilons, strict=True)]
    return {
        "epsilon": [one if math.isfinite(one) else None for one in totals],
        "delta": [math.fsum(column) for column in zip(*(cost["delta"] for cost in costs), strict=True)],
        "caveats": list(dict.fromkeys(words for cost in costs for words in cost.get("caveats", ()))),
    }


def cost_text(cost: Mapping[str, Sequence[Any]], trials: int) -> str:
    """What the search cost its clients, in words and a table; the caveats stand beside the first epsilon."""
    numbers = [math.inf if one is None else one for one in cost["epsilon"]]
    most = numbers.index(max(numbers))
    delta = delta_text(max(cost["delta"]))
    words = (
        f"PRIVATE: {trials} trials on the clients' records, each a release of its own. Together they, and what was "
        f"chosen by them, reveal of one record of a client at most epsilon {epsilon(numbers[most])} at delta "
        f"{delta} (client {most} has the largest epsilon; the whole budgets of all trials added up). A run on the same "
        "clients that follows adds its own."
    )
    words = " ".join([words, *(f"Caveat: {caveat.rstrip('.')}." for caveat in cost["caveats"])])
    if len(numbers) > _MOST_CLIENTS:
        return words
    rows = [[client, epsilon(own), delta_text(cost["delta"][client])] for client, own in enumerate(numbers)]
    return f"{words}\n{columns([['client', 'epsilon', 'delta'], *rows])}"


def set_text(card: Mapping[str, Any]) -> str:
    """What the distilled set cost, and what a final run adds to it."""
    spent, cost = card.get("epsilon_max"), "an epsilon without bound"
    if spent is not None and "delta_max" in card:
        cost = f"at most epsilon {epsilon(spent)} at delta {delta_text(card['delta_max'])}"
    words = (
        f"The set cost its clients {cost}; searching on it costs nothing more. A final run on the same clients adds "
        "its own epsilon and delta to that."
    )
    promise = card.get("guarantee")  # with its caveats
    return f"{words} The set's guarantee: {promise}" if promise else words


def with_trials_text(cost: Mapping[str, Sequence[Any]], clients: Sequence[Mapping[str, Any]]) -> str:
    """What private trials and the run that they chose reveal together, by addition.

    Args:
        cost: `total_cost` of the trials.
        clients: of the run's result, the same ones.
    """
    added = total_cost(
        [
            {"cost": {key: cost[key] for key in ("epsilon", "delta")}},
            {"cost": {key: [one[name] for one in clients] for key, name in _SPENT.items()}},
        ]
    )
    assert added is not None  # for mypy: two cost something
    most = max(math.inf if one is None else one for one in added["epsilon"])
    return (
        "With the trials that chose it: of one record of a client at most epsilon "
        f"{epsilon(most)} at delta {delta_text(max(added['delta']))} (each client's, added up; the largest)."
    )


def best_yaml(options: Options, best: Trial, name: str, complete: int, words: str) -> str:
    """The options of the best trial as a configuration, which says where it comes from."""
    scores = ", ".join(_shown(score, value) for score, value in best.scores.items())
    head = f"# Trial {best.number} of study {name}, the best of {complete}: {scores}; {words}."
    return "\n".join([*textwrap.wrap(head, 118, subsequent_indent="# "), dump(departures(options))])


def as_dict(trial: Trial) -> dict[str, Any]:
    """Ready for JSON."""
    return {
        "number": trial.number,
        "state": trial.state,
        "params": dict(trial.found),
        "scores": dict(trial.scores),
        "reason": trial.reason,
        "made_again": trial.again,
        **{name: value for name, value in trial.facts.items() if name in ("num_params", "seconds", "cost", "host")},
    }


def value_text(value: Any) -> str:
    """A drawn value.

    >>> value_text(0.0123456), value_text(32), value_text("relu")
    ('0.01235', '32', 'relu')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _shown(name: str, value: float) -> str:
    if name == "accuracy":
        return f"accuracy {value:.2%}"
    return f"{value:,.0f} parameters" if name == "num_params" else duration(value)


def _measured(trial: Trial) -> list[str]:
    known = {**trial.facts, **trial.scores}
    accuracy = f"{known['accuracy']:.2%}" if "accuracy" in known else "-"
    return [accuracy, f"{known['num_params']:,.0f}", f"{known['seconds']:.1f}"]
