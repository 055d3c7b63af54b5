"""One round of real training: the estimates of its updates' noise beside the true noise."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.results import RunResult
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.papers.robust_hdp.noise_estimators import EstimatorOptions, estimate
from dpfl_lightning.papers.robust_hdp.noise_weights import weights
from experiments.papers.noise_aware.formulas import of_sum, oracle_weights
from experiments.papers.recorder import FirstRoundOnly, Recorder


class FirstRound(Recorder, FirstRoundOnly):
    """Ends the run after its first round, whose noise is that of the whole run's plan.

    `<name>_noise` is the noise variance of the sum under an estimator's weights, per parameter at learning rate 1, and
    `<name>_excess` that / the least possible. `first_round` holds lists of one number for each client.

    Args:
        names: name -> the fields of `EstimatorOptions`; a list has the names of estimators with default options.
    """

    _kept = ("_lists",)

    def __init__(self, names: Sequence[str] | Mapping[str, Mapping[str, Any]] = ()) -> None:
        super().__init__()
        listed = names if isinstance(names, Mapping) else {name: {"name": name} for name in names}
        self.estimators = {name: EstimatorOptions(**options) for name, options in listed.items()}
        self._lists: dict[str, list] = {}

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor | None:
        rates = [view.learning_rate[client] for client in updates.clients]
        truth = [(std / rate) ** 2 for std, rate in zip(updates.noise_std, rates, strict=True)]
        planned = view.run.clients
        assert planned is not None, "a round follows its plan"
        self._lists = {
            "epsilon": [planned.budget[client] for client in updates.clients],
            "truth": truth,
            "oracle_weights": oracle_weights(truth),
        }
        for name, options in self.estimators.items():
            noise_var = estimate(updates.released, options).noise_var
            scale = updates.released.shape[1] * rates[0] ** 2
            self._lists[f"{name}_variance"] = (noise_var / scale).tolist()
            self._lists[f"{name}_weights"] = weights(noise_var).tolist()
        return None

    def on_fit_end(self, view: View, result: RunResult) -> None:
        super().on_fit_end(view, result)
        self.record["first_round"] = self._lists

    def _values(self, view: View, result: RunResult) -> dict[str, Any]:
        if not self._lists:
            return {}  # interrupted before its end
        truth = self._lists["truth"]
        least = of_sum(self._lists["oracle_weights"], truth)
        noises = {name: of_sum(self._lists[f"{name}_weights"], truth) for name in self.estimators}
        return {
            "oracle_noise": least,
            **{f"{name}_noise": noise for name, noise in noises.items()},
            **{f"{name}_excess": noise / least for name, noise in noises.items()},
        }
