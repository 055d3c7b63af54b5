"""Rivals of clustering by updates: loss clustering, k-means of each round, true groups, and everybody for itself."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from conftest import FIXED_KEY, PowerCut, blobs, cut_at, small_net
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_lightning import strategies
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.plan import main as plan_command
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.strategies.clustering.kmeans_clusters import coordinates, kmeans
from dpfl_lightning.strategies.clustering.model_selection import PLAIN_CHOICES

GROUPS = (0, 1, 0, 1)
RIVALS = {
    "ifca": {"num_clusters": 2, "selection_rounds": 3},
    "kmeans_clusters": {"num_clusters": 2},
    "oracle_clusters": {},
    "local": {},
    "mr_mtl": {},
}


def of_two_kinds():
    """Four clients; those of group 1 call class y what the others call y + 1."""
    population = blobs()
    y = population.y.clone()
    for client, group in enumerate(GROUPS):
        for rows in (population.train_of[client], population.held_out_of[client]):
            y[rows] = (y[rows] + group) % 3
    return dataclasses.replace(population, y=y, groups=GROUPS, test=None)


def run(make_loop, name, population=None, beside="size_weighted", extra=(), more=None, resume=False, **options):
    """The loop, its result and the strategy, after all rounds beside a base rule and `extra` parts."""
    base, own = strategies.build({beside: None, name: {**RIVALS[name], **(more or {})}})
    loop = make_loop(of_two_kinds() if population is None else population, parts=[base, *extra, own], **options)
    return loop, loop.run(resume=resume), own


def selections(loop):
    """(round, client) of each."""
    return [(one.round, one.client) for one in read_ledger(loop.clients.folder.ledger_file) if one.purpose == "select"]


class Present(Strategy):
    """Lets some clients in: all but those absent in a round, and only the updates of those that are kept."""

    def __init__(self, absent=None, kept=(0, 1, 2, 3)):
        self._absent, self._kept = absent or {}, kept

    def plan_round(self, plan, view):
        return plan.only(lambda client: client not in self._absent.get(view.round, ()))

    def weigh(self, updates, view):
        return torch.tensor([float(client in self._kept) for client in updates.clients])


class Sees(Strategy, Callback):
    """Keeps what arrived, the weights' row sums, the models, and what was told of groups."""

    def needs_updates(self, plan, view):
        return True

    def __init__(self):
        self._rounds = []

    def on_fit_start(self, view):
        self._begin = view.state

    def after_step(self, state, updates, view):
        self._updates = updates
        return state

    def on_round_end(self, view, report):
        group = report.metrics.get("group")
        self._rounds.append((self._updates, report.weights.sum(dim=1), view.state.models.clone(), group))


# ---- what all have in common


@pytest.mark.slow
@pytest.mark.parametrize("name", RIVALS)
def test_resumed_equals_unbroken(name, make_loop):
    unbroken, whole, _ = run(make_loop, name, rounds=4)
    chosen = strategies.build({"size_weighted": None, name: RIVALS[name]})
    broken = make_loop(of_two_kinds(), parts=chosen, rounds=4)
    cut_at(broken, 3)
    with pytest.raises(PowerCut):
        broken.run()
    again, result, _ = run(make_loop, name, rounds=4, output_dir=broken.output_dir, resume=True)
    assert torch.equal(again.state.models, unbroken.state.models)
    assert again.state.model_of == unbroken.state.model_of and selections(again) == selections(unbroken)
    assert result.metrics == whole.metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("beside", ["size_weighted", "uniform", "epsilon_weighted", "noise_aware"])
def test_it_goes_beside_every_base_rule(name, beside, make_loop):
    sees = Sees()
    loop, result, _ = run(make_loop, name, beside=beside, extra=[sees])
    for _, sums, _, _ in sees._rounds:
        assert all(total == 0.0 or abs(total - 1) < 1e-6 for total in sums.tolist())
    assert all(0.97 * one["epsilon_budget"] < one["epsilon_spent"] <= one["epsilon_budget"] for one in result.clients)
    assert loop.state.models.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", RIVALS)
def test_one_client_absent_clients_and_a_round_without_any(name, make_loop):
    absent = Present({1: (0, 2), 2: (0, 1, 2, 3), 3: (3,)})
    sees = Sees()
    _, result, _ = run(make_loop, name, extra=[absent, sees], rounds=4)
    assert result.finished and result.rounds == 4
    groups = [one[3] for one in sees._rounds]
    if name in ("ifca", "kmeans_clusters", "oracle_clusters"):
        present = [group is not None and (~group.isnan()).nonzero().flatten().tolist() for group in groups]
        assert present == [[1, 3], False, [0, 1, 2], [0, 1, 2, 3]]

    alone = dataclasses.replace(blobs(num_clients=1), groups=(0,))
    privacy = PrivacyOptions(epsilon=4.0, delta=1e-3, noise_key=FIXED_KEY)
    assert run(make_loop, name, population=alone, privacy=privacy)[0].state.models.isfinite().all()


# ---- several models to begin with


@pytest.mark.slow
def test_models_of_their_own_begin_from_seeds_of_their_own(make_loop):
    def begun(**options):
        sees = Sees()
        run(make_loop, "ifca", extra=[sees], rounds=1, more={"num_clusters": 3}, **options)
        return sees._begin

    first, same, other = begun(), begun(), begun(seed=1)
    assert torch.equal(first.models, same.models) and first.model_of == same.model_of
    assert torch.equal(first.models[0], ClientModule(small_net()).flat), "the run's own initialisation is one of them"
    for one, another in itertools.combinations([*first.models, *other.models[1:]], 2):
        assert not torch.equal(one, another)
    assert all(0.5 < one.norm() / first.models[0].norm() < 2 for one in first.models)


def test_new_models_need_to_be_buildable_and_leave_the_random_state_alone(make_loop):
    with pytest.raises(UserError, match="`new_net` must be a function, got None"):
        run(make_loop, "ifca", new_net=None)
    with pytest.raises(UserError, match="`new_net` must build a net of 83 parameters, got 59"):
        run(make_loop, "ifca", new_net=lambda seed: small_net(features=3, seed=seed))
    loop = make_loop()
    loop.plan_schedule()
    torch.manual_seed(3)
    view, expected = loop.view(ServerState(loop.module.flat[None], (0,) * 4)), torch.rand(1)
    torch.manual_seed(3)
    view.new_model(1)
    assert torch.equal(torch.rand(1), expected)


def test_two_strategies_with_models_of_their_own_do_not_mix(make_loop):
    with pytest.raises(UserError, match="`initialise` must be answered by one strategy, got Local and Ifca"):
        run(make_loop, "ifca", extra=strategies.build({"local": None}))


# ---- loss clustering


@pytest.mark.slow
def test_one_cluster_is_the_base_rule(make_loop):
    plain = make_loop(of_two_kinds())
    plain.run()
    for selection in ("exponential", "paper_argmin"):
        more = {"num_clusters": 1, "selection": selection, "selection_rounds": None}
        loop, result, _ = run(make_loop, "ifca", more=more)
        assert torch.equal(loop.state.models, plain.state.models)
        assert not selections(loop) and all(one["epsilon_spent"] is not None for one in result.clients)


def test_the_plan_says_what_choices_cost_and_what_nothing_protects(capsys, request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    assert plan_command(["--config", "conf/ifca.yaml"]) == 0
    text = capsys.readouterr().out
    assert "40 train, 4 select" in text and PLAIN_CHOICES not in text
    paper = "{size_weighted: null, ifca: {num_clusters: 3, selection: paper_argmin}}"
    assert plan_command(["--config", "conf/ifca.yaml", "--strategies", paper, "--json"]) == 0
    text = capsys.readouterr().out
    assert "40 train, 40 select" in text and f"No differential privacy per record: {PLAIN_CHOICES}." in text
    client = json.loads(text.splitlines()[-1])["clients"][0]
    assert PLAIN_CHOICES in client["guarantee"] and client["epsilon"] is None and client["noise_multiplier"] > 0
    assert [line["epsilon_alone"] for line in client["planned"]][1] is None


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["exponential", "paper_argmin"])
def test_clients_of_two_kinds_part_and_each_kind_is_served(selection, make_loop):
    more = {"selection": selection, "selection_rounds": None}
    loop, result, _ = run(make_loop, "ifca", more=more, rounds=12, seed=1)
    model_of = loop.state.model_of
    assert model_of[0] == model_of[2] != model_of[1] == model_of[3]
    assert result.accuracy_worst > 0.9
    assert result.metrics["group"] == [float(row) for row in model_of]
    assert run(make_loop, "ifca", more={"num_clusters": 1}, rounds=12)[1].accuracy_worst < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["paper_argmin", "exponential_frozen"])
def test_equal_models_do_not_collapse(selection, make_loop):
    """Nobody is asked between equal models: the first round is drawn, costs nothing, and makes them different."""
    more = {"init": "random_assignment", "selection": selection, "selection_rounds": None}
    sees = Sees()
    loop, _, _ = run(make_loop, "ifca", more=more, extra=[sees], rounds=4, seed=2)
    start = ClientModule(small_net()).flat
    assert torch.equal(sees._begin.models, start.repeat(2, 1))
    assert all(not torch.equal(model, start) for model in sees._rounds[0][2]), "both models move"
    assert {round for round, _ in selections(loop)} == ({2, 3, 4} if selection == "paper_argmin" else {2})
    assert sees._rounds[0][3].tolist() == [float(row) for row in sees._begin.model_of]


def test_a_model_that_nobody_chose_stays(make_loop):
    sees = Sees()
    more = {"num_clusters": 7, "selection": "paper_argmin", "selection_rounds": None}
    run(make_loop, "ifca", more=more, extra=[sees], rounds=2)
    before = sees._begin.models
    for updates, sums, after, _ in sees._rounds:
        for row in range(7):
            assert torch.equal(after[row], before[row]) == (row not in updates.model_of)
            assert sums[row] == pytest.approx(float(row in updates.model_of))
        before = after


def test_who_was_absent_chooses_when_it_comes(make_loop):
    absent = Present({1: (0,), 2: (0,)})
    loop, _, own = run(make_loop, "ifca", more={"selection_rounds": 1}, extra=[absent], rounds=4)
    assert selections(loop) == [(1, 1), (1, 2), (1, 3), (3, 0)]
    assert own._choice.done


# ---- true groups


@pytest.mark.slow
def test_true_groups_are_the_base_rule_in_each(make_loop):
    loop, result, _ = run(make_loop, "oracle_clusters")
    assert loop.state.model_of == GROUPS and [one["model"] for one in result.clients] == list(GROUPS)
    for group in (0, 1):
        kept = [client for client in range(4) if GROUPS[client] == group]
        alone = make_loop(of_two_kinds(), parts=[*strategies.build({"size_weighted": None}), Present(kept=kept)])
        alone.run()
        assert torch.equal(loop.state.models[group], alone.state.models[0])
    assert result.metrics["group"] == [0.0, 1.0, 0.0, 1.0]
    assert all("a simulation" in words for words in (result.guarantee, loop.clients.budgets.guarantees()[3].words()))


def test_without_true_groups_there_is_no_oracle(make_loop):
    with pytest.raises(UserError, match=r"`data\.groups` must be given for strategy oracle_clusters"):
        run(make_loop, "oracle_clusters", population=blobs())


# ---- everybody for itself


def test_alone_only_own_updates_count(make_loop):
    sees = Sees()
    run(make_loop, "local", extra=[sees], rounds=2)
    before = sees._begin.models
    assert torch.equal(before, before[:1].repeat(4, 1))
    for updates, _, after, _ in sees._rounds:
        assert torch.equal(after, before + updates.deltas)
        before = after


@pytest.mark.slow
def test_the_pull_goes_to_the_mean_of_all_and_changes_no_epsilon(make_loop):
    def models(name, **more):
        loop, result, _ = run(make_loop, name, more=more, rounds=4)
        return loop.state.models, [one["epsilon_spent"] for one in result.clients]

    alone, price = models("local")
    assert torch.equal(models("mr_mtl", pull=0.0)[0], alone)
    pulled, same_price = models("mr_mtl", pull=2.0)
    assert same_price == price
    assert 0 < pulled.std(dim=0).norm() < 0.7 * alone.std(dim=0).norm()
    with pytest.raises(UserError, match=r"strategies\.mr_mtl\.pull` must be >= 0, got -1"):
        models("mr_mtl", pull=-1)


def test_the_pull_by_hand(make_loop):
    """Without clipping and noise two runs differ by the pull alone: in one full step by pull * rate * distance."""
    whole = {"privacy": None, "rounds": 2}
    clients = ClientOptions(count=4, batch_size=[48, 56, 64, 72], learning_rate=0.1)
    population = of_two_kinds()
    assert population.num_records == (48, 56, 64, 72)
    seen = {}
    for pull in (0.0, 2.0):
        sees = Sees()
        run(make_loop, "mr_mtl", more={"pull": pull}, extra=[sees], clients=clients, **whole)
        seen[pull] = sees._rounds
    assert torch.equal(seen[0.0][0][2], seen[2.0][0][2]), "in the first round all are at their mean"
    models = seen[0.0][0][2]
    difference = seen[2.0][1][2] - seen[0.0][1][2]
    torch.testing.assert_close(difference, -2.0 * 0.1 * (models - models.mean(dim=0)), rtol=1e-4, atol=1e-6)


# ---- k-means of each round


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 6), width=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_coordinates_keep_distances(count, width, seed):
    deltas = 5 + torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    points = torch.from_numpy(coordinates(deltas))
    assert points.shape == (count, count)
    torch.testing.assert_close(torch.cdist(points, points), torch.cdist(deltas.double(), deltas.double()))


def test_kmeans_in_few_dimensions_is_kmeans_in_all():
    """The same partition and the same inertia as k-means on the updates themselves."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import adjusted_rand_score

    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 500, generator=generator)
    deltas = centres[torch.arange(21) % 4] + 0.3 * torch.randn(21, 500, generator=generator)
    points, whole = coordinates(deltas), KMeans(4, n_init=10, random_state=0).fit(deltas.double().numpy())
    assert adjusted_rand_score(kmeans(points, 4, seed=0), whole.labels_) == 1.0
    assert KMeans(4, n_init=10, random_state=0).fit(points).inertia_ == pytest.approx(whole.inertia_)
    assert np.array_equal(kmeans(points, 4, seed=7), kmeans(points, 4, seed=7))
    assert sorted(kmeans(points[:3], 4, seed=0)) == [0, 1, 2], "more clusters than points"


def test_everybody_adds_the_mean_update_of_its_cluster(make_loop):
    sees = Sees()
    run(make_loop, "kmeans_clusters", beside="uniform", extra=[sees], rounds=3)
    before = sees._begin.models
    for updates, sums, after, group in sees._rounds:
        assert sums.tolist() == pytest.approx([1.0] * 4)
        for client in range(4):
            mates = (group == group[client]).nonzero().flatten()
            torch.testing.assert_close(after[client], before[client] + updates.deltas[mates].mean(dim=0))
        before = after


def test_absent_clients_keep_their_models_and_order_does_not_count(make_loop):
    (own,) = strategies.build({"kmeans_clusters": {"num_clusters": 2}})
    loop = make_loop(blobs(num_clients=4), parts=[*strategies.build({"uniform": None}), own])
    loop.plan_schedule()
    view = loop.view(ServerState(loop.module.flat.repeat(4, 1), (0, 1, 2, 3)))
    deltas = torch.tensor([[9.0, 0.0], [0.0, 1.0], [9.1, 0.1]])
    route = own.weigh(ClientUpdates((3, 0, 1), (1,) * 3, (0.1,) * 3, deltas), view)
    assert route.tolist() == [[0, 1, 0], [1, 0, 1], [0, 0, 0], [1, 0, 1]]
    order = [2, 0, 1]
    mixed = own.weigh(ClientUpdates((1, 3, 0), (1,) * 3, (0.1,) * 3, deltas[order]), view)
    assert torch.equal(mixed, route[:, order])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("ifca", {"num_clusters": 0}, "`strategies.ifca.num_clusters` must be >= 1, got 0"),
        ("ifca", {"init": "distinkt"}, "`strategies.ifca.init` must be one of .* Did you mean `distinct`"),
        ("ifca", {"selection": "argmin"}, "`strategies.ifca.selection` must be one of"),
        ("ifca", {"selection_epsilon": "much"}, "`strategies.ifca.selection_epsilon` must be a number or null"),
        ("kmeans_clusters", {"num_clusters": 0}, "`strategies.kmeans_clusters.num_clusters` must be >= 1"),
    ],
)
def test_bad_options(name, options, words):
    with pytest.raises(UserError, match=words):
        strategies.build({name: options})
