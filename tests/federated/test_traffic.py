"""What a run sends, and how long a simulated network takes for it."""

from __future__ import annotations

import json

import pytest
from conftest import PowerCut, cut_at

from dpfl_lightning import strategies
from dpfl_lightning.config.options import NetworkOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.server.traffic import Network

SLOW = NetworkOptions(down_megabits_per_second=[8, 4, 8, 8], up_megabits_per_second=2, latency_seconds=0.25)


def test_a_megabit_is_a_million_bits_and_a_number_has_32():
    network = Network.of(SLOW, 4, seed=0)
    assert network.seconds({0: 1_000_000}) == pytest.approx(32 / 8 + 0.25)
    assert network.seconds({1: 1_000_000}, up=1_000_000) == pytest.approx(32 / 4 + 32 / 2 + 0.25)
    assert network.seconds({}) == 0.0


def test_a_round_takes_as_long_as_its_slowest_client():
    network = Network.of(SLOW, 4, seed=0)
    assert network.seconds({0: 1000, 1: 1000}) == network.seconds({1: 1000}) > network.seconds({0: 1000})


def test_nothing_is_simulated_unless_it_is_asked_for(make_loop):
    assert Network.of(NetworkOptions(), 4, seed=0) is None
    result = make_loop(rounds=1).run()
    assert "network_seconds" not in result.metrics and result.metrics["floats_up"] > 0


def test_rounds_add_up_and_what_is_not_given_takes_no_time(make_loop):
    model = make_loop().module.num_params
    result = make_loop(rounds=3, network=SLOW).run()
    assert result.metrics["network_seconds"] == pytest.approx(3 * (32e-6 * model * (1 / 4 + 1 / 2) + 0.25))
    only_up = make_loop(rounds=3, network=NetworkOptions(up_megabits_per_second=2)).run()
    assert only_up.metrics["network_seconds"] == pytest.approx(3 * 32e-6 * model / 2)


def test_a_query_is_an_exchange_of_its_own(make_loop):
    """Three models go to everybody to choose from; the start of the round is among them and takes no time again."""
    model = make_loop().module.num_params
    choosing = strategies.build({"ifca": {"num_clusters": 3, "selection_rounds": 1}})
    result = make_loop(parts=choosing, rounds=1, network=SLOW).run()
    asked, trained = 3 * 32e-6 * model / 4 + 0.25, 32e-6 * model / 2 + 0.25
    assert result.metrics["network_seconds"] == pytest.approx(asked + trained)


def test_the_network_changes_nothing_of_the_run(make_loop):
    plain, simulated = make_loop(rounds=2), make_loop(rounds=2, network=SLOW)
    plain.run(), simulated.run()
    assert plain.state.models.equal(simulated.state.models)


def test_simulated_time_and_clients_time_go_on_in_a_resumed_run(make_loop, tmp_path):
    whole = make_loop(rounds=3, network=SLOW).run()
    place = {"output_dir": tmp_path / "cut", "network": SLOW}
    loop = make_loop(rounds=3, **place)
    cut_at(loop, 3)
    with pytest.raises(PowerCut):
        loop.run()
    before = loop.totals.client_seconds
    resumed = make_loop(rounds=3, **place).run(resume=True)
    assert resumed.metrics["network_seconds"] == whole.metrics["network_seconds"]
    assert resumed.client_seconds > before * 0.5 > 0


def test_clients_work_is_part_of_the_rounds(make_loop):
    loop = make_loop(rounds=2)
    result = loop.run()
    assert 0 < result.client_seconds < result.training_seconds <= result.wall_seconds
    assert json.loads((loop.output_dir / "result.json").read_text())["client_seconds"] == result.client_seconds


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"up_megabits_per_second": 0.0}, "network.up_megabits_per_second"),
        ({"down_megabits_per_second": [1.0, 2.0]}, "network.down_megabits_per_second"),
        ({"latency_seconds": -0.1}, "network.latency_seconds"),
    ],
)
def test_bad_numbers_are_named(options, key, make_loop):
    with pytest.raises(UserError, match=key):
        make_loop(network=NetworkOptions(**options))
