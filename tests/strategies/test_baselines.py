"""Baselines of clustering by updates: loss clustering, k-means of each round, true groups, and clients on their own."""

import itertools

import pytest
import torch
from conftest import GROUPS, blobs, of_two_kinds, small_net
from fakes import Absent, Recorder
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_lightning import strategies
from dpfl_lightning.commands.plan import main as plan_command
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.papers.baselines.kmeans_clusters import coordinates
from dpfl_lightning.papers.clustered.model_selection import PLAIN_CHOICES
from dpfl_lightning.privacy.ledger.ledger import read_ledger

BASELINES = {
    "ifca": {"num_clusters": 2, "selection_rounds": 3},
    "kmeans_clusters": {"num_clusters": 2},
    "oracle_clusters": {},
    "local": {},
    "mr_mtl": {},
}


def build(make_loop, name, population=None, base="size_weighted", extra=(), more=None, **options):
    """A loop with an aggregation rule, `extra` parts and the strategy."""
    rule, strategy = strategies.build({base: None, name: {**BASELINES[name], **(more or {})}})
    population = of_two_kinds() if population is None else population
    return make_loop(population, parts=[rule, *extra, strategy], **options)


def run(make_loop, name, **options):
    """The loop after all rounds, its result, and the rounds."""
    seen = Recorder(updates=True)
    loop = build(make_loop, name, **{**options, "extra": [*options.get("extra", ()), seen]})
    return loop, loop.run(), seen


def selections(loop):
    """(round, client) of each."""
    return [(one.round, one.client) for one in read_ledger(loop.clients.folder.ledger_file) if one.purpose == "select"]


def rounds_of(seen):
    """(models before, updates, row sums of the weights, models after, groups) of each round."""
    before = seen.start.models
    for updates, report, after in zip(seen.updates, seen.reports, seen.models, strict=True):
        yield before, updates, report.weights.sum(dim=1), after, report.metrics.get("group")
        before = after


# ---- several models to begin with


@pytest.mark.slow
def test_each_model_begins_from_its_seed(make_loop):
    def begun(**options):
        return run(make_loop, "ifca", rounds=1, more={"num_clusters": 3}, **options)[2].start

    first, same, other = begun(), begun(), begun(seed=1)
    assert torch.equal(first.models, same.models) and first.model_of == same.model_of
    assert torch.equal(first.models[0], ClientModule(small_net()).flat), "the run's initialisation is one of them"
    for one, another in itertools.combinations([*first.models, *other.models[1:]], 2):
        assert not torch.equal(one, another)
    assert all(0.5 < one.norm() / first.models[0].norm() < 2 for one in first.models)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("ifca", {"new_net": None}, "`new_net` must be a function, got None"),
        (
            "ifca",
            {"new_net": lambda seed: small_net(features=3, seed=seed)},
            "`new_net` must build a model of 83 parameters, got 59",
        ),
        ("oracle_clusters", {"population": blobs()}, r"`data\.groups` must be given for strategy oracle_clusters"),
    ],
)
def test_runs_that_do_not_fit_are_refused(name, options, words, make_loop):
    with pytest.raises(UserError, match=words):
        build(make_loop, name, **options).run()


# ---- loss clustering


def test_the_plan_has_the_cost_of_choices_and_says_what_nothing_protects(capsys, request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    assert plan_command(["--config", "conf/ifca.yaml"]) == 0
    text = capsys.readouterr().out
    assert "40 train, 4 select" in text and PLAIN_CHOICES not in text
    paper = "{size_weighted: null, ifca: {num_clusters: 3, selection: paper_argmin}}"
    assert plan_command(["--config", "conf/ifca.yaml", "--strategies", paper]) == 0
    text = capsys.readouterr().out
    assert "40 train, 40 select" in text and f"No differential privacy per record: {PLAIN_CHOICES}." in text


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["exponential", "paper_argmin"])
def test_clients_of_two_kinds_part_and_each_kind_is_served(selection, make_loop):
    more = {"selection": selection, "selection_rounds": None}
    loop, result, _ = run(make_loop, "ifca", more=more, rounds=12, seed=1)
    model_of = loop.state.model_of
    assert model_of[0] == model_of[2] != model_of[1] == model_of[3]
    assert result.headline_worst > 0.9
    assert result.metrics["group"] == [float(row) for row in model_of]


def test_a_model_that_nobody_chose_stays(make_loop):
    more = {"num_clusters": 7, "selection": "paper_argmin", "selection_rounds": None}
    _, _, seen = run(make_loop, "ifca", more=more, rounds=2)
    for before, updates, sums, after, _ in rounds_of(seen):
        for row in range(7):
            assert torch.equal(after[row], before[row]) == (row not in updates.model_of)
            assert sums[row] == pytest.approx(float(row in updates.model_of))


# ---- true groups


class Kept(Strategy):
    """Only the updates of these clients count."""

    def __init__(self, clients):
        self._clients = clients

    def weigh(self, updates, view):
        return torch.tensor([float(client in self._clients) for client in updates.clients])


@pytest.mark.slow
def test_true_groups_are_the_base_rule_in_each(make_loop):
    loop, result, _ = run(make_loop, "oracle_clusters")
    assert loop.state.model_of == GROUPS and [one["model"] for one in result.clients] == list(GROUPS)
    for group in (0, 1):
        clients = [client for client in range(4) if GROUPS[client] == group]
        alone = make_loop(of_two_kinds(), parts=[*strategies.build({"size_weighted": None}), Kept(clients)])
        alone.run()
        assert torch.equal(loop.state.models[group], alone.state.models[0])
    assert result.metrics["group"] == [0.0, 1.0, 0.0, 1.0]
    assert all(
        "a simulation" in words for words in (result.guarantee.words(), loop.clients.budgets.guarantees()[3].words())
    )


# ---- clients on their own


def test_alone_only_the_clients_updates_count(make_loop):
    _, _, seen = run(make_loop, "local", rounds=2)
    assert torch.equal(seen.start.models, seen.start.models[:1].repeat(4, 1))
    for before, updates, _, after, _ in rounds_of(seen):
        assert torch.equal(after, before + updates.deltas)


def test_the_pull_is_pull_times_rate_times_distance(make_loop):
    """Without clipping and noise, in one full step, two runs differ by the pull alone."""
    clients = ClientOptions(count=4, batch_size=None, learning_rate=0.1)
    free, pulled = (
        run(make_loop, "mr_mtl", more={"pull": pull}, clients=clients, privacy=None, rounds=2)[2].models
        for pull in (0.0, 2.0)
    )
    assert torch.equal(free[0], pulled[0]), "in the first round all are at their mean"
    expected = -2.0 * 0.1 * (free[0] - free[0].mean(dim=0))
    torch.testing.assert_close(pulled[1] - free[1], expected, rtol=1e-4, atol=1e-6)


# ---- k-means of each round


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 6), width=st.integers(1, 40), seed=st.integers(0, 10**6))
def test_coordinates_keep_distances(count, width, seed):
    deltas = 5 + torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    points = torch.from_numpy(coordinates(deltas))
    assert points.shape == (count, count)
    torch.testing.assert_close(torch.cdist(points, points), torch.cdist(deltas.double(), deltas.double()))


def means_by_hand(before, updates, group, models):
    """The models `[N, P]` that the clients have after a round, from those before it, client by client."""
    after = before.clone()
    for client in range(4):
        mates = [other for other in range(4) if group[other] == group[client]]  # of an absent client, none
        if mates:
            mean = sum(updates.deltas[updates.clients.index(mate)] for mate in mates) / len(mates)
            begun = sum(before[mate] for mate in mates) / len(mates) if models == "merged" else before[client]
            after[client] = begun + mean
    return after


@pytest.mark.parametrize("models", ["of_clients", "merged"])
def test_clients_add_the_mean_update_of_their_cluster_to_their_model_or_to_their_mean(models, make_loop):
    absent = Absent({2: (0, 2)})
    _, _, seen = run(make_loop, "kmeans_clusters", base="uniform", rounds=3, more={"models": models}, extra=[absent])
    for before, updates, sums, after, group in rounds_of(seen):
        assert sums.tolist() == pytest.approx([float(client in updates.clients) for client in range(4)])
        torch.testing.assert_close(after, means_by_hand(before, updates, group, models))


def test_models_of_clusters_are_the_servers_and_clients_take_the_one_of_their_number(make_loop):
    absent = Absent({2: (0, 2)})
    more = {"models": "of_clusters", "num_clusters": 3}
    loop, _, seen = run(make_loop, "kmeans_clusters", base="uniform", rounds=3, more=more, extra=[absent])
    of_client = [0, 0, 0, 0]
    assert torch.equal(seen.start.models, seen.start.models[:1].repeat(3, 1))
    for before, updates, _, after, group in rounds_of(seen):
        assert list(updates.model_of) == [of_client[client] for client in updates.clients]
        for model in range(3):
            mates = [client for client in updates.clients if group[client] == model]
            mean = sum((updates.deltas[updates.clients.index(mate)] for mate in mates), torch.zeros_like(before[model]))
            torch.testing.assert_close(after[model], before[model] + mean / max(1, len(mates)))
        for client in updates.clients:
            of_client[client] = int(group[client])
    assert loop.state.model_of == tuple(of_client)
