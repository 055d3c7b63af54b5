"""Clients that missed the full batches: compared with groups, and placed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.strategies.clustering.clustered import Clustered
from dpfl_lightning.strategies.clustering.late_clients import LateClients, nearest

LATE_VIEW = SimpleNamespace(module=ClientModule(nn.Linear(5, 1)), learning_rate=(0.5, *(1.0,) * 9))


def updates_of_kinds(clients, model_of, steps=None):
    """Updates with noise of std 1 per step: client 0 is of kind 0, the others of kind 1, far from it."""
    kind, steps = [min(client, 1) for client in clients], steps or [1] * len(clients)
    noise = torch.randn(len(kind), 6, generator=torch.Generator().manual_seed(sum(model_of)))
    size = torch.tensor([LATE_VIEW.learning_rate[client] * one for client, one in zip(clients, steps, strict=True)])
    deltas = size[:, None] * (100.0 * torch.eye(2, 6)[kind] + noise)
    return ClientUpdates(tuple(clients), tuple(steps), tuple(size.tolist()), deltas, model_of=tuple(model_of))


def test_a_late_client_is_placed_when_it_was_compared_with_every_group():
    """It belongs to group 0, whose member is away in some rounds."""
    late = LateClients.of([0], 2)
    assert late.next_models([0, 5]) == {0: 0}
    assert late.placed(updates_of_kinds([0, 5], [0, 1]), LATE_VIEW) == {}, "no member of group 0"
    assert late.next_models([0, 5]) == {0: 1}
    assert late.placed(updates_of_kinds([0, 5], [1, 1]), LATE_VIEW) == {}, "compared with group 1 alone"
    again = LateClients({client: seen.clone() for client, seen in late.seen.items()})
    assert late.next_models([0]) == {0: 0}
    late.seen[0][1:, 0] = torch.tensor([1.0, 0.0])  # near group 0
    found = late.placed(updates_of_kinds([0, 5], [1, 1]), LATE_VIEW)
    assert found[0].tolist() == pytest.approx([1, 0]) and late.next_models([0]) == {}
    for _ in range(2):
        assert again.next_models([0, 5]) == {0: 0}
        found = again.placed(updates_of_kinds([0, 5], [0, 1]), LATE_VIEW)
    assert found[0].tolist() == [0, 1], "no member of group 0 came in three rounds"


def test_a_late_client_with_fewer_local_steps_joins_the_group_of_its_gradients():
    late = LateClients.of([0], 2)
    for group, members in enumerate([(7,), (5, 6)]):
        updates = updates_of_kinds([0, *members], [group] * (1 + len(members)), [2, *[40] * len(members)])
        if group == 0:  # updates of the late client's own kind, which are the longer ones
            updates.deltas[1] = 40 * 1.5 * 100.0 * torch.eye(2, 6)[0]
        found = late.placed(updates, LATE_VIEW)
    assert found[0].argmax() == 0


def test_memberships_of_a_late_client_say_how_sure_the_comparison_is():
    noise = torch.Generator().manual_seed(0)
    sure, right = [], []
    for _ in range(300):
        near = nearest(torch.tensor([0.0, 1.0]) + torch.randn(2, generator=noise), torch.ones(2))
        sure.append(float(near.max()))
        right.append(float(near.argmax() == 0))
    assert np.mean(right) < np.mean(sure) < 0.9, "no prior, so somewhat too sure, but never certain"
    assert nearest(torch.tensor([0.0, 40.0, 0.0]), torch.tensor([1.0, 1.0, 0.0])).tolist() == pytest.approx([1, 0, 0])


def test_the_state_of_late_clients_is_that_of_its_round():
    """The same checkpoint may be written again after the next round began."""
    clustered = Clustered()
    clustered._late = LateClients.of([4, 8], 3)
    state = clustered.state_dict()
    clustered._late.seen[8][0, 0] = 1.0
    del clustered._late.seen[4]
    assert sorted(state["late"]) == [4, 8] and not state["late"][8].any()
