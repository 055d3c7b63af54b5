"""What a run sends, and how long a simulated network takes for it."""

import pytest
from conftest import break_off

from dpfl_lightning import strategies
from dpfl_lightning.config.options import NetworkOptions
from dpfl_lightning.federated.server.traffic import Network

SLOW = NetworkOptions(down_megabits_per_second=[8, 4, 8, 8], up_megabits_per_second=2, latency_seconds=0.25)


def test_a_megabit_is_a_million_bits_a_number_has_32():
    network = Network(SLOW, 4, seed=0)
    assert network.seconds({0: 1_000_000}) == pytest.approx([32 / 8 + 0.25])
    assert network.seconds({1: 1_000_000}, up=1_000_000) == pytest.approx([32 / 4 + 32 / 2 + 0.25])


@pytest.mark.e2e
def test_rounds_add_up_and_survive_a_resumed_run(make_loop, tmp_path):
    plain, whole = make_loop(), make_loop(network=SLOW)
    model, quiet, result = plain.module.num_params, plain.run(), whole.run()
    assert quiet.metrics["floats_down"] == quiet.metrics["floats_up"] == 3 * 4 * model
    assert "network_seconds" not in quiet.metrics and plain.state.models.equal(whole.state.models)
    assert result.metrics["network_seconds"] == pytest.approx(3 * (32e-6 * model * (1 / 4 + 1 / 2) + 0.25))
    only_up = make_loop(network=NetworkOptions(up_megabits_per_second=2)).run()
    assert only_up.metrics["network_seconds"] == pytest.approx(3 * 32e-6 * model / 2)
    broken = make_loop(network=SLOW)
    break_off(broken, 3)
    before = broken.totals.client_seconds
    resumed = make_loop(network=SLOW, output_dir=broken.output_dir).run(resume=True)
    assert resumed.client_seconds >= before > 0
    for name in ("network_seconds", "floats_down"):
        assert resumed.metrics[name] == result.metrics[name]


@pytest.mark.e2e
def test_what_strategies_send_beside_the_model_counts(make_loop):
    """Three models go to everybody to choose from; the start of the round is among them and takes no time again."""
    model = make_loop().module.num_params
    choosing = strategies.build({"ifca": {"num_clusters": 3, "selection_rounds": 1}})
    metrics = make_loop(parts=choosing, rounds=2, network=SLOW).run().metrics
    assert metrics["floats_up"] == 2 * 4 * model + 4 and metrics["floats_down"] == (1 + 3) * 4 * model
    asked, trained = 32e-6 * (3 * model / 4 + 1 / 2) + 0.25, 32e-6 * model / 2 + 0.25
    second_round = 32e-6 * model * (1 / 4 + 1 / 2) + 0.25
    assert metrics["network_seconds"] == pytest.approx(asked + trained + second_round)
    metrics = make_loop(parts=strategies.build({"mr_mtl": {}}), rounds=1).run().metrics
    assert metrics["floats_down"] == 2 * metrics["floats_up"], "the mean of all models beside the client's"
