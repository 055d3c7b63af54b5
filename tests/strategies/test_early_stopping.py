"""Early stopping: when a run ends, what its guarantee then states, and runs without public records."""

import csv
import dataclasses
import json
import math
from pathlib import Path

import pytest
from conftest import blobs, break_off
from fakes import a_view
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from dpfl_lightning.commands.ledger import main as ledger
from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.evaluation import Score
from dpfl_lightning.privacy.accounting.guarantee import ENDS_BY_RESULTS
from dpfl_lightning.reporting.loggers import Loggers
from dpfl_lightning.runtime.text import at_most
from dpfl_lightning.strategies import build
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted


def stopping(**options):
    (strategy,) = build({"early_stopping": options})
    return strategy


def after(view, round, metric, value):
    """The view after a round whose models have this score on the test set."""
    score = Score(value if metric == "accuracy" else None, value if metric == "loss" else 1.0, {"auroc": value})
    state = dataclasses.replace(view.state, round=round)
    return dataclasses.replace(view, state=state, test_score=score)


@pytest.mark.parametrize(
    ("metric", "values", "ends_after"),
    [
        ("loss", [0.9, 0.8, 0.85, 0.81, 0.7], 4),
        ("loss", [0.9, 0.8, 0.85, 0.7, 0.8], None),
        ("auroc", [0.6, 0.7, None, 0.65, 0.7], 5),
        ("loss", [math.nan, 0.9, 0.8, math.nan, 0.7], None),
        ("loss", [math.nan, math.nan], 2),
        ("accuracy", [0.5, 0.6, 0.7, 0.8, 0.9], None),
    ],
)
@pytest.mark.filterwarnings("ignore:the test set does not define")
def test_it_ends_after_evaluations_without_a_better_score(metric, values, ends_after, tmp_path):
    strategy, ended = stopping(metric=metric, patience=2), None
    for round, value in enumerate(values, 1):
        view = after(a_view(tmp_path), round, metric, value)
        again = stopping(metric=metric, patience=2)
        again.load_state_dict(strategy.state_dict())
        assert again.stop(view) == strategy.stop(view) == strategy.stop(view), "a round counts once"
        ended = ended or (round if strategy.stop(view) else None)
    assert ended == ends_after


@pytest.mark.e2e
def test_an_interrupted_run_ends_in_the_same_round(make_loop):
    parts = [SizeWeighted(), stopping(metric="accuracy", patience=1)]
    unbroken = make_loop(parts=parts, rounds=30).run()
    assert 1 < unbroken.rounds < 29
    for at in range(2, unbroken.rounds + 1):
        parts = [SizeWeighted(), stopping(metric="accuracy", patience=1)]
        folder = break_off(make_loop(parts=parts, rounds=30), at).output_dir
        parts = [SizeWeighted(), stopping(metric="accuracy", patience=1)]
        resumed = make_loop(parts=parts, rounds=30, output_dir=folder).run(resume=True)
        assert resumed.rounds == unbroken.rounds and resumed.reason == unbroken.reason


@pytest.mark.e2e
@pytest.mark.parametrize("privacy", [PrivacyOptions(epsilon=4.0), PrivacyOptions(noise_multiplier=1.0)])
def test_the_guarantee_of_a_run_that_ended_early_is_that_of_the_whole_plan(privacy, make_loop, tmp_path, capsys):
    logger = CSVLogger(tmp_path / "logs")
    parts = [SizeWeighted(), stopping(metric="accuracy", patience=1), Loggers([logger])]
    loop = make_loop(parts=parts, rounds=30, privacy=privacy)
    result = loop.run()
    assert result.rounds < 30 and "accuracy has not improved in 1 evaluations" in result.reason
    whole = make_loop(parts=[SizeWeighted()], rounds=30, privacy=privacy).run()
    assert result.guarantee.epsilon == pytest.approx(whole.guarantee.epsilon, rel=1e-6)
    spent = [one["epsilon_spent"] for one in result.clients]
    assert spent == pytest.approx([one["epsilon_spent"] for one in whole.clients], rel=1e-6)
    assert "the whole budget is what holds" in str(result.guarantee)
    rows = [json.loads(line) for line in (loop.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["values"]["train_epsilon_max"] == max(spent), "curves end in what is guaranteed"
    assert list(rows[-1]["clients"]["train_epsilon"].values()) == spent
    assert rows[-2]["values"]["train_epsilon_max"] < max(spent)
    logged = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
    assert float(logged[-1]["train_epsilon_max"]) == pytest.approx(max(spent)), "so do those of loggers"
    page = (loop.output_dir / "guarantee.html").read_text()
    assert f"(epsilon {at_most(max(spent))})" in page and ENDS_BY_RESULTS in page
    assert ledger([str(loop.output_dir)]) == 0
    text = capsys.readouterr().out
    assert f"Largest epsilon: {result.guarantee.words()[:30]}" in text and "Paid so far: epsilon at most" in text
    assert ledger([str(loop.output_dir), "--json"]) == 0
    clients = json.loads(capsys.readouterr().out)["clients"]
    assert [one["guaranteed"] for one in clients] == spent
    assert all(one["epsilon"] < one["guaranteed"] for one in clients), "what was paid is not the guarantee"


def test_what_cannot_decide_is_refused_before_anything_is_spent(make_loop):
    population = dataclasses.replace(blobs(), test=None)
    with pytest.raises(
        UserError, match=r"`strategies.early_stopping` must have a public test set.*data.init_args.test"
    ):
        make_loop(population, parts=[SizeWeighted(), stopping()]).plan_schedule()
    loop = make_loop(parts=[SizeWeighted(), stopping(metric="auc")], options={"evaluation": {"metrics": ["auroc"]}})
    with pytest.raises(
        UserError, match=r"`strategies.early_stopping.metric` must be one of accuracy.*Did you mean `auroc`"
    ):
        loop.plan_schedule()


@pytest.mark.parametrize(
    ("metric", "module", "message"),
    [
        ("auroc", {}, r"be one of accuracy, loss, got 'auroc'. Name it: evaluation.metrics: \[auroc\]."),
        ("auc", {}, r"got 'auc'. Did you mean `auroc`\? Other scores are named by evaluation.metrics."),
        ("auroc1", {"metrics": ["auroc"]}, "be one of auroc, accuracy, loss, got 'auroc1'. Did you mean `auroc`"),
        ("accuracy", {"task": "regression"}, "be one of mae, r2, loss, got 'accuracy'"),
    ],
)
def test_a_metric_that_is_not_measured_is_refused_before_anything_is_spent(metric, module, message, make_loop):
    population = blobs()
    if "task" in module:
        population = dataclasses.replace(population, y=population.y.float(), num_classes=1)
    net = ClientModule(nn.Linear(population.input_shape[0], population.num_classes), **module)
    with pytest.raises(UserError, match=message):
        make_loop(population, net, parts=[SizeWeighted(), stopping(metric=metric)]).plan_schedule()


def test_a_metric_that_stays_undefined_warns_once_and_ends_nothing(tmp_path):
    strategy, view = stopping(metric="auroc", patience=1), a_view(tmp_path)
    with pytest.warns(UserNotice, match="the test set does not define auroc after round 1") as warned:
        for round in range(1, 5):
            assert strategy.stop(after(view, round, "auroc", None)) is None
    assert len(warned) == 1 and strategy.state_dict()["best"] is None
