"""Tasks: loss, accuracy and metrics of each, how they are inferred, and one short run of each."""

import dataclasses
import itertools
import json
import math
import pickle
import re
from dataclasses import replace
from operator import itemgetter
from types import SimpleNamespace

import pytest
import sklearn.metrics as sk
import torch
from rooms import ROOT
from task_cases import CASES, NETS, K, N, T, V, module_of, population, records
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

from dpfl_lightning import ClientModule, FederatedLoop, Population
from dpfl_lightning.build import build_module
from dpfl_lightning.config.load import load
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Dataset
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client import evaluation
from dpfl_lightning.federated.client.answers import losses_at
from dpfl_lightning.federated.client.checks import check_fits
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.dummy_data import dummy_batch
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.client.identity import module_digest
from dpfl_lightning.federated.client.metrics import METRICS, Metric, Metrics, measures_of, metrics_of
from dpfl_lightning.federated.messages.evaluation import ClientModels
from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.models.tasks import (
    IGNORED,
    TASKS,
    Classification,
    ClassWeightedLoss,
    QuantileRegression,
    build_task,
    described,
    task_of,
)
from dpfl_lightning.papers.distillation.distillation import Distillation
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.sites.node.records import only


class Named(nn.Module):
    """A net that returns a dictionary, as those of Hugging Face."""

    def __init__(self, key: str = "logits") -> None:
        super().__init__()
        self.net, self.key = nn.Linear(4, K), key

    def forward(self, x):
        return {self.key: self.net(x)}


class WithLogits(Named):
    """A net that returns an object."""

    def forward(self, x):
        return SimpleNamespace(**super().forward(x))


def test_loss_is_the_mean_over_a_records_labels_and_right_is_what_counts():
    g = torch.Generator().manual_seed(0)
    for task, output_shape in (("segmentation", (3, K, 5, 5)), ("language_modeling", (3, T, V))):
        output, y = torch.randn(output_shape, generator=g), records(task)[1][:3]
        losses, (right, counted) = TASKS[task].loss(output, y), TASKS[task].hits(output, y)
        for row in range(3):
            logits = output[row].T if task == "language_modeling" else output[row]
            used = y[row] != -100
            assert counted[row] == used.sum() and right[row] == ((logits.argmax(0) == y[row]) & used).sum()
            expected = F.cross_entropy(logits[:, used].T, y[row][used]) if used.any() else torch.tensor(0.0)
            assert losses[row] == pytest.approx(expected.item())
    one, y = torch.randn(6, 1, generator=g), torch.tensor([0, 1, 1, 0, 1, 0])
    torch.testing.assert_close(
        TASKS["binary"].loss(one, y), F.binary_cross_entropy_with_logits(one[:, 0], y.float(), reduction="none")
    )
    assert TASKS["binary"].hits(one, y)[0].tolist() == ((one[:, 0] > 0) == y).tolist()
    many, labels = torch.randn(6, K, generator=g), torch.randint(2, (6, K), generator=g)
    expected = F.binary_cross_entropy_with_logits(many, labels.float(), reduction="none").mean(dim=1)
    torch.testing.assert_close(TASKS["multilabel"].loss(many, labels), expected)
    assert TASKS["multilabel"].hits(many, labels)[0].sum() == ((many > 0) == labels).sum()
    targets = torch.randn(6, K, generator=g)
    torch.testing.assert_close(TASKS["regression"].loss(many, targets), (many - targets).square().mean(dim=1))


def test_a_task_follows_from_shapes_and_dtype_or_must_be_named():
    names = {
        ((10,), (), False, 10): "multiclass",
        ((2,), (), False, 2): "binary",
        ((2,), (), False, 3): "multiclass",
        ((1,), (), False, 2): "binary",
        ((), (), False, 2): "binary",
        ((1,), (1,), False, 2): "binary",
        ((4,), (4,), False, 4): "multilabel",
        ((1,), (), True, 1): "regression",
        ((4,), (4,), True, 1): "regression",
        ((3, 5, 5), (5, 5), False, 3): "segmentation",
        ((3, 5), (5,), False, 3): "segmentation",
        ((3, 5, 5), (1, 5, 5), False, 3): "segmentation",
        ((1, 5, 5), (1, 5, 5), False, 2): "segmentation",
        ((5, 9), (5,), False, 9): "language_modeling",
    }
    assert {shapes: task_of(*shapes).name for shapes in names} == names
    with pytest.raises(
        UserError, match=r"`task` must be one of segmentation and language_modeling.*task: segmentation"
    ):
        task_of((5, 5), (5,), False, 5)
    assert task_of((5, 5), (5,), False, 5, named=TASKS["language_modeling"]).name == "language_modeling"
    with pytest.raises(
        UserError, match=r"`task` must fit .* multilabel needs .*got 'outputs \[B, 3\] for integer labels"
    ):
        task_of((3,), (), False, 3, named=TASKS["multilabel"])
    with pytest.raises(
        UserError, match=r"got outputs \[B, 5, 9\] for integer labels \[B\]. Known tasks: multiclass needs"
    ):
        task_of((5, 9), (), False, 9)
    with pytest.raises(UserError, match=r"got outputs \[B, 3\] for integer labels \[B, 1\]\. .* Pass y\.squeeze\(1\)"):
        task_of((3,), (1,), False, 3)
    with pytest.raises(UserError, match=r"`task` must be one of .*Did you mean `binary`"):
        ClientModule(nn.Linear(4, 1), task="binry")


def test_a_causal_model_is_compared_with_the_next_token():
    g = torch.Generator().manual_seed(0)
    output, y = torch.randn(3, T, V, generator=g), records("language_modeling")[1][:3]
    causal, task = TASKS["causal_lm"], TASKS["language_modeling"]
    torch.testing.assert_close(causal.loss(output, y), task.loss(output[:, :-1], y[:, 1:]))
    assert torch.equal(torch.stack(causal.hits(output, y)), torch.stack(task.hits(output[:, :-1], y[:, 1:])))
    shifted = value_of("language_modeling", "perplexity", output[:, :-1], y[:, 1:])
    assert value_of("causal_lm", "perplexity", output, y) == shifted
    for one in (evaluation.of_constant(some("perplexity"), causal, V, y),):
        assert one == evaluation.of_constant(some("perplexity"), task, V, y[:, 1:])


class NumbersForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = NETS["language_modeling"]()

    def forward(self, tokens):
        return self.net(tokens)


@pytest.mark.parametrize(
    "net, loss, name",
    [
        (NumbersForCausalLM, None, "causal_lm"),
        (NETS["language_modeling"], None, "language_modeling"),
        (NETS["language_modeling"], TASKS["causal_lm"].loss, "causal_lm"),
        (NumbersForCausalLM, TASKS["language_modeling"].loss, "language_modeling"),
    ],
)
def test_labels_are_shifted_by_the_models_class_or_as_its_own_loss_does(net, loss, name):
    module = ClientModule(net(), loss)
    check_fits(module, population("language_modeling"))
    assert module.task.name == name and ("next one" in module.task_advice) == (name == "causal_lm")


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float])
def test_masks_may_have_a_channel_and_be_of_any_type(dtype):
    x = torch.randn(20, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    mask, classes = (x > 0).to(dtype), None if dtype == torch.float else 2
    people = Population.from_datasets([(x, mask)], num_classes=classes, held_out=0.5)
    module = ClientModule(nn.Conv2d(1, 1, 1), task="segmentation" if classes is None else None, metrics=["dice"])
    check_fits(module, people)
    assert module.task == TASKS["segmentation"]
    losses = module.loss(x, people.y)
    expected = F.binary_cross_entropy_with_logits(x, mask.float(), reduction="none").flatten(1).mean(dim=1)
    torch.testing.assert_close(losses, expected)
    assert value_of("segmentation", "dice", x, people.y, classes=2) == 1.0


def some(*names: str) -> dict[str, Metric]:
    return {name: METRICS[name] for name in names}


def value_of(task: str, name: str, output, y, batches: int = 1, classes: int = K) -> float | None:
    metrics = Metrics({name: METRICS[name]}, TASKS[task], classes)
    for part in torch.arange(len(y)).chunk(batches):
        metrics.update(output[part], y[part])
    return metrics.values()[name]


def why_undefined(task: str, name: str, output, y) -> str:
    metrics = Metrics({name: METRICS[name]}, TASKS[task], K)
    metrics.update(output, y)
    assert metrics.values() == {name: None}
    return metrics.undefined()[name]


def score(metric, *tensors, **options) -> float:
    return metric(*(tensor.numpy() for tensor in tensors), **options)


def test_metrics_are_those_of_scikit_learn_in_one_batch_or_in_several():
    g = torch.Generator().manual_seed(0)
    y = torch.randint(2, (30,), generator=g)
    one = torch.randn(30, 1, generator=g) + y[:, None]
    chance, sure = one[:, 0].sigmoid(), (one[:, 0] > 0).long()
    expected = [
        ("binary", "auroc", one, y, score(sk.roc_auc_score, y, chance)),
        ("binary", "average_precision", one, y, score(sk.average_precision_score, y, chance)),
        ("binary", "f1", one, y, score(sk.f1_score, y, sure)),
        ("binary", "precision", one, y, score(sk.precision_score, y, sure)),
        ("binary", "recall", one, y, score(sk.recall_score, y, sure)),
    ]
    two = torch.cat([torch.zeros(30, 1), one], dim=1)
    expected.append(("binary", "auroc", two, y, score(sk.roc_auc_score, y, chance)))
    classes = torch.randint(K, (30,), generator=g)
    logits = torch.randn(30, K, generator=g)
    expected += [
        (
            "multiclass",
            "auroc",
            logits,
            classes,
            score(sk.roc_auc_score, classes, logits.softmax(1), multi_class="ovr"),
        ),
        ("multiclass", "f1", logits, classes, score(sk.f1_score, classes, logits.argmax(1), average="macro")),
        ("multiclass", "recall", logits, classes, score(sk.recall_score, classes, logits.argmax(1), average="macro")),
    ]
    labels = torch.randint(2, (30, K), generator=g)
    expected += [
        ("multilabel", "auroc", logits, labels, score(sk.roc_auc_score, labels, logits)),
        ("multilabel", "average_precision", logits, labels, score(sk.average_precision_score, labels, logits)),
        ("multilabel", "f1", logits, labels, score(sk.f1_score, labels, logits > 0, average="macro")),
    ]
    real = torch.randn(30, K, generator=g)
    for output, target in ((one, real[:, 0]), (logits, real)):
        flat = output.reshape(target.shape)
        expected += [
            ("regression", "mae", output, target, score(sk.mean_absolute_error, target, flat)),
            ("regression", "mse", output, target, score(sk.mean_squared_error, target, flat)),
            ("regression", "rmse", output, target, math.sqrt(score(sk.mean_squared_error, target, flat))),
            ("regression", "r2", output, target, score(sk.r2_score, target, flat)),
        ]
    pixels, scores = records("segmentation")[1][:30], torch.randn(30, K, 5, 5, generator=g)
    used = pixels != -100
    jaccard = score(sk.jaccard_score, pixels[used], scores.argmax(1)[used], average="macro")
    dice = score(sk.f1_score, pixels[used], scores.argmax(1)[used], average="macro")
    expected += [("segmentation", "iou", scores, pixels, jaccard), ("segmentation", "dice", scores, pixels, dice)]
    tokens, words = records("language_modeling")[1][:30], torch.randn(30, T, V, generator=g)
    perplexity = math.exp(F.cross_entropy(words.flatten(0, 1), tokens.flatten()))
    expected.append(("language_modeling", "perplexity", words, tokens, perplexity))
    for task, name, output, target, value in expected:
        for batches in (1, 4):
            assert value_of(task, name, output, target, batches) == pytest.approx(value, abs=1e-5), (task, name)
    error = value_of("binary", "calibration_error", one, y)
    assert error is not None and 0 <= error <= 1


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_has_the_direction_that_torchmetrics_says(name):
    metric, measure = METRICS[name], METRICS[name].measure()
    for task in (one for one in TASKS.values() if isinstance(one, metric.tasks)):
        made = metric.create(task, 3)
        of_task = metric.measure(task)
        assert of_task == replace(measure, constant=of_task.constant) and of_task.constant in ("", task.constant)
        assert measure.higher_is_better is made.higher_is_better
        assert (made.higher_is_better is None) == (measure.target is not None)
        again = pickle.loads(pickle.dumps(metric)).create(task, 3)
        assert type(again) is type(made)
    assert metric.has_baseline == bool(measure.constant) == (name != "calibration_error")


def test_some_metrics_are_best_where_they_are_smallest_and_coverage_at_its_quantile():
    worst = {name: metric.measure().worst([0.1, 0.6, 0.9]) for name, metric in METRICS.items()}
    assert {name for name, value in worst.items() if value == 0.9} == {
        *("mae", "mse", "rmse", "perplexity", "calibration_error", "pinball")
    }
    high = METRICS["coverage"].measure(build_task({"name": "quantile_regression", "quantile": 0.9}))
    assert high.worst([0.1, 0.6, 0.99]) == 0.1 and high.merit(0.9) > high.merit(0.95) > high.merit(0.7)


def test_each_task_has_an_example_and_is_on_the_pages_with_its_metrics():
    assert list(CASES) == list(TASKS)
    features, models = ((ROOT / "docs" / page).read_text() for page in ("features.md", "howto/model.md"))
    for name in (*TASKS, *METRICS):
        assert re.search(rf"[ *`]{name}[ ,*`]", features) and re.search(rf"[ *`]{name}[ ,*`]", models), name


@pytest.mark.parametrize("task", TASKS)
def test_a_metric_is_the_same_of_one_batch_and_of_several(task):
    x, y, classes = records(task)
    torch.manual_seed(0)
    output = CASES[task].net()(x).detach()
    for name in metrics_of(TASKS[task]):
        whole, parts = (value_of(task, name, output, y, batches, classes or 1) for batches in (1, 7))
        assert whole is not None and parts == pytest.approx(whole, rel=1e-5), name


@pytest.mark.parametrize("task", CASES)
def test_labels_are_checked_where_there_are_no_records(task):
    """The server of sites knows the shapes of records, and has none."""
    _, y, num_classes = records(task)
    wrong = TASKS[task].wrong_labels(y[:0], num_classes or 1, ())
    assert not any(len(bad) for bad, _, _ in wrong)


def test_a_set_that_does_not_define_a_metric_has_none_of_it():
    logits, y = torch.randn(6, K), torch.tensor([0, 0, 0, 1, 1, 1])
    assert why_undefined("binary", "auroc", logits[:, :1], torch.ones(6, dtype=torch.long)) == "have one class"
    assert why_undefined("regression", "r2", logits[:1, :1], torch.ones(1)) == "are fewer than two, or have one label"
    assert why_undefined("multiclass", "auroc", logits / 0, y) == "have outputs that are not finite"
    expected = [score(sk.roc_auc_score, y == label, logits.softmax(1)[:, label]) for label in (0, 1)]
    assert value_of("multiclass", "auroc", logits, y) == pytest.approx(sum(expected) / 2)  # class 2 is absent


def test_the_baseline_is_the_best_constant_prediction():
    rare, real = (torch.arange(50) < 3).long(), torch.arange(50.0) ** 2
    metrics = some("auroc", "average_precision", "f1", "calibration_error")
    found = evaluation.of_constant(metrics, TASKS["binary"], 2, rare)
    expected = {"accuracy": 0.94, "auroc": 0.5, "average_precision": 0.06, "f1": 0.0}
    assert found == pytest.approx(expected)
    found = evaluation.of_constant(some("mae", "rmse", "r2"), TASKS["regression"], 1, real)
    mean = torch.full((50,), float(real.mean()))
    errors = {"mae": score(sk.mean_absolute_error, real, mean), "rmse": float(real.std(correction=0)), "r2": 0.0}
    assert found.pop("accuracy") is None and found == pytest.approx(errors)


@pytest.mark.parametrize("name", TASKS)
def test_no_constant_has_a_smaller_loss_than_the_best_one(name):
    """Candidates are the constants that would be best for one record alone, such as its label."""
    _, y, num_classes = records(name)
    options = [{"quantile": q} for q in (0.1, 0.5, 0.9)] if name == "quantile_regression" else [{}]
    for task, size in itertools.product([build_task({"name": name, **given}) for given in options], (2, 3, 10, len(y))):
        few = y[(y != IGNORED).reshape(len(y), -1).any(dim=1)][:size]

        def mean_loss(constant, few=few, task=task):
            return float(task.loss(constant.expand(len(few), *constant.shape), few).mean())

        best = mean_loss(task.best_constant(few, num_classes or 1))
        others = [mean_loss(task.best_constant(few[row : row + 1], num_classes or 1)) for row in range(len(few))]
        assert math.isfinite(best) and best <= min([*others, math.inf]) + 1e-6, (str(task), size)


def test_a_baseline_is_called_as_the_constant_of_the_task():
    y = torch.arange(50.0) ** 2
    high, mean = build_task({"name": "quantile_regression", "quantile": 0.9}), TASKS["regression"]
    chosen = some("mae", "r2", "pinball", "coverage")
    assert {one.constant for one in measures_of(chosen, high).values()} == {"", "predicting the quantile"}
    found = evaluation.of_constant(chosen, high, 1, y)
    assert found["mae"] == pytest.approx(score(sk.mean_absolute_error, y, torch.full((50,), float(y[44]))))
    assert found["r2"] == pytest.approx(score(sk.r2_score, y, torch.full((50,), float(y[44])))) and found["r2"] < 0
    assert evaluation.of_constant(some("r2"), mean, 1, y)["r2"] == 0
    for task in TASKS.values():
        called = {one.constant for one in measures_of(metrics_of(task), task).values()}
        assert called <= {"", task.constant}, "all scores of a task have the same baseline"


@pytest.mark.e2e
@pytest.mark.usefixtures("code_was_read")
@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains_and_reports(task, tmp_path):
    people = population(task)
    torch.manual_seed(0)
    fitting = list(metrics_of(TASKS[task]))
    module = module_of(task, metrics=fitting)
    loop = FederatedLoop(
        people,
        module,
        rounds=2,
        clients=ClientOptions(batch_size=5, learning_rate=0.05),
        privacy=PrivacyOptions(noise_multiplier=0.5),
        output_dir=tmp_path / "run",
        device="cpu",
    )
    result = loop.run()
    assert loop.clients.description == "fast (exact rules for all layers)"
    seen = json.loads((tmp_path / "run" / "result.json").read_text())
    named = "inferred from outputs [B" if TASKS[task].inferred else "named)"
    assert loop.info.task.startswith(str(TASKS[task])) and named in loop.info.task
    assert (result.test_accuracy is None) != TASKS[task].has_accuracy and math.isfinite(result.test_loss)
    assert set(result.test_metrics) == set(fitting) == set(result.clients[0]["metrics"]) == set(result.metrics_mean)
    assert all(value is not None and math.isfinite(value) for value in result.test_metrics.values())
    compared = {name for name in fitting if METRICS[name].has_baseline}
    assert set(result.baseline) == {"accuracy", *compared} and result.undefined == {}
    assert seen["test_metrics"] == result.test_metrics and result.clients[2]["metrics"] == {}


@pytest.mark.e2e
@pytest.mark.usefixtures("code_was_read")
@pytest.mark.parametrize("task", TASKS)
def test_gradients_by_layer_rules_are_those_of_vmap(task):
    module, people = module_of(task), population(task)
    x, y = dummy_batch(people, 4, torch.device("cpu"))
    assert clipped_sum_for(module.net, module.sample_loss, x, y)[1] == "fast: exact rules for all layers"
    models = module.flat + torch.randn(2, module.num_params)
    alone = vmap(lambda x, y: losses_at(module, models, x[None], y[None])[0])(x, y)  # as clients choose a model
    torch.testing.assert_close(alone, losses_at(module, models, x, y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("task", [task for task in TASKS if records(task)[1].dim() > 1])
def test_evaluation_in_small_batches_gives_the_same_scores(task, monkeypatch):
    people, module = population(task), module_of(task)
    engine, models = SerialEngine(), ClientModels(module.flat[None], (0, 0, 0))
    engine.setup(module, HeldClients(people), Streams(), "poisson")
    whole, sizes = evaluation.evaluate(module, people, models, engine), []
    outputs = engine.outputs
    monkeypatch.setattr(evaluation, "MOST_NUMBERS", 3 * people.y[0].numel() * people.num_classes)
    monkeypatch.setattr(engine, "outputs", lambda model, rows: (sizes.append(len(rows)), outputs(model, rows))[1])
    parts = evaluation.evaluate(module, people, models, engine)
    assert max(sizes) == 3 and sum(sizes) == 10
    for one, other in zip((whole.test, *whole.clients[:2]), (parts.test, *parts.clients[:2]), strict=True):
        assert one.accuracy == other.accuracy and one.loss == pytest.approx(other.loss)
        assert one.metrics == pytest.approx(other.metrics)


def of_one_logit(output, y):
    return F.binary_cross_entropy_with_logits(output[:, 0], y.float(), reduction="none")


def test_the_accuracy_of_one_logit_is_that_of_its_sign_whatever_the_loss():
    people = population("binary")
    for module in (ClientModule(nn.Linear(4, 1), of_one_logit), ClientModule(nn.Linear(4, 1))):
        model = torch.tensor([5.0, 0.0, 0.0, 0.0, 0.0])  # the sign of the first feature, which is the label
        engine = SerialEngine()
        engine.setup(module, HeldClients(people), Streams(), "poisson")
        check_fits(module, people)
        scores = evaluation.evaluate(module, people, ClientModels(model[None], (0, 0, 0)), engine)
        assert scores.test.accuracy == 1.0 and module.task is TASKS["binary"]


def of_probabilities(output, y):
    output, y = output.reshape(len(y), -1), y.to(output).reshape(len(y), -1)
    return F.binary_cross_entropy(output, y, reduction="none").mean(dim=1)


@pytest.mark.parametrize(("name", "last"), [("binary", ()), ("binary", (nn.Flatten(0),)), ("multilabel", ())])
def test_probabilities_are_recognised_and_scored_as_such(name, last):
    people = population(name)
    outputs = people.y[0].numel()
    net = nn.Sequential(nn.Linear(4, outputs), nn.Sigmoid(), *last)
    module = ClientModule(net, of_probabilities, metrics=["auroc", "f1"])
    logits = ClientModule(net[0], metrics=["auroc", "f1"])
    scores = []
    for one in (module, logits):
        engine = SerialEngine()
        engine.setup(one, HeldClients(people), Streams(), "poisson")
        check_fits(one, people)
        scores.append(evaluation.evaluate(one, people, ClientModels(logits.flat[None], (0, 0, 0)), engine).test)
    assert scores[0].accuracy == scores[1].accuracy
    assert scores[0].metrics == pytest.approx(scores[1].metrics, abs=1e-6)
    assert "outputs are probabilities" in module.task_note and "probabilities" not in logits.task_note
    with pytest.raises(
        UserError, match=r"`model` must give logits for the default loss, got .*Remove its last Sigmoid"
    ):
        check_fits(ClientModule(net), people)
    stated = ClientModule(net, of_probabilities, probabilities=False)
    check_fits(stated, people)
    assert stated.task is TASKS[name]


def test_floating_labels_of_0_and_1_fit_a_named_task():
    for name in ("binary", "multilabel"):
        people = population(name)
        net = nn.Linear(4, people.y[0].numel())
        expected = ClientModule(net)
        check_fits(expected, people)
        loss = expected.sample_loss(expected.named_trainable, people.x, people.y)
        people = dataclasses.replace(people, y=people.y.float())
        named = ClientModule(net, task=name, metrics=["auroc"])
        check_fits(named, people)
        assert torch.equal(named.sample_loss(named.named_trainable, people.x, people.y), loss)
        inferred = ClientModule(net)
        with pytest.warns(UserNotice, match=f"is inferred from floating labels. .* for labels of 0 and 1, {name}: "):
            FederatedLoop(people, inferred, rounds=1, privacy=None, clients=ClientOptions(batch_size=5), device="cpu")
        people.y[0] = 0.5
        with pytest.raises(UserError, match="`y` must hold 0 or 1 for each label"):
            check_fits(named, people)


class Reconstruction(nn.Sequential):
    """An autoencoder that returns the difference to its input, which its loss squares."""

    def forward(self, x):
        return super().forward(x) - x


def size(output, y):
    return output.square().mean(dim=1)


def distance(output, y):
    return (output.mean(dim=(1, 2)) - y).square()


@pytest.mark.parametrize(
    ("net", "loss"),
    [
        (Reconstruction(nn.Linear(4, 4), nn.Linear(4, 4)), size),
        (nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2))), distance),
    ],
)
def test_a_users_loss_needs_no_known_task(net, loss, tmp_path):
    module = ClientModule(net, loss)
    population = Population.from_datasets([(torch.randn(20, 4), torch.randint(3, (20,)))] * 2, num_classes=3)
    fitting = loss is size  # outputs [B, 4] for three classes
    run = FederatedLoop(
        population, module, rounds=1, clients=ClientOptions(batch_size=4), privacy=None, output_dir=tmp_path / "run"
    )
    result = run.run()
    assert module.task_note.startswith("multiclass" if fitting else "custom")
    assert (result.test_accuracy is None) == (not fitting) and math.isfinite(result.test_loss)


def test_outputs_with_logits_are_unwrapped_and_others_refused_before_a_run():
    people = population("multiclass")
    for module in (
        ClientModule(Named()),
        ClientModule(WithLogits()),
        ClientModule(Named("a"), output=itemgetter("a")),
    ):
        check_fits(module, people)
        assert module.output(module.named_trainable, people.x).shape == (N, K)
    with pytest.raises(UserError, match=r"`model` must return a tensor, .* `logits`, got 'dict'"):
        check_fits(ClientModule(Named("scores")), people)


def test_what_does_not_fit_is_refused_before_a_run():
    wrong = ClientModule(nn.Linear(4, 1), metrics=["auroc", "mae"])
    with pytest.raises(UserError, match=r"`evaluation.metrics` must name metrics of task binary \(auroc.*got 'mae'"):
        check_fits(wrong, population("binary"))
    with pytest.raises(UserError, match=r"`evaluation.metrics` .* got 'AUC'. Did you mean `auroc`?"):
        check_fits(ClientModule(nn.Linear(4, 1), metrics=["AUC"]), population("binary"))
    people = population("multilabel")
    people.y[0, 0] = 2
    with pytest.raises(UserError, match="`y` must hold 0 or 1 for each label of task multilabel"):
        check_fits(ClientModule(nn.Linear(4, K)), people)


def test_what_needs_one_class_a_record_refuses_other_tasks(tmp_path):
    people, module = population("segmentation"), ClientModule(NETS["segmentation"]())
    options = {"clients": ClientOptions(batch_size=5), "privacy": PrivacyOptions(noise_multiplier=1.0)}
    options |= {"output_dir": tmp_path / "run", "device": "cpu"}
    loop = FederatedLoop(people, module, rounds=1, strategies=[Distillation()], **options)
    with pytest.raises(UserError, match="`task` must be multiclass or binary for distillation, got 'segmentation'"):
        loop.run()
    assert not (tmp_path / "run").exists()
    x, y, classes = records("segmentation")
    dataset = Dataset("mine", x, y, x[:9], y[:9], classes)
    parts = Population.partitioned(dataset, num_clients=3)
    assert parts.y.shape == (N + 9, 5, 5) and sum(parts.num_records) == N
    with pytest.raises(UserError, match="name` must be iid, sizes, overlapping if a record has"):
        Population.partitioned(dataset, num_clients=3, partition=("dirichlet", {}))
    for option in ({"groups": ("label_shift", {"count": 3})}, {"label_noise": ("records", {"share": 0.5})}):
        with pytest.raises(UserError, match="`data` must have one class for each record"):
            Population.partitioned(dataset, num_clients=3, **option)


def test_public_shares_of_classes_weigh_each_record_alone():
    loss = ClassWeightedLoss.of_priors([0.8, 0.2], 2)
    output, y = torch.randn(9, 2), torch.arange(9) % 2
    torchs = torch.nn.CrossEntropyLoss(weight=torch.tensor([0.25, 1.0]), reduction="none")
    assert torch.allclose(loss(output, y), torchs(output, y))
    for priors in ([0.8], [0.5, 0.4], [1.0, 0.0], "0.8", ["0.8", "0.2"]):
        with pytest.raises(UserError, match=r"`model.class_priors` must be the public shares of the 2 classes"):
            ClassWeightedLoss.of_priors(priors, 2)


def test_shares_of_classes_are_set_on_the_command_line_and_decide_the_run():
    def built(*words):
        options, _ = load(["--config", "digits", "--model.name", "logistic", *words])
        return build_module(options, Facts((20,), 10, (1, 8, 8)))

    usual, even = built(), built("--model.class_priors", str([0.1] * 10))
    rare = built("--model.class_priors", str([0.01, 0.19, *[0.1] * 8]))
    output, y = torch.randn(4, 10), torch.tensor([0, 1, 2, 3])
    losses = usual.infer_task(output, y, 10).loss(output, y)
    assert torch.allclose(even.loss(output, y), losses)
    assert torch.allclose(rare.loss(output, y) / losses, torch.tensor([1, 0.01 / 0.19, 0.1, 0.1]))
    assert len({module_digest(one) for one in (usual, even, rare)}) == 3


#: logits of two intervals, as hazards 1/4 and 1/2; (interval, event)
HAZARDS = torch.tensor([[-math.log(3), 0.0]] * 4)
TIMES = torch.tensor([[0, 1], [0, 0], [1, 1], [1, 0]])


def test_the_loss_of_survival_is_the_likelihood_by_hand():
    losses = TASKS["survival"].loss(HAZARDS, TIMES)
    by_hand = [1 / 4, 3 / 4, 3 / 4 * 1 / 2, 3 / 4 * 1 / 2]
    assert losses.exp().reciprocal().tolist() == pytest.approx(by_hand)


def test_the_c_index_counts_pairs_whose_order_is_known():
    # expected survival 1 < 2 < 3 < 4; known pairs: 0 before 1, 2, 3 (1 was censored in the same interval), 2 before 3
    def index(*order, batches=1):
        output = torch.tensor([[-float(one), -float(one)] for one in order])
        return value_of("survival", "c_index", output, TIMES, batches, classes=2)

    assert index(1, 2, 3, 4) == index(1, 2, 3, 4, batches=4) == 1.0 and index(4, 3, 2, 1) == 0.0
    assert index(2, 1, 3, 4) == 3 / 4 and index(1, 2, 4, 3) == 3 / 4 and index(1, 1, 2, 3) == 7 / 8
    censored = torch.tensor([[0, 0], [1, 0]])
    assert why_undefined("survival", "c_index", HAZARDS[:2], censored).startswith("have no two")
    constant = evaluation.of_constant(some("c_index"), TASKS["survival"], 2, TIMES)
    assert constant == {"accuracy": None, "c_index": 0.5}


@pytest.mark.e2e
def test_survival_is_learnt_from_two_columns_of_a_table(tmp_path):
    pandas = pytest.importorskip("pandas")
    g = torch.Generator().manual_seed(0)
    risk = torch.randn(600, generator=g)
    month = (4 * torch.rand(600, generator=g) * (1.2 - risk.sigmoid())).long().clamp(max=3)
    columns = {"risk": risk, "month": month, "relapse": torch.rand(600, generator=g) < 0.7}
    table = pandas.DataFrame({name: one.numpy() for name, one in columns.items()}).astype({"relapse": int})
    people = Population.from_dataframe(table, label=["month", "relapse"], num_classes=4)
    privacy, clients = PrivacyOptions(epsilon=8.0, delta=1e-3), ClientOptions(batch_size=60, learning_rate=1.0)
    module = ClientModule(nn.Linear(1, 4), task="survival")
    loop = FederatedLoop(people, module, rounds=4, clients=clients, privacy=privacy, output_dir=tmp_path / "run")
    result = loop.run()
    assert loop.clients.description == "fast (exact rules for all layers)"
    assert result.test_metrics["c_index"] > 0.6 and result.baseline["c_index"] == 0.5
    with pytest.raises(UserError, match=r"`task` must fit .* survival needs integer labels \[B, 2\], the interval"):
        task_of((4,), (), False, 4, named=TASKS["survival"])


@pytest.mark.e2e
def test_a_quantile_is_learnt_with_its_loss_baseline_and_coverage(tmp_path):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(900, 2, generator=g)
    y = x[:, 0] + torch.rand(900, generator=g)
    people = Population.from_datasets([(x[:300], y[:300])] * 2, test=(x[600:], y[600:]), held_out=0.0)
    module = ClientModule(nn.Linear(2, 1), task={"name": "quantile_regression", "quantile": 0.9})
    privacy, clients = PrivacyOptions(epsilon=20.0, delta=1e-3), ClientOptions(batch_size=50, learning_rate=0.5)
    loop = FederatedLoop(people, module, rounds=8, clients=clients, privacy=privacy, output_dir=tmp_path / "run")
    result = loop.run()
    assert loop.clients.description == "fast (exact rules for all layers)"
    assert 0.8 < result.test_metrics["coverage"] < 0.99
    constant = float(y[600:].quantile(0.9, interpolation="higher"))
    above = y[600:] - constant
    baseline = float(torch.maximum(0.9 * above, -0.1 * above).mean())
    assert result.baseline["pinball"] == pytest.approx(baseline, abs=1e-5)
    assert result.test_metrics["pinball"] < 0.6 * baseline
    assert loop.module.task_note == "quantile_regression quantile 0.9 (named)"


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
def test_the_pinball_loss_is_that_of_scikit_learn(quantile):
    task, output = build_task({"name": "quantile_regression", "quantile": quantile}), torch.randn(30)
    y = torch.randn(30, generator=torch.Generator().manual_seed(1))
    losses = task.loss(output[:, None], y)
    assert float(losses.mean()) == pytest.approx(sk.mean_pinball_loss(y, output, alpha=quantile), abs=1e-6)
    metrics = Metrics(some("pinball", "coverage", "mae"), task, 1)
    for part in range(3):
        metrics.update(output[10 * part :][:10, None], y[10 * part :][:10])
    assert metrics.values()["pinball"] == pytest.approx(float(losses.mean()), abs=1e-6)
    assert metrics.values()["coverage"] == pytest.approx(float((y <= output).double().mean()))


def test_a_task_takes_its_own_options_only():
    for given, words in (
        ({"name": "quantile_regression", "quantile": 1.5}, r"`task.quantile` must be a number in \(0, 1\)"),
        ({"name": "binary", "quantile": 0.5}, "`task.quantile` must be an option of binary"),
        ({"quantile": 0.5}, "`task` must be one of multiclass"),
    ):
        with pytest.raises(UserError, match=words):
            ClientModule(nn.Linear(4, 1), task=given)


@pytest.mark.parametrize("name", TASKS)
def test_outputs_are_probabilities_of_tasks_with_classes_only(name):
    task = TASKS[name]
    if isinstance(task, Classification):
        assert build_task({"name": name, "probabilities": True}).probabilities
        assert "outputs are probabilities" in described(replace(task, probabilities=True), (3,), (), True)
        return
    with pytest.raises(UserError, match=f"`task.probabilities` must be an option of {name}"):
        build_task({"name": name, "probabilities": True})
    with pytest.raises(UserError, match=f"`probabilities` must be left out for task {name}"):
        check_fits(module_of(name, probabilities=True), population(name))


def test_a_task_is_also_an_object_or_a_class():
    for given in (QuantileRegression(quantile=0.3), {"name": "quantile_regression", "quantile": 0.3}):
        assert ClientModule(nn.Linear(4, 1), task=given).named_task == QuantileRegression(quantile=0.3)
    assert ClientModule(nn.Linear(4, 1), task=QuantileRegression).named_task == QuantileRegression()
    with pytest.raises(UserError, match=r"`task.quantile` must be a number in \(0, 1\)"):
        QuantileRegression(quantile=1.5)
    with pytest.raises(UserError, match=r"`task` must be a name .*, a mapping with a name, or a Task"):
        ClientModule(nn.Linear(4, 1), task=3)


def test_a_label_to_ignore_is_refused_by_a_task_that_ignores_none():
    x, y, classes = records("multilabel")
    people = Population.from_datasets([(x, y.index_fill(0, torch.tensor([3]), IGNORED))], num_classes=classes)
    module = ClientModule(CASES["multilabel"].net(), task="multilabel")
    with pytest.raises(UserError, match="`y` must hold 0 or 1 for each label of task multilabel"):
        check_fits(module, people)
    wrong = [bad.tolist() for bad, _, _ in TASKS["multiclass"].wrong_labels(torch.tensor([0, IGNORED]), 3, ())]
    assert wrong == [[False, True]] and not [*TASKS["segmentation"].wrong_labels(torch.tensor([[IGNORED]]), 3, ())]


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.ignores])
def test_records_without_a_label_that_counts_define_no_metric(name):
    x, y, classes = records(name)
    output, ignored = CASES[name].net()(x).detach(), torch.full_like(y, IGNORED)
    for metric in metrics_of(TASKS[name]):
        metrics = Metrics(some(metric), TASKS[name], classes)
        metrics.update(output, ignored)
        assert metrics.values() == {metric: None}
        assert metrics.undefined() == {metric: "have no label that counts"}
        metrics.update(output, y)
        assert metrics.values() == {metric: pytest.approx(value_of(name, metric, output, y, classes=classes))}


@pytest.mark.parametrize(
    ("labels", "where", "message"),
    [
        (
            [[2, 1], [0, 2]],
            "rome",
            r"`y of client rome` must have the event, 0 or 1, .* replace: \{event: \{1: 0, 2: 1",
        ),
        ([[0, 3], [1, 2]], "rome", r"`y of client rome` must have the event.* The order is \[time, event\]"),
        ([[2, 1], [0, 2]], "test", "`y of the test set` must have the event"),
        ([[2, 1], [0, -100]], "rome", "`y of client rome` must have the event"),
        ([[2, 1], [-100, 0]], "test", r"`y of the test set` must have an interval from 0 to 3 .* None is ignored"),
    ],
)
def test_labels_of_survival_are_an_interval_and_an_event(labels, where, message):
    right, given = (torch.randn(2, 1), torch.tensor([[0, 0], [3, 1]])), (torch.randn(2, 1), torch.tensor(labels))
    clients = {"bergen": right, "rome": given if where == "rome" else right}
    test = given if where == "test" else right
    people = Population.from_datasets(clients, test, num_classes=4, held_out=0)
    with pytest.raises(UserError, match=message) as refused:
        check_fits(ClientModule(nn.Linear(1, 4), task="survival"), people)
    assert "-100" not in str(refused.value)
    if where == "rome":
        at_site = only(people, client=1, names=("rome",))
        with pytest.raises(UserError, match=message):
            check_fits(ClientModule(nn.Linear(1, 4), task="survival"), at_site)


def test_columns_of_survival_are_named_and_a_model_has_an_output_for_each_interval():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"age": [0.5, 1.0] * 10, "month": [0, 3] * 10, "relapse": [0, 1] * 10})
    swapped = Population.from_dataframe(table, label=["relapse", "month"], num_classes=4)
    with pytest.raises(UserError, match=r"The order is label: \[time, event\], got \['relapse', 'month'\]"):
        check_fits(ClientModule(nn.Linear(1, 4), task="survival"), swapped)
    people = Population.from_dataframe(table, label=["month", "relapse"], num_classes=4)
    for outputs in (3, 5):
        with pytest.raises(UserError, match=f"`model` must give 4 outputs, one for each interval, got {outputs}"):
            check_fits(ClientModule(nn.Linear(1, outputs), task="survival"), people)
    with pytest.raises(UserError, match="num_classes says how many values a label has, such as classes or intervals"):
        Population.from_dataframe(table, label=["month", "relapse"], num_classes=2)
