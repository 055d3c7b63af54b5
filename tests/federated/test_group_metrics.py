"""Groups of clients: how well each is served, how well clusters match them, and where a run says so."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
import torch
from conftest import PowerCut, cut_at
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_lightning import strategies
from dpfl_lightning.federated.server.group_metrics import (
    accuracy_of_groups,
    clustering,
    smallest,
    true_groups,
)
from dpfl_lightning.federated.server.results import ClientEmbedding
from dpfl_lightning.federated.server.strategy import Strategy

SIZES = [0] * 3 + [1] * 6 + [2] * 6 + [3] * 6


def matched_by_hand(found, groups):
    """The most clients that any one-to-one naming of clusters has right."""
    names = [*set(groups), *[f"none {i}" for i in set(found)]]
    clusters = sorted(set(found))
    return max(
        sum(dict(zip(clusters, chosen, strict=True))[own] == group for own, group in zip(found, groups, strict=True))
        for chosen in itertools.permutations(names, len(clusters))
    )


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_clusters_are_matched_as_well_as_can_be(pairs):
    found, groups = zip(*pairs, strict=True)
    told = clustering(found, groups)
    assert told["clustering_accuracy"] == pytest.approx(matched_by_hand(found, groups) / len(found))
    renamed = clustering([7 - own for own in found], groups)
    assert renamed["clustering_accuracy"] == told["clustering_accuracy"], "the names of clusters do not matter"
    assert renamed["adjusted_rand_index"] == pytest.approx(told["adjusted_rand_index"])
    same = {(a == b) == (c == d) for (a, c), (b, d) in itertools.combinations(pairs, 2)} <= {True}
    assert (told["clustering_accuracy"] == 1) == same


def test_a_minority_that_is_swallowed_is_seen():
    """Only 3 of 21 are wrong, but none of the minority is right."""
    told = clustering([1] * 9 + [2] * 6 + [3] * 6, SIZES)
    assert told["clustering_accuracy"] == pytest.approx(18 / 21) and told["minority_recall"] == 0
    assert 0.5 < told["adjusted_rand_index"] < 1
    split = clustering([0, 0, 9, *SIZES[3:]], SIZES)
    assert split["minority_recall"] == pytest.approx(2 / 3)


def test_who_is_absent_does_not_count():
    found = [math.nan, math.nan, math.nan, *SIZES[3:]]
    assert clustering(found, SIZES) == {"clustering_accuracy": 1.0, "adjusted_rand_index": 1.0}
    assert clustering([math.nan] * 21, SIZES) == {}


def test_groups_are_means_over_their_clients():
    told = accuracy_of_groups([0.1 * group for group in SIZES], SIZES)
    assert told["minority"] == told["0"] == 0.0 and told["majority"] == pytest.approx(0.2)
    assert told["3"] == pytest.approx(0.3) and smallest(SIZES) == {0}
    assert accuracy_of_groups([0.5, 0.7], [0, 1]) == {"0": 0.5, "1": 0.7}, "equal sizes: nobody is a minority"
    assert accuracy_of_groups([None, 0.7], [0, 1]) == {"1": 0.7}
    assert accuracy_of_groups([0.5], None) == accuracy_of_groups((), [0]) == {}


# ---- in a run


class Clusters(Strategy):
    """Tells clusters and has a picture of them."""

    def metrics(self, view):
        return {"group": torch.tensor([5.0, 5.0, 6.0, float("nan")])}

    def client_embedding(self, view):
        points = ((0.0, 1.0), (0.5, 1.0), (9.0, -1.0))
        return ClientEmbedding("Updates of round 1", (0, 1, 2), points, (0, 0, 1), (1.0, 0.9, 1.0), 2, 7.5, True)


@pytest.fixture
def run(make_loop):
    loop = make_loop(parts=[Clusters()], rounds=2)
    loop.facts = dataclasses.replace(loop.facts, truth={"groups": (0, 0, 1, 1)})
    return loop, loop.run()


def test_a_run_says_how_groups_fare(run):
    loop, result = run
    accuracies = [client["accuracy"] for client in result.clients]
    assert [client["true_group"] for client in result.clients] == [0, 0, 1, 1]
    assert result.accuracy_of_groups == accuracy_of_groups(accuracies, [0, 0, 1, 1])
    assert result.accuracy_gap == max(accuracies) - min(accuracies)
    assert result.metrics["clustering_accuracy"] == result.metrics["adjusted_rand_index"] == 1.0
    assert "minority_recall" not in result.metrics
    kept = json.loads((loop.output_dir / "result.json").read_text())
    assert kept["accuracy_of_groups"] == result.accuracy_of_groups
    losses = [score.loss for score in loop.evaluate(loop.state).clients]
    assert [client["loss"] for client in kept["clients"]] == pytest.approx(losses)


def test_a_picture_of_the_clients_is_kept(run):
    loop, result = run
    kept = json.loads((loop.output_dir / "result.json").read_text())["client_embedding"]
    assert kept["points"] == [[0.0, 1.0], [0.5, 1.0], [9.0, -1.0]] and kept["confident"] is True
    assert result.client_embedding.separation == 7.5
    with pytest.raises(ValueError, match="one point"):
        dataclasses.replace(result.client_embedding, cluster=(0,))


def test_without_true_groups_nothing_is_said_of_them(make_loop):
    loop = make_loop(parts=[Clusters()], rounds=1)
    result = loop.run()
    assert true_groups(loop.facts) is None and result.accuracy_of_groups == {}
    assert "clustering_accuracy" not in result.metrics and result.clients[0]["true_group"] is None


def test_what_is_sent_is_counted_from_the_first_round_on(run, make_loop):
    loop, result = run
    model = loop.module.num_params
    assert result.metrics["floats_down"] == result.metrics["floats_up"] == 2 * 4 * model
    choosing = strategies.build({"ifca": {"num_clusters": 3, "selection_rounds": 1}})
    result = make_loop(parts=choosing, rounds=2).run()
    assert result.metrics["floats_up"] == 2 * 4 * model
    assert result.metrics["floats_down"] == (1 + 3) * 4 * model, "three models to choose from, and to start from, once"
    result = make_loop(parts=strategies.build({"mr_mtl": {}}), rounds=1).run()
    assert result.metrics["floats_down"] == 2 * result.metrics["floats_up"], "the mean of all models beside one's own"


def test_what_was_sent_survives_a_resumed_run(make_loop, tmp_path):
    whole = make_loop(rounds=3).run()
    place = tmp_path / "cut"
    loop = make_loop(rounds=3, output_dir=place)
    cut_at(loop, 3)
    with pytest.raises(PowerCut):
        loop.run()
    resumed = make_loop(rounds=3, output_dir=place).run(resume=True)
    assert resumed.metrics["floats_down"] == whole.metrics["floats_down"]
