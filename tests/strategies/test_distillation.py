"""Distillation through the real loop: federated equals centralised, schedules, options."""

from __future__ import annotations

import copy
import warnings

import pytest
import reference
import torch
from conftest import FIXED_KEY, blobs, small_net
from few_digits import (
    CLASSES,
    EQUAL,
    NOTICE,
    SHAPE,
    SMALL,
    UNEQUAL,
    Spy,
    Target,
    a_net,
    class_means,
    digits,
    distilled,
    images_of,
    new_net,
    private,
    target_of,
    together,
)
from torch import nn

from dpfl_lightning import strategies
from dpfl_lightning.algorithms.gradient_matching import matched_names
from dpfl_lightning.algorithms.server_training import public_generator, torch_seed
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.models.augmentation import ClassAugmentation
from dpfl_lightning.strategies.aggregation.uniform import Uniform
from dpfl_lightning.strategies.distillation.distillation import Distillation, mean_of_holders
from dpfl_lightning.strategies.distillation.options import loops

# --- federated and centralised


@pytest.mark.slow
@NOTICE
@pytest.mark.parametrize("sampling", ["full", "fixed"])
def test_sums_of_all_records_are_the_gradient_of_their_union(sampling, make_loop):
    population = digits(UNEQUAL)
    target, present, params = target_of(make_loop, population, sampling=sampling)
    assert present.all()
    torch.testing.assert_close(target, torch.stack(class_means(population, params)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@NOTICE
def test_means_of_clients_count_as_the_aggregation_says(make_loop):
    population = digits([*UNEQUAL[:3], [3, 2, 0]])
    uniform, _, params = target_of(make_loop, population, aggregation="uniform")
    each = [class_means(population, params, client) for client in range(4)]
    holders = [[own[label] for own in each if own[label] is not None] for label in range(CLASSES)]
    assert list(map(len, holders)) == [4, 4, 3]
    expected = torch.stack([torch.stack(rows).mean(dim=0) for rows in holders])
    torch.testing.assert_close(uniform, expected, rtol=1e-4, atol=1e-6)
    union = torch.stack(class_means(population, params))
    assert float((uniform - union).norm() / union.norm()) > 0.01
    by_count, _, _ = target_of(make_loop, population, aggregation="class_count")
    torch.testing.assert_close(by_count, union, rtol=1e-4, atol=1e-6)
    median, _, _ = target_of(make_loop, population, aggregation="median")
    expected = torch.stack([torch.stack(rows).quantile(0.5, dim=0) for rows in holders])
    torch.testing.assert_close(median, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@NOTICE
def test_equal_counts_make_uniform_and_sampled_the_same(make_loop):
    population = digits(EQUAL)
    uniform, _, _ = target_of(make_loop, population, aggregation="uniform")
    sampled, _, _ = target_of(make_loop, population)
    torch.testing.assert_close(uniform, sampled, rtol=1e-4, atol=1e-6)


def reference_run(population, rounds, steps, reinit_every, epochs, augmented=False):
    """Centralised condensation, class by class, with torch's optimisers and the run's public seeds."""
    theta, net = a_net().flat, a_net().net
    seed = torch_seed(public_generator(0, "images"))
    start = torch.randn(CLASSES, 2, *SHAPE, generator=torch.Generator().manual_seed(seed))
    images = [one.clone().requires_grad_() for one in start]
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
    return torch.stack([leaf.detach() for leaf in images]), theta, start


@pytest.mark.slow
@NOTICE
@pytest.mark.parametrize("steps", [1, 2])
def test_one_client_is_centralised_condensation(steps, make_loop):
    """Five rounds, a new net after each second one, against loops over classes with torch's own optimisers."""
    population = together(digits([[5, 3, 4]]))
    options = {"image_steps": steps, "image_learning_rate": 0.1, "reinit_every": 2, "net_epochs": 3}
    loop, own = distilled(make_loop, population, rounds=5, **options)
    images, theta, start = reference_run(population, 5, steps, reinit_every=2, epochs=3)
    torch.testing.assert_close(images_of(own), images, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loop.state.models[0], theta, rtol=1e-4, atol=1e-5)
    assert float((images - start).abs().max()) > 0.01


@pytest.mark.slow
@NOTICE
@pytest.mark.parametrize("counts", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("augmentation", ["none", "dsa"])
def test_clients_are_as_good_as_one_that_holds_everything(counts, augmentation, make_loop):
    population = digits(counts)
    options = {"rounds": 4, "reinit_every": 3, "augmentation": augmentation, "image_steps": 2}
    many, one = (distilled(make_loop, own, **options)[1] for own in (population, together(population)))
    torch.testing.assert_close(images_of(many), images_of(one), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@NOTICE
def test_sums_are_streamed_and_single_updates_are_kept_for_who_needs_them(make_loop):
    for aggregation, kept in (("sampled", False), ("uniform", True), ("class_count", True), ("median", True)):
        loop = make_loop(
            population=digits(EQUAL),
            module=a_net(),
            new_net=new_net,
            parts=[Distillation(aggregation=aggregation, **SMALL)],
            privacy=None,
            rounds=1,
            clients=ClientOptions(count=4, batch_size=12),
        )
        seen, train = [], loop.clients.engine.train

        def spy(plan, state, charge_numbers, raw_weights, seen=seen, train=train):
            seen.append(raw_weights is None)
            return train(plan, state, charge_numbers, raw_weights)

        loop.clients.engine.train = spy
        loop.run()
        assert seen == [kept]


@pytest.mark.slow
@NOTICE
@pytest.mark.parametrize("privacy", [None, PrivacyOptions(noise_multiplier=1.0, delta=1e-3, noise_key=FIXED_KEY)])
def test_who_else_reads_updates_changes_nothing(privacy, make_loop):
    (_, alone), (_, beside) = (distilled(make_loop, privacy=privacy, others=others) for others in ([], [Spy()]))
    assert torch.equal(images_of(alone), images_of(beside))


# --- the server's own work


@pytest.mark.slow
@NOTICE
def test_classes_that_nobody_has_keep_their_images(make_loop):
    population = digits([[9, 3, 0], [2, 8, 0], [6, 6, 0]])
    spy = Spy()
    _, own = distilled(make_loop, population, rounds=3, others=[spy])
    seed = torch_seed(public_generator(0, "images"))
    noise = torch.randn(CLASSES, 2, *SHAPE, generator=torch.Generator().manual_seed(seed))
    state = own.state_dict()
    assert torch.equal(state["images"][2], noise[2]) and not state["velocity"][2].any()
    assert not torch.equal(state["images"][:2], noise[:2])
    assert [told["classes_left_out"] for told in spy._told] == [1.0] * 3


@pytest.mark.slow
@NOTICE
def test_targets_of_few_records_are_left_out_without_noise_only(make_loop):
    counts = [[9, 3, 5], [2, 8, 4], [6, 6, 1]]  # 17, 17, 10
    for options, left_out in (({}, 1.0), ({"aggregation": "uniform"}, 1.0), ({"privacy": private()}, 0.0)):
        spy = Spy()
        distilled(make_loop, digits(counts), rounds=1, others=[spy], min_records_per_target=12, **options)
        assert [told["classes_left_out"] for told in spy._told] == [left_out]


@NOTICE
def test_where_every_class_is_left_out_the_images_stay(make_loop):
    spy = Spy()
    loop, own = distilled(make_loop, digits(EQUAL), rounds=2, others=[spy], min_records_per_target=17)
    seed = torch_seed(public_generator(0, "images"))
    noise = torch.randn(CLASSES, 2, *SHAPE, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(images_of(own), noise) and not own.state_dict()["velocity"].any()
    assert [told["classes_left_out"] for told in spy._told] == [3.0] * 2
    assert loop.state.models.isfinite().all()


@pytest.mark.slow
@NOTICE
def test_a_target_has_as_many_records_as_were_drawn_however_clients_weigh(make_loop):
    few, many = [1, 1, 0], [0, 10, 30]

    def left_out(least, others=(), **options):
        spy = Spy()
        clients = {"population": digits([few, many]), "others": [*others, spy], "rounds": 1}
        distilled(make_loop, **clients, min_records_per_target=least, **options)
        return [told["classes_left_out"] for told in spy._told]

    for least, expected in ((1, 0.0), (2, 1.0), (11, 1.0), (12, 2.0), (30, 2.0), (31, 3.0)):
        assert left_out(least) == [expected]
        assert left_out(least, [Uniform()], aggregation="by_base_rule") == [expected]


class Masked(Strategy):
    """Only the second client counts."""

    role = "correction"

    def weigh(self, updates, view):
        return torch.tensor([0.0, 1.0], dtype=torch.float64)


@pytest.mark.slow
@NOTICE
@pytest.mark.parametrize("aggregation", ["sampled", "uniform", "median"])
def test_records_of_clients_that_do_not_count_are_not_counted(aggregation, make_loop):
    for least, expected in ((2, 1.0), (3, 2.0), (9, 3.0)):
        spy = Spy()
        clients = {"population": digits([[9, 9, 9], [0, 2, 8]]), "others": [Masked(), spy], "rounds": 1}
        distilled(make_loop, **clients, min_records_per_target=least, aggregation=aggregation)
        assert [told["classes_left_out"] for told in spy._told] == [expected]


@pytest.mark.slow
@NOTICE
def test_a_step_to_images_that_are_not_finite_is_left_out(make_loop, tmp_path):
    def images(rate, steps=1):
        found = distilled(make_loop, rounds=1, image_learning_rate=rate, image_steps=steps)[1].state_dict()
        return found["images"], found["velocity"]

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserNotice)
        warnings.filterwarnings("ignore", "strategy distillation: gradients of single classes")
        once = images(1e37)
    with pytest.warns(UserNotice, match=r"round 1 .* not finite.*a smaller .*image_learning_rate") as seen:
        more = images(1e37, steps=5)
    assert len([one for one in seen if "finite" in str(one.message)]) == 1
    assert all(one.isfinite().all() and torch.equal(one, other) for one, other in zip(more, once, strict=True))


@pytest.mark.slow
@NOTICE
def test_the_net_begins_again_as_often_as_it_should(make_loop):
    def ages(**options):
        spy = Spy()
        distilled(make_loop, rounds=5, others=[spy], **options)
        return [told["net_reinitialised"] for told in spy._told], spy

    fresh, spy = ages(reinit_every=2)
    assert fresh == [0, 1, 0, 1, 0]
    seed = torch_seed(public_generator(0, "initialisation", 4))
    assert torch.equal(spy._states[3].models[0], a_net(seed=seed).flat)
    assert ages(images_per_class=1)[0] == [1] * 5 and loops(1)[0] == 1
    assert ages(reinit_every=0)[0] == ages(mode="paper_literal", images_per_class=1)[0] == [0] * 5


@NOTICE
def test_the_net_may_follow_the_released_gradients(make_loop):
    population, own = digits(UNEQUAL), Target(net_update="aggregate", net_learning_rate=0.3, **SMALL)
    loop = make_loop(
        population=population,
        module=a_net(),
        new_net=new_net,
        parts=[own],
        privacy=None,
        rounds=1,
        clients=ClientOptions(count=4, batch_size=8),
    )
    start = loop.module.flat
    loop.run()
    torch.testing.assert_close(loop.state.models[0], start - 0.3 * own.kept[0][0].mean(dim=0))
    assert not torch.equal(loop.state.models[0], start)


@pytest.mark.slow
@NOTICE
def test_evaluation_changes_nothing_and_gives_the_same_net_for_the_same_set(make_loop):
    found = []
    for every in (1, 4):
        own = Distillation(**SMALL)
        loop = make_loop(
            population=digits(EQUAL),
            module=a_net(),
            new_net=new_net,
            parts=[own],
            privacy=None,
            rounds=4,
            evaluate_every=every,
            clients=ClientOptions(count=4, batch_size=12),
        )
        loop.run()
        found.append((images_of(own), loop.final_models(loop.state).models))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_another_rule_may_weigh(make_loop):
    spy = Spy()
    loop, own = distilled(make_loop, privacy=private(), others=[Uniform(), spy], aggregation="by_base_rule", rounds=1)
    assert own.role == "correction"
    combined = spy._updates[0].released.mean(dim=0)
    assert combined.shape == (CLASSES, sum(p.numel() for p in loop.module.trainable if p.dim() >= 2))
    with pytest.raises(UserError, match="exactly one base rule"):
        distilled(make_loop, privacy=private(), others=[Uniform()])


#: base rules that weigh what clients send, whatever it is
COMPANY = ("epsilon_weighted", "inverse_noise", "minimum_epsilon", "noise_aware", "size_weighted", "uniform")
OPTIONS = {"two_stage_selection": {"warmup_rounds": 2, "clients_per_round": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPANY)
def test_base_rules_may_weigh_class_gradients(name, make_loop):
    privacy = private([4.0, 6.0, 8.0, 10.0])
    loop, _ = distilled(
        make_loop, privacy=privacy, others=strategies.build({name: None}), aggregation="by_base_rule", rounds=1
    )
    assert loop.state.round == 1 and sum(map(loop.clients.budgets.releases, range(4))) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*strategies.STRATEGIES} - {"distillation", *COMPANY}))
def test_strategies_of_local_training_are_refused_in_any_order(name, make_loop):
    (other,) = strategies.build({name: OPTIONS.get(name)})
    own = Distillation(**SMALL | {"aggregation": "by_base_rule" if other.role == "base" else None})
    words = (
        f"`strategies` must not hold {type(other).__name__} beside Distillation, got both.* class gradients, a share "
        r"`strategies\.distillation\.participation_fraction` of them in each round. Remove one"
    )
    for parts in ([own, other], [other, own]):
        with pytest.raises(UserError, match=words):
            make_loop(parts=parts, population=digits(EQUAL), module=a_net(), new_net=new_net)


@pytest.mark.slow
@NOTICE
def test_a_set_of_real_digits_teaches_a_net(make_loop):
    """Six images a class in place of 60 records: most test records of three classes are told apart."""
    population = digits([[15, 15, 15]] * 4)
    options = {
        "images_per_class": 6,
        "evaluation_epochs": 100,
        "net_epochs": 10,
        "net": lambda seed: a_net(8, seed).net,
    }
    loop, _ = distilled(make_loop, population, rounds=10, image_steps=10, reinit_every=4, **options)
    assert loop.evaluated[10].test.accuracy > 0.75
    told = loop.totals.metrics
    assert 0 < told["matching_loss_per_row"] < 2
    assert told["matching_loss"] == pytest.approx(told["matching_loss_per_row"] * CLASSES * (8 + 8 + 3), rel=1e-5)


# --- options


def test_the_mode_decides_what_is_left_out_and_nothing_else():
    literal = {"aggregation": "uniform", "sampling": "fixed", "reinit_every": 0, "image_learning_rate": 0.1}
    default = {"aggregation": "sampled", "sampling": None, "reinit_every": None, "image_learning_rate": 1.0}
    same = {
        "matching": "layerwise_cosine",
        "net_update": "synthetic",
        "image_steps": 1,
        "image_momentum": 0.5,
        "records_per_class": 256,
        "noise_scale": "sum",
    }
    for mode, expected in (("default", default), ("paper_literal", literal)):
        own = Distillation(mode=mode)._switches
        assert {name: own[name] for name in (*expected, *same)} == expected | same
        assert own["net_epochs"] is None and Distillation(mode=mode)._between.epochs == loops(10)[1]
    other = {"aggregation": "median", "sampling": "full", "reinit_every": 7, "image_learning_rate": 0.3}
    overridden = Distillation(mode="paper_literal", **other)._switches
    assert {name: overridden[name] for name in literal} == other
    for name, value in other.items():
        own = Distillation(mode="paper_literal", **{name: value})._switches
        assert own[name] == value and all(own[one] == literal[one] for one in literal if one != name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "paper"}, r"mode` must be one of default, paper_literal, got 'paper'"),
        ({"matching": "cosine"}, r"matching` must be one of .* got 'cosine'. Did you mean `cos`"),
        ({"aggregation": "medium"}, r"aggregation` must .*Did you mean `median`"),
        ({"images_per_class": 0}, r"images_per_class` must be >= 1, got 0"),
        ({"image_learning_rate": 0.0}, r"image_learning_rate` must be above 0"),
        ({"image_momentum": 1.0}, r"image_momentum` must be in \[0, 1\)"),
        ({"participation_fraction": 0.0}, r"participation_fraction` must be in \(0, 1\]"),
        ({"row_weights": "noise_aware", "matching": "mse"}, r"row_weights` must be equal unless"),
        ({"row_weights": "noise_aware", "aggregation": "median"}, r"row_weights` must be equal unless"),
        ({"reinit_every": -1}, r"reinit_every` must be >= 0"),
    ],
)
def test_bad_options_are_one_sentence(options, words):
    with pytest.raises(UserError, match=r"`strategies\.distillation\." + words):
        Distillation(**options)


@pytest.mark.slow
def test_populations_that_do_not_fit_are_refused(make_loop):
    def planned(population=None, module=None, privacy=None, more=None, **options):
        loop = make_loop(
            population=population,
            module=module,
            parts=[Distillation(**options)],
            privacy=privacy or private(),
            **(more or {}),
        )
        loop.plan_schedule()

    with pytest.raises(UserError, match=r"min_participants` must be at most the 4 clients of a round, got 5"):
        planned()
    with pytest.raises(UserError, match=r"augmentation` must be none for these data, got 'dsa'"):
        planned(augmentation="dsa", min_participants=1)
    with pytest.raises(UserError, match=r"aggregation` must not be class_count if clients add noise"):
        planned(aggregation="class_count", min_participants=1)
    own = type("Own", (ClientModule,), {"personal": ("0.bias",)})
    with pytest.raises(UserError, match="`personal` must be empty"):
        planned(module=own(small_net()), min_participants=1)
    with pytest.raises(UserError, match="`new_net` must be a function, got None"):
        planned(min_participants=1, more={"new_net": None})
    flat = ClientModule(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3).requires_grad_(False)))
    for net_update in ("synthetic", "aggregate"):
        with pytest.raises(UserError, match=r"matching` must be cos or mse for a net .* got 'layerwise_cosine'"):
            planned(module=flat, min_participants=1, net_update=net_update)
    fits = {"new_net": lambda seed: copy.deepcopy(flat.net)}
    planned(module=flat, min_participants=1, matching="cos", more=fits)
    pairs = [(torch.randn(20, 6), torch.randn(20)) for _ in range(4)]
    with pytest.raises(UserError, match="must have records of classes, got '1 class'"):
        planned(Population.from_datasets(pairs), ClientModule(nn.Linear(6, 1)), min_participants=1)


def test_vectors_of_numbers_are_distilled_too(make_loop):
    loop = make_loop(parts=[Distillation(**SMALL)], population=blobs())
    assert loop.run().finished


def test_shares_of_nobody_are_zeros():
    blocks = torch.arange(6.0).view(2, 1, 3).expand(2, 2, 3)
    found = mean_of_holders(blocks, torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    assert found.tolist() == [[2.25, 3.25, 4.25], [0.0, 0.0, 0.0]]


@pytest.mark.slow
def test_augmentations_of_a_round_are_in_its_job(make_loop):
    loop = make_loop(
        population=digits(EQUAL),
        module=a_net(),
        new_net=new_net,
        clients=ClientOptions(count=4, batch_size=12),
        privacy=private(),
        parts=[Distillation(augmentation="dsa_without_flip", **SMALL)],
    )
    jobs, train = [], loop.clients.engine.train

    def spy(plan, *rest):
        jobs.append(plan.job)
        return train(plan, *rest)

    loop.clients.engine.train = spy
    loop.run()
    drawn = [job.augmentation for job in jobs]
    assert all(isinstance(one, ClassAugmentation) and "flip" not in one.operations for one in drawn)
    assert len(set(drawn)) == 3
    assert {job.parameters for job in jobs} == {
        matched_names({n: tuple(p.shape) for n, p in a_net().named_trainable.items()}, "layerwise_cosine")
    }
