"""Reports of a search: a line for each trial, a table, and the configuration of the best trial."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dpfl_lightning.config.options import Options, changed_options
from dpfl_lightning.config.yaml_text import dump
from dpfl_lightning.runtime.text import columns, duration
from dpfl_lightning.search.study import Trial

_MOST_ROWS = 10


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
