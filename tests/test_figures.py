"""What the figures of a finished run draw."""

import dataclasses
import warnings

from fakes import a_result, a_view

from dpfl_lightning.federated.server.history import Round
from dpfl_lightning.federated.server.results import ClientEmbedding
from dpfl_lightning.reporting.charts import Chart, Series
from dpfl_lightning.reporting.figures import figures


def test_the_picture_of_the_clients_has_clusters_and_true_groups(tmp_path):
    """Two clusters of three clients: the marker is the cluster, the colour is the true group."""
    points = ((0.0, 0.0), (1.0, 1.0), (1.1, 1.0))
    found = {"separation": 24.27, "confident": True, "num_clusters": 4}
    client_embedding = ClientEmbedding("Updates", (0, 1, 2), points, (0, 0, 1), (1.0, 0.5, 0.0), **found)
    result = a_result(a_view(tmp_path), client_embedding=client_embedding)
    rows = tuple({**row, "true_group": 1 + (row["client"] == 0)} for row in result.clients)
    figure = figures([], dataclasses.replace(result, clients=rows))["clients"]
    (axes,) = figure.axes
    assert axes.get_title() == "Updates\n4 clusters, separation 24.3: confident"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["cluster 0", "cluster 1", "true group 1", "true group 2"]
    assert [text.get_text() for text in axes.texts] == ["0", "1", "2"]


def test_clients_with_one_curve_share_its_label(tmp_path):
    names = [*map(str, range(8)), "north $8$"]
    spent = {1: [0.1] * 9, 2: [0.2] * 8 + [1.2]}
    rounds = [Round(step, {}, {"train_epsilon": dict(zip(names, of, strict=True))}) for step, of in spent.items()]
    clients = tuple(
        {"client": i, "name": name, "epsilon_budget": None, "accuracy": None} for i, name in enumerate(names)
    )
    result = a_result(a_view(tmp_path), clients=clients)
    (figure,) = figures(rounds, result).values()
    assert [text.get_text() for text in figure.axes[0].texts] == ["0, 1, 2, 3, 4 and 3 more", "north $8$"]
    assert figure.get_supxlabel().replace("\n", " ") == str(result.guarantee), "an epsilon is shown with what it means"


def drawn(view, **metrics):
    return figures([], a_result(view, metrics=metrics))


def test_estimated_noise_is_drawn_against_the_true_one(tmp_path):
    figure = drawn(a_view(tmp_path), weight=[0.7, None, 0.1], estimated_noise_std=[0.011, 0.02, None])[
        "noise_estimated"
    ]
    axes = figure.axes[0]
    assert axes.collections[0].get_offsets().tolist() == [[0.01, 0.011], [0.02, 0.02]]
    words = [text.get_text() for text in axes.texts]
    assert words[:2] == ["0", "1"] and "median 1.05, from 1 to 1.1" in words[2]


def test_weights_are_drawn_quietest_first_unless_all_are_equal(tmp_path):
    view = a_view(tmp_path)
    figure = drawn(view, weight=[0.2, 0.7, 0.1])["weights"]
    assert [round(bar.get_height(), 6) for bar in figure.axes[0].patches] == [0.2, 0.7, 0.1]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0", "1", "2"]
    for equal in ([1 / 3] * 3, [None] * 3):
        assert "weights" not in drawn(view, weight=equal)


def test_participations_are_drawn_beside_budgets_unless_all_took_part_alike(tmp_path):
    view = a_view(tmp_path)
    above, below = drawn(view, quota=[2.0, 5.0, 3.0], participations=[2.0, 4.0, 3.0])["participation"].axes
    assert [bar.get_height() for bar in above.patches] == [5, 3, 2, 4, 3, 2], "largest quota first"
    budgets = [a_result(view).clients[client]["epsilon_budget"] for client in (1, 2, 0)]
    assert [bar.get_height() for bar in below.patches][:3] == budgets
    assert "participation" not in drawn(view, quota=[3.0] * 3, participations=[3.0] * 3)
    bare = a_result(view, metrics={"quota": [2.0, 5.0, 3.0], "participations": [2.0, 5.0, 3.0]})
    for client in bare.clients:
        client["epsilon_spent"] = None
    assert len(figures([], bare)["participation"].axes) == 1, "without privacy there is no budget"


def test_letters_that_no_font_has_are_drawn_without_a_warning():
    series = Series("\u7532 clinic", [1, 2], [0.5, 0.6])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Chart("\u7532", "round", "accuracy", [series]).image({series.name: "#123456"})
