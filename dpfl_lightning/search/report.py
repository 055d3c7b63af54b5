"""Reports of a search: a line for each trial, and the configuration of the best trial."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dpfl_lightning.config.options import Options, changed_options
from dpfl_lightning.config.yaml_text import dump
from dpfl_lightning.federated.server.scores import formatted
from dpfl_lightning.runtime.text import duration
from dpfl_lightning.search.study import Trial


def line(trial: Trial, done: int, wanted: int, best: Trial | None, seconds_left: float) -> str:
    """Return the line for a finished trial in the terminal."""
    many = len(str(wanted))
    head = f"trial {trial.number:{many}} ({done:{many}} of {wanted})"
    if trial.state == "failed":
        outcome = f"failed: {trial.reason}" + ("; it will be repeated" if trial.again else "")
    else:
        outcome = scores_text(trial)
        outcome += f", pruned {trial.reason}" if trial.state == "pruned" else ""
    parts = [f"{head} {outcome}", ", ".join(f"{key} {value_text(value)}" for key, value in trial.found.items())]
    if best is not None:
        parts.append(f"best: {scores_text(best, 1)} (trial {best.number})")
    if done < wanted:
        parts.append(f"{duration(seconds_left)} left")
    return " | ".join(parts)


def counted(trials: Sequence[Trial]) -> str:
    """Return the number of trials by state."""
    states = Counter("repeated" if one.again else one.state for one in trials)
    return ", ".join(f"{count} {state}" for state, count in states.items()) or "no trial ended"


def ties(trials: Sequence[Trial]) -> list[str]:
    """Return a line if all complete trials have the same scores."""
    scores = [dict(one.scores) for one in trials if one.state == "complete"]
    same = len(scores) > 1 and all(one == scores[0] for one in scores)
    return [f"All {len(scores)} complete trials have the same scores, so they choose nothing."] if same else []


def reasons(trials: Sequence[Trial]) -> list[str]:
    """Return why trials failed: each reason once, with the number of trials."""
    failed = Counter(one.reason for one in trials if one.state == "failed" and not one.again)
    return [f"{count} failed: {reason}" for reason, count in failed.most_common()]


def best_yaml(options: Options, best: Trial, name: str, complete: int, words: str) -> str:
    """Return the options of the best trial as a configuration, with a comment that states where it comes from."""
    head = f"# Trial {best.number} of study {name}, the best of {complete}: {scores_text(best)}; {words}."
    return "\n".join([*textwrap.wrap(head, 118, subsequent_indent="# "), dump(changed_options(options))])


def as_dict(trial: Trial) -> dict[str, Any]:
    """Return the trial as a dictionary for JSON."""
    return {
        "number": trial.number,
        "state": trial.state,
        "params": dict(trial.found),
        "scores": dict(trial.scores),
        "spread": {name: trial.facts[f"{name}_std"] for name in trial.scores if f"{name}_std" in trial.facts},
        "reason": trial.reason,
        "made_again": trial.again,
        **{name: trial.facts[name] for name in ("num_params", "seconds", "host") if name in trial.facts},
    }


def value_text(value: Any) -> str:
    """Format a drawn value.

    >>> value_text(0.0123456), value_text(32), value_text("relu")
    ('0.01235', '32', 'relu')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def scores_text(trial: Trial, most: int | None = None) -> str:
    """Format the first `most` scores of a trial, with their standard deviation over seeds if there are several."""
    texts = []
    for name, value in [*trial.scores.items()][:most]:
        spread = trial.facts.get(f"{name}_std")
        texts.append(
            score_text(name, value) + ("" if spread is None else f" \N{PLUS-MINUS SIGN} {formatted(name, spread)}")
        )
    return ", ".join(texts)


def score_text(name: str, value: float) -> str:
    """Format one score.

    >>> score_text("accuracy", 0.5), score_text("mae", 0.123456), score_text("num_params", 1234)
    ('accuracy 50.00%', 'mae 0.1235', '1,234 parameters')
    """
    if name == "num_params":
        return f"{value:,.0f} parameters"
    return duration(value) if name == "seconds" else f"{name} {formatted(name, value)}"
