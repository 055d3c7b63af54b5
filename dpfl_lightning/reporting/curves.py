"""The curves of a run, from which MLflow, figures and reports are made."""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.curves import completed
from dpfl_lightning.federated.server.history import FILE, Round, Values, read
from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.run import FILE as ABOUT
from dpfl_lightning.federated.server.run import Run, change_about, write_about
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.reporting import description
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.runtime.text import distinct

HEADLINE = "headline"  # trackers show groups of charts by name, and MLflow charts without a group last


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
        write_about(view.run, description.about(view))

    def on_round_end(self, view: View, report: RoundReport) -> None:
        path = view.run.output_dir / FILE
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(report.curves.line())
        except OSError as error:
            error.filename = str(path)  # a full disk does not say which file it was
            raise

    def on_fit_end(self, view: View, result: RunResult) -> None:
        if not (view.run.output_dir / ABOUT).is_file():
            return  # the run was refused before it began
        if result.finished:
            path = view.run.output_dir / FILE
            write_text(path, "".join(map(Round.line, completed(read(path), result))))
        state = Run.ended(view, result).state.value
        ended = {"state": state, "reason": result.reason, "seconds": result.wall_seconds}
        change_about(view.run.output_dir, ended=ended)


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


def with_headline(values: Values, scores: Mapping[str, str]) -> dict[str, float | None]:
    """Add the first of the curves of `scores` again, as `headline/...`, of which trackers make the first chart.

    >>> with_headline({"test_accuracy": 0.5}, {"accuracy": "test_accuracy"})
    {'test_accuracy': 0.5, 'headline/test_accuracy': 0.5}
    """
    first = list(scores.values())[:1]
    return {**values, **{f"{HEADLINE}/{name}": values.get(name) for name in first}}


def history(rounds: Sequence[Round], name: str) -> dict[int, float]:
    """Return round -> value of a curve, without rounds in which it was not measured."""
    return {one.round: value for one in rounds if (value := one.values.get(name)) is not None}


def over_seeds(runs: Sequence[Sequence[Round]], name: str) -> dict[int, tuple[float, float]]:
    """Return round -> mean and standard deviation of a curve over runs, for rounds that all runs have."""
    each = [history(rounds, name) for rounds in runs]
    steps = [step for step in each[0] if all(step in one for one in each)] if each else []
    columns = {step: [one[step] for one in each] for step in steps}
    return {step: (fmean(values), stdev(values) if len(values) > 1 else 0.0) for step, values in columns.items()}
