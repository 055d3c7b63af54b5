"""DistDD as Wang and Wang (2024) print it, with their noise, and eq. 41 beside the epsilon of the accountant."""

# Printed                                                      Here
#   theta_0 drawn once (Algorithm 1, line 1)                   `reinit_every: 0`
#   G_{t,c} = sum over clients of class means, eq. 3           `aggregation: sum_of_client_means`
#   D = |G - g|^2, eq. 27                                      `matching: mse`
#   a mini-batch of a class                                    `sampling: fixed`, at half the noise multiplier
#   (sum of clipped gradients + N(0, sigma^2 C^2)) / |B_c|     `noise_on: sum`, eq. 10; the divisor is public here
#   mean of clipped gradients + N(0, sigma^2 C^2), app. C      `noise_on: mean`, charged as B sigma on the sum
#   epsilon = sqrt(2 ln(1.25 / delta)) 2 C / sigma, eq. 41     `paper_epsilon`, shown beside the guarantee
#   theta <- G_{t,c} (line 20)                                 never: eq. 7 of the text, as in `distillation`

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.errors import require
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.papers.distillation.distillation import PURPOSE, Distillation
from dpfl_lightning.privacy.accounting.events import GaussianEvent, NoisedEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule
from dpfl_lightning.privacy.sampling import OfEachClass
from dpfl_lightning.runtime.text import at_most

_MOVED = {"fixed": OfEachClass.moved}  # sampling -> drawn records that one record more changes; 1 in the others


@dataclass
class DistillationAsPrinted(Distillation):
    """DistDD as printed: sums of clients' means, squared distance, one initialisation, and noise that eq. 41 explains.

    Use it to compare with the paper; `distillation` makes better sets. A given privacy.noise_multiplier is the paper's
    sigma: the standard deviation of the noise divided by the clip norm C of a record. With `sampling: fixed` an added
    record can replace another one, so records are clipped to half of privacy.clip_norm, and sigma / 2 is charged.

    Args:
        noise_on: `sum` (eq. 10): sigma C is on the sum of clipped gradients. `mean` (appendix C): it is on the mean of
            a class, so that B sigma is on the sum, for the public number B of records of a class that are expected.
        reinit_every: rounds between two initialisations of the model; 0, the paper's, is one initialisation.

    **Privacy** The guarantee is the accountant's for what is charged, and infinite without noise. Eq. 41 is shown
    beside it and is no guarantee: it counts one release of the whole run, and takes sigma for a standard deviation.
    The printed divisor, the drawn number of records, is private: with noise a public number replaces it.

    Reference: Wang and Wang (2024), Algorithm 1, eqs. 3, 7 to 10, 27, 40 and 41.
    """

    matching: Literal["layerwise_cosine", "mse"] = "mse"
    aggregation: Literal["sum", "client_means", "sum_of_client_means", "median", "trimmed_mean"] = "sum_of_client_means"
    reinit_every: Annotated[int, Interval(ge=0)] | None = 0
    sampling: Literal["full", "poisson", "fixed"] | None = "fixed"
    noise_on: Literal["sum", "mean"] = "sum"

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        def on_sums(client: int, own: ClientSchedule) -> ClientSchedule:
            """Replace the paper's sigma by the noise multiplier of the sum."""
            lines = []
            for line in own.planned:
                if line.purpose == "train" and isinstance(line.event, NoisedEvent):
                    sigma = line.event.noise_multiplier
                    key, advice = "privacy.noise_multiplier", "A budget is solved for noise on the sum."
                    given = sigma is not None or self.noise_on == "sum"
                    require(given, key, f"be given with {self._key('noise_on')} mean", sigma, advice)
                    if sigma is not None:
                        noise = sigma / self._sigma_of_one(client, line.event.sample_rate, view)
                        line = dataclasses.replace(line, event=line.event.with_noise(noise))
                lines.append(line)
            return dataclasses.replace(own, planned=tuple(lines))

        return super().plan_run(schedule.replan(on_sums), view)

    def _sigma_of_one(self, client: int, sample_rate: float, view: View) -> float:
        """Return the paper's sigma of noise multiplier 1 on the sum."""
        moved = _MOVED.get(self.sampling or "", 1)
        if self.noise_on == "sum":
            return float(moved)
        records = (sample_rate if self.sampling == "poisson" else 1.0) * view.facts.num_records[client]
        of_class = records / view.facts.num_classes
        return moved / (min(of_class, self.records_per_class) if self.sampling == "fixed" else of_class)

    def _paper_epsilon(self, view: View) -> float:
        """Return the largest eq. 41 of the clients with Gaussian noise; infinity without any."""
        found = []
        for client, own in enumerate(view.schedule.clients):
            event = view.schedule.noised(client, PURPOSE)
            if isinstance(event, GaussianEvent) and event.noise_multiplier and own.delta > 0:
                sigma = event.noise_multiplier * self._sigma_of_one(client, event.sample_rate, view)
                clip_norm = view.clip_norm[client] / _MOVED.get(self._sampling, 1)
                found.append(paper_epsilon(sigma, own.delta, clip_norm))
        return max(found, default=math.inf)

    def _words(self, view: View) -> tuple[str, ...]:
        epsilon = self._paper_epsilon(view)
        if not math.isfinite(epsilon):
            return ("The paper's eq. 41 says nothing of this run, which has no Gaussian noise.",)
        return (
            f"For comparison only, no guarantee: the paper's eq. 41 says epsilon {at_most(epsilon, 3)}. It counts "
            "one release of the whole run, and takes the noise multiplier for a standard deviation.",
        )

    def describe(self, view: View) -> tuple[str, ...]:
        return (*super().describe(view), *self._words(view))

    def remarks(self, view: View) -> tuple[str, ...]:
        return (*super().remarks(view), *self._words(view))

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        epsilon = self._paper_epsilon(view)
        beside = {"epsilon_of_eq_41": epsilon} if math.isfinite(epsilon) else {}
        return {**super().metrics(view), **beside}


def paper_epsilon(sigma: float, delta: float, clip_norm: float = 1.0) -> float:
    """Return eq. 41, `sqrt(2 ln(1.25 / delta)) 2 clip_norm / sigma`, for comparison only: it is not a valid epsilon.

    It counts one release, however many a run makes; it grows with the clip norm, on which no epsilon depends; and the
    formula that it rests on holds below 1 only. `sigma` > 0 is noise std / clip norm, and 0 < `delta` < 1.

    Reference: Wang and Wang (2024), eqs. 40 and 41; Dwork and Roth (2014), theorem A.1.

    >>> round(paper_epsilon(10.0, 1e-5), 3)  # 500 rounds of full batches have epsilon 11.48
    0.969
    """
    return math.sqrt(2 * math.log(1.25 / delta)) * 2 * clip_norm / sigma
