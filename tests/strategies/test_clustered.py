"""Robust clustered DPFL in runs: three stages, what they cost, and clients that are missing."""

import dataclasses
import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PowerCut, cut_at, private
from fakes import Absent, Recorder, changed_releases
from scipy.stats import chisquare
from torch import nn

from dpfl_lightning import strategies
from dpfl_lightning.algorithms.update_geometry import SEPARATION, noise_that_separates
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.papers.baselines.ifca import Ifca
from dpfl_lightning.papers.baselines.kmeans_clusters import KMeansClusters
from dpfl_lightning.papers.baselines.oracle_clusters import OracleClusters
from dpfl_lightning.papers.baselines.uniform_selection import UniformSelection
from dpfl_lightning.papers.clustered.clustered import Clustered, drawn_groups
from dpfl_lightning.papers.clustered.first_round import DISTANCE
from dpfl_lightning.papers.clustered.model_selection import PLAIN_CHOICES
from dpfl_lightning.papers.robust_hdp.robust_hdp import RobustHdp
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.strategies.aggregation.fedprox import FedProx
from dpfl_lightning.strategies.aggregation.noise_aware import NoiseAware
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted
from dpfl_lightning.strategies.aggregation.uniform import Uniform
from dpfl_lightning.strategies.clustering.local import Local
from dpfl_lightning.strategies.clustering.mr_mtl import MrMtl
from dpfl_lightning.strategies.selection.biased_selection import BiasedSelection

pytestmark = pytest.mark.filterwarnings("ignore:strategy clustered")
TRUE = (0, 0, 1, 1, 1, 2, 2, 2, 2)
COUNT = len(TRUE)
UNEQUAL = [16.0, 4.0, 16.0, 6.0, 8.0, 4.0, 16.0, 8.0, 6.0]  # budgets


def kinds_of_clients(shift: bool = True, more: int = 0) -> Population:
    """Nine clients of three kinds: class y of kind k is called y + k; with shift=False all are of one kind.

    Each has 200 training records, and client i `0.8 * more * i` more.
    """
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(3, 6, generator=generator)
    pairs = []
    for client, kind in enumerate(TRUE):
        y = torch.randint(3, (250 + more * client,), generator=generator)
        x = centres[y] + torch.randn(len(y), 6, generator=generator)
        pairs.append((x, (y + kind * shift) % 3))
    population = Population.from_datasets(pairs, held_out=0.2, num_classes=3)
    return dataclasses.replace(population, groups=TRUE)


@pytest.fixture
def start(make_loop):
    """`start(strategy, ...)`: a loop over the clients of three kinds."""

    def make(*strategies, **options):
        torch.manual_seed(0)
        usual = {
            "population": kinds_of_clients(),
            "module": ClientModule(nn.Linear(6, 3)),
            "privacy": private(),
            "clients": ClientOptions(count=COUNT, batch_size=40, learning_rate=0.5),
            "rounds": 6,
        }
        with_base = any(one.role == "base" for one in strategies)
        return make_loop(parts=[*([] if with_base else [SizeWeighted()]), *strategies], **usual | options)

    return make


def paid(loop, purpose, client=0):
    """Rounds in which the client paid for this purpose."""
    charges = read_ledger(loop.clients.folder.ledger_file)
    return [one.round for one in charges if (one.client, one.purpose) == (client, purpose)]


def groups_of(strategy):
    return strategy.responsibilities.argmax(dim=1).tolist()


# ---- three stages


@pytest.mark.e2e
def test_kinds_are_found_and_trained_apart_and_the_first_round_is_a_full_batch(start):
    clustered, seen = Clustered(), Recorder()
    loop = start(clustered, seen, rounds=8)
    result = loop.run()
    assert clustered.confident and groups_of(clustered) == list(TRUE) and len(loop.state.models) == 3
    assert clustered.separation > 3 and clustered.overlap < 1e-3 and clustered.diagnostics["p_value"] < 0.01
    metrics = [report.metrics for report in seen.reports]
    assert [one["group"].tolist() for one in metrics] == [[0.0] * COUNT, *[list(map(float, TRUE))] * 7]
    for one in metrics:
        assert (one["num_clusters"], one["confident"], one["switch_round"]) == (3, 1, 4)
        assert one["separation"] == clustered.separation > one["overlap"] and one["membership_entropy"] < 1e-6
        assert 0.9 <= one["probability"] == clustered.probability < 1
    assert "p_value" in metrics[0] and "p_value" not in metrics[1]
    assert result.metrics["clustering_accuracy"] == 1.0
    assert min(client["accuracy"] for client in result.clients) > 0.8
    embedding = result.client_embedding
    assert embedding.cluster == TRUE and set(embedding.membership) == {1.0} and embedding.confident
    assert embedding.points == tuple(map(tuple, clustered.embedding.tolist()))

    assert [line.purpose for line in loop.schedule.clients[0].planned] == ["train", "first_round", "select"]
    for client in range(COUNT):
        first = loop.schedule.planned(client, "first_round")
        assert first.count == 1
        events = loop.clients.budgets.ledger.events(client)
        assert events[0] == GaussianEvent(1.0, first.event.noise_multiplier, 1)
        trained = [event for event in events[1:] if isinstance(event, GaussianEvent)]
        size = loop.population.num_records[client]
        assert {(event.sample_rate, event.steps) for event in trained} == {(40 / size, -(-size // 40))}
        assert len(trained) == 7
        assert result.clients[client]["epsilon_spent"] <= 8.0
    assert paid(loop, "first_round") == [1] and paid(loop, "train") == [2, 3, 4, 5, 6, 7, 8]
    assert paid(loop, "select") == [5]


@pytest.mark.slow
@pytest.mark.parametrize("reuse", [False, True])
def test_models_after_the_first_round(start, reuse):
    clustered, seen = Clustered(reuse_first_round=reuse), Recorder(updates=True)
    loop = start(clustered, seen, rounds=2, population=kinds_of_clients(more=20))
    begin = loop.module.flat
    loop.run()
    expected = begin.repeat(3, 1)
    if reuse:
        shares = clustered.responsibilities.T / clustered.responsibilities.sum(dim=0)[:, None]
        expected = expected + (shares @ seen.updates[0].deltas.double()).float()
        torch.testing.assert_close(seen.models[0], expected)
    else:
        assert torch.equal(seen.models[0], expected)
    assert not torch.allclose(*seen.models[1][:2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "selected"),
    [
        ({}, [6]),
        ({"switch_round": 3}, [4]),
        ({"switch_round": 10}, []),
        ({"selection": "exponential", "selection_epsilon": 0.05}, [6, 7, 8, 9, 10]),
        ({"selection": "server_similarity"}, []),
        ({"selection": "paper_argmin"}, [6, 7, 8, 9, 10]),
    ],
)
def test_when_clients_choose(start, options, selected):
    clustered, seen = Clustered(**options), Recorder()
    loop = start(clustered, seen, rounds=10)
    result = loop.run()
    assert paid(loop, "select") == selected
    assert result.metrics["switch_round"] == clustered.last_drawn_round == options.get("switch_round", 5)
    assert all(report.metrics["group"].tolist() == list(TRUE) for report in seen.reports[1:])
    sent = 10 + (3 - 1) * len(selected)  # section 8 of the specification: E_c + M (E - E_c), and E + (M - 1) S
    assert result.metrics["floats_down"] == sent * COUNT * loop.module.num_params
    plain = options.get("selection") == "paper_argmin"
    assert (PLAIN_CHOICES in str(result.guarantee)) == plain
    for client in result.clients:
        assert client["epsilon_spent"] is None if plain else client["epsilon_spent"] <= 8.0


@pytest.mark.slow
def test_draws_follow_memberships_and_depend_on_nothing_else():
    """10,000 draws of seed 5 against their laws: chi-square, false-alarm rate 0.1 % each."""
    memberships = torch.tensor([[0.6, 0.0, 0.3, 0.1], [1 / 3, 1 / 3, 1 / 3, 0.0]], dtype=torch.float64)
    draws = np.array([drawn_groups(memberships, (0, 1), round, seed=5) for round in range(5000)])
    for client, law in enumerate(memberships.numpy()):
        counts = np.bincount(draws[:, client], minlength=4)
        assert counts[law == 0].sum() == 0, "never an impossible one"
        assert chisquare(counts[law > 0], 5000 * law[law > 0]).pvalue > 1e-3
    assert drawn_groups(memberships, (1,), 17, seed=5) == tuple(draws[17, 1:])
    assert drawn_groups(memberships, (1, 0), 17, seed=5) == tuple(draws[17, ::-1])
    other = np.array([drawn_groups(memberships, (0, 1), round, seed=6) for round in range(100)])
    assert (other != draws[:100]).any(axis=0).all()
    tiny = torch.full((1, 3), 0.1 / 3, dtype=torch.float32)
    assert set(drawn_groups(tiny, (0,), 1, seed=0)) <= {0, 1, 2}, "rows need not be rounded to a sum of 1"


# ---- equal to what it must equal


def models_of(loop):
    loop.run()
    return loop.state.models


@pytest.mark.slow
def test_one_cluster_is_the_base_rule_alone(start):
    assert torch.equal(models_of(start(Clustered(num_clusters=1))), models_of(start()))


class FromTheSecondRound(OracleClusters):
    """The oracle, whose first round is the clustered strategy's, and leaves its models alone."""

    def plan_run(self, schedule, view):
        self._first = Clustered(switch_round=schedule.rounds)
        return self._first.plan_run(super().plan_run(schedule, view), view)

    def plan_round(self, plan, view):
        if view.round > 1:
            return plan
        return dataclasses.replace(view.plan("first_round"), model_of=plan.model_of)

    role = "mask"

    def needs_updates(self, plan, view):
        return view.round == 1  # else zeros would be refused before the charge

    def weigh(self, updates, view):
        return torch.zeros(len(updates.clients)) if view.round == 1 else None


@pytest.mark.slow
@pytest.mark.parametrize("base", [SizeWeighted, NoiseAware])
def test_sure_groups_that_are_kept_are_the_oracle(start, base):
    clustered = Clustered(switch_round=6, reuse_first_round=False)
    ours, theirs = models_of(start(base(), clustered)), models_of(start(base(), FromTheSecondRound()))
    assert clustered.responsibilities.max(dim=1).values.min() == 1.0
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_one_group_found_is_one_model_and_planned_choices_are_not_spent(start):
    class Plain(FromTheSecondRound):
        def initialise(self, state, view):
            return state

    population = kinds_of_clients(shift=False)
    clustered = Clustered(reuse_first_round=False, selection="server_similarity")
    ours = models_of(start(clustered, population=population))
    assert clustered.responsibilities.shape == (COUNT, 1) and clustered.overlap == 1
    assert torch.equal(ours, models_of(start(Plain(), population=population)))
    loop = start(Clustered(), seen := Recorder(), population=population)
    begin = loop.module.flat
    result = loop.run()
    assert len(loop.state.models) == 1 and not torch.equal(seen.models[0][0], begin)
    assert loop.schedule.clients[0].count_of("select") == 1 and paid(loop, "select") == []
    assert all(client["epsilon_spent"] <= 8.0 for client in result.clients)


# ---- choices between equal models


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["paper_argmin", "exponential_frozen"])
def test_equal_models_are_drawn_and_not_chosen(start, selection):
    """Else the lowest index would have everybody, and the others none, for ever."""
    clustered = Clustered(num_clusters=2, switch_round=1, reuse_first_round=False, selection=selection)
    loop = start(clustered, seen := Recorder(), rounds=4)
    begin = loop.module.flat
    loop.run()
    assert torch.equal(seen.models[0], begin.repeat(2, 1))
    assert 0 < sum(seen.reports[1].metrics["group"].tolist()) < COUNT
    assert all(not torch.equal(model, begin) for model in seen.models[1])
    assert paid(loop, "select") == ([3, 4] if selection == "paper_argmin" else [3])


@pytest.mark.slow
def test_unsure_groups_are_drawn_evenly_between_equal_models(start):
    """No kinds of clients, M = 3 given: memberships are noise, so the first models come from a fair draw."""
    clustered = Clustered(num_clusters=3, reuse_first_round=False)
    loop = start(clustered, seen := Recorder(), population=kinds_of_clients(shift=False), rounds=4)
    with pytest.warns(UserWarning, match="models begin with groups that may be wrong"):
        loop.run()
    assert not clustered.confident and clustered.last_drawn_round == 1
    fair = drawn_groups(torch.ones(COUNT, 3), range(COUNT), 2, loop.config.seed)
    assert seen.reports[1].metrics["group"].tolist() == list(fair)
    assert paid(loop, "select") == [3]


@pytest.mark.slow
def test_a_model_that_nobody_trains_stays(start, monkeypatch):
    everybody = "dpfl_lightning.papers.clustered.clustered.drawn_groups"
    monkeypatch.setattr(everybody, lambda memberships, clients, round, seed: (0,) * len(clients))
    start(Clustered(switch_round=4), seen := Recorder(), rounds=4).run()
    assert torch.equal(seen.models[3][1:], seen.models[0][1:])
    assert not torch.equal(seen.models[3][0], seen.models[0][0])


# ---- clients that are missing, few, or IID


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["exponential_frozen", "paper_argmin", "server_similarity"])
def test_clients_that_missed_the_first_round_wait_until_they_choose(start, selection):
    clustered = Clustered(switch_round=3, selection=selection)
    loop = start(Absent({1: (4, 8)}), clustered, seen := Recorder(), rounds=6)
    result = loop.run()
    groups = [report.metrics["group"].tolist() for report in seen.reports]
    for client in (4, 8):
        assert clustered.embedding[client].isnan().all()
        assert all(math.isnan(round[client]) for round in groups[:3])
        if selection == "server_similarity":  # it never chooses
            assert all(math.isnan(round[client]) for round in groups) and paid(loop, "train", client) == []
        else:
            assert [round[client] for round in groups[3:]] == [TRUE[client]] * 3
            assert paid(loop, "train", client) == [4, 5, 6]
    assert result.client_embedding.clients == (0, 1, 2, 3, 5, 6, 7) and result.client_embedding.num_clusters == 3


def test_fewer_groups_than_asked_for_are_told(start):
    with pytest.warns(UserNotice, match="2 of 3 groups, as 2 clients sent an update of a full batch"):
        start(Absent({1: range(7)}), Clustered(num_clusters=3), rounds=1).run()


@pytest.mark.slow
@pytest.mark.parametrize("small", [(5,), (5, 6, 7, 8)])
def test_noisy_clients_do_not_move_the_first_model_of_their_group(start, small):
    """Clients 5 to 8 are a group. Before, their noise was in its model at its full length."""
    steps = {}
    for epsilon in (8.0, 0.05):
        torch.manual_seed(0)
        module = ClientModule(nn.Sequential(nn.Linear(6, 1500), nn.ReLU(), nn.Linear(1500, 3)))
        budgets, before = [epsilon if client in small else 8.0 for client in range(COUNT)], module.flat
        seen = Recorder()
        start(Clustered(num_clusters=3), seen, module=module, privacy=private(budgets), rounds=2).run()
        steps[epsilon] = float((seen.models[0] - before).norm(dim=1).max())
    assert steps[0.05] < 3 * steps[8.0]


@pytest.mark.slow
def test_groups_are_found_beside_personal_parameters(start):
    class Wide(nn.Module):
        personal = ("own",)

        def __init__(self):
            super().__init__()
            self.shared, self.own = nn.Linear(6, 3), nn.Parameter(torch.zeros(20_000))

        def forward(self, x):
            return self.shared(x) + 0 * self.own.sum()

    clustered, plain = Clustered(), start(Clustered(), rounds=2)
    loop = start(clustered, module=ClientModule(Wide()), rounds=2)
    plain.plan_schedule()
    loop.run()
    assert clustered.confident and groups_of(clustered) == list(TRUE)
    noise = [one.schedule.noised(0, "first_round").noise_multiplier for one in (loop, plain)]
    assert noise[0] == noise[1], "what is not sent needs none"


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_missing(start):
    clustered = Clustered()
    loop = start(clustered, rounds=3)
    changed_releases(loop, lambda round, client, delta: delta * (math.nan if (round, client) == (1, 2) else 1.0))
    with pytest.warns(UserWarning, match="not finite"):
        loop.run()
    assert clustered.embedding.isnan().any(dim=1).tolist() == [client == 2 for client in range(COUNT)]
    assert clustered.confident and clustered.responsibilities.shape == (COUNT, 3)


@pytest.mark.e2e
def test_the_warning_of_a_group_that_is_too_small_says_so(start):
    with pytest.warns(UserNotice, match=r"3 groups .* is 0, as a group is a single client or .*, below 0\.9"):
        start(Absent({1: (0,)}), Clustered(num_clusters=3), rounds=2).run()


@pytest.mark.slow
def test_a_first_round_without_clients_leaves_one_model(start):
    clustered = Clustered()
    loop = start(Absent({1: range(COUNT)}), clustered, rounds=3)
    result = loop.run()
    assert result.finished and len(loop.state.models) == 1
    assert clustered.responsibilities is None and result.client_embedding is None


@pytest.mark.slow
def test_absent_clients_keep_their_models_and_choose_later(start):
    loop = start(Absent({4: (0, 3), 5: (0,), 6: (0,)}), Clustered(), seen := Recorder())
    result = loop.run()
    assert [client["model"] for client in result.clients] == list(TRUE)
    group = seen.reports[-1].metrics["group"]
    assert math.isnan(group[0]) and group[3] == 1
    assert [paid(loop, "select", client) for client in (0, 3, 8)] == [[], [5], [4]]


@pytest.mark.slow
@pytest.mark.parametrize("num_clusters", ["auto", 2])
def test_few_clients(make_loop, num_clusters):
    """Four clients of different sizes are the least that may be two groups."""
    clustered = Clustered(num_clusters=num_clusters)
    loop = make_loop(parts=[SizeWeighted(), clustered], rounds=4)
    assert loop.run().finished
    if num_clusters != "auto":
        assert clustered.responsibilities.shape[1] == len(loop.state.models) == num_clusters


@pytest.mark.slow
@pytest.mark.parametrize("mixture", ["robust", "paper"])
def test_clients_without_any_difference(make_loop, mixture):
    """No noise and the same records everywhere: all updates of a full batch are the same."""
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    population = Population.from_datasets([(x, y)] * 4, held_out=0.0, num_classes=3)
    clustered = Clustered(num_clusters=2, mixture=mixture)
    assert make_loop(population, parts=[SizeWeighted(), clustered], privacy=None, rounds=3).run().finished
    assert clustered.responsibilities.isfinite().all()
    assert mixture == "paper" or (clustered.separation < 1 and not clustered.confident)


@pytest.mark.slow
def test_without_privacy_kinds_of_a_given_number_are_found(start):
    clustered = Clustered(num_clusters=3)
    result = start(clustered, privacy=None, rounds=4).run()
    assert groups_of(clustered) == list(TRUE) and clustered.confident
    assert clustered.separation > 3, "in units of the clients' spread"
    json.dumps(result.as_dict(), allow_nan=False)


# ---- noise


@pytest.mark.slow
def test_a_single_multiplier_is_solved_for_all_rounds(start):
    loop = start(Clustered(first_round_noise_multiplier="same"))
    result = loop.run()
    apart = start(Clustered()).plan_schedule()
    for client, schedule in enumerate(loop.schedule.clients):
        assert schedule.noise_multiplier("first_round") == schedule.noise_multiplier("train")
        assert schedule.noise_multiplier("train") > apart.clients[client].noise_multiplier("train")
        assert result.clients[client]["epsilon_spent"] == pytest.approx(8.0, rel=0.02)


@pytest.mark.e2e
def test_the_first_round_has_the_noise_that_separates_groups_unless_it_costs_too_much(start):
    """The full batch alone costs at most half of epsilon 8, whatever the size of the model."""
    plain, loop = start(), start(Clustered())
    for one in (plain, loop):
        one.plan_schedule()

    def planned(num_params, population=None, **options):
        view = loop.view(loop._one_model())
        view = dataclasses.replace(view, module=SimpleNamespace(num_sent=num_params))
        schedule = view.solve(Clustered(**options).plan_run(plain.schedule, view)).clients[0]
        return schedule.noise_multiplier("first_round"), schedule

    size = loop.population.num_records[0]
    separating = partial(noise_that_separates, DISTANCE, size)
    assert planned(21, first_round_noise_multiplier=7)[0] == 7.0
    capped, schedule = planned(10**9)
    assert separating(10**9) < capped < planned(1)[0] == pytest.approx(separating(1))
    (batch,) = [line for line in schedule.planned if line.purpose == "first_round"]
    assert batch.count == 1
    assert 3.98 < loop.config.accountant.epsilon(batch.events(), schedule.delta) <= 4.0


@pytest.mark.slow
def test_unequal_records_have_equally_noisy_first_updates(start):
    loop = start(Clustered(), population=kinds_of_clients(more=20))
    schedule = loop.plan_schedule()
    noises = [one.noise_multiplier("first_round") for one in schedule.clients]
    per_record = [noise / size for noise, size in zip(noises, loop.population.num_records, strict=True)]
    assert max(per_record) == pytest.approx(min(per_record)) and max(noises) > 1.3 * min(noises)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, "same"])
def test_unequal_budgets(start, noise):
    """Under one multiplier for all rounds the first updates have unequal noise, too."""
    clustered = Clustered(first_round_noise_multiplier=noise)
    result = start(clustered, privacy=private(UNEQUAL)).run()
    assert clustered.confident and groups_of(clustered) == list(TRUE)
    assert all(0.98 * one["epsilon_budget"] < one["epsilon_spent"] <= one["epsilon_budget"] for one in result.clients)


@pytest.mark.slow
def test_given_noise_and_a_budget(start):
    loop = start(Clustered(), privacy=private(epsilon=2.0, noise_multiplier=2.0), rounds=12)
    result = loop.run()
    assert 0 < loop.schedule.clients[0].count_of("train") < 11
    assert all(client["epsilon_spent"] <= 2.0 for client in result.clients)


@pytest.mark.e2e
def test_a_reserve_pays_for_one_more_first_round(start):
    schedule = start(Clustered(), privacy=private(reserve_rounds=2)).plan_schedule().clients[0]
    assert (schedule.count_of("first_round"), schedule.count_of("train")) == (2, 7)


@pytest.mark.e2e
def test_users_are_warned_when_noise_hides_groups(start):
    with pytest.warns(UserWarning, match=r"differ by 1\.\d+ of the clip norm, more than 0\.1 "):
        start(Clustered(first_round_noise_multiplier=40.0)).plan_schedule()


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "noise"), [(1, 5.0), (4, 2.0)])
def test_separation_follows_the_design_law(make_loop, epochs, noise):
    """Records on the unit sphere, clip norm 1, two groups whose mean gradients are g apart: within 5 %."""
    generator = torch.Generator().manual_seed(0)
    records, width, far = 1000, 60, 0.5
    pairs = []
    for client in range(12):
        x = torch.randn(records, width, generator=generator)
        x[:, 0] = 0
        x = x / x.norm(dim=1, keepdim=True) * math.sqrt(1 - far**2 / 4)
        x[:, 0] = far / 2 if client < 6 else -far / 2
        pairs.append((x, torch.zeros(records, dtype=torch.long)))
    clustered = Clustered(num_clusters=2, first_round_noise_multiplier=noise)
    loop = make_loop(
        Population.from_datasets(pairs, held_out=0.0, num_classes=2),
        module=ClientModule(nn.Linear(width, 1, bias=False), loss=lambda output, y: -output[:, 0]),  # gradient: -x
        parts=[SizeWeighted(), clustered],
        clients=ClientOptions(count=12, batch_size=50, learning_rate=0.01, local_epochs=epochs),
        privacy=private(epsilon=20.0, delta=1e-4, clip_norm=1.0),
        rounds=1,
    )
    loop.run()
    assert loop.clients.budgets.ledger.events(0)[0] == GaussianEvent(1.0, noise, epochs), "full batches"
    expected = SEPARATION * width**0.25 * noise_that_separates(far, records, width, epochs) / noise
    assert clustered.separation == pytest.approx(expected, rel=0.05)


# ---- with other strategies, and resumed


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", sorted(strategies.STRATEGIES))
def test_a_strategy_that_does_not_fit_beside_it_is_refused_before_any_charge(name, first, start):
    """Each registered strategy, before and after it: the run is refused at once, or it starts and is not refused."""
    in_stages = {"warmup_rounds": 2, "clients_per_round": 3} if name.startswith("two_stage") else None
    other, clustered = *strategies.build({name: in_stages}), Clustered()
    try:
        loop = start(*((clustered, other) if first else (other, clustered)), rounds=2)
        loop.plan_schedule()
    except UserError:
        return
    loop.run()


@pytest.mark.slow
def test_with_a_pull_and_a_noise_aware_base_rule(start):
    clustered = Clustered()
    result = start(NoiseAware(), clustered, FedProx(0.1)).run()
    assert clustered.confident and result.metrics["clustering_accuracy"] == 1.0
    assert min(client["accuracy"] for client in result.clients) > 0.75


@pytest.mark.e2e
def test_noise_of_the_first_round_is_not_that_of_later_rounds(start):
    """Full batches throughout: as many steps in every round, but the first one has its special noise."""
    base = RobustHdp("oracle", reestimate_every="first_round")
    clients = ClientOptions(count=COUNT, batch_size=None, learning_rate=0.5)
    loop = start(base, Clustered(), seen := Recorder(), clients=clients, privacy=private(UNEQUAL), rounds=4)
    result = loop.run()
    assert [report.metrics["rounds_since_estimate"] for report in seen.reports] == [0, 0, 1, 2]
    stds = [one["noise_std"] for one in result.clients]
    assert seen.reports[-1].metrics["estimated_noise_std"].tolist() == pytest.approx(stds, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("selection", [UniformSelection, BiasedSelection])
def test_a_selection_comes_after_it(start, selection):
    """All clients take part in the first full batch, and quotas are of the later rounds."""
    clustered = Clustered()
    loop = start(Uniform(), clustered, selection(3), rounds=7, privacy=private(reserve_rounds=1))
    result = loop.run()
    assert all(paid(loop, "first_round", client) == [1] for client in range(COUNT))
    trained = [len(paid(loop, "train", client)) for client in range(COUNT)]
    assert trained == result.metrics["quota"] and sum(trained) == 3 * 6
    assert groups_of(clustered) == list(TRUE)
    words = r"`strategies\.clustered` must be named before .*uniform_selection.*: client \d trains in \d of 7 rounds"
    with pytest.raises(UserError, match=words):
        start(Uniform(), selection(3), Clustered(), rounds=7, privacy=private(reserve_rounds=1)).plan_schedule()
    one_model = Clustered(num_clusters=1)  # takes no round
    start(Uniform(), selection(3), one_model, rounds=7).plan_schedule()


@pytest.mark.slow
@pytest.mark.parametrize(("mixture", "cut"), [*(("robust", cut) for cut in range(1, 7)), ("paper", 1), ("paper", 4)])
def test_a_run_resumed_in_any_stage_equals_the_unbroken_one(start, mixture, cut):
    options = {"mixture": mixture, "switch_round": 3, "num_clusters": 3}
    unbroken, broken = start(Clustered(**options)), start(Clustered(**options))
    expected = unbroken.run()
    cut_at(broken, cut)
    with pytest.raises(PowerCut):
        broken.run()
    again = start(Clustered(**options), output_dir=broken.output_dir)
    result = again.run(resume=True)
    assert torch.equal(again.state.models, unbroken.state.models) and again.state.model_of == unbroken.state.model_of
    assert result.metrics == expected.metrics and result.client_embedding == expected.client_embedding
    ours, theirs = (read_ledger(loop.clients.folder.ledger_file) for loop in (again, unbroken))
    assert [(c.client, c.round, c.purpose) for c in ours] == [(c.client, c.round, c.purpose) for c in theirs]


@pytest.mark.parametrize("selection", ["exponential_frozen", "server_similarity"])
def test_private_choices_in_a_regression_are_refused_as_losses_have_no_bound(start, selection):
    known = kinds_of_clients()
    real = dataclasses.replace(known, y=known.y.float(), num_classes=1)
    module = ClientModule(nn.Linear(6, 1))
    loop = start(Clustered(selection=selection), population=real, module=module)
    if selection == "server_similarity":
        loop.plan_schedule()
        return
    words = r"`strategies\.clustered\.selection` must be server_similarity for a regression.*got 'exponential_frozen'"
    with pytest.raises(UserError, match=words):
        loop.plan_schedule()


@pytest.mark.parametrize(
    ("parts", "options", "words"),
    [
        ([Clustered(num_clusters=5)], {}, r"num_clusters` must be at most 4, .* at least 2 of the 9 .*, got 5"),
        (
            [Clustered(num_clusters=10, mixture="paper")],
            {},
            r"num_clusters` must be at most the 9 clients, got 10",
        ),
        ([Clustered()], {"privacy": None}, r"num_clusters` must be a number without privacy, got 'auto'"),
        (
            [Clustered(first_round_noise_multiplier=5)],
            {"privacy": private(epsilon=0.3)},
            r"the cost of first_round.* with the given noise",
        ),
        *(
            ([*pair], {}, r"one strategy that gives clients their models \(`initialise`\), got .* and .*Remove")
            for other in (Ifca(), KMeansClusters(), Local(), MrMtl(), OracleClusters())
            for pair in ((other, Clustered()), (Clustered(), other))
        ),
    ],
)
def test_runs_that_do_not_fit_are_refused(start, parts, options, words):
    with pytest.raises(UserError, match=words):
        start(*parts, **options).run()


@pytest.mark.e2e
def test_a_proximal_term_does_not_depend_on_the_order_of_strategies(start):
    """The anchor of a client is the model from which it starts, whoever has chosen it."""
    key = private(noise_key="1" * 32)
    ends = [start(*parts, privacy=key) for parts in ([FedProx(0.1), Clustered()], [Clustered(), FedProx(0.1)])]
    for loop in ends:
        loop.run()
    assert torch.equal(ends[0].state.models, ends[1].state.models)


@pytest.mark.parametrize("init", ["distinct", "random_assignment"])
def test_ifca_begins_with_models_of_their_own_or_as_the_papers_code_does(init, start):
    """Its code has copies of one model, of which each client trains a random one before anybody chooses."""
    states = []

    class Begins(Recorder):
        def on_round_start(self, view):
            states.append(view.state)

    def new_net(seed):
        torch.manual_seed(seed)
        return nn.Linear(6, 3)

    ifca = Ifca(num_clusters=3, init=init, selection="paper_argmin")
    loop = start(ifca, Begins(), rounds=2, new_net=new_net)
    loop.run()
    distinct = init == "distinct"
    assert [len(one.models.unique(dim=0)) for one in states] == [3 if distinct else 1, 3]
    assert paid(loop, "select") == ([1, 2] if distinct else [2]), "nobody chooses between equal models"
