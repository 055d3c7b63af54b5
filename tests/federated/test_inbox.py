"""What arrives in parts, in any order, is what arrives at once."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_lightning.federated.messages.inbox import AnswerBox
from dpfl_lightning.federated.messages.jobs import ProximalTraining
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.update import UpdateBuffer
from dpfl_lightning.privacy.mechanism import Gaussian

CLIENTS = 6
PLAN = RoundPlan(
    round=1,
    clients=(5, 3, 0, 7, 2, 9),
    model_of=(0, 1, 0, 1, 0, 1),
    mechanism_of=(Gaussian(1.0, 0.5, 0.5, 4.0),) * CLIENTS,
    steps=(1,) * CLIENTS,
    learning_rate_of=(0.1,) * CLIENTS,
    job=ProximalTraining(0.1, torch.ones(1, 4), dict.fromkeys(range(CLIENTS), 0)),
)
UPDATES = torch.randn(CLIENTS, 4, generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.tensor([[1.0, 2.0, 0.5, 0.0, 3.0, 0.0], [0.0] * 6, [0.0, 0.0, 0.0, 1.0, 0.0, 2.0]])


def filled(inbox, clients, replies):
    for client in clients:
        inbox.receive(client, replies[client])
    return inbox


@settings(max_examples=60, deadline=None)
@given(
    place=st.lists(st.integers(0, 2), min_size=CLIENTS, max_size=CLIENTS),
    kinds=st.lists(
        st.sampled_from(["sound", "sound", "sound", "fails", "not finite"]), min_size=CLIENTS, max_size=CLIENTS
    ),
    weighted=st.booleans(),
    backwards=st.booleans(),
)
def test_parts_of_an_inbox_are_the_whole(place, kinds, weighted, backwards):
    replies = {}
    for client, update, kind in zip(PLAN.clients, UPDATES, kinds, strict=True):
        bad = {"fails": OSError(str(client)), "not finite": update * float("nan")}
        replies[client] = bad.get(kind, update)
    weights = WEIGHTS if weighted else None
    whole = filled(UpdateBuffer(PLAN, weights), PLAN.clients, replies)
    joined = UpdateBuffer(PLAN, weights)
    for number in range(3):
        clients = [client for client, at in zip(PLAN.clients, place, strict=True) if at == number]
        clients = clients[::-1] if backwards else clients
        if clients:
            joined.merge(filled(joined.part(clients), clients, replies))
    ours, theirs = joined.updates(), whole.updates()
    for name in ("clients", "lost", "absent", "noise_std"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert {str(error) for error in joined.failed.values()} == {str(one) for one in whole.failed.values()}
    if not weighted and theirs.deltas is not None:
        assert torch.equal(ours.released, theirs.released)
    if weighted and theirs.total.pair is not None:
        assert torch.equal(ours.total.rounded(), theirs.total.rounded())


def test_a_part_has_no_anchors_and_only_the_models_that_its_clients_change():
    part = UpdateBuffer(PLAN, WEIGHTS).part([7, 9])
    assert part.plan.job.anchors is None and part.plan.clients == (7, 9)
    assert part.models == [2] and part.total.weights.tolist() == [[1.0, 2.0]]


def test_answers_come_in_the_order_of_those_who_were_asked():
    box = AnswerBox()
    part = box.part([3])
    filled(part, [3], {3: "three"}), filled(box, [5, 0], {5: ValueError("no"), 0: "zero"})
    box.merge(part)
    assert list(box.of((5, 3, 0)).items()) == [(3, "three"), (0, "zero")] and set(box.failed) == {5}
    with pytest.raises(KeyError):
        UpdateBuffer(dataclasses.replace(PLAN)).take(1, UPDATES[0])
