"""What a recorder reads off a run."""

from __future__ import annotations

import pytest

from experiments.papers.recorder import Recorder, accuracies


def test_accuracies_and_how_equal_they_are():
    clients = [{"accuracy": one, "num_records": 10 * (i + 1)} for i, one in enumerate((0.9, 0.5, 0.6, 0.7, 0.8, 1.0))]
    found = accuracies([*clients, {"accuracy": None, "num_records": 1}], 0.25)
    assert found["accuracy"] == pytest.approx(75.0) and found["test_accuracy"] == 25.0
    assert found["accuracy_std"] == pytest.approx(17.078, abs=1e-3)
    assert found["accuracy_worst"] == 50.0 and found["accuracy_best"] == 100.0 and found["accuracy_gap"] == 50.0
    assert found["accuracy_worst_fifth"] == pytest.approx(55.0)  # of six clients two
    assert found["accuracy_best_fifth"] == pytest.approx(95.0)
    assert found["accuracy_smallest"] == pytest.approx(90.0)
    assert found["accuracy_weighted"] == pytest.approx((90 + 2 * 50 + 3 * 60 + 4 * 70 + 5 * 80 + 6 * 100) / 21)


def test_clients_of_equal_size_are_the_smallest_together():
    clients = [{"accuracy": 0.5, "num_records": 10}, {"accuracy": 0.7, "num_records": 10}]
    assert accuracies(clients, None)["accuracy_smallest"] == pytest.approx(60.0)


def test_nothing_is_read_where_nothing_was_evaluated():
    assert accuracies([{"accuracy": None, "num_records": 10}], None) == {}


def test_a_run_is_read(make_loop):
    recorder = Recorder()
    result = make_loop(parts=[recorder], rounds=3, evaluate_every=2).run()
    found = recorder.record
    assert list(found["curve"]) == ["2", "3"] and found["curve"]["3"] == pytest.approx(found["values"]["accuracy"])
    assert found["values"]["test_accuracy"] == pytest.approx(100 * result.test_accuracy)
    assert found["clients"]["epsilon_budget"] == [4.0, 6.0, 8.0, 10.0] and recorder.device == "cpu"


def test_a_resumed_run_is_read_as_a_whole(make_loop, tmp_path):
    class StopsAfterTwo(Recorder):
        def on_round_end(self, view, report):
            super().on_round_end(view, report)
            if report.round == 2:
                raise KeyboardInterrupt

    folder, again, whole = tmp_path / "run", Recorder(), Recorder()
    with pytest.raises(KeyboardInterrupt):
        make_loop(parts=[StopsAfterTwo()], rounds=4, output_dir=folder).run()
    make_loop(parts=[again], rounds=4, output_dir=folder).run(resume=True)
    make_loop(parts=[whole], rounds=4).run()
    assert list(whole.record["curve"]) == ["1", "2", "3", "4"]
    assert again.record["values"] == whole.record["values"]
    assert set(again.record["curve"].items()) <= set(whole.record["curve"].items()) and "4" in again.record["curve"]
