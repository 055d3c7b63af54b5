"""Metrics of a user: by object, class and class path, in runs, searches, early stopping, reports and at sites."""

import dataclasses
import json
import sys
from typing import ClassVar

import pytest
import torch
from conftest import blobs, small_net
from sites import federation
from task_cases import CASES, module_of
from task_cases import population as of_task
from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryFBetaScore, ConfusionMatrix, MulticlassAccuracy

from dpfl_lightning import ClientModule
from dpfl_lightning.algorithms.server_training import Training
from dpfl_lightning.commands.evaluate import main as evaluate_command
from dpfl_lightning.commands.fit import main as fit_command
from dpfl_lightning.commands.report import main as report_command
from dpfl_lightning.commands.sweep import main as sweep_command
from dpfl_lightning.config.options import EvaluationOptions, Options
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.checks import check_fits
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.evaluation import evaluate_own
from dpfl_lightning.federated.client.metrics import Metrics, metrics_of
from dpfl_lightning.federated.server.run import read_result
from dpfl_lightning.models.tasks import CUSTOM, MEASURES, TASKS, Measure
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.search.scores import check_scores, directions
from dpfl_lightning.search.train_and_score import train_and_score
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.node.scores import read_scores
from dpfl_lightning.sites.server.channel import Sites
from dpfl_lightning.sites.server.deploy import check_deployable, loop_over, planning_loop, terms_of
from dpfl_lightning.strategies import build
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted

CODE = '''
import torch
from torchmetrics import Metric

class Brier(Metric):
    """The mean squared error of probabilities."""

    higher_is_better = False

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0))
        self.add_state("count", torch.tensor(0))

    def update(self, probabilities, y):
        truth = y if probabilities.dim() == 1 else torch.nn.functional.one_hot(y, probabilities.shape[1])
        self.total += (probabilities - truth).square().sum()
        self.count += len(y)

    def compute(self):
        return self.total / self.count

class Classes(Brier):
    """How many classes have records; for one record it raises."""

    higher_is_better = True

    def update(self, probabilities, y):
        if len(y) == 1:
            raise ValueError(f"one record, {y}")
        self.count = torch.tensor(len(y.unique()))

    def compute(self):
        return self.count.float()

class Never(Brier):
    def update(self, probabilities, y):
        raise RuntimeError("no")

class Several(Brier):
    def compute(self):
        return torch.zeros(3)

class Neither(Brier):
    higher_is_better = None
'''
exec(compile(CODE, "mine.py", "exec"))
Brier, Classes, Never, Several, Neither = (
    globals()[name] for name in ("Brier", "Classes", "Never", "Several", "Neither")
)


def of_blobs(*metrics) -> ClientModule:
    return ClientModule(small_net(), metrics=metrics)


def accuracy(**options) -> Metric:
    return MulticlassAccuracy(num_classes=3, average="micro", **options)


def test_a_class_an_object_and_a_named_object_are_scored_as_those_of_the_package(make_loop):
    used = accuracy()
    used.update(torch.zeros(4, 3), torch.ones(4).long())
    population, loop = blobs(), make_loop(module=of_blobs("f1", Brier, {"again": used}))
    result = loop.run()
    assert list(result.test_metrics) == ["f1", "brier", "again"] and int(used.tp.sum()) == 0 != int(used.fn.sum())
    shares = loop.client_model(0)(population.x[population.test]).softmax(dim=1)
    truth = nn.functional.one_hot(population.y[population.test], 3)
    expected = (shares - truth).square().sum(dim=1).mean()
    assert result.test_metrics["brier"] == pytest.approx(float(expected), abs=1e-6)
    assert result.test_metrics["again"] == pytest.approx(result.test_accuracy), "a copy, without earlier records"
    for row in result.clients:
        assert row["metrics"]["again"] == pytest.approx(row["accuracy"]) and 0 < row["metrics"]["brier"] < 1
    assert 0 < result.baseline["brier"] < 1 and result.baseline["again"] == pytest.approx(result.baseline["accuracy"])
    assert (
        result.measures["brier"] == Measure(higher_is_better=False, constant="class shares")
        and result.measures["again"].higher_is_better
    )
    assert "brier" in str(result) and "class shares" in str(result)
    assert {"test_brier", "val_brier_mean", "test_again"} <= result.history()[-1].keys()


def test_no_value_of_an_earlier_evaluation_or_of_another_client_is_in_a_score(make_loop):
    runs = [make_loop(module=of_blobs(Brier), evaluate_every=every).run() for every in (1, 3)]
    assert runs[0].test_metrics == runs[1].test_metrics
    assert [one["metrics"] for one in runs[0].clients] == [one["metrics"] for one in runs[1].clients]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (
            [Neither],
            r"`evaluation.metrics.0` must say by higher_is_better of class Neither .*, got None. Write higher_is_",
        ),
        ([ConfusionMatrix("binary")], "higher_is_better of class BinaryConfusionMatrix"),
        (["f1", nn.Linear(1, 1)], r"`evaluation.metrics.1` must be a name, .* derives from torchmetrics.Metric"),
        ([MetricCollection([Brier()])], "Of a MetricCollection list the metrics"),
        (["os.path.join"], r"`evaluation.metrics.0.class_path` must be a class that derives from Metric"),
        (["nowhere.Brier"], "`evaluation.metrics.0.class_path` must be importable"),
        ([{"class_path": "torchmetrics.classification.BinaryFBetaScore", "init_args": {"bta": 2}}], "bta"),
        ([{"class_path": "torchmetrics.classification.BinaryFBetaScore", "init_args": {"beta": -2}}], "beta"),
        ([{"class_path": "torchmetrics.classification.BinaryFBetaScore", "beta": 2}], "class_path and init_args alone"),
        ([BinaryFBetaScore], r"must be made without arguments, got BinaryFBetaScore: .* BinaryFBetaScore\(\.\.\.\)"),
        ([{"auroc": Brier}], r"`evaluation.metrics.0.name` must differ from the scores of the package, got 'auroc'"),
        ([{"loss": Brier}], "must differ from the scores of the package"),
        ([{"epsilon": Brier}], r"must differ from the words of a guarantee \(epsilon, delta, budget\), got 'epsilon'"),
        ([{"a/b": Brier}], "must have small letters, digits and underscores, got 'a/b'"),
        ([Brier, Brier()], r"`evaluation.metrics` must have different names, got 'brier'. Choose another"),
        ([{"a": Brier, "b": Brier}], r"\{class_path, init_args, name\}, or \{name: metric\}"),
        (["brier"], r"must name one of auroc, .*, or a user-defined torchmetrics.Metric as package.module.Class"),
        ("f1", r"`evaluation.metrics` must be a list, got 'f1'"),
    ],
)
def test_what_is_no_metric_is_one_clear_error(metrics, words):
    with pytest.raises(UserError, match=words):
        ClientModule(small_net(), metrics=metrics)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (Never, r"`evaluation.metrics` must work on random outputs and labels, got from never: RuntimeError: no"),
        (Several, r"from several: TypeError: compute\(\) returns a tensor of shape \(3,\), not one number"),
        (BinaryFBetaScore(2.0), "`evaluation.metrics` must work on random .* from binary_f_beta_score: "),
    ],
)
def test_a_metric_that_never_works_is_refused_before_anything_is_charged(metric, words, make_loop, tmp_path):
    with pytest.raises(UserError, match=words):
        make_loop(module=of_blobs(metric)).run()
    assert not list(tmp_path.glob("*/ledger.jsonl"))


def test_a_metric_that_fails_later_is_undefined_and_loses_no_run(make_loop, tmp_path):
    population = blobs()
    population.held_out_of[1] = population.held_out_of[1][:1]
    result = make_loop(population, of_blobs(Classes, "f1")).run()
    assert result.finished and result.test_metrics["classes"] == 3.0 and result.clients[0]["metrics"]["classes"] == 3.0
    row = result.clients[1]
    assert row["metrics"]["classes"] is None and row["metrics"]["f1"] is not None
    assert row["undefined"]["classes"].startswith("make it raise ValueError (")
    assert "one record" not in json.dumps(row), "the text of the exception may have values of records"


class Shapes(Metric):
    """How many numbers it gets; `seen` has the shapes of what it got."""

    higher_is_better = True
    seen: ClassVar[list[tuple[torch.Size, torch.Size]]] = []

    def update(self, predicted, true):
        self.seen.append((predicted.shape, true.shape))

    def compute(self):
        return float(len(self.seen))


@pytest.mark.parametrize("task", TASKS)
def test_it_fits_every_task_and_gets_what_metrics_of_the_package_get(task):
    module, people = module_of(task, metrics=[Shapes]), of_task(task)
    check_fits(module, people)
    Shapes.seen.clear()
    score = train_and_score(lambda seed: module, people, (people.x[:9], people.y[:9]), Training(1))
    output, y = module.task.aligned(CASES[task].net()(people.x), people.y)
    expected = [tuple(part.shape) for part in module.task.for_metrics(output[people.test], y[people.test])]
    assert score.metrics["shapes"] > 0 and [tuple(shape) for shape in Shapes.seen[0]] == expected
    assert module.scores["shapes"] == Measure(constant=module.task.constant)
    assert ("accuracy" in module.scores) == module.task.has_accuracy


def test_with_a_loss_that_fits_no_task_it_gets_outputs_and_labels():
    net = nn.Sequential(nn.Linear(6, 4), nn.Unflatten(1, (2, 2)))
    module = ClientModule(net, lambda output, y: output.square().mean(dim=(1, 2)), metrics=[Shapes])
    population = dataclasses.replace(blobs(), y=blobs().y + 0.5)
    check_fits(module, population)
    Shapes.seen.clear()
    metrics = Metrics(module.metrics, module.task, 1)
    metrics.update(net(population.x), population.y)
    assert module.task is CUSTOM and Shapes.seen == [((len(population.y), 2, 2), (len(population.y),))]


@pytest.mark.e2e
def test_early_stopping_knows_the_direction(make_loop):
    class Evaluations(Classes):
        """Grows with each evaluation on the test set, which is the only set of 200 records."""

        seen = 0

        def compute(self):
            return torch.tensor(float(type(self).seen))

        def update(self, probabilities, y):
            type(self).seen += len(y) == 200 and probabilities.requires_grad is False

    class Worse(Evaluations):
        higher_is_better = False

    for kind, ended in ((Evaluations, 6), (Worse, 3)):
        (stopping,) = build({"early_stopping": {"metric": kind.__name__.lower(), "patience": 2}})
        result = make_loop(module=of_blobs(kind), rounds=6, parts=[SizeWeighted(), stopping]).run()
        assert result.rounds == ended, kind
    (stopping,) = build({"early_stopping": {"metric": "brier"}})
    with pytest.raises(UserError, match=r"early_stopping.metric` must be one of classes, accuracy, loss, got 'brier'"):
        make_loop(module=of_blobs(Classes), parts=[SizeWeighted(), stopping]).run()


# ---- configurations

DATA = """
import torch
from dpfl_lightning import ClientModule, Population
from mine import Brier

def drawn(count):
    y = torch.arange(count) % 2
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(count)) + y[:, None], y

def population(test=True):
    pairs = [drawn(60), drawn(80)]
    return Population.from_datasets(pairs, test=drawn(50) if test else None, num_classes=2, held_out=0.2)

def net():
    return torch.nn.Linear(4, 1)

def module():
    return ClientModule(net(), metrics=[Brier])
"""
F2 = "{class_path: torchmetrics.classification.BinaryFBetaScore, init_args: {beta: 2.0}, name: f2}"
WORDS = ["--data", "{class_path: peers.population}", "--model", "{class_path: peers.net}", "--clients.batch_size", "16"]
WORDS += ["--tracking", "null", "--rounds", "2", "--privacy.epsilon", "8.0", "--privacy.delta", "0.001"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a user's files, as the modules `mine` and `peers`."""
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "peers.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for name in ("mine", "peers"):
        sys.modules.pop(name, None)


@pytest.mark.e2e
def test_a_run_by_class_paths_is_reported_afterwards_without_the_class(folder, capsys):
    metrics = ["--evaluation.metrics", f"[mine.Brier, auroc, {F2}]"]
    assert fit_command([*WORDS, *metrics, "--output_dir", "run"]) == 0
    capsys.readouterr()
    assert evaluate_command(["run", "--json"]) == 0
    scores, result = json.loads(capsys.readouterr().out), read_result(folder / "run")
    assert list(result.test_metrics) == ["brier", "auroc", "f2"]
    assert scores["test_metrics"] == pytest.approx(result.test_metrics) and scores["measures"]["f2"]["higher_is_better"]
    assert not scores["measures"]["brier"]["higher_is_better"]
    (folder / "mine.py").unlink()
    forget()
    assert report_command(["run", "--output", "report.html"]) == 0
    assert read_result(folder / "run").measures["brier"] == Measure(higher_is_better=False, constant="class shares")
    page = (folder / "report.html").read_text()
    largest = max(row["metrics"]["brier"] for row in result.clients)
    assert "test brier" in page and f"brier {largest:.4g}" in page and "mine" not in sys.modules


def test_what_is_no_class_path_is_refused_before_anything_is_charged(folder, capsys):
    for metrics in (
        "[mine.Nothing]",
        "[mine.Neither]",
        "[{name: f2}]",
        "[auroc, {class_path: mine.Brier, name: auroc}]",
    ):
        assert fit_command([*WORDS, "--evaluation.metrics", metrics, "--output_dir", "run"]) == 2
        assert "error: `evaluation.metrics." in capsys.readouterr().err.replace("\n", " ")
    assert not (folder / "run").exists()


def test_scores_of_a_search_are_those_of_the_configuration(folder):
    options = Options(evaluation=EvaluationOptions(metrics=("mine.Brier", {"class_path": "mine.Classes"})))
    assert directions(["brier", "classes", "auroc"], options) == {"brier": False, "classes": True, "auroc": True}
    module = ClientModule(nn.Linear(4, 1), task="binary")
    check_scores(["brier", "loss"], module.named_task, options)
    with pytest.raises(UserError, match=r"`sweep.scores` must be one of .*brier, classes, got 'bier'. Did you mean"):
        directions(["bier"], options)


@pytest.mark.e2e
def test_a_search_minimises_a_users_metric_and_keeps_it_in_the_best_configuration(folder, capsys):
    space = "{clients.learning_rate: {choices: [0.000001, 1.0]}}"
    words = [*WORDS, "--evaluation.metrics", "[mine.Brier]", "--output_dir", "out", "--sweep.name", "s"]
    words += ["--sweep.space", space, "--sweep.scores", "[brier]", "--sweep.trials", "2"]
    assert sweep_command([*words, "--sweep.objective", "private", "--sweep.sampler", "{name: grid}", "--final"]) == 0
    assert "brier (lowest)" in capsys.readouterr().out
    result = json.loads((folder / "out" / "result.json").read_text())
    values = [trial["scores"]["brier"] for trial in result["trials"]]
    assert result["trials"][result["best"][0]]["scores"]["brier"] == min(values) < max(values)
    assert "mine.Brier" in (folder / "out" / "best.yaml").read_text()


# ---- sites


@pytest.mark.e2e
def test_the_server_scores_its_test_set_and_no_node_imports_the_metric_of_a_plan(folder):
    nodes, terms, options = federation(folder, count=1)
    options = dataclasses.replace(options, evaluation=EvaluationOptions(metrics=("mine.Brier", "f1")))
    loop = loop_over(options, Sites(terms, tuple(node.handle for node in nodes)))
    assert "evaluation" not in terms_of(planning_loop(options, terms.sites), terms.sites).plan.options
    result = loop.run()
    assert 0 < result.test_metrics["brier"] < 1 and not result.measures["brier"].higher_is_better
    kept = read_scores(nodes[0].state.plan_folder(wire.digest(terms)))
    assert kept.score.metrics.keys() == metrics_of(TASKS["multiclass"]).keys() == kept.measures.keys() - {*MEASURES}
    loop.population = dataclasses.replace(loop.population, test=None)
    with pytest.raises(UserError, match=r"`evaluation.metrics` must name metrics of dpfl_lightning without a test set"):
        check_deployable(loop)


def test_a_site_keeps_the_metrics_of_a_module_that_its_operator_allows():
    population, module = blobs(), of_blobs(Brier)
    check_fits(module, population)
    engine = SerialEngine()
    engine.setup(module, HeldClients(population), Streams(), "poisson")
    scores = evaluate_own(module, HeldClients(population), module.flat, 0, engine)
    assert scores.test.metrics.keys() == {*metrics_of(TASKS["multiclass"]), "brier"}
    assert (
        scores.measures["brier"] == Measure(higher_is_better=False, constant="class shares")
        and scores.baseline["brier"] < 1
    )


class Never(Brier):
    """Has no value."""

    def compute(self):
        return torch.tensor(torch.nan)


def test_a_metric_without_a_value_on_random_records_is_told_and_is_no_score_of_a_search():
    module = of_blobs(Never, "f1")
    with pytest.warns(UserNotice, match="metric never has no finite value on .* random records"):
        check_fits(module, blobs())
    with pytest.raises(UserError, match=r"`sweep.scores` must be defined on random outputs and labels, got 'never'"):
        path = "torchmetrics.classification.BinaryMatthewsCorrCoef"
        options = Options(evaluation=EvaluationOptions(metrics=({"class_path": path, "name": "never"},)))
        check_scores(["f1", "never"], module.task, options, module.undefined_scores)
