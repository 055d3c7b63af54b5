"""Distillation in runs: federated equals centralised, rounds, options."""

import copy
import warnings

import pytest
import reference
import torch
from conftest import FIXED_KEY, blobs, private, small_net
from contracts.test_strategies import OPTIONS
from fakes import Recorder
from few_digits import (
    CLASSES,
    EQUAL,
    NOTICE,
    SHAPE,
    SMALL,
    UNEQUAL,
    a_net,
    class_means,
    digits,
    distilled,
    few,
    images_of,
    made_of,
    target_of,
    together,
)
from torch import nn

from dpfl_lightning import strategies
from dpfl_lightning.algorithms.server_training import public_generator, torch_seed
from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.models.augmentation import ClassAugmentation
from dpfl_lightning.papers.distillation.distillation import Distillation, loops
from dpfl_lightning.papers.distillation.gradient_matching import matched_names
from dpfl_lightning.strategies.aggregation.uniform import Uniform

pytestmark = NOTICE


def metric_of(make_loop, name="classes_left_out", others=(), **options):
    """What a run reported under a name in each of its rounds."""
    distilled(make_loop, others=[*others, seen := Recorder()], **options)
    return [report.metrics[name] for report in seen.reports]


def first_images():
    seed = torch_seed(public_generator(0, "images"))
    return torch.randn(CLASSES, 2, *SHAPE, generator=torch.Generator().manual_seed(seed))


def spied(loop):
    """The arguments of every round that the loop will train: (plan, raw weights)."""
    calls, train = [], loop.clients.train

    def spy(plan, models, raw_weights):
        calls.append((plan, raw_weights))
        return train(plan, models, raw_weights)

    loop.clients.train = spy
    return calls


# ---- federated and centralised


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["full", "fixed"])
def test_sums_of_all_records_are_the_gradient_of_their_union(sampling, make_loop):
    population = digits(UNEQUAL)
    target, present, params = target_of(make_loop, population, sampling=sampling)
    assert present.all()
    torch.testing.assert_close(target, torch.stack(class_means(population, params)), rtol=1e-5, atol=1e-6)


def reference_run(population, rounds, steps, reinit_every, epochs):
    """Centralised condensation, class by class, with torch's optimisers and the run's public seeds."""
    theta, net = a_net().flat, a_net().net
    images = [one.clone().requires_grad_() for one in first_images()]
    optimizers = [torch.optim.SGD([leaf], lr=0.1, momentum=0.5) for leaf in images]
    rows = torch.cat(population.train_of)
    for round in range(1, rounds + 1):
        real = {label: population.x[rows[population.y[rows] == label]] for label in range(CLASSES)}
        for _ in range(steps):
            reference.condensation_round(net, theta, optimizers, images, real)
        if round % reinit_every == 0:
            theta = a_net(seed=torch_seed(public_generator(0, "initialisation", round))).flat
        else:
            x, y = torch.cat([leaf.detach() for leaf in images]), torch.arange(CLASSES).repeat_interleave(2)
            theta = reference.sgd_epochs(net, theta, x, y, epochs, 0.01, torch_seed(public_generator(0, "net", round)))
    return torch.stack([leaf.detach() for leaf in images]), theta


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
def test_one_client_is_centralised_condensation(steps, make_loop):
    """Five rounds, a new net after each second one, against loops over classes with torch's own optimisers."""
    population = together(digits([[5, 3, 4]]))
    # a step of 0.1 for two images a class and 4 + 4 + 3 rows
    options = {"image_steps": steps, "image_learning_rate": 5.5, "reinit_every": 2, "net_epochs": 3}
    loop, strategy = distilled(make_loop, population, rounds=5, **options)
    images, theta = reference_run(population, 5, steps, reinit_every=2, epochs=3)
    torch.testing.assert_close(images_of(strategy), images, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loop.state.models[0], theta, rtol=1e-4, atol=1e-5)
    assert float((images - first_images()).abs().max()) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("counts", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("augmentation", ["none", "dsa"])
def test_clients_are_as_good_as_one_that_holds_everything(counts, augmentation, make_loop):
    population = digits(counts)
    options = {"rounds": 4, "reinit_every": 3, "augmentation": augmentation, "image_steps": 2}
    many, one = (distilled(make_loop, of, **options)[1] for of in (population, together(population)))
    torch.testing.assert_close(images_of(many), images_of(one), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [None, PrivacyOptions(noise_multiplier=1.0, delta=1e-3, noise_key=FIXED_KEY)])
def test_other_readers_of_updates_change_nothing(privacy, make_loop):
    alone, read = (distilled(make_loop, privacy=privacy, others=others)[1] for others in ([], [Recorder(updates=True)]))
    assert torch.equal(images_of(alone), images_of(read))


# ---- the server's work


@pytest.mark.slow
def test_classes_without_records_keep_their_images(make_loop):
    seen = Recorder()
    _, strategy = distilled(make_loop, digits([[9, 3, 0], [2, 8, 0], [6, 6, 0]]), rounds=3, others=[seen])
    noise, state = first_images(), made_of(strategy)
    assert torch.equal(state["images"][2], noise[2]) and not state["velocity"][2].any()
    assert not torch.equal(state["images"][:2], noise[:2])
    assert [report.metrics["classes_left_out"] for report in seen.reports] == [1.0] * 3


@pytest.mark.slow
def test_targets_of_few_records_are_left_out_without_noise_only(make_loop):
    counts = [[9, 3, 5], [2, 8, 4], [6, 6, 1]]  # 17, 17, 10
    for options, left_out in (({}, 1.0), ({"privacy": private()}, 0.0)):
        options |= {"population": digits(counts), "rounds": 1, "min_records_per_target": 12}
        assert metric_of(make_loop, **options) == [left_out]


@pytest.mark.e2e
def test_where_every_class_is_left_out_the_images_stay(make_loop):
    seen = Recorder()
    loop, strategy = distilled(make_loop, digits(EQUAL), rounds=2, others=[seen], min_records_per_target=17)
    assert torch.equal(images_of(strategy), first_images()) and not made_of(strategy)["velocity"].any()
    assert [report.metrics["classes_left_out"] for report in seen.reports] == [3.0] * 2
    assert loop.state.models.isfinite().all()


class Masked(Strategy):
    """Only the second client counts."""

    def weigh(self, updates, view):
        return torch.tensor([0.0, 1.0], dtype=torch.float64)


@pytest.mark.slow
def test_a_target_has_as_many_records_as_were_drawn_from_clients_that_count(make_loop):
    for least, expected in ((1, 0.0), (2, 1.0), (11, 1.0), (12, 2.0), (30, 2.0), (31, 3.0)):
        options = {"population": digits([[1, 1, 0], [0, 10, 30]]), "rounds": 1, "min_records_per_target": least}
        assert metric_of(make_loop, **options) == [expected]
    for least, expected in ((2, 1.0), (3, 2.0), (9, 3.0)):
        options = {"population": digits([[9, 9, 9], [0, 2, 8]]), "rounds": 1, "min_records_per_target": least}
        assert metric_of(make_loop, others=[Masked()], **options) == [expected]


@pytest.mark.slow
def test_a_step_to_images_that_are_not_finite_is_left_out(make_loop):
    def images(steps):
        options = {"image_learning_rate": 1e39, "image_steps": steps, "net_epochs": 0}
        return made_of(distilled(make_loop, rounds=1, **options)[1])

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserNotice)
        warnings.filterwarnings("ignore", "strategy distillation: gradients of single classes")
        once = images(1)
    with pytest.warns(UserNotice, match=r"round 1 .* not finite.*a smaller .*image_learning_rate") as seen:
        more = images(5)
    assert len([one for one in seen if "finite" in str(one.message)]) == 1
    for name in ("images", "velocity"):
        assert more[name].isfinite().all() and torch.equal(more[name], once[name])


@pytest.mark.slow
def test_the_net_begins_again_as_often_as_it_should(make_loop):
    seen = Recorder()
    assert metric_of(make_loop, "net_reinitialised", [seen], rounds=5, reinit_every=2) == [0, 1, 0, 1, 0]
    seed = torch_seed(public_generator(0, "initialisation", 4))
    assert torch.equal(seen.models[3][0], a_net(seed=seed).flat)
    assert loops(1)[0] == 1
    for options, again in (({"images_per_class": 1}, 1), ({"reinit_every": 0}, 0)):
        assert metric_of(make_loop, "net_reinitialised", rounds=5, **options) == [again] * 5


@pytest.mark.parametrize(
    ("rounds", "every", "warns"), [(3, 3, True), (3, 4, True), (4, 3, False), (3, 0, False), (1, 1, False)]
)
def test_a_set_that_is_made_with_one_net_warns(make_loop, rounds, every, warns):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", UserNotice)
        distilled(make_loop, rounds=rounds, reinit_every=every, net_epochs=0, evaluation_epochs=1)
    assert any(f"reinit_every is {every}, not below the {rounds} rounds" in str(one.message) for one in seen) == warns


@pytest.mark.slow
def test_evaluation_changes_nothing_and_gives_the_same_net_for_the_same_set(make_loop):
    ends = []
    for every in (1, 4):
        strategy = Distillation(**SMALL)
        loop = few(make_loop, strategy, rounds=4, evaluate_every=every)
        loop.run()
        ends.append((images_of(strategy), loop.final_models(loop.state).models))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_another_base_rule_is_refused(make_loop):
    with pytest.raises(UserError, match="exactly one aggregation rule"):
        distilled(make_loop, privacy=private(), others=[Uniform()])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, kind in strategies.classes().items() if kind.role != "base" and kind.jobs]
)
def test_strategies_of_local_training_are_refused_in_any_order(name, make_loop):
    (other,) = strategies.build({name: OPTIONS.get(name)})
    strategy = Distillation(**SMALL)
    for parts in ([strategy, other], [other, strategy]):
        with pytest.raises(UserError, match=r"clients release gradients of classes.* Remove one of them") as caught:
            few(make_loop, *parts)
        assert f"{name}, for which clients train" in str(caught.value)


@pytest.mark.slow
def test_a_set_of_real_digits_teaches_a_net(make_loop):
    """Six images a class in place of 60 records: most test records of three classes are classified."""
    options = {"images_per_class": 6, "evaluation_epochs": 100, "net_epochs": 10}
    options |= {"net": lambda seed: a_net(8, seed).net, "image_steps": 10, "reinit_every": 4}
    loop, _ = distilled(make_loop, digits([[15, 15, 15]] * 4), rounds=10, **options)
    assert loop.evaluated[10].test.accuracy > 0.75
    metrics = loop.totals.metrics
    assert 0 < metrics["matching_loss_per_row"] < 2
    assert metrics["matching_loss"] == pytest.approx(metrics["matching_loss_per_row"] * CLASSES * (8 + 8 + 3), rel=1e-5)


# ---- options

FLAT = ClientModule(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3).requires_grad_(False)))
REAL = Population.from_datasets([(torch.randn(20, 6), torch.randn(20)) for _ in range(4)], held_out=0.0)


def test_populations_and_nets_that_do_not_fit_are_refused(make_loop):
    def planned(options, **more):
        parts = [Distillation(**{"min_participants": 1, **options})]
        make_loop(parts=parts, **{"privacy": private(), **more}).plan_schedule()

    for options, more, words in (
        ({"min_participants": 5}, {}, r"min_participants` must be at most the 4 clients of a round, got 5"),
        ({"augmentation": "dsa"}, {}, r"augmentation` must be none for these data, got 'dsa'"),
        ({}, {"module": ClientModule(small_net(), personal=["0.bias"])}, "`personal` must be empty"),
        ({}, {"new_net": None}, "`new_net` must be a function, got None"),
        ({}, {"module": FLAT}, r"matching` must be mse for a model .* got 'layerwise_cosine'"),
        ({}, {"population": REAL, "module": ClientModule(nn.Linear(6, 1))}, "records of at least 2 classes, got 1"),
    ):
        with pytest.raises(UserError, match=words):
            planned(options, **more)
    planned({"matching": "mse"}, module=FLAT, new_net=lambda seed: copy.deepcopy(FLAT.net))


def test_vectors_of_numbers_are_distilled_too(make_loop):
    assert make_loop(parts=[Distillation(**SMALL)], population=blobs()).run().finished


@pytest.mark.slow
def test_augmentations_of_a_round_are_in_its_job(make_loop):
    loop = few(make_loop, Distillation(augmentation="dsa_without_flip", **SMALL), privacy=private())
    calls = spied(loop)
    loop.run()
    drawn = [plan.job.augmentation for plan, _ in calls]
    assert all(isinstance(one, ClassAugmentation) and "flip" not in one.operations for one in drawn)
    assert len(set(drawn)) == 3
    shapes = {name: tuple(p.shape) for name, p in a_net().named_trainable.items()}
    assert {plan.job.parameters for plan, _ in calls} == {matched_names(shapes, "layerwise_cosine")}
