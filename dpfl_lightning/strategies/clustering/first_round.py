"""The full batches of `clustered`: their plan, their noise, which groups they can separate, and their mean."""

import dataclasses
import math
from statistics import median

import numpy as np
import torch

from dpfl_lightning.algorithms.update_geometry import gram_and_width, noise_that_separates
from dpfl_lightning.errors import warn_user
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.accounting.events import GaussianEvent, LaplaceEvent, NoisedEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned

PURPOSE = "first_round"
_ROUNDING, _TINY = 1e-6, np.finfo(float).tiny


def with_full_batches(
    schedule: RunSchedule,
    view: View,
    noise_multiplier: float | str | None,
    distance: float,
    share: float,
    batches: int,
) -> RunSchedule:
    """Return the schedule in which each client has `batches` releases of full batches, one in each local epoch.

    The first one is for the first round, the others are a reserve. Of the rounds that are planned beyond the run's
    rounds, a reserve as well, the first round gets one. `noise_multiplier`, `distance` and `share` are options of
    `Clustered`; clients without noise add none.
    """
    full = [_full_batch(client, schedule, view) for client in range(len(schedule.clients))]
    price = schedule.replan(lambda client, one: _alone(one, share, Planned(PURPOSE, full[client], batches)))
    cheapest = price if noise_multiplier is not None else view.solve(price)

    def noise_of(client: int, given: float | None) -> float | None:
        if not schedule.clients[client].adds_noise or noise_multiplier == "same":
            return given
        if noise_multiplier is not None:
            return float(noise_multiplier)
        least = cheapest.noised(client, PURPOSE).noise_multiplier or 0.0
        return max(least, _wanted(full[client], client, distance, view))

    def change(client: int, client_schedule: ClientSchedule) -> ClientSchedule:
        train = schedule.planned(client, "train")
        noise = noise_of(client, schedule.noised(client, "train").noise_multiplier)
        reserve = min(1, max(0, train.count - schedule.rounds))
        first = Planned(PURPOSE, dataclasses.replace(full[client], noise_multiplier=noise), batches + reserve)
        later = dataclasses.replace(train, count=max(0, train.count - 1))
        others = (line for line in client_schedule.planned if line is not train)
        return dataclasses.replace(client_schedule, planned=(later, first, *others))

    return schedule.replan(change)


def _full_batch(client: int, schedule: RunSchedule, view: View) -> NoisedEvent:
    event = schedule.noised(client, "train")
    epochs = max(1, event.steps // math.ceil(view.facts.num_records[client] / view.facts.batch_size[client]))
    return LaplaceEvent(None, epochs) if isinstance(event, LaplaceEvent) else GaussianEvent(1.0, None, epochs)


def _alone(client_schedule: ClientSchedule, share: float, line: Planned) -> ClientSchedule:
    epsilon = share * client_schedule.target_epsilon
    return dataclasses.replace(client_schedule, target_epsilon=epsilon, planned=(line,))


def _wanted(event: NoisedEvent, client: int, distance: float, view: View) -> float:
    """Return the noise multiplier of `noise_that_separates`; Laplace noise has a standard deviation of sqrt(2)."""
    wanted = noise_that_separates(distance, view.facts.num_records[client], view.module.num_sent, event.steps)
    return wanted / math.sqrt(2) if isinstance(event, LaplaceEvent) else wanted


def distance_of_updates(distance: float, clients: tuple[int, ...], steps: tuple[int, ...], view: View) -> float:
    """Return the distance of two groups' mean updates at a `distance` of mean gradients in units of the clip norm."""
    lengths = [one * view.learning_rate[i] * view.clip_norm[i] for i, one in zip(clients, steps, strict=True)]
    return distance * median(lengths)


def without_impossible(updates: ClientUpdates, view: View) -> ClientUpdates:
    """Leave out updates that clipping and the planned noise rule out: they are false.

    - Longer ones than twice the longest: a full batch takes each record once, so a step without noise is no longer than
      learning rate times clip norm, with momentum m divided by 1 - m.
    - Shorter ones than their noise alone.
    - Of two that are more alike, or opposite, than their signals can be, because noises are independent, one: a copy.

    Such pairs are resolved one by one. Left out is the client in most of them, so that one false client cannot have a
    group left out; of two that are in equally many, the one whose products with the other updates are closer to their
    bounds, as of an update without its noise, then the one that opposes the others, then the later one. Nothing tells a
    copy from its original, so one of them stays and counts once; if it is the copy, it has the content of the original,
    whose client joins a group later. Several false clients, each alike to another part of an update, can have this one
    update left out.

    What noise decides has six standard deviations of room. No update is left out if the optimiser makes its noise
    unknown, and none if all would be. **Privacy** Post-processing.
    """
    gram, width = gram_and_width(view.module.sent(updates.released.flatten(1)))
    square, std = np.diag(gram), np.array(updates.noise_std)
    rates, norms = (
        np.array([values[client] for client in updates.clients]) for values in (view.learning_rate, view.clip_norm)
    )
    momentum = getattr(view.optimizer, "momentum", 0.0)
    longest = np.array(updates.steps) * rates * norms / (1 - momentum) + std * (math.sqrt(width) + 5)
    beyond_noise = square - width * std**2
    room = 6 * std**2 * (math.sqrt(5 * width) + 6)  # the squared length of Laplace noise varies most
    wrong = (np.sqrt(square) > 2 * longest) | (beyond_noise < -room)
    signal = np.sqrt(np.maximum(beyond_noise + room, 0)) + 6 * std
    crossed = np.outer(signal, std)
    most = np.outer(signal, signal) + 6 * (crossed + crossed.T + np.outer(std, std) * math.sqrt(width))
    likeness = np.where(np.outer(~wrong, ~wrong), (gram - np.diag(square)) / np.maximum(most, _TINY), 0.0)
    while (alike := np.abs(likeness) > 1 + _ROUNDING).any():
        evidence = -likeness.sum(axis=1), np.abs(likeness).sum(axis=1), alike.sum(axis=1)
        false_one = np.lexsort(np.round(evidence, 6))[-1]
        wrong[false_one], likeness[false_one], likeness[:, false_one] = True, 0.0, 0.0
    false = frozenset(np.array(updates.clients)[wrong].tolist())
    if not false or len(false) == len(updates.clients):
        return updates
    names = ", ".join(map(view.facts.name_of, sorted(false)))
    warn_user(
        f"strategy clustered: left out of the search for groups, because clipping and noise rule out such updates: "
        f"clients {names}"
    )
    return updates.without(false)


def warn_if_blind(schedule: RunSchedule, view: View, distance: float) -> None:
    """Warn the user if the noise of the first round hides groups at this distance from most clients."""
    lines = [(client, schedule.planned(client, PURPOSE)) for client in range(len(schedule.clients))]
    noises = [
        line.event.noise_multiplier / math.sqrt(line.count) / _wanted(line.event, client, 1.0, view)
        for client, line in lines
        if isinstance(line.event, NoisedEvent) and line.event.noise_multiplier
    ]
    if noises and (needed := median(noises)) > distance:
        warn_user(
            "strategy clustered: the first round separates groups only if their mean clipped gradients differ by "
            f"{needed:.2g} of the clip norm, more than smallest_distance {distance:g} (0.11 for rotated Fashion-MNIST "
            "images). Use more records per client, more local epochs, or a larger budget or first_round_share."
        )


def limited(updates: ClientUpdates) -> ClientUpdates:
    """Return the updates, those longer than twice the median length shortened to it."""
    lengths = torch.linalg.vector_norm(updates.released, dim=1, dtype=torch.float64)
    factors = (2 * lengths.median() / lengths.clamp_min(_TINY)).clamp_max(1.0)
    return dataclasses.replace(updates, deltas=updates.released * factors.to(updates.released)[:, None])


def averaged(first: ClientUpdates, second: ClientUpdates) -> ClientUpdates:
    """Return the updates of all clients of two full batches of one model, averaged by precision for those in both."""
    parts = [
        {
            client: (delta, std, steps)
            for client, delta, std, steps in zip(one.clients, one.released, one.noise_std, one.steps, strict=True)
        }
        for one in (first, second)
    ]
    clients = tuple(sorted({*first.clients, *second.clients}))
    deltas, stds = [], []
    for client in clients:
        looks = [part[client] for part in parts if client in part]
        precisions = [std**-2.0 if std > 0 else 1.0 for _, std, _ in looks]
        mean = sum(w * delta.double() for w, (delta, _, _) in zip(precisions, looks, strict=True)) / sum(precisions)
        deltas.append(mean.to(second.released.dtype))
        stds.append(sum(precisions) ** -0.5 if all(std > 0 for _, std, _ in looks) else 0.0)
    steps = tuple((parts[1].get(client) or parts[0][client])[2] for client in clients)
    return ClientUpdates(clients, steps, tuple(stds), torch.stack(deltas), model_of=(0,) * len(clients))
