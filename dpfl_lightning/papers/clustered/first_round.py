"""The full batch of `clustered` in round 1: its plan, its noise, and which groups it can separate."""

import dataclasses
import math
from statistics import median

import numpy as np
import torch

from dpfl_lightning.algorithms.update_geometry import noise_that_separates
from dpfl_lightning.errors import warn_user
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned

PURPOSE = "first_round"
DISTANCE = 0.1  # of two groups' mean clipped gradients, in clip norms; rotated Fashion-MNIST images have 0.11
SHARE = 0.5  # of a client's budget that the full batch alone may cost; later noise grows by about a fifth at most
_TINY = np.finfo(float).tiny


def with_full_batch(schedule: RunSchedule, view: View, noise_multiplier: float | str | None) -> RunSchedule:
    """Return the schedule in which round 1 is a full batch of each client, one step in each local epoch.

    Without a `noise_multiplier`, its noise is the largest that separates groups at `DISTANCE`, or more where it would
    cost more than `SHARE` of the client's epsilon. A reserve of rounds pays for one more full batch.
    """
    full = [_full_batch(client, schedule, view) for client in range(len(schedule.clients))]
    price = schedule.replan(lambda client, one: _alone(one, Planned(PURPOSE, full[client], 1)))
    cheapest = price if noise_multiplier is not None else view.solve(price)

    def noise_of(client: int, given: float | None) -> float | None:
        if not schedule.clients[client].adds_noise or noise_multiplier == "same":
            return given
        if noise_multiplier is not None:
            return float(noise_multiplier)
        least = cheapest.noised(client, PURPOSE).noise_multiplier or 0.0
        return max(least, _wanted(full[client], client, DISTANCE, view))

    def change(client: int, client_schedule: ClientSchedule) -> ClientSchedule:
        train = schedule.planned(client, "train")
        noise = noise_of(client, schedule.noised(client, "train").noise_multiplier)
        reserve = min(1, max(0, train.count - schedule.rounds))
        first = Planned(PURPOSE, full[client].with_noise(noise), 1 + reserve)
        later = dataclasses.replace(train, count=max(0, train.count - 1))
        others = (line for line in client_schedule.planned if line is not train)
        return dataclasses.replace(client_schedule, planned=(later, first, *others))

    return schedule.replan(change)


def _full_batch(client: int, schedule: RunSchedule, view: View) -> NoisedEvent:
    event = schedule.noised(client, "train")
    epochs = max(1, event.steps // math.ceil(view.facts.num_records[client] / view.facts.batch_size[client]))
    return event.of(1.0, None, epochs)


def _alone(client_schedule: ClientSchedule, line: Planned) -> ClientSchedule:
    epsilon = SHARE * client_schedule.target_epsilon
    return dataclasses.replace(client_schedule, target_epsilon=epsilon, planned=(line,))


def _wanted(event: NoisedEvent, client: int, distance: float, view: View) -> float:
    """Return the noise multiplier of `noise_that_separates`."""
    wanted = noise_that_separates(distance, view.facts.num_records[client], view.module.num_sent, event.steps)
    return wanted / event.unit_std


def distance_of_updates(clients: tuple[int, ...], steps: tuple[int, ...], view: View) -> float:
    """Return the distance of two groups' mean updates whose mean gradients are `DISTANCE` clip norms apart."""
    lengths = [one * view.learning_rate[i] * view.clip_norm[i] for i, one in zip(clients, steps, strict=True)]
    return DISTANCE * median(lengths)


def warn_if_blind(schedule: RunSchedule, view: View) -> None:
    """Warn the user if the noise of round 1 hides groups at `DISTANCE` from most clients."""
    events = [schedule.noised(client, PURPOSE) for client in range(len(schedule.clients))]
    noises = [
        event.noise_multiplier / _wanted(event, client, 1.0, view)
        for client, event in enumerate(events)
        if event.noise_multiplier
    ]
    if noises and (needed := median(noises)) > DISTANCE:
        warn_user(
            "strategy clustered: the first round separates groups only if their mean clipped gradients differ by "
            f"{needed:.2g} of the clip norm, more than {DISTANCE:g} (rotated Fashion-MNIST images differ by 0.11). "
            "Use more records per client, more local epochs, or a larger budget."
        )


def limited(updates: ClientUpdates) -> ClientUpdates:
    """Return the updates, those longer than twice the median length shortened to it."""
    lengths = torch.linalg.vector_norm(updates.released, dim=1, dtype=torch.float64)
    factors = (2 * lengths.median() / lengths.clamp_min(_TINY)).clamp_max(1.0)
    return dataclasses.replace(updates, deltas=updates.released * factors.to(updates.released)[:, None])
