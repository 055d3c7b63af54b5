"""How fast a rule converges, from the rounds that were evaluated."""

from types import SimpleNamespace

import pytest

from experiments.papers.noise_aware.convergence import Convergence

CLIENTS = [dict.fromkeys(("epsilon_spent", "epsilon_budget", "batch_size", "num_records", "noise_multiplier"), 1)]


@pytest.mark.parametrize(("goal", "rounds"), [(60, 4), (50, 2), (71, 7)])
def test_a_cell_has_the_curve_its_mean_and_the_first_round_that_reaches_the_goal(goal, rounds):
    recorder = Convergence(goal)
    for number, accuracy in ((1, None), (2, 0.5), (3, None), (4, 0.7), (6, 0.6)):
        recorder.on_round_end(None, SimpleNamespace(round=number, test_accuracy=accuracy))
    resumed = Convergence(goal)
    resumed.load_state_dict(recorder.state_dict())
    clients = [{**one, "accuracy": 0.5} for one in CLIENTS]
    resumed.on_fit_end(None, SimpleNamespace(rounds=6, clients=clients, test_accuracy=0.6))
    assert resumed.record["curve"] == [(2, 50), (4, 70), (6, 60)]
    assert resumed.record["values"]["speed"] == pytest.approx(60)
    assert resumed.record["values"]["rounds"] == rounds and resumed.record["values"]["test_accuracy"] == 60
