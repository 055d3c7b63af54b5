"""Groups of clients: how well each is served, how well clusters match them, and where a run says so."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_lightning.federated.server.results import ClientEmbedding
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.summary import (
    accuracy_of_groups,
    clustering,
    smallest,
)

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
    scores = clustering(found, groups)
    assert scores["clustering_accuracy"] == pytest.approx(matched_by_hand(found, groups) / len(found))
    renamed = clustering([7 - own for own in found], groups)
    assert renamed["clustering_accuracy"] == scores["clustering_accuracy"], "the names of clusters do not matter"
    assert renamed["adjusted_rand_index"] == pytest.approx(scores["adjusted_rand_index"])
    same = {(a == b) == (c == d) for (a, c), (b, d) in itertools.combinations(pairs, 2)} <= {True}
    assert (scores["clustering_accuracy"] == 1) == same


def test_a_minority_that_is_swallowed_is_seen():
    """Only 3 of 21 are wrong, but none of the minority is right."""
    scores = clustering([1] * 9 + [2] * 6 + [3] * 6, SIZES)
    assert scores["clustering_accuracy"] == pytest.approx(18 / 21) and scores["minority_recall"] == 0
    assert 0.5 < scores["adjusted_rand_index"] < 1
    split = clustering([0, 0, 9, *SIZES[3:]], SIZES)
    assert split["minority_recall"] == pytest.approx(2 / 3)


def test_absent_clients_do_not_count():
    found = [math.nan, math.nan, math.nan, *SIZES[3:]]
    assert clustering(found, SIZES) == {"clustering_accuracy": 1.0, "adjusted_rand_index": 1.0}
    assert clustering([math.nan] * 21, SIZES) == {}


def test_groups_are_means_over_their_clients():
    accuracies = accuracy_of_groups([0.1 * group for group in SIZES], SIZES)
    assert accuracies["minority"] == accuracies["0"] == 0.0 and accuracies["majority"] == pytest.approx(0.2)
    assert accuracies["3"] == pytest.approx(0.3) and smallest(SIZES) == {0}
    assert accuracy_of_groups([0.5, 0.7], [0, 1]) == {"0": 0.5, "1": 0.7}, "equal sizes: nobody is a minority"
    assert accuracy_of_groups([None, 0.7], [0, 1]) == {"1": 0.7}
    assert accuracy_of_groups([0.5], None) == accuracy_of_groups((), [0]) == {}


# ---- in a run


class Clusters(Strategy):
    """Gives clusters and a picture of them."""

    def metrics(self, view):
        return {"group": torch.tensor([5.0, 5.0, 6.0, float("nan")])}

    def client_embedding(self, view):
        points = ((0.0, 1.0), (0.5, 1.0), (9.0, -1.0))
        return ClientEmbedding("Updates of round 1", (0, 1, 2), points, (0, 0, 1), (1.0, 0.9, 1.0), 2, 7.5, True)


def test_a_run_says_how_groups_fare_and_keeps_a_picture_of_the_clients(make_loop):
    loop = make_loop(parts=[Clusters()], rounds=2)
    facts = dataclasses.replace(loop.config.facts, truth={"groups": (0, 0, 1, 1)})
    loop.config = dataclasses.replace(loop.config, facts=facts)
    result = loop.run()
    accuracies = [client["accuracy"] for client in result.clients]
    assert [client["true_group"] for client in result.clients] == [0, 0, 1, 1]
    assert result.accuracy_of_groups == accuracy_of_groups(accuracies, [0, 0, 1, 1])
    assert result.headline_gap == max(accuracies) - min(accuracies)
    assert result.metrics["clustering_accuracy"] == result.metrics["adjusted_rand_index"] == 1.0
    assert "minority_recall" not in result.metrics
    kept = json.loads((loop.output_dir / "result.json").read_text())
    assert kept["accuracy_of_groups"] == result.accuracy_of_groups
    losses = [score.loss for score in loop.evaluate(loop.state).clients]
    assert [client["loss"] for client in kept["clients"]] == pytest.approx(losses)
    picture = kept["client_embedding"]
    assert picture["points"] == [[0.0, 1.0], [0.5, 1.0], [9.0, -1.0]] and picture["confident"] is True
    assert result.client_embedding.separation == 7.5
    with pytest.raises(ValueError, match="one point"):
        dataclasses.replace(result.client_embedding, cluster=(0,))
