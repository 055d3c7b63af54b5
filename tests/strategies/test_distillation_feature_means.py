"""One-shot sets: what a client releases, what it costs, how clients are weighted, and what the images teach."""

import math
from pathlib import Path

import pytest
import torch
from conftest import PowerCut, private
from few_digits import CLASSES, EQUAL, UNEQUAL, a_net, digits, few
from reference import passes_like

from dpfl_lightning.config.options import NetworkOptions, PrivacyOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client import answers
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.query import ChargedQuery, FeatureSums
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.history import FILE as HISTORY
from dpfl_lightning.federated.server.history import read as read_curves
from dpfl_lightning.models.features import COUNT_WEIGHT, record_features
from dpfl_lightning.models.nets import convnet
from dpfl_lightning.papers.distillation import feature_means
from dpfl_lightning.papers.distillation.distillation import Distillation
from dpfl_lightning.papers.distillation.feature_means import PURPOSE, FeatureMeans, pooled
from dpfl_lightning.papers.sets.distilled_set import DistilledSet
from dpfl_lightning.privacy.accounting.accountant import EXACT
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.mechanism import Gaussian
from dpfl_lightning.privacy.noise import RandomGenerator
from dpfl_lightning.strategies.aggregation.fedprox import FedProx

QUICK = {"images_per_class": 2, "nets": 2, "image_steps": 2, "evaluation_epochs": 2, "min_records_per_target": 1}
pytestmark = pytest.mark.filterwarnings("ignore:strategy feature_means. sums of records of single classes")
NETS = torch.stack([a_net(seed=seed).flat for seed in (5, 6)])


def sums_of(x, y, clip_norm=1.0):
    """What a client with these records releases without noise, `[CLASSES, k]`."""
    query = FeatureSums(mechanism_of={0: Gaussian(clip_norm, 0.0, 1.0, 1.0)}, nets=NETS, num_classes=CLASSES)
    return query.read(0, answers.answer(ChargedQuery.of(query), 0, a_net(), x, y, None, passes_like(x, y)))


def records_of(counts):
    population = digits([counts])
    return population.x[population.train_of[0]], population.y[population.train_of[0]]


def slow_sums(x, y):
    """A loop over records: a constant, the record, and the inputs of each net's last layer, in one row of norm 1."""
    total = [torch.zeros(0)] * CLASSES
    for record, label in zip(x, y, strict=True):
        parts = [record.flatten(), *(a_net(seed=seed).net[:-1](record[None]).flatten() for seed in (5, 6))]
        row = torch.cat([part / part.norm() for part in parts]) * math.sqrt((1 - COUNT_WEIGHT**2) / 3)
        row = torch.cat([torch.tensor([COUNT_WEIGHT]), row]).detach()
        total[label] = total[label] + row if len(total[label]) else row
    return torch.stack([one if len(one) else torch.zeros_like(row) for one in total])


def test_a_client_releases_the_sums_of_each_class():
    x, y = records_of([4, 3, 0])
    torch.testing.assert_close(sums_of(x, y).float(), slow_sums(x, y), rtol=1e-4, atol=1e-5)
    assert (sums_of(x, y)[:, 0] / COUNT_WEIGHT).tolist() == pytest.approx([4, 3, 0])


class Sliced(torch.nn.Module):
    """Uses its layers otherwise than one after the other."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.GroupNorm(4, 4), torch.nn.ReLU(), torch.nn.AvgPool2d(2))

    def forward(self, x):
        return self.body[0](x.expand(-1, 4, -1, -1)).abs()


def test_features_of_a_net_that_slices_its_parts_are_the_inputs_of_its_last_layer():
    module = ClientModule(torch.nn.Sequential(Sliced(), torch.nn.Flatten(), torch.nn.Linear(256, 3)))
    x = torch.randn(5, 1, 8, 8)
    expected = torch.nn.functional.normalize(module.net[:-1](x).detach(), dim=1)
    torch.testing.assert_close(record_features(module, module.flat[None], x)[1].detach(), expected)


@pytest.mark.parametrize("hooked", [False, True])
def test_features_of_fused_layers_are_those_of_the_net_also_where_a_hook_changes_a_layer(hooked):
    module = ClientModule(convnet((1, 8, 8), 3, width=4, depth=2))
    if hooked:
        module.net[1].register_forward_hook(lambda layer, inputs, output: output.square())
    x, net = torch.randn(5, 1, 8, 8), module.flat.clone()
    expected = torch.nn.functional.normalize(module.net[:-1](x).detach(), dim=1)
    with torch.no_grad():
        together = record_features(module, net[None], x)[1]
        alone = torch.func.vmap(lambda record: record_features(module, net[None], record[None])[1][0])(x)
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.e2e
def test_one_record_moves_one_class_by_at_most_one():
    x, y = records_of([4, 3, 2])
    x = torch.cat([x, 1e4 * x[:1], torch.zeros_like(x[:1])])  # large and empty records are no exception
    y = torch.cat([y, y[:1], y[:1]])
    whole = sums_of(x, y)
    for record in range(len(y)):
        others = torch.arange(len(y)) != record
        moved = (whole - sums_of(x[others], y[others])).norm(dim=1)
        assert float(moved[y[record]]) <= 1 + 1e-6 and float(moved.sum() - moved[y[record]]) == 0
    assert float(moved[y[record]]) < 0.99 < float((whole - sums_of(x[1:], y[1:])).norm())


def run(make_loop, strategy=None, counts=EQUAL, **options):
    loop = few(make_loop, strategy or FeatureMeans(**QUICK), counts=counts, **{"rounds": 1, **options})
    return loop, loop.run()


@pytest.mark.e2e
def test_a_run_costs_one_exact_gaussian_release_of_every_client(make_loop):
    budgets = [2.0, 4.0, 8.0, 8.0]
    loop, result = run(make_loop, privacy=private(budgets))
    noise = [schedule.main.noise_multiplier for schedule in loop.schedule.clients]
    assert noise[0] > noise[1] > noise[2] == noise[3]
    for client, budget in enumerate(budgets):
        assert loop.clients.budgets.ledger.events(client) == [GaussianEvent(1.0, noise[client], 1)]
        assert 0.999 * budget < result.clients[client]["epsilon_spent"] <= budget
    assert {charge.purpose for charge in read_ledger(loop.clients.folder.ledger_file)} == {PURPOSE}
    assert EXACT in result.guarantee.accountant and result.rounds == 1 and result.finished
    numbers = 1 + 64 + 2 * 16  # of a class: a constant, pixels, and four channels of 2 x 2 in each net
    assert result.metrics["floats_up"] == 4 * CLASSES * numbers
    assert result.metrics["floats_down"] == 4 * 2 * loop.module.num_params
    (words,) = loop.describe()
    assert "The run sends" in words and result.metrics["feature_noise"] > 0


@pytest.mark.e2e
def test_noise_does_not_depend_on_the_clip_norm_of_training(make_loop, monkeypatch):
    asked = []
    read = FeatureSums.read
    monkeypatch.setattr(FeatureSums, "read", lambda self, *own: asked.append(self.mechanism_of) or read(self, *own))
    run(make_loop, privacy=private(clip_norm=7.0))
    assert {mechanism.clip_norm for mechanism in asked[0].values()} == {1.0}


def test_clients_are_weighted_by_the_variance_of_their_noise():
    mechanisms = [Gaussian(1.0, noise, 1.0, records) for noise, records in ((1.0, 10.0), (2.0, 30.0))]
    sums = [torch.full((2, 3), 5.0), torch.full((2, 3), 7.0)]
    released = [one / mechanism.expected_batch_size for one, mechanism in zip(sums, mechanisms, strict=True)]
    total, noise_std = pooled(released, mechanisms)
    torch.testing.assert_close(total, sums[0] + sums[1] / 4)
    first, second = (mechanism.noise_scale(6) for mechanism in mechanisms)
    assert noise_std == pytest.approx(math.sqrt(first**2 + (second / 4) ** 2))
    silent = [Gaussian(1.0, 0.0, 1.0, 10.0)] * 2
    total, noise_std = pooled([one / 10 for one in sums], silent)
    assert noise_std == 0 and torch.equal(total, torch.full((2, 3), 12.0))


def test_the_noise_of_pooled_sums_is_as_stated():
    """Released sums of nothing: the deviation of their weighted sum, over 3,000 numbers."""
    mechanisms = [Gaussian(1.0, noise, 1.0, 20.0) for noise in (1.0, 3.0, 3.0)]
    draw = RandomGenerator(bytes(32))
    released = [one.privatise(torch.zeros(1, 3000, dtype=torch.float64), draw, torch.float64) for one in mechanisms]
    total, noise_std = pooled(released, mechanisms)
    assert float(total.std()) == pytest.approx(noise_std, rel=0.05)


@pytest.mark.e2e
def test_one_shot_images_of_real_digits_teach_a_net(make_loop):
    """Six images a class in place of 180 records: most test records of three classes, also within a budget."""
    options = {"counts": [[15, 15, 15]] * 4, "new_net": lambda seed: a_net(8, seed).net, "module": a_net(8)}
    for privacy in (None, private(30.0)):
        strategy = FeatureMeans(images_per_class=6, image_steps=60, evaluation_epochs=100)
        _, result = run(make_loop, strategy, privacy=privacy, **options)
        assert result.test_accuracy > 0.75, privacy


@pytest.mark.e2e
def test_images_match_the_means_of_records(make_loop):
    """Without noise, the set's own mean features are nearer to the records' than those of the mean image."""
    population = digits(EQUAL)
    x, y = (torch.cat([own[rows] for rows in population.train_of]) for own in (population.x, population.y))
    truth = sums_of(x, y) / 16

    def apart(strategy):
        loop, _ = run(make_loop, strategy)
        own = sums_of(*DistilledSet.load(loop.output_dir).records) / 4
        return float((own - truth).norm())

    few_steps, many = (
        apart(FeatureMeans(4, nets=8, image_steps=steps, min_records_per_target=1)) for steps in (1, 100)
    )
    assert many < 0.7 * few_steps


@pytest.mark.e2e
def test_a_run_leaves_its_set_and_resuming_changes_nothing(make_loop):
    loop, result = run(make_loop, privacy=private())
    made = DistilledSet.load(loop.output_dir)
    assert made.y.bincount().tolist() == [2] * CLASSES and "mean features" in made.card["what"]
    assert made.card["epsilon_max"] <= 8 and made.card["options"]["nets"] == 2 and made.card["sampling"] == "full"
    again = few(make_loop, FeatureMeans(**QUICK), rounds=1, privacy=private(), output_dir=loop.output_dir)
    resumed = again.run(resume=True)
    assert resumed.test_accuracy == result.test_accuracy and torch.equal(DistilledSet.load(loop.output_dir).x, made.x)


@pytest.mark.e2e
def test_a_crash_while_images_are_made_loses_no_release(make_loop, monkeypatch):
    whole = run(make_loop, privacy=private())[1]
    loop = few(make_loop, FeatureMeans(**QUICK), rounds=1, privacy=private())
    with monkeypatch.context() as cut:
        cut.setattr(FeatureMeans, "_matched", lambda *args: (_ for _ in ()).throw(PowerCut))
        with pytest.raises(PowerCut):
            loop.run()
    paid = read_ledger(loop.clients.folder.ledger_file)
    again = few(make_loop, FeatureMeans(**QUICK), rounds=1, privacy=private(), output_dir=loop.output_dir)
    assert again.run(resume=True).test_accuracy == whole.test_accuracy
    assert read_ledger(loop.clients.folder.ledger_file) == paid


@pytest.mark.e2e
def test_classes_that_nobody_has_get_images_all_the_same(make_loop):
    for privacy in (None, private()):
        loop, _ = run(make_loop, counts=[[*one[:2], 0] for one in UNEQUAL], privacy=privacy)
        made = DistilledSet.load(loop.output_dir)
        assert made.y.bincount().tolist() == [2] * CLASSES and bool(made.x.isfinite().all())


@pytest.mark.e2e
def test_without_noise_classes_of_few_records_stay_noise(make_loop):
    strategy = FeatureMeans(**QUICK | {"min_records_per_target": 16})
    with pytest.warns(UserNotice, match="sums of records of single classes are sent without noise"):
        loop, result = run(make_loop, strategy, counts=[*EQUAL[:3], [4, 3, 4]])
    assert result.metrics["classes_left_out"] == 1
    images = torch.nn.functional.normalize(DistilledSet.load(loop.output_dir).x.flatten(1)).view(CLASSES, 2, -1)
    alike = (images[:, 0] * images[:, 1]).sum(dim=1).tolist()
    assert abs(alike[1]) < 0.5 < min(alike[0], alike[2]), "noise, and mean images"


def test_a_round_of_answers_counts_its_clients(make_loop):
    loop, _ = run(make_loop, privacy=private())
    (line,) = read_curves(loop.output_dir / HISTORY)
    assert line.values["train_participants"] == 4 and line.values["train_classes_left_out"] == 0


def test_the_accountant_is_the_same_before_and_after_a_run(make_loop):
    class Watching(Callback):
        def on_fit_start(self, view):
            self.promise = view.expected_guarantee()

    watching = Watching()
    result = few(make_loop, FeatureMeans(**QUICK), watching, rounds=1, privacy=private()).run()
    assert watching.promise.accountant == EXACT and EXACT in result.guarantee.accountant


def test_a_net_may_have_frozen_parameters():
    module = a_net()
    frozen = next(iter(module.net.parameters()))
    frozen.requires_grad_(False)
    fresh = ClientModule(module.net)
    first, second = record_features(fresh, torch.stack([fresh.flat]), torch.randn(2, 1, 8, 8))
    assert first.shape == (2, 64) and second.shape == (2, 16)


def test_what_does_not_fit_is_refused(make_loop):
    laplace = PrivacyOptions(epsilon=8.0, delta=0.0, mechanism="laplace")
    silent = PrivacyOptions(noise_multiplier=[0.0, 1.0, 1.0, 1.0], delta=1e-3)
    for options, words in (
        ({"rounds": 2}, "`rounds` must be 1 for feature_means, whose clients release once, got 2"),
        ({"privacy": laplace}, "`privacy.mechanism` must be gaussian for feature_means"),
        ({"privacy": silent}, "`privacy.noise_multiplier` must be above 0 for all clients or for none.* 1 of 4"),
    ):
        with pytest.raises(UserError, match=words):
            few(make_loop, FeatureMeans(**QUICK), **{"rounds": 1, **options}).run()
    for other, words in (
        (FedProx(), "got feature_means, for which clients release sums of features once, beside fedprox"),
        (Distillation(), "exactly one"),
    ):
        with pytest.raises(UserError, match=words):
            few(make_loop, FeatureMeans(**QUICK), other, rounds=1)


@pytest.mark.e2e
def test_an_answer_that_the_network_loses_is_charged_and_is_in_no_sum(make_loop):
    losses = {"dropout": NetworkOptions(dropout=[0.0, 1.0, 0.0, 1.0])}
    losses["time_limit"] = NetworkOptions(time_limit=1.0, latency_seconds=[0.0, 2.0, 0.0, 2.0])
    kept, _ = run(make_loop, network=NetworkOptions(dropout=0.0))
    for network in losses.values():
        loop, result = run(make_loop, network=network)
        sums, whole = (one.config.strategies[0]._released[0] for one in (loop, kept))
        counts = (sums[:, 0].sum() / COUNT_WEIGHT, whole[:, 0].sum() / COUNT_WEIGHT)
        assert float(counts[0]) == pytest.approx(float(counts[1]) / 2)
        assert [loop.clients.account(client).releases for client in range(4)] == [1, 1, 1, 1]
        assert result.metrics["lost_updates"] == 2
    loop = few(make_loop, FeatureMeans(**QUICK), counts=EQUAL, rounds=1, network=NetworkOptions(dropout=1.0))
    with pytest.raises(UserError, match=r"must get the release of at least one client.*reserve_rounds"):
        loop.run()
    assert not list(Path(loop.output_dir).glob("distilled*"))


def test_without_a_release_that_the_budget_pays_for_nothing_begins(make_loop):
    privacy = PrivacyOptions(epsilon=0.5, delta=1e-3, noise_multiplier=0.4)
    with pytest.raises(UserError, match=r"privacy\.epsilon` must be a budget that pays for one release"):
        few(make_loop, FeatureMeans(**QUICK), counts=EQUAL, rounds=1, privacy=privacy).run()


@pytest.mark.e2e
def test_a_release_that_a_crash_lost_gives_no_set_when_the_run_is_resumed(make_loop, monkeypatch):
    loop = few(make_loop, FeatureMeans(**QUICK), counts=EQUAL, rounds=1, privacy=private(noise_key=None))
    monkeypatch.setattr(feature_means, "pooled", lambda *arguments: (_ for _ in ()).throw(PowerCut))
    with pytest.raises(PowerCut):
        loop.run()
    monkeypatch.undo()
    again = few(
        make_loop,
        FeatureMeans(**QUICK),
        counts=EQUAL,
        rounds=1,
        privacy=private(noise_key=None),
        output_dir=loop.output_dir,
    )
    with (
        pytest.warns(UserNotice, match=r"round 1 was broken off, and without .* nothing is left to repeat"),
        pytest.raises(UserError, match="must get the release of at least one client"),
    ):
        again.run(resume=True)
    assert not list(Path(loop.output_dir).glob("distilled*"))


def test_a_step_to_images_that_diverge_is_left_out(make_loop):
    strategy = FeatureMeans(**{**QUICK, "image_steps": 5})
    strategy.image_learning_rate = 1e7
    with pytest.warns(
        UserNotice, match=r"step 1 of the images was skipped .*smaller .*feature_means\.image_learning"
    ) as seen:
        loop, result = run(make_loop, strategy)
    assert len([one for one in seen if "skipped" in str(one.message)]) == 1
    assert result.finished and float(DistilledSet.load(loop.output_dir).x.abs().max()) < 100
