"""The curves of a run, from which MLflow, figures and reports are made."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

import numpy as np
from torch import Tensor

from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.history import FILE, Round, Values, read
from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.scores import number
from dpfl_lightning.federated.server.summary import accuracy_of_groups, true_groups
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.reporting import description
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.runtime.text import distinct

HEADLINE = "headline"  # trackers show groups of charts by name, and MLflow charts without a group last
MOST_CLIENTS = 100  # of more clients, only quantiles are kept
_TIMES = ("wall_seconds", "client_seconds", "records_per_second")


class Curves(Callback):
    """Appends each round to `metrics.jsonl` in the folder of the run. A resumed run removes rounds that it repeats.

    The last round of a finished run gets its result, which may have been evaluated later, its times, and the epsilon
    that is guaranteed.

    `run.json` beside it describes the run, and says how it ended.

    **Privacy** Contains accuracies on test and held-out records, which no guarantee covers, and released values.
    """

    def on_fit_start(self, view: View) -> None:
        path = view.run.output_dir / FILE
        kept = [one for one in read(path) if one.round < view.round]
        write_text(path, "".join(map(Round.line, kept)))
        description.write(view.run.output_dir, description.about(view))

    def on_round_end(self, view: View, report: RoundReport) -> None:
        path = view.run.output_dir / FILE
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(of_round(report, view.facts).line())
        except OSError as error:
            error.filename = str(path)  # a full disk does not say which file it was
            raise

    def on_fit_end(self, view: View, result: RunResult) -> None:
        if not (view.run.output_dir / description.FILE).is_file():
            return  # the run was refused before it began
        if result.finished:
            path = view.run.output_dir / FILE
            write_text(path, "".join(map(Round.line, completed(read(path), result))))
        status = "FINISHED" if result.finished else "KILLED" if result.interrupted else "FAILED"
        ended = {"status": status, "reason": result.reason, "seconds": result.wall_seconds}
        description.change(view.run.output_dir, ended=ended)


def of_round(report: RoundReport, facts: Facts) -> Round:
    """Return the curves of a finished round."""
    diagnostics, scores = report.diagnostics, report.client_scores
    clients: dict[str, Sequence[float | None]] = {
        "val_accuracy": report.client_accuracy or (),
        "val_loss": [score.loss for score in scores],
        **{
            f"val_{name}": [score.metrics.get(name) for score in scores]
            for name in dict.fromkeys(name for score in scores for name in score.metrics)
        },
        "train_epsilon": report.epsilon_spent,
        "train_clip_fraction": () if diagnostics is None else diagnostics.clip_fraction,
        "train_gradients_not_finite": () if diagnostics is None else diagnostics.not_finite,
        **{f"train_{name}": value.tolist() for name, value in report.metrics.items() if isinstance(value, Tensor)},
    }
    over_all = {name: quantiles(name, values) for name, values in clients.items()}
    groups = accuracy_of_groups(report.client_accuracy or (), true_groups(facts))
    values = {
        **(on_test(report.test_accuracy, report.test_loss, report.test_metrics) if facts.test_set else {}),
        **{curve: value for found in over_all.values() for curve, value in found.items()},
        **of_groups(groups),
        **{f"train_{name}": value for name, value in report.metrics.items() if not isinstance(value, Tensor)},
        "train_participants": len(report.participants),
        "train_records_per_second": report.seconds and report.records / max(report.seconds, 1e-9),
    }
    named: dict[str, Values] = {}
    if facts.num_clients <= MOST_CLIENTS:
        names = facts.names or tuple(map(str, range(facts.num_clients)))  # `name_of`, without a call for each client
        columns = {name: _known(column) for name, column in clients.items() if over_all[name]}
        named = {name: dict(zip(names, column, strict=True)) for name, column in columns.items()}
    return Round(report.round, dict(zip(values, _known(list(values.values())), strict=True)), named)


def completed(rounds: Sequence[Round], result: RunResult) -> list[Round]:
    """Return the rounds, the last one with the results of the run under the names of the curves that end in them."""
    last = next((one for one in rounds if one.round == result.rounds), Round(result.rounds, {}, {}))
    clients = {
        "val_accuracy": [client["accuracy"] for client in result.clients],
        "train_epsilon": [number(client["epsilon_spent"]) for client in result.clients],
    }
    values = {
        **(on_test(result.test_accuracy, result.test_loss, result.test_metrics) if result.test_set else {}),
        **{curve: value for name, column in clients.items() for curve, value in quantiles(name, column).items()},
        **of_groups(result.accuracy_of_groups),
        **{f"train_{name}": getattr(result, name) for name in _TIMES},
    }
    spent = _known(clients["train_epsilon"])  # of a run that may end by its results, more than its rounds have spent
    known = {
        name: value
        for name, value in last.values.items()
        if name not in values or (value is not None and not name.startswith("train_epsilon"))
    }
    values = {**dict(zip(values, _known(list(values.values())), strict=True)), **known}
    columns = {
        name: dict(zip(column, spent, strict=True)) if name == "train_epsilon" else column
        for name, column in last.clients.items()
    }
    return [*(one for one in rounds if one is not last), dataclasses.replace(last, values=values, clients=columns)]


#: begins of the curves of scores that clients have released with noise
RELEASED = ("train_released_", "train_noise_of_")


def with_clients(one: Round, begins: str | tuple[str, ...] = "") -> dict[str, float | None]:
    """Return the curves of a round and those of each client that begin so, `val_auroc/bergen`."""
    return {
        **one.values,
        **{
            f"{curve}/{client}": value
            for curve, column in one.clients.items()
            if curve.startswith(begins)
            for client, value in zip(_charts(list(column)), column.values(), strict=True)
        },
    }


def _charts(clients: Sequence[str]) -> list[str]:
    """Return different names of the clients' charts, in which a slash would be a group.

    >>> _charts(["7", "north/east", "a+b", "a*b"])
    ['07', 'north_east', 'a_b (1)', 'a_b (2)']
    """
    return distinct(
        [
            client.zfill(2) if client.isdigit() else re.sub(r"[^\w. -]", "_", client).strip(". ") or "_"
            for client in clients
        ]
    )


def on_test(accuracy: float | None, loss: float | None, metrics: Values) -> dict[str, float | None]:
    """Name the scores on test records."""
    return {"test_accuracy": accuracy, "test_loss": loss, **{f"test_{name}": value for name, value in metrics.items()}}


def score_curves(names: Iterable[str]) -> dict[str, str]:
    """Return score -> its curve: on the test set, else the mean over held-out records.

    The first one stands for the run: a metric, if any was asked for, and else the accuracy.

    >>> score_curves(["test_loss", "test_accuracy", "test_auroc", "val_accuracy_mean"])
    {'auroc': 'test_auroc', 'accuracy': 'test_accuracy', 'loss': 'test_loss'}
    """
    listed = list(dict.fromkeys(names))
    test = {name.removeprefix("test_"): name for name in listed if name.startswith("test_")}
    means = (name for name in listed if name.startswith("val_") and name.endswith("_mean"))
    found = test or {name.removeprefix("val_").removesuffix("_mean"): name for name in means}
    return {score: found[score] for score in sorted(found, key=lambda one: ("loss" in one, "accuracy" in one))}


def with_headline(values: Values, names: Iterable[str]) -> dict[str, float | None]:
    """Add the first score of a run with these curves again, as `headline/...`, of which trackers make the first chart.

    >>> with_headline({"test_accuracy": 0.5}, ["test_accuracy"])
    {'test_accuracy': 0.5, 'headline/test_accuracy': 0.5}
    """
    first = list(score_curves(names).values())[:1]
    return {**values, **{f"{HEADLINE}/{name}": values.get(name) for name in first}}


def of_groups(accuracies: Mapping[str, float]) -> dict[str, float]:
    """Name the accuracies of `summary.accuracy_of_groups`.

    >>> of_groups({"minority": 0.5, "0": 0.75})
    {'val_accuracy_minority': 0.5, 'val_accuracy_group_0': 0.75}
    """
    return {f"val_accuracy_{'group_' * name.isdigit()}{name}": value for name, value in accuracies.items()}


def quantiles(name: str, values: Sequence[float | None]) -> dict[str, float]:
    """Return the smallest, median, mean and largest value over clients, for accuracies also the standard deviation.

    None and NaN are left out. An epsilon without a bound is infinite, and so is then the largest.

    >>> quantiles("epsilon", [1.0, None, 4.0])
    {'epsilon_min': 1.0, 'epsilon_median': 2.5, 'epsilon_mean': 2.5, 'epsilon_max': 4.0}
    """
    known = np.array(values, dtype=np.float64)  # None becomes NaN
    known = known[~np.isnan(known)]
    if not known.size:
        return {}
    found = {"min": known.min(), "median": np.median(known), "mean": known.mean(), "max": known.max()}
    found |= {"std": known.std()} if name == "val_accuracy" else {}
    return {f"{name}_{key}": float(value) for key, value in found.items()}


def history(rounds: Sequence[Round], name: str) -> dict[int, float]:
    """Return round -> value of a curve, without rounds in which it was not measured."""
    return {one.round: value for one in rounds if (value := one.values.get(name)) is not None}


def over_seeds(runs: Sequence[Sequence[Round]], name: str) -> dict[int, tuple[float, float]]:
    """Return round -> mean and standard deviation of a curve over runs, for rounds that all runs have."""
    each = [history(rounds, name) for rounds in runs]
    steps = [step for step in each[0] if all(step in one for one in each)] if each else []
    columns = {step: [one[step] for one in each] for step in steps}
    return {step: (fmean(values), stdev(values) if len(values) > 1 else 0.0) for step, values in columns.items()}


def _known(values: Sequence[float | None]) -> list[float | None]:
    """Replace values that are not finite by None."""
    return [value if value is not None and math.isfinite(value) else None for value in values]
