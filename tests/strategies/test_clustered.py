"""Robust clustered DPFL through the real loop: three stages, their price, and what can go wrong in between."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from conftest import FIXED_KEY, PowerCut, cut_at
from scipy.stats import chisquare
from torch import nn

from dpfl_lightning.algorithms.update_geometry import expected_separation
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.strategies.aggregation.fedprox import FedProx
from dpfl_lightning.strategies.aggregation.noise_aware import NoiseAware
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted
from dpfl_lightning.strategies.clustering.clustered import Clustered, drawn_groups
from dpfl_lightning.strategies.clustering.ifca import Ifca
from dpfl_lightning.strategies.clustering.model_selection import PLAIN_CHOICES
from dpfl_lightning.strategies.clustering.oracle_clusters import OracleClusters
from dpfl_lightning.strategies.selection.biased_selection import BiasedSelection
from dpfl_lightning.strategies.selection.reweighted_selection import ReweightedSelection
from dpfl_lightning.strategies.selection.uniform_selection import UniformSelection

pytestmark = pytest.mark.filterwarnings("ignore:strategy clustered")
TRUE = (0, 0, 1, 1, 1, 2, 2, 2, 2)
COUNT = len(TRUE)


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
    made = Population.from_datasets(pairs, held_out=0.2, num_classes=3)
    return dataclasses.replace(made, groups=TRUE)


def private(**options) -> PrivacyOptions:
    return PrivacyOptions(**{"epsilon": 8.0, "delta": 1e-3, "noise_key": FIXED_KEY, **options})


@pytest.fixture
def start(make_loop):
    """`start(strategy, ...)`: a loop over the clients of three kinds."""

    def made(*strategies, **options):
        torch.manual_seed(0)
        usual = {
            "population": kinds_of_clients(),
            "module": ClientModule(nn.Linear(6, 3)),
            "privacy": private(),
            "clients": ClientOptions(count=COUNT, batch_size=40, learning_rate=0.5),
            "rounds": 6,
        }
        with_base = any(getattr(one, "role", "") == "base" for one in strategies)
        return make_loop(parts=[*([] if with_base else [SizeWeighted()]), *strategies], **usual | options)

    return made


class Watch(Callback):
    """Remembers models and what was told after every round."""

    def __init__(self):
        self._models, self._told = [], []

    def on_round_end(self, view, report):
        self._models.append(view.state.models.clone())
        self._told.append(dict(report.metrics))


def paid(loop, purpose, client=0):
    """Rounds in which the client paid for this purpose."""
    charges = read_ledger(loop.clients.folder.ledger_file)
    return [one.round for one in charges if (one.client, one.purpose) == (client, purpose)]


# ---- three stages


@pytest.mark.slow
def test_kinds_are_found_and_trained_apart(start):
    own, watch = Clustered(), Watch()
    loop = start(own, watch, rounds=8)
    result = loop.run()
    assert own.confident and own.responsibilities.argmax(dim=1).tolist() == list(TRUE)
    assert own.separation > own.diagnostics["separation_threshold"] and own.overlap < 1e-6
    assert own.last_drawn_round == 4 and loop.state.models.shape[0] == 3
    assert [one["group"].tolist() for one in watch._told] == [[0.0] * COUNT, *[list(map(float, TRUE))] * 7]
    assert result.metrics["clustering_accuracy"] == 1.0
    assert min(client["accuracy"] for client in result.clients) > 0.8
    together = start(rounds=8).run()
    assert max(client["accuracy"] for client in together.clients[:2]) < 0.6, "one model does not fit all"


def test_the_first_round_is_a_full_batch_of_its_own_noise(start):
    loop = start(Clustered())
    result = loop.run()
    assert [line.purpose for line in loop.schedule.clients[0].planned] == ["train", "first_round", "select"]
    for client in range(COUNT):
        events = loop.clients.budgets.ledger.events(client)
        assert events[0] == GaussianEvent(1.0, 5.0, 1)
        trained = [event for event in events[1:] if isinstance(event, GaussianEvent)]
        assert len(trained) == 5 and {event.sample_rate for event in trained} == {40 / 200}
        assert {event.steps for event in trained} == {5}
    assert paid(loop, "first_round") == [1] and paid(loop, "train") == [2, 3, 4, 5, 6] and paid(loop, "select") == [4]
    for client in result.clients:
        assert 0.98 * 8.0 < client["epsilon_spent"] <= 8.0


@pytest.mark.slow
@pytest.mark.parametrize("reuse", [False, True])
def test_models_after_the_first_round(start, reuse):
    seen = {}

    class Peek(Strategy):
        def needs_updates(self, plan, view):
            return True

        def after_step(self, state, updates, view):
            seen.setdefault("deltas", updates.deltas.clone())
            return state

    own, watch = Clustered(reuse_first_round=reuse), Watch()
    loop = start(own, watch, Peek(), rounds=2, population=kinds_of_clients(more=20))
    begin = loop.module.flat
    loop.run()
    expected = begin.repeat(3, 1)
    if reuse:
        shares = own.responsibilities.T * torch.tensor(loop.population.num_records)
        shares = shares / shares.sum(dim=1, keepdim=True)
        expected = expected + (shares @ seen["deltas"].double()).float()
        torch.testing.assert_close(watch._models[0], expected)
    else:
        assert torch.equal(watch._models[0], expected)
    assert not torch.allclose(*watch._models[1][:2])


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 3])
def test_local_epochs_are_full_batches(start, epochs):
    clients = ClientOptions(count=COUNT, batch_size=40, learning_rate=0.2, local_epochs=epochs)
    loop = start(Clustered(), clients=clients, rounds=2)
    loop.run()
    assert loop.clients.budgets.ledger.events(0)[0] == GaussianEvent(1.0, 5.0, epochs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "selected"),
    [
        ({}, [6]),
        ({"selection_rounds": 3}, [6, 7, 8]),
        ({"switch_round": 3, "selection_rounds": 2}, [4, 5]),
        ({"switch_round": 10}, []),
        ({"selection": "exponential", "selection_epsilon": 0.05}, [6, 7, 8, 9, 10]),
        ({"selection": "server_similarity"}, []),
        ({"selection": "paper_argmin"}, [6, 7, 8, 9, 10]),
    ],
)
def test_when_clients_choose(start, options, selected):
    own, watch = Clustered(**options), Watch()
    loop = start(own, watch, rounds=10)
    result = loop.run()
    assert paid(loop, "select") == selected
    assert result.metrics["switch_round"] == own.last_drawn_round == options.get("switch_round", 5)
    for told in watch._told[1:]:
        assert told["group"].tolist() == list(TRUE), "choices agree with the groups, whoever makes them"
    sent = 10 + (3 - 1) * len(selected)  # section 8 of the specification: E_c + M (E - E_c), and E + (M - 1) S
    assert result.metrics["floats_down"] == sent * COUNT * loop.module.num_params
    plain = options.get("selection") == "paper_argmin"
    assert (PLAIN_CHOICES in result.guarantee) == plain
    for client in result.clients:
        assert client["epsilon_spent"] is None if plain else client["epsilon_spent"] <= 8.0


@pytest.mark.slow
def test_draws_follow_memberships_and_depend_on_nothing_else():
    """10,000 draws of seed 5 against their laws: chi-square, false-alarm rate 0.1 % each."""
    cluster_metrics = torch.tensor([[0.6, 0.0, 0.3, 0.1], [1 / 3, 1 / 3, 1 / 3, 0.0]], dtype=torch.float64)
    draws = np.array([drawn_groups(cluster_metrics, (0, 1), round, seed=5) for round in range(5000)])
    for client, law in enumerate(cluster_metrics.numpy()):
        counts = np.bincount(draws[:, client], minlength=4)
        assert counts[law == 0].sum() == 0, "never an impossible one"
        assert chisquare(counts[law > 0], 5000 * law[law > 0]).pvalue > 1e-3
    assert drawn_groups(cluster_metrics, (1,), 17, seed=5) == tuple(draws[17, 1:])
    assert drawn_groups(cluster_metrics, (1, 0), 17, seed=5) == tuple(draws[17, ::-1])
    other = np.array([drawn_groups(cluster_metrics, (0, 1), round, seed=6) for round in range(100)])
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

    def weigh(self, updates, view):
        return torch.zeros(len(updates.clients)) if view.round == 1 else None


@pytest.mark.slow
@pytest.mark.parametrize("base", [SizeWeighted, NoiseAware])
def test_sure_groups_that_are_kept_are_the_oracle(start, base):
    own = Clustered(switch_round=6, reuse_first_round=False)
    ours, theirs = models_of(start(base(), own)), models_of(start(base(), FromTheSecondRound()))
    assert own.responsibilities.max(dim=1).values.min() == 1.0
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_one_group_found_is_one_model(start):
    """No kinds of clients: after the first round it is the base rule, with the first updates or without."""

    class Plain(FromTheSecondRound):
        def initialise(self, state, view):
            return state

    population = kinds_of_clients(shift=False)
    own = Clustered(reuse_first_round=False, selection="server_similarity")
    with pytest.warns(UserWarning, match=r"separation .* all clients share one model"):
        ours = models_of(start(own, population=population))
    assert own.responsibilities.shape == (COUNT, 1) and not own.confident and own.overlap == 1
    assert torch.equal(ours, models_of(start(Plain(), population=population)))
    moved = Clustered(selection="server_similarity")
    loop = start(moved, watch := Watch(), population=population)
    begin = loop.module.flat
    loop.run()
    assert len(loop.state.models) == 1 and not torch.equal(watch._models[0][0], begin)


@pytest.mark.slow
def test_what_was_planned_for_choices_is_not_spent_without_groups(start):
    loop = start(Clustered(), population=kinds_of_clients(shift=False))
    result = loop.run()
    assert loop.schedule.clients[0].count_of("select") == 1 and paid(loop, "select") == []
    assert all(client["epsilon_spent"] <= 8.0 for client in result.clients)


# ---- choices between equal models


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["paper_argmin", "exponential_frozen"])
def test_equal_models_are_drawn_and_not_chosen(start, selection):
    """Else the lowest index would have everybody, and the others none, for ever."""
    own = Clustered(num_clusters=2, switch_round=1, reuse_first_round=False, selection=selection)
    loop = start(own, watch := Watch(), rounds=4)
    begin = loop.module.flat
    loop.run()
    assert torch.equal(watch._models[0], begin.repeat(2, 1))
    assert 0 < sum(watch._told[1]["group"].tolist()) < COUNT
    assert all(not torch.equal(model, begin) for model in watch._models[1])
    assert paid(loop, "select") == ([3, 4] if selection == "paper_argmin" else [3])


@pytest.mark.slow
def test_unsure_groups_are_drawn_evenly_between_equal_models(start):
    """No kinds of clients, M = 3 given: memberships are noise, so the first models come from a fair draw."""
    own = Clustered(num_clusters=3, reuse_first_round=False)
    loop = start(own, watch := Watch(), population=kinds_of_clients(shift=False), rounds=4)
    with pytest.warns(UserWarning, match="models begin with groups that may be noise"):
        loop.run()
    assert not own.confident and own.last_drawn_round == 1
    even = torch.ones(COUNT, 3)
    assert watch._told[1]["group"].tolist() == list(drawn_groups(even, range(COUNT), 2, loop.seed))
    assert paid(loop, "select") == [3]


@pytest.mark.slow
def test_a_model_that_nobody_trains_stays(start, monkeypatch):
    monkeypatch.setattr(Clustered, "_models_of", lambda self, plan, cluster_metrics, view: (0,) * len(plan.clients))
    loop = start(Clustered(), watch := Watch(), rounds=4)
    loop.run()
    assert torch.equal(watch._models[3][1:], watch._models[0][1:])
    assert not torch.equal(watch._models[3][0], watch._models[0][0])


# ---- clients that are missing, few, or alike


class Missing(Strategy):
    """Clients that do not take part in some round: round -> clients."""

    def __init__(self, absent):
        self._absent = absent

    def plan_round(self, plan, view):
        return plan.only(lambda client: client not in self._absent.get(view.round, ()))


@pytest.mark.slow
def test_who_missed_the_first_round_joins_by_draw_and_by_loss(start):
    own = Clustered(switch_round=2)
    loop = start(Missing({1: (4, 8)}), own, watch := Watch(), rounds=5)
    result = loop.run()
    assert result.finished
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    for client in (4, 8):
        torch.testing.assert_close(own.responsibilities[client], third)
        assert own.embedding[client].isnan().all() and math.isnan(watch._told[0]["group"][client])
        drawn = drawn_groups(own.responsibilities, (client,), 2, loop.seed)[0]
        assert watch._told[1]["group"][client] == drawn
        assert watch._told[2]["group"][client] == TRUE[client], "its loss tells"
    assert result.client_embedding.clients == (0, 1, 2, 3, 5, 6, 7) and result.client_embedding.num_clusters == 3


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_missing(start):
    own = Clustered()
    loop = start(own, rounds=3)
    releases = loop.clients.engine.releases

    def broken(plan, state, charge_numbers):
        for row, release in releases(plan, state, charge_numbers):
            yield row, release * (math.nan if (plan.round, plan.clients[row]) == (1, 2) else 1.0)

    loop.clients.engine.releases = broken
    with pytest.warns(UserWarning, match="not finite"):
        loop.run()
    assert own.embedding.isnan().any(dim=1).tolist() == [client == 2 for client in range(COUNT)]
    assert own.confident and own.responsibilities.shape == (COUNT, 3)


@pytest.mark.slow
def test_a_first_round_that_nobody_came_to(start):
    own = Clustered()
    loop = start(Missing({1: range(COUNT)}), own, rounds=3)
    result = loop.run()
    assert result.finished and own.responsibilities is None and len(loop.state.models) == 1
    assert result.client_embedding is None and "num_clusters" not in result.metrics


@pytest.mark.slow
def test_who_is_absent_later_keeps_its_model(start):
    loop = start(Missing({4: (0, 3), 5: (0,), 6: (0,)}), Clustered(), watch := Watch())
    result = loop.run()
    assert [client["model"] for client in result.clients] == list(TRUE)
    assert math.isnan(watch._told[-1]["group"][0]) and watch._told[-1]["group"][3] == 1
    assert [paid(loop, "select", client) for client in (0, 3, 8)] == [[], [5], [4]], "asked when it is there"


@pytest.mark.slow
@pytest.mark.parametrize("num_clusters", ["auto", 2, 4])
def test_few_clients(make_loop, num_clusters):
    """Four clients of unlike sizes: two are the least that auto can part."""
    own = Clustered(num_clusters=num_clusters)
    loop = make_loop(parts=[SizeWeighted(), own], rounds=4)
    assert loop.run().finished
    assert own.responsibilities.shape[1] == (own.responsibilities.shape[1] if num_clusters == "auto" else num_clusters)
    assert num_clusters == "auto" or len(loop.state.models) == num_clusters
    assert num_clusters != 4 or not own.confident, "one client is no group"


@pytest.mark.slow
@pytest.mark.parametrize("mixture", ["robust", "paper"])
def test_clients_without_any_difference(make_loop, mixture):
    """No noise and the same records everywhere: all updates of a full batch are the same."""
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    population = Population.from_datasets([(x, y)] * 4, held_out=0.0, num_classes=3)
    own = Clustered(num_clusters=2, mixture=mixture)
    loop = make_loop(population, parts=[SizeWeighted(), own], privacy=None, rounds=3)
    assert loop.run().finished
    assert own.responsibilities.isfinite().all()
    assert mixture == "paper" or (own.separation < 1 and not own.confident)


@pytest.mark.slow
def test_without_privacy_kinds_of_a_given_number_are_found(start):
    own = Clustered(num_clusters=3)
    result = start(own, privacy=None, rounds=4).run()
    assert own.responsibilities.argmax(dim=1).tolist() == list(TRUE) and own.confident
    assert own.separation > 1e4, "in units of rounding"
    json.dumps(result.as_dict(), allow_nan=False)


# ---- noise


@pytest.mark.slow
def test_a_single_multiplier_is_solved_for_all_rounds(start):
    loop = start(Clustered(first_round_noise_multiplier="same"))
    result = loop.run()
    apart = start(Clustered())
    apart.plan_schedule()
    for client, own in enumerate(loop.schedule.clients):
        assert own.noise_multiplier("first_round") == own.noise_multiplier("train")
        assert own.noise_multiplier("train") > apart.schedule.clients[client].noise_multiplier("train")
        assert result.clients[client]["epsilon_spent"] == pytest.approx(8.0, rel=0.02)


@pytest.mark.parametrize(("num_params", "noise"), [(21, 5.0), (2_000_000, 3.0)])
def test_large_models_need_less_noise_to_be_told_apart(start, num_params, noise):
    loop = start(Clustered())
    loop.plan_schedule()
    info = dataclasses.replace(loop.info, num_params=num_params)
    plain = start()
    plain.plan_schedule()
    view = dataclasses.replace(loop.view(loop._one_model()), run=info)
    planned = Clustered().plan_run(plain.schedule, view)
    assert planned.planned(0, "first_round").event.noise_multiplier == noise
    given = Clustered(first_round_noise_multiplier=7).plan_run(plain.schedule, view)
    assert given.planned(0, "first_round").event.noise_multiplier == 7.0


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, "same"])
def test_unequal_budgets(start, noise):
    """Budgets from 1 to 16: under one multiplier for all rounds the first updates are unlike in noise, too."""
    privacy = private(epsilon=[16.0, 4.0, 16.0, 6.0, 8.0, 4.0, 16.0, 8.0, 6.0])
    own = Clustered(first_round_noise_multiplier=noise)
    result = start(own, privacy=privacy).run()
    assert own.confident and own.responsibilities.argmax(dim=1).tolist() == list(TRUE)
    assert all(0.98 * one["epsilon_budget"] < one["epsilon_spent"] <= one["epsilon_budget"] for one in result.clients)


@pytest.mark.slow
def test_given_noise_and_a_budget(start):
    loop = start(Clustered(), privacy=private(epsilon=2.0, noise_multiplier=2.0), rounds=12)
    result = loop.run()
    assert 0 < loop.schedule.clients[0].count_of("train") < 11
    assert all(client["epsilon_spent"] <= 2.0 for client in result.clients)


def test_a_reserve_pays_for_one_first_round_more(start):
    loop = start(Clustered(), privacy=private(reserve_rounds=2))
    loop.plan_schedule()
    own = loop.schedule.clients[0]
    assert (own.count_of("first_round"), own.count_of("train")) == (2, 7)


def test_the_user_is_told_when_noise_hides_groups(start):
    with pytest.warns(UserWarning, match=r"differ by 1\.\d of the clip norm .* smaller first_round_noise_multiplier"):
        start(Clustered(first_round_noise_multiplier=40.0)).plan_schedule()


class Linear(ClientModule):
    """A loss whose gradient is the record itself: `-x . theta`."""

    def sample_loss(self, params, x, y):
        return -(x * params["weight"]).sum(dim=1)


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
    population = Population.from_datasets(pairs, held_out=0.0, num_classes=2)
    own = Clustered(num_clusters=2, first_round_noise_multiplier=noise)
    make_loop(
        population,
        module=Linear(nn.Linear(width, 1, bias=False)),
        parts=[SizeWeighted(), own],
        clients=ClientOptions(count=12, batch_size=50, learning_rate=0.01, local_epochs=epochs),
        privacy=private(epsilon=20.0, delta=1e-4, clip_norm=1.0),
        rounds=1,
    ).run()
    assert own.separation == pytest.approx(expected_separation(far, records, noise, epochs), rel=0.05)


# ---- beside others, and again


@pytest.mark.slow
def test_beside_a_pull_and_a_noise_aware_base_rule(start):
    own = Clustered()
    result = start(NoiseAware(), own, FedProx(0.1)).run()
    assert own.confident and result.metrics["clustering_accuracy"] == 1.0
    assert min(client["accuracy"] for client in result.clients) > 0.75
    with pytest.raises(UserError, match=r"strategies\.clustered` must be named before strategies that pull"):
        start(FedProx(0.1), Clustered()).run()


def test_the_first_round_says_nothing_of_the_noise_in_later_ones(start):
    """Full batches throughout: as many steps in every round, but the first one has noise of its own."""
    base = NoiseAware(estimator="oracle", reestimate_every="first_round")
    clients = ClientOptions(count=COUNT, batch_size=None, learning_rate=0.5)
    budgets = [16.0, 4.0, 16.0, 6.0, 8.0, 4.0, 16.0, 8.0, 6.0]
    watch = Watch()
    loop = start(base, Clustered(), watch, clients=clients, privacy=private(epsilon=budgets), rounds=4)
    result = loop.run()
    assert [told["rounds_since_estimate"] for told in watch._told] == [0, 0, 1, 2]
    assert watch._told[-1]["estimated_noise_std"].tolist() == [one["noise_std"] for one in result.clients]


@pytest.mark.slow
@pytest.mark.parametrize("selection", [UniformSelection, BiasedSelection, ReweightedSelection])
def test_a_selection_comes_after_it(start, selection):
    """All clients take the first full batch, and quotas are of the later rounds."""
    own = Clustered()
    loop = start(own, selection(3), rounds=7, privacy=private(reserve_rounds=1))
    result = loop.run()
    assert all(paid(loop, "first_round", client) == [1] for client in range(COUNT))
    trained = [len(paid(loop, "train", client)) for client in range(COUNT)]
    assert trained == result.metrics["quota"] and sum(trained) == 3 * 6
    assert own.responsibilities.argmax(dim=1).tolist() == list(TRUE)
    words = r"`strategies\.clustered` must be named before .*uniform_selection.*: client \d trains in \d of 7 rounds"
    with pytest.raises(UserError, match=words):
        start(selection(3), Clustered(), rounds=7, privacy=private(reserve_rounds=1)).plan_schedule()
    start(selection(3), Clustered(num_clusters=1), rounds=7).plan_schedule()  # the base rule alone takes no round


def test_it_is_the_only_one_with_models(start):
    with pytest.raises(UserError, match=r"only strategy that creates models, got 4"):
        start(Ifca(), Clustered(), new_net=lambda seed: nn.Linear(6, 3)).run()


@pytest.mark.slow
@pytest.mark.parametrize(("mixture", "cut"), [*(("robust", cut) for cut in range(1, 7)), ("paper", 1), ("paper", 4)])
def test_resumed_equals_unbroken_in_every_stage(start, mixture, cut):
    options = {"mixture": mixture, "switch_round": 3, "num_clusters": 3, "selection_rounds": 2}
    unbroken = start(Clustered(**options))
    expected = unbroken.run()
    broken = start(Clustered(**options))
    cut_at(broken, cut)
    with pytest.raises(PowerCut):
        broken.run()
    again = start(Clustered(**options), output_dir=broken.output_dir)
    result = again.run(resume=True)
    assert torch.equal(again.state.models, unbroken.state.models) and again.state.model_of == unbroken.state.model_of
    assert result.metrics == expected.metrics and result.client_embedding == expected.client_embedding
    ours, theirs = (read_ledger(loop.clients.folder.ledger_file) for loop in (again, unbroken))
    assert [(c.client, c.round, c.purpose) for c in ours] == [(c.client, c.round, c.purpose) for c in theirs]


@pytest.mark.slow
def test_what_is_told(start):
    own, watch = Clustered(), Watch()
    result = start(own, watch).run()
    for told in watch._told:
        assert (told["num_clusters"], told["confident"], told["switch_round"]) == (3, 1, 3)
        assert told["separation"] == own.separation > told["overlap"] and told["membership_entropy"] < 1e-6
    assert watch._told[0]["separation_of_3"] == own.separation < watch._told[0]["separation_with_noise"]
    assert not any(name.startswith("separation_") for name in watch._told[1])
    assert (
        result.client_embedding.cluster == TRUE
        and set(result.client_embedding.membership) == {1.0}
        and result.client_embedding.confident
    )
    assert result.client_embedding.points == tuple(map(tuple, own.embedding.tolist()))


@pytest.mark.slow
def test_the_papers_way(start):
    own = Clustered(
        num_clusters=3,
        mixture="paper",
        first_round_noise_multiplier="same",
        reuse_first_round=False,
        selection="paper_argmin",
    )
    loop = start(own, rounds=8)
    result = loop.run()
    assert PLAIN_CHOICES in result.guarantee and own.confident
    assert result.metrics["clustering_accuracy"] == 1.0 and paid(loop, "select")[-1] == 8
    assert paid(loop, "select")[0] == own.last_drawn_round + 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_clusters": 0}, r"strategies\.clustered\.num_clusters` must be `auto` or a whole number .* got 0"),
        ({"num_clusters": "four"}, r"num_clusters` must be `auto` or a whole number .* got 'four'"),
        ({"num_clusters": True}, r"num_clusters` must be `auto` or a whole number"),
        ({"mixture": "papre"}, r"strategies\.clustered\.mixture` must be one of robust, paper.*Did you mean `paper`"),
        ({"choose_m": "gap"}, r"strategies\.clustered\.choose_m` must be one of split, mss"),
        ({"min_cluster_size": 0}, r"strategies\.clustered\.min_cluster_size` must be at least 1"),
        ({"data_floor": -0.1}, r"strategies\.clustered\.data_floor` must be at least 0"),
        ({"first_round_noise_multiplier": 0}, r"first_round_noise_multiplier` must be a number above 0, `same` or"),
        ({"first_round_noise_multiplier": "auto"}, r"first_round_noise_multiplier` must be .* got 'auto'"),
        ({"reuse_first_round": "no"}, r"strategies\.clustered\.reuse_first_round` must be true or false, got 'no'"),
        ({"switch_round": 0}, r"strategies\.clustered\.switch_round` must be `auto` or a whole number"),
        ({"selection": "loss"}, r"strategies\.clustered\.selection` must be one of .*server_similarity"),
        ({"selection_rounds": 0}, r"strategies\.clustered\.selection_rounds` must be >= 1"),
        ({"mixture": "paper", "choose_m": "mss"}, r"clustered\.choose_m` must not be set with mixture paper.*'mss'"),
        (
            {"mixture": "paper", "min_cluster_size": 3},
            r"min_cluster_size` must not be set with mixture paper.* got 3",
        ),
        ({"mixture": "paper", "data_floor": 0.0}, r"data_floor` must not be set with mixture paper.* got 0\.0"),
        (
            {"selection": "server_similarity", "selection_epsilon": 0.1},
            r"clustered\.selection_epsilon` must not be set with selection server_similarity.* got 0\.1",
        ),
        (
            {"selection": "server_similarity", "selection_rounds": 2},
            r"clustered\.selection_rounds` must not be set with selection server_similarity.* got 2",
        ),
        (
            {"selection": "server_similarity", "loss_bound": 2.0},
            r"clustered\.loss_bound` must not be set with selection server_similarity.* got 2",
        ),
        (
            {"selection": "paper_argmin", "selection_epsilon": 0.1},
            r"clustered\.selection_epsilon` must not be set with selection paper_argmin.* got 0\.1",
        ),
    ],
)
def test_mistakes_are_one_sentence(options, words):
    with pytest.raises(UserError, match=words):
        Clustered(**options)


def test_mistakes_that_show_in_the_run(start):
    with pytest.raises(UserError, match=r"num_clusters` must be at most the 9 clients, got 10"):
        start(Clustered(num_clusters=10)).plan_schedule()
    with pytest.raises(UserError, match=r"num_clusters` must be a number without privacy, got 'auto'"):
        start(Clustered(), privacy=None).plan_schedule()
    with pytest.raises(UserError, match=r"the cost of first_round.* with the given noise"):
        start(Clustered(), privacy=private(epsilon=0.3)).plan_schedule()
