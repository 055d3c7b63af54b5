"""Read a run: accuracies of clients, and how equal they are."""

import copy
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import View

_MOST_CLIENTS = 100  # the lists of single clients are kept up to this number


class Recorder(Callback):
    """Watches one run; afterwards `record` is the content of its cell.

    Tables show `record["values"]`, from `_values`; `clients` has the lists of a small federation.

    **Privacy** Reads released models' accuracies on held-out records, which no guarantee covers.
    """

    _kept: tuple[str, ...] = ()  # attributes of the checkpoint

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}
        self.device = ""

    def on_fit_start(self, view: View) -> None:
        self.device = view.run.device

    def on_fit_end(self, view: View, result: RunResult) -> None:
        self.record = {"values": self._values(view, result)}
        if len(result.clients) <= _MOST_CLIENTS:
            names = ("accuracy", "epsilon_spent", "epsilon_budget", "batch_size", "num_records", "noise_multiplier")
            self.record["clients"] = {name: [client[name] for client in result.clients] for name in names}

    def _values(self, view: View, result: RunResult) -> dict[str, Any]:
        return accuracies(result.clients, result.test_accuracy)

    def state_dict(self) -> dict[str, Any]:
        return {name[1:]: copy.deepcopy(getattr(self, name)) for name in self._kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._kept:
            setattr(self, name, copy.deepcopy(state[name[1:]]))


class NoiseRecorder(Recorder):
    """Also keeps the mean noise multiplier; accuracy is that of the test set where the run has one model."""

    def _values(self, view: View, result: RunResult) -> dict[str, Any]:
        values = super()._values(view, result)
        noises = [client["noise_multiplier"] for client in result.clients]
        accuracy = values.get("test_accuracy", values.get("accuracy"))
        return {**values, "accuracy": accuracy, "noise_multiplier": fmean(noise for noise in noises if noise)}


class FirstRoundOnly(Strategy):
    """Looks at the updates of the first round, and ends the run after it."""

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return True

    def exhausted(self, view: View) -> str | None:
        return "one round is all that is looked at" if view.round > 1 else None


def guarantee_of(result: RunResult) -> dict[str, Any]:
    """The largest epsilon of a run's clients (None: infinite), its accountant, guarantee in words and rounds."""
    promise = result.guarantee
    finite = math.isfinite(promise.epsilon)
    return {
        "epsilon_max": promise.epsilon if finite else None,
        "accountant": promise.accountant if finite else None,
        "guarantee": str(promise),
        "rounds": result.rounds,
    }


def numbers_of(result: RunResult) -> dict[str, float]:
    """The metrics of a run that are single numbers."""
    return {name: value for name, value in result.metrics.items() if isinstance(value, float)}


def accuracies(clients: Sequence[Mapping[str, Any]], test_accuracy: float | None) -> dict[str, float]:
    """Accuracy over clients on their held-out records and on the test set, in per cent: mean and fairness, if measured.

    >>> accuracies([{"accuracy": 0.5}, {"accuracy": 0.75}], None)
    {'accuracy': 62.5, 'accuracy_worst': 50.0, 'accuracy_gap': 25.0}
    """
    known = [100 * client["accuracy"] for client in clients if client["accuracy"] is not None]
    values = {} if test_accuracy is None else {"test_accuracy": 100 * test_accuracy}
    if known:
        values |= {"accuracy": fmean(known), "accuracy_worst": min(known), "accuracy_gap": max(known) - min(known)}
    return values
