"""Any Lightning logger beside MLflow: CSV, TensorBoard, Weights & Biases, ..."""

from collections.abc import Sequence

from lightning.pytorch.loggers import Logger

from dpfl_lightning.errors import UserError, warn_user
from dpfl_lightning.federated.server import history
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.curves import score_curves
from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.run import read_about
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.reporting import curves


class Loggers(Callback):
    """Sends parameters and curves of a run to Lightning loggers, with `per_client` also the curves of every client.

    A logger that fails during the run gets nothing more, and training continues. A resumed run logs all its rounds
    again, to new versions of the loggers.

    **Privacy** Loggers may record exact times, also of private runs, whose guarantee does not cover them.
    """

    def __init__(self, loggers: Sequence[Logger], per_client: bool = False) -> None:
        self._loggers, self._per_client = list(loggers), per_client
        self._logged: dict[str, tuple[int, float]] = {}  # curve -> its last round and value

    def on_fit_start(self, view: View) -> None:
        if self._loggers and not view.run.exact_times:
            warn_user("`tracking.loggers` may record the exact times of rounds, which MLflow gets rounded")
        params = read_about(view.run.output_dir)["params"]
        for logger in self._loggers:
            try:
                logger.log_hyperparams(params)
            except Exception as error:  # a logger may start a server, or open a file
                kind, got = type(logger).__name__, f"{type(error).__name__}: {error}"
                raise UserError(f"`tracking.loggers` must work, got from {kind}: {got}. Mend or remove it.") from error
        self._log(view, history.read(view.run.output_dir / history.FILE))

    def on_round_end(self, view: View, report: RoundReport) -> None:
        self._log(view, [report.curves])

    def on_fit_end(self, view: View, result: RunResult) -> None:
        if result.finished:  # the last round now has the result and the guaranteed epsilon
            self._log(view, history.read(view.run.output_dir / history.FILE)[-1:])
        self._each("finalize", "success" if result.finished else "failed")

    def _log(self, view: View, rounds: Sequence[history.Round]) -> None:
        for one in rounds:
            values = curves.with_clients(one, "" if self._per_client else curves.RELEASED)
            values = curves.with_headline(values, score_curves(one.values, view.run.measures))
            known = {name: (one.round, value) for name, value in values.items() if value is not None}
            new = {name: value for name, (_, value) in known.items() if self._logged.get(name) != known[name]}
            if new:
                self._each("log_metrics", new, one.round)
            self._logged |= known

    def _each(self, method: str, *args: object) -> None:
        for logger in list(self._loggers):
            try:
                getattr(logger, method)(*args)
            except Exception as error:
                self._loggers.remove(logger)
                words = f"{type(logger).__name__} failed; training continues without it"
                warn_user(f"{words}, and metrics.jsonl has all curves: {type(error).__name__}: {error}")
