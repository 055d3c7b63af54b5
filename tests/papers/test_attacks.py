"""Simulated false updates: who sends them, what they are, and that honest clients stay as they are."""

import pytest
import torch
from attack_tools import Releases
from conftest import blobs

from dpfl_lightning.strategies.aggregation.uniform import Uniform
from experiments.papers.robustness.attacks import ATTACKS, HostileClients


def updates_of(make_loop, attack):
    """The updates `[C, P]` of the first round; clients 1 and 2 attack."""
    seen = Releases()
    loop = make_loop(blobs(), parts=[Uniform(), seen], rounds=1)
    if attack is not None:
        loop.clients = HostileClients(loop.clients, ATTACKS[attack], frozenset({1, 2}), seed=0)
    loop.run()
    return seen.of_round[1]


@pytest.mark.e2e
def test_attackers_alone_send_what_the_attack_says(make_loop):
    true = updates_of(make_loop, None)
    own, honest = true[[1, 2]], true[[0, 3]]
    sent = {attack: updates_of(make_loop, attack) for attack in ATTACKS}
    assert all(torch.equal(one[[0, 3]], honest) for one in sent.values())
    flipped, tiny, noisy, colluding = (sent[attack][[1, 2]] for attack in ("flip", "tiny", "noise", "collude"))
    torch.testing.assert_close(flipped, -10 * own)
    torch.testing.assert_close(tiny, 0.01 * own)
    torch.testing.assert_close((noisy - own).norm(dim=1), 10 * own.norm(dim=1))
    assert torch.equal(colluding[0], colluding[1]) and colluding[0].norm() <= honest.norm(dim=1).max() * 1.001
    assert torch.cosine_similarity(colluding[0], honest.mean(dim=0), dim=0) < -0.999


def test_a_streamed_sum_holds_the_false_updates(make_loop):
    loop = make_loop(blobs(), parts=[Uniform()], rounds=1)
    train, true, before = loop.clients.train, [], loop.module.flat.clone()
    loop.clients.train = lambda *args: true.append(train(*args)) or true[-1]
    loop.clients = HostileClients(loop.clients, ATTACKS["flip"], frozenset({1, 2}), seed=0)
    loop.run()
    sent = true[0].deltas * torch.tensor([1.0, -10.0, -10.0, 1.0])[:, None]
    torch.testing.assert_close(loop.state.models[0], before + sent.mean(dim=0))
