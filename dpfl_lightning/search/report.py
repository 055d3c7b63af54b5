"""Reports of a search: a line for each trial, a table, and the privacy cost for the clients."""

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dpfl_lightning.config.options import Options, changed_options
from dpfl_lightning.config.yaml_text import dump
from dpfl_lightning.privacy.accounting.accountant import delta_text, rounded_up
from dpfl_lightning.privacy.accounting.accountant import epsilon_text as epsilon
from dpfl_lightning.runtime.text import columns, duration
from dpfl_lightning.search.study import Trial

_MOST_ROWS = 10
_MOST_CLIENTS = 30


def line(trial: Trial, done: int, wanted: int, best: Trial | None, seconds_left: float) -> str:
    """Return the line for a finished trial in the terminal."""
    many = len(str(wanted))
    head = f"trial {trial.number:{many}} ({done:{many}} of {wanted})"
    if trial.state == "failed":
        outcome = f"failed: {trial.reason}" + ("; it will be repeated" if trial.again else "")
    else:
        outcome = ", ".join(_shown(name, value) for name, value in trial.scores.items())
        outcome += f", pruned {trial.reason}" if trial.state == "pruned" else ""
    parts = [f"{head} {outcome}", ", ".join(f"{key} {value_text(value)}" for key, value in trial.found.items())]
    if best is not None:
        name, value = next(iter(best.scores.items()))
        parts.append(f"best: {_shown(name, value)} (trial {best.number})")
    if done < wanted:
        parts.append(f"{duration(seconds_left)} left")
    return " | ".join(parts)


def table(trials: Sequence[Trial], best: Sequence[Trial], better: Mapping[str, bool]) -> str:
    """Return a table of the best complete trials, or of the whole Pareto front, ordered by the first score.

    `better` maps each score to whether larger is better.
    """
    name = next(iter(better))
    complete = [one for one in trials if one.state == "complete"]
    if len(better) > 1:
        chosen, title = list(best), f"Pareto front of {', '.join(better)}: {len(best)} of {len(complete)} trials"
    else:
        chosen = sorted(complete, key=lambda one: one.scores[name], reverse=better[name])[:_MOST_ROWS]
        title = f"The best {len(chosen)} of {len(complete)} complete trials"
    keys = list(dict.fromkeys(key for one in chosen for key in one.found))
    rows: list[list[object]] = [["trial", "accuracy", "parameters", "seconds", *_short(keys)]]
    for one in chosen:
        known = {**one.facts, **one.scores}
        accuracy = f"{known['accuracy']:.2%}" if "accuracy" in known else "-"
        drawn = [value_text(one.found[key]) if key in one.found else "-" for key in keys]
        rows.append([one.number, accuracy, f"{known['num_params']:,.0f}", f"{known['seconds']:.1f}", *drawn])
    return f"{title}:\n{columns(rows)}"


def _short(keys: Sequence[str]) -> list[str]:
    """Return the last part of each dotted key where no other key has the same.

    >>> _short(["model.width", "clients.name", "model.name"])
    ['width', 'clients.name', 'model.name']
    """
    last = [key.rpartition(".")[2] for key in keys]
    return [short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)]


def counted(trials: Sequence[Trial]) -> str:
    """Return the number of trials by state."""
    states = Counter("repeated" if one.again else one.state for one in trials)
    return ", ".join(f"{count} {state}" for state, count in states.items())


def reasons(trials: Sequence[Trial]) -> list[str]:
    """Return why trials failed: each reason once, with the number of trials."""
    failed = Counter(one.reason for one in trials if one.state == "failed" and not one.again)
    return [f"{count} failed: {reason}" for reason, count in failed.most_common()]


def total_cost(begun: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]] | None:
    """Return each client's epsilon (None: no bound) and delta, added up over the notes of all trials that began.

    A trial counts with its whole budget even if it was pruned, failed or died, because its length depends on the
    trials' results. None if no trial has a cost.
    """
    costs = [noted["cost"] for noted in begun if "cost" in noted]
    if not costs:
        return None
    columns_of = {name: list(zip(*(cost[name] for cost in costs), strict=True)) for name in ("epsilon", "delta")}
    totals = [rounded_up(math.fsum(map(_bound, column)), 6) for column in columns_of["epsilon"]]
    return {
        "epsilon": [one if math.isfinite(one) else None for one in totals],
        "delta": list(map(math.fsum, columns_of["delta"])),
        "caveats": list(dict.fromkeys(words for cost in costs for words in cost.get("caveats", ()))),
        "names": list(costs[0].get("names", ())),
    }


def _bound(spent: float | None) -> float:
    return math.inf if spent is None else spent


def cost_words(cost: Mapping[str, Sequence[Any]], trials: int) -> str:
    """Describe the cost of the search for its clients. The caveats follow the first epsilon."""
    numbers = list(map(_bound, cost["epsilon"]))
    most, names = numbers.index(max(numbers)), cost.get("names") or range(len(numbers))
    delta = delta_text(max(cost["delta"]))
    words = (
        f"PRIVATE: {trials} trials on the clients' records, each of them a separate release. Together with the choice "
        f"made from them, they cost a record of a client at most epsilon {epsilon(numbers[most])} at delta "
        f"{delta} (client {names[most]} has the largest epsilon; the whole budgets of all trials are added up). A "
        "later run on the same clients adds its epsilon and delta."
    )
    return " ".join([words, *(f"Caveat: {caveat.rstrip('.')}." for caveat in cost["caveats"])])


def cost_text(cost: Mapping[str, Sequence[Any]], trials: int) -> str:
    """Return `cost_words`, and a table if the clients are few."""
    words, numbers = cost_words(cost, trials), list(map(_bound, cost["epsilon"]))
    if len(numbers) > _MOST_CLIENTS:
        return words
    names = cost.get("names") or range(len(numbers))
    rows = zip(names, map(epsilon, numbers), map(delta_text, cost["delta"]), strict=True)
    return f"{words}\n{columns([['client', 'epsilon', 'delta'], *rows])}"


def set_text(card: Mapping[str, Any]) -> str:
    """Describe the cost of the distilled set, and what a final run adds to it."""
    spent, cost = card.get("epsilon_max"), "an epsilon without a bound"
    if spent is not None and "delta_max" in card:
        cost = f"at most epsilon {epsilon(spent)} at delta {delta_text(card['delta_max'])}"
    words = (
        f"The set cost its clients {cost}. Searching on it costs nothing more. A final run on the same clients adds "
        "its epsilon and delta to this cost."
    )
    promise = card.get("guarantee")  # with its caveats
    return f"{words} The set's guarantee: {promise}" if promise else words


def with_trials_text(cost: Mapping[str, Sequence[Any]], clients: Sequence[Mapping[str, Any]]) -> str:
    """Describe what private trials (their `total_cost`) and the run chosen by them cost the same clients together."""
    run = {"epsilon": [one["epsilon_spent"] for one in clients], "delta": [one["delta"] for one in clients]}
    added = total_cost([{"cost": {**cost, "caveats": []}}, {"cost": run}])
    assert added is not None  # for mypy: both have a cost
    return (
        "Together with the trials that chose it, a record of a client costs at most epsilon "
        f"{epsilon(max(map(_bound, added['epsilon'])))} at delta {delta_text(max(added['delta']))} (added up for each "
        "client; the largest sums)."
    )


def best_yaml(options: Options, best: Trial, name: str, complete: int, words: str) -> str:
    """Return the options of the best trial as a configuration, with a comment that states where it comes from."""
    scores = ", ".join(_shown(score, value) for score, value in best.scores.items())
    head = f"# Trial {best.number} of study {name}, the best of {complete}: {scores}; {words}."
    return "\n".join([*textwrap.wrap(head, 118, subsequent_indent="# "), dump(changed_options(options))])


def as_dict(trial: Trial) -> dict[str, Any]:
    """Return the trial as a dictionary for JSON."""
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
    """Format a drawn value.

    >>> value_text(0.0123456), value_text(32), value_text("relu")
    ('0.01235', '32', 'relu')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _shown(name: str, value: float) -> str:
    if name == "accuracy":
        return f"accuracy {value:.2%}"
    return f"{value:,.0f} parameters" if name == "num_params" else duration(value)
