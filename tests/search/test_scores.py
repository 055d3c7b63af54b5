"""Scores of trials: which are known, in which direction, of which task, and what several seeds make of them."""

import pytest

from dpfl_lightning.config.options import EvaluationOptions, Options
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client import metrics
from dpfl_lightning.models.tasks import TASKS
from dpfl_lightning.search.scores import Outcome, check_scores, directions, reported


def test_every_metric_of_a_run_has_a_direction_or_is_refused():
    searched = [name for name, metric in metrics.METRICS.items() if metric.measure().target is None]
    known = directions([*searched, "accuracy", "loss", "num_params", "seconds"], Options())
    assert known["auroc"] and known["r2"] and known["accuracy"]
    assert not (known["mae"] or known["perplexity"] or known["loss"] or known["num_params"])
    for name in metrics.METRICS.keys() - {*searched}:
        with pytest.raises(UserError, match=r"`sweep\.scores` must be scores whose best value is the largest or"):
            directions([name], Options())


def test_an_unknown_score_is_refused_with_the_way_out():
    known = r"`sweep\.scores` must be one of accuracy, loss, .*'aurok'\. Did you mean `auroc`"
    with pytest.raises(UserError, match=known):
        directions(["aurok"], Options())


@pytest.mark.parametrize(("task", "score"), [("regression", "accuracy"), ("regression", "auroc"), ("binary", "mae")])
def test_a_score_of_another_task_is_refused(task, score):
    with pytest.raises(UserError, match=rf"`sweep\.scores` must be scores of task {task} \(.*loss.*got '{score}'"):
        check_scores([score], TASKS[task], Options())
    check_scores(["loss", "num_params", *metrics.metrics_of(TASKS[task])], TASKS[task], Options())


@pytest.mark.parametrize(
    ("scores", "given", "expected"),
    [
        (["accuracy", "seconds"], (), ()),
        (["auroc"], (), ("auroc",)),
        (["auroc", "f1"], ("f1",), ("f1", "auroc")),
        (["mse"], (), ("mae", "r2", "mse")),
        (["mae"], ("r2",), ("r2", "mae")),
    ],
)
def test_runs_report_the_scores_beside_their_own_metrics(scores, given, expected):
    options = Options(privacy=None, evaluation=EvaluationOptions(metrics=given))
    assert reported(scores, options).evaluation.metrics == expected


def test_a_score_is_the_mean_over_seeds_with_its_spread():
    outcome = Outcome([{"mae": 1.0, "loss": 4.0}, {"mae": 2.0, "loss": None}, {"mae": 3.0, "loss": 5.0}], 7, 0.5)
    assert outcome.mean("mae") == 2.0 and outcome.mean("num_params") == 7
    assert outcome.notes() == {"mae": 2.0, "mae_std": 1.0, "num_params": 7, "seconds": 0.5}
    with pytest.raises(UserError, match=r"`sweep\.scores` must be defined on the records that score, got 'loss'"):
        outcome.mean("loss")
    assert Outcome([{"auroc": 0.5}], 7, 0.5).notes() == {"auroc": 0.5, "num_params": 7, "seconds": 0.5}
