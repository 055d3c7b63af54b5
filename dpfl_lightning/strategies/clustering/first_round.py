"""The first round of `clustered`, with full batches: its plan, its noise, and which groups it can separate."""

from __future__ import annotations

import dataclasses
import math
import warnings

from dpfl_lightning.algorithms.update_geometry import expected_separation
from dpfl_lightning.errors import UserNotice
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.accounting.events import GaussianEvent, LaplaceEvent, NoisedEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned

PURPOSE = "first_round"
_TRAIN = "train"
_MANY = 1_000_000  # number of parameters above which less noise is added
_BAR = 1.5  # separation / P^(1/4) from which groups are found
_FAR = 0.2  # distance of mean clipped gradients / clip norm; distances of real groups are rarely larger


def with_full_batch(schedule: RunSchedule, view: View, noise_multiplier: float | str | None) -> RunSchedule:
    """Return the schedule in which each client's first round uses full batches, one in each local epoch.

    Rounds that are planned beyond the run's rounds are a reserve, of which the first round gets one.

    Args:
        schedule: schedule of the run, before its noise is solved.
        view: facts of the run.
        noise_multiplier: noise multiplier of the full batches. None is 5, or 3 above a million parameters, which leaves
            nearly all of the budget to the later rounds; `same` uses one multiplier for all rounds, solved together.
            Clients without noise add none.
    """
    usual = 5.0 if view.run.num_params <= _MANY else 3.0

    def change(client: int, client_schedule: ClientSchedule) -> ClientSchedule:
        train = _training(client_schedule)
        event = train.event
        assert isinstance(event, NoisedEvent)  # for mypy
        noise = event.noise_multiplier
        bare = noise == 0 or (noise is None and math.isinf(client_schedule.target_epsilon))
        if not bare and noise_multiplier != "same":
            noise = float(usual if noise_multiplier is None else noise_multiplier)
        epochs = max(1, event.steps // math.ceil(view.facts.num_records[client] / view.facts.batch_size[client]))
        reserve = min(1, max(0, train.count - schedule.rounds))
        laplace = isinstance(event, LaplaceEvent)
        full = LaplaceEvent(noise, epochs) if laplace else GaussianEvent(1.0, noise, epochs)
        first = Planned(PURPOSE, full, 1 + reserve)
        later = dataclasses.replace(train, count=max(0, train.count - 1))
        return dataclasses.replace(
            client_schedule, planned=(later, first, *(line for line in client_schedule.planned if line is not train))
        )

    return schedule.replan(change)


def sampling_std(client: int, steps: int, view: View) -> float:
    """Return an upper bound on the deviation of the client's full-batch update from its group's mean due to sampling.

    The deviation arises because the client's records are a sample. It is a length, see `Updates`. Without clipping the
    bound is unknown, and 0 is returned.
    """
    if math.isinf(view.clip_norm[client]):
        return 0.0
    return steps * view.learning_rate[client] * view.clip_norm[client] / math.sqrt(view.facts.num_records[client])


def warn_if_blind(schedule: RunSchedule, view: View) -> None:
    """Warn the user if the given noise of the first round hides all but unusually different groups."""
    seen = []
    for client, client_schedule in enumerate(schedule.clients):
        event = next(line.event for line in client_schedule.planned if line.purpose == PURPOSE)
        if isinstance(event, GaussianEvent) and event.noise_multiplier:
            records = view.facts.num_records[client]
            seen.append(expected_separation(1.0, records, event.noise_multiplier, event.steps))
    if not seen or (needed := _BAR * view.run.num_params**0.25 / min(seen)) <= _FAR:
        return
    warnings.warn(
        "strategy clustered: the first round separates groups only if their mean clipped gradients differ by "
        f"{needed:.2g} of the clip norm (0.11 for rotated Fashion-MNIST images). Use more records per client, more "
        "local epochs, or a smaller first_round_noise_multiplier.",
        UserNotice,
        stacklevel=2,
    )


def _training(own: ClientSchedule) -> Planned:
    return next(line for line in own.planned if line.purpose == _TRAIN)
