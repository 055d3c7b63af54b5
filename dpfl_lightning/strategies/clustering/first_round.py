"""The first round of `clustered`, with full batches: its plan, its noise, and which groups it can separate."""

import dataclasses
import math

from dpfl_lightning.algorithms.update_geometry import expected_separation
from dpfl_lightning.errors import warn_user
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.accounting.events import GaussianEvent, LaplaceEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned

PURPOSE = "first_round"
_MANY = 1_000_000  # number of parameters above which less noise is added
_BAR = 1.5  # separation / P^(1/4) from which groups are found
_FAR = 0.2  # distance of mean clipped gradients / clip norm; distances of real groups are rarely larger


def with_full_batch(schedule: RunSchedule, view: View, noise_multiplier: float | str | None) -> RunSchedule:
    """Return the schedule in which each client's first round uses full batches, one in each local epoch.

    Rounds that are planned beyond the run's rounds are a reserve, of which the first round gets one. `noise_multiplier`
    is the option of `Clustered`; clients without noise add none.
    """
    usual = 5.0 if view.run.num_params <= _MANY else 3.0

    def change(client: int, client_schedule: ClientSchedule) -> ClientSchedule:
        train, event = schedule.planned(client, "train"), schedule.noised(client, "train")
        noise = event.noise_multiplier
        if client_schedule.adds_noise and noise_multiplier != "same":
            noise = float(usual if noise_multiplier is None else noise_multiplier)
        epochs = max(1, event.steps // math.ceil(view.facts.num_records[client] / view.facts.batch_size[client]))
        reserve = min(1, max(0, train.count - schedule.rounds))
        laplace = isinstance(event, LaplaceEvent)
        full = LaplaceEvent(noise, epochs) if laplace else GaussianEvent(1.0, noise, epochs)
        first = Planned(PURPOSE, full, 1 + reserve)
        later = dataclasses.replace(train, count=max(0, train.count - 1))
        others = (line for line in client_schedule.planned if line is not train)
        return dataclasses.replace(client_schedule, planned=(later, first, *others))

    return schedule.replan(change)


def sampling_std(client: int, steps: int, view: View) -> float:
    """Bound the distance of a client's full-batch update from its group's mean that sampling explains; 0: unknown."""
    if math.isinf(view.clip_norm[client]):
        return 0.0
    return steps * view.learning_rate[client] * view.clip_norm[client] / math.sqrt(view.facts.num_records[client])


def warn_if_blind(schedule: RunSchedule, view: View) -> None:
    """Warn the user if the given noise of the first round hides all but unusually different groups."""
    events = [schedule.noised(client, PURPOSE) for client in range(len(schedule.clients))]
    separations = [
        expected_separation(1.0, view.facts.num_records[client], event.noise_multiplier, event.steps)
        for client, event in enumerate(events)
        if isinstance(event, GaussianEvent) and event.noise_multiplier
    ]
    if separations and (needed := _BAR * view.run.num_params**0.25 / min(separations)) > _FAR:
        warn_user(
            "strategy clustered: the first round separates groups only if their mean clipped gradients differ by "
            f"{needed:.2g} of the clip norm (0.11 for rotated Fashion-MNIST images). Use more records per client, more "
            "local epochs, or a smaller first_round_noise_multiplier."
        )
