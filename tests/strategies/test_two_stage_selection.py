"""Two stages: reports planned and charged, budgets split and then spent to the last, quotas that follow from losses."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import blobs, break_off, small_net
from fakes import Absent, Recorder
from reference import passes_like
from strategies.test_selection import COHORT, COUNT, DELTA, EPSILON
from strategies.test_selection import federation as of_eight

from dpfl_lightning import strategies
from dpfl_lightning.algorithms.allocation import allocate_int
from dpfl_lightning.commands.ledger import main as verify
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client import answers
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.query import ChargedQuery, LossOfOwnStep, MeanLoss, NoMechanism
from dpfl_lightning.federated.messages.requests import Ask
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.folder import RunFolder
from dpfl_lightning.papers.selection.two_stage_selection import FILTER, TwoStageSelection
from dpfl_lightning.papers.selection.two_stages_as_printed import TwoStagesAsPrinted
from dpfl_lightning.privacy.accounting.events import SelectionEvent
from dpfl_lightning.privacy.accounting.gaussian import gaussian_mu
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.mechanism import Gaussian, Laplace
from dpfl_lightning.sites import wire
from dpfl_lightning.strategies.selection.biased_selection import BiasedSelection

ROUNDS, WARMUP = 12, 4


def federation(make_loop, *parts, **options):
    """The eight clients of `test_selection.py`, for twelve rounds."""
    return of_eight(make_loop, *parts, **{"rounds": ROUNDS, **options})


def two_stages(kind=TwoStageSelection, **more) -> TwoStageSelection:
    return kind(**{"clients_per_round": COHORT, "warmup_rounds": WARMUP, **more})


@pytest.mark.e2e
@pytest.mark.parametrize(
    "accountant, kind", [("pld", TwoStageSelection), ("rdp", TwoStagesAsPrinted), ("laplace", TwoStageSelection)]
)
def test_budgets_are_spent_in_two_stages_and_never_exceeded(accountant, kind, make_loop):
    laplace = accountant == "laplace"
    strategy, seen = two_stages(kind), Recorder()
    privacy = {} if laplace else {"accountant": accountant}
    loop = federation(make_loop, strategy, seen, laplace=laplace, privacy=privacy)
    loop.plan_schedule()
    first, planned = strategy._quota.copy(), loop.schedule
    result = loop.run()
    cohorts = [report.clients for report in seen.reports]
    assert [len(cohort) for cohort in cohorts] == [COHORT] * ROUNDS
    early, late = (Counter(n for cohort in part for n in cohort) for part in (cohorts[:WARMUP], cohorts[WARMUP:]))
    reports = 1 if kind is TwoStageSelection else 2
    charges = Counter((charge.client, charge.purpose) for charge in read_ledger(loop.clients.folder.ledger_file))
    for client, budget in enumerate(EPSILON):
        assert charges[client, "train"] == early[client] <= first[client]
        assert charges[client, "loss"] == reports * early[client]
        assert charges[client, "later_train"] == late[client] == strategy._quota[client]
        events, delta = loop.clients.budgets.ledger.events(client), loop.schedule.clients[client].delta
        spent = loop.config.accountant.epsilon(events, delta)
        whole = loop.config.accountant.epsilon(planned.clients[client].events(), delta)
        assert spent <= budget and whole <= budget, "the first plan alone would have fitted, too"
        if first[client]:
            assert whole > budget * (1 - 1e-4)
        if late[client]:
            assert spent > budget * (1 - 1e-4), "the second stage takes all that is left"
        guarantee = loop.clients.budgets.guarantees()[client]
        if early[client] or late[client]:
            assert result.clients[client]["epsilon_spent"] == budget, "the budget is what holds"
            assert "as a privacy filter" in guarantee.accountant
        assert FILTER.rstrip(".") in guarantee.words()
    assert verify([str(loop.output_dir)]) == 0
    metrics = result.metrics
    assert metrics["participations"] == metrics["quota"] == [early[n] + late[n] for n in range(COUNT)]
    assert len(metrics["unlikeness"]) == COUNT


@pytest.mark.parametrize("laplace", [False, True], ids=["gaussian", "laplace"])
def test_each_participation_is_split_between_update_and_losses(laplace, make_loop):
    """Two reports have the share w of each participation: of epsilon (Laplace), or of mu^2 (Gaussian)."""
    share, strategy = 0.2, two_stages(TwoStagesAsPrinted, loss_share=0.2)
    loop = federation(make_loop, strategy, laplace=laplace)
    loop.plan_schedule()
    for client, quota in enumerate(strategy._quota):
        if quota:
            update, report = (loop.schedule.clients[client].noise_multiplier(name) for name in ("train", "loss"))
            power = 1 if laplace else 2  # epsilons add up, or inverse squares of noise do
            assert 2 * (update / report) ** power == pytest.approx(share / (1 - share), rel=1e-6)


@pytest.mark.e2e
@pytest.mark.parametrize("laplace", [False, True], ids=["gaussian", "laplace"])
def test_the_printed_budget_of_a_participation_is_a_share_of_epsilon_and_of_delta(laplace, make_loop):
    """Algorithm 2, lines 3 and 5, in both stages; with Gaussian noise it costs several times the exact noise."""
    share, loops = 0.2, {}
    for calibration in ("exact", "linear"):
        strategy = two_stages(TwoStagesAsPrinted, loss_share=share, calibration=calibration)
        loops[calibration] = federation(make_loop, strategy, laplace=laplace)
        loops[calibration].plan_schedule()
    power = 1 if laplace else 2
    for exact, linear in zip(*(loop.schedule.clients for loop in loops.values()), strict=True):
        count = linear.count_of("train")
        assert count == exact.count_of("train")
        if not count:
            continue
        event = linear.planned[0].event
        of_one = event.with_noise(event.noise_multiplier * (1 - share) ** (1 / power))
        epsilon = loops["linear"].config.accountant.epsilon([of_one], linear.delta / count)
        assert epsilon == pytest.approx(linear.target_epsilon / count, rel=1e-3)
        more = event.noise_multiplier / exact.noise_multiplier("train")
        assert more == pytest.approx(1, rel=1e-3) if laplace or count == 1 else more > 1.2, count
    loops["linear"].run()
    assert_within_budgets(loops["linear"])
    assert any(own.count_of("later_train") for own in loops["linear"].schedule.clients)


@pytest.mark.e2e
def test_losses_of_a_noiseless_step_are_those_of_the_box_and_every_epsilon_is_infinite(make_loop):
    """Algorithm 2, Loss: F_n(w - g), where g is the mean of the clipped gradients times the rate."""
    asked = []

    class Reads(TwoStagesAsPrinted):
        def _second_losses(self, updates, view):
            def ask(question):
                asked.append((question, view.ask(question)))
                return asked[-1][1]

            return super()._second_losses(updates, dataclasses.replace(view, ask=ask))

    strategy = two_stages(Reads, second_loss="noiseless_step")
    loop = federation(make_loop, strategy)
    loop.run()
    assert len(asked) == WARMUP and all(len(found) == COHORT for _, found in asked)
    for question, found in asked:
        for client, loss in found.items():
            params, rows = (
                loop.module.unflatten(question.models[question.row_of[client]]),
                loop.population.train_of[client],
            )
            x, y = loop.population.x[rows], loop.population.y[rows]
            assert loss == pytest.approx(
                after_own_step(
                    loop.module.net, params, x, y, question.learning_rate_of[client], question.clip_norm_of[client]
                ),
                rel=1e-4,
            )
    reporting = {client for _, client, _ in strategy._after}
    for client, guarantee in enumerate(loop.clients.budgets.guarantees()):
        assert math.isinf(guarantee.epsilon) == (client in reporting)
        assert client not in reporting or "a step without noise" in guarantee.words()
    assert all(np.isfinite(loss) for _, _, loss in strategy._after)


def test_a_noiseless_step_on_records_that_noise_protects_is_refused(make_loop, tmp_path):
    """It would be a release without noise, even if the guarantee said so."""
    folder, strategy = tmp_path / "refused", two_stages(TwoStagesAsPrinted, second_loss="noiseless_step")
    words = r"second_loss` must be left out where noise protects records, got 'noiseless_step'.*privacy\.noise_key: KEY"
    with pytest.raises(UserError, match=words):
        federation(make_loop, strategy, privacy={"noise_key": None}, output_dir=folder).run()
    assert not (folder / "ledger.jsonl").exists()
    federation(make_loop, two_stages(TwoStagesAsPrinted), privacy={"noise_key": None}).plan_schedule()
    federation(make_loop, strategy, privacy=None).plan_schedule()


def test_no_message_to_a_site_can_ask_for_a_noiseless_step():
    question = LossOfOwnStep(
        mechanism_of={0: NoMechanism("all")},
        models=torch.zeros(1, 3),
        row_of={0: 0},
        learning_rate_of={0: 0.1},
        clip_norm_of={0: 1.0},
        clip_order=2,
    )
    with pytest.raises(wire.WireError, match="LossOfOwnStep"):
        wire.encode(Ask(1, question))


def after_own_step(net, params, x, y, learning_rate, clip_norm) -> float:
    """The loss after a step along the mean of clipped gradients, record by record."""

    def loss(params, x, y):
        return torch.nn.functional.cross_entropy(torch.func.functional_call(net, params, (x,)), y)

    sums = {name: torch.zeros_like(p) for name, p in params.items()}
    for one, label in zip(x, y, strict=True):
        grads = torch.func.grad(loss)(params, one[None], label[None])
        norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
        for name, grad in grads.items():
            sums[name] += min(1.0, clip_norm / float(norm)) * grad
    moved = {name: p - learning_rate / len(y) * sums[name] for name, p in params.items()}
    return float(loss(moved, x, y))


@pytest.mark.e2e
@pytest.mark.parametrize("clients, kind", [((), TwoStagesAsPrinted), ((6,), TwoStageSelection)])
def test_a_run_says_if_its_reports_decide_nothing(kind, clients, make_loop):
    """All others are away in the first stage; then quotas are those of least noise."""
    away = dict.fromkeys(range(1, WARMUP + 1), tuple(set(range(COUNT)) - set(clients)))
    strategy = two_stages(kind, ratio=100.0)
    loop = federation(make_loop, Absent(away), strategy)
    with pytest.warns(UserNotice, match=r"reports of losses show no difference between clients"):
        loop.run()
    assert (len(strategy._reports) > 0) == bool(clients) and np.ptp(strategy._gamma) == 0
    assert_within_budgets(loop)


def odd_one_out() -> Population:
    """Eight clients; the labels of client 5 are turned by one: no model of the others fits it."""
    population = blobs(num_clients=COUNT)
    rows = population.train_of[5]
    population.y[rows] = (population.y[rows] + 1) % 3
    return population


@pytest.mark.e2e
def test_an_unlike_client_is_avoided_where_losses_show_it(make_loop):
    """Large budgets: reports have little noise."""
    quotas = {}
    for ratio in (0.0, 100.0):
        strategy = two_stages(ratio=ratio, loss_bound=6.0)
        federation(make_loop, strategy, population=odd_one_out(), privacy={"epsilon": 200.0}, rounds=30).run()
        quotas[ratio] = strategy._quota
        assert strategy._gamma.argmax() == 5 and strategy._gamma[5] > 1.2 * np.median(strategy._gamma)
    assert quotas[100.0][5] == 0 < quotas[0.0][5] and quotas[100.0].sum() == quotas[0.0].sum()


@pytest.mark.e2e
def test_without_privacy_losses_are_exact(make_loop):
    strategy = two_stages(loss_bound=50.0)
    loop = federation(make_loop, strategy, privacy=None)
    start = loop.module.flat
    loop.run()
    _, client, reported = strategy._reports[0]
    x, y = loop.population.records(client, torch.arange(loop.population.num_records[client]))
    net = small_net()
    torch.nn.utils.vector_to_parameters(start, net.parameters())
    assert reported == pytest.approx(torch.nn.functional.cross_entropy(net(x), y).item(), rel=1e-5)


def cut(make_loop, round, kind=TwoStageSelection, **options):
    """A loop that resumes one that was cut in a round."""
    first = break_off(federation(make_loop, two_stages(kind), **options), round)
    return federation(make_loop, two_stages(kind), output_dir=first.output_dir, **options)


def assert_within_budgets(loop):
    for client, budget in enumerate(EPSILON):
        assert loop.config.accountant.epsilon(loop.clients.budgets.ledger.events(client), DELTA) <= budget


@pytest.mark.e2e
def test_a_run_pays_for_what_it_repeats(make_loop):
    again = cut(make_loop, WARMUP + 2, privacy={"noise_key": None, "reserve_rounds": 1})
    again.run(resume=True)
    assert_within_budgets(again)


@pytest.mark.e2e
def test_a_second_stage_that_was_paid_for_is_not_planned_again_with_other_noise(make_loop, monkeypatch):
    """Without its checkpoints the first stage is made anew; what later noise follows from is then another release."""
    save = RunFolder.save_checkpoint
    with monkeypatch.context() as patch:  # as a kill: nothing is saved after the start
        patch.setattr(
            RunFolder,
            "save_checkpoint",
            lambda folder, *now: None if folder.checkpoint.exists() else save(folder, *now),
        )
        again = cut(make_loop, WARMUP + 3, privacy={"noise_key": None, "reserve_rounds": WARMUP})
    with pytest.raises(UserError, match=r"ledger.jsonl` must hold what the schedule of client \d plans now"):
        again.run(resume=True)
    assert_within_budgets(again)


@pytest.mark.e2e
def test_a_loss_is_one_step_however_many_an_update_has(make_loop):
    clients = ClientOptions(count=COUNT, batch_size=None, local_epochs=2, learning_rate=0.3)
    loop = federation(make_loop, two_stages(), clients=clients)
    loop.run()
    for client in range(COUNT):
        paid = loop.clients.budgets.ledger.paid(client)
        assert {event.steps for event in paid.get("train", ())} <= {2}
        assert {event.steps for event in paid.get("loss", ())} <= {1}
    assert_within_budgets(loop)


def test_runs_that_do_not_fit_are_refused(make_loop):
    sampled = ClientOptions(count=COUNT, batch_size=16)
    noise = {"noise_multiplier": 2.0}
    for options, loop, words in (
        ({"warmup_rounds": ROUNDS}, {}, r"warmup_rounds` must be below the 12 rounds, got 12"),
        (
            {},
            {"clients": sampled},
            r"plan one full batch a round.* got 'train: .* sampled batches'. Set clients.batch_size: null",
        ),
        ({}, {"laplace": True, "privacy": {"delta": 1e-3}}, r"with delta 0 if noise is Laplace"),
        ({}, {"privacy": noise}, r"`privacy\.noise_multiplier` must be null for strategy two_stage"),
    ):
        with pytest.raises(UserError, match=words):
            federation(make_loop, two_stages(**options), **loop).run()


@pytest.mark.parametrize("name", ["ifca", "clustered"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_releases_that_no_filter_covers_are_refused_before_any_charge(name, first, make_loop):
    (other,) = strategies.build({name: {"num_clusters": 2}})
    parts = (other, two_stages()) if first else (two_stages(), other)
    loop = federation(make_loop, *parts)
    with pytest.raises(UserError, match=r"`strategies(\.clustered)?` must .*, got (it|'train: Gaussian noise,)"):
        loop.plan_schedule()


@pytest.mark.e2e
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_choices_of_models_fit_where_epsilons_are_pure(first, make_loop):
    """A client without quota in the first stage also adds noise to its choice."""
    (other,) = strategies.build({"ifca": {"num_clusters": 2}})
    loop = federation(make_loop, *((other, two_stages()) if first else (two_stages(), other)), laplace=True)
    planned = loop.plan_schedule()
    assert all(isinstance(client.planned[-1].event, SelectionEvent) for client in planned.clients)
    loop.run()
    for client, budget in enumerate(EPSILON):
        assert loop.config.accountant.epsilon(loop.clients.budgets.ledger.events(client), 0.0) <= budget


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["mr_mtl", "ifca"])
def test_with_several_models_each_client_reports_the_loss_of_its_model(name, make_loop):
    (other,) = strategies.build({name: {"selection": "paper_argmin"} if name == "ifca" else None})
    strategy = two_stages(TwoStagesAsPrinted)
    loop = federation(make_loop, other, strategy)
    loop.run()
    assert len(loop.state.models) > 1 and len(strategy._reports) == COHORT * WARMUP
    assert all(np.isfinite(one).all() for one in strategy._reports)


# ---- the query


@pytest.mark.parametrize("kind", [Gaussian, Laplace])
def test_one_record_moves_a_reported_loss_by_what_its_mechanism_says(kind):
    """Half of the bound / records for one more, the bound / records for another: extremes are reached."""
    module, bound, count = ClientModule(torch.nn.Linear(1, 2, bias=False)), 3.0, 10
    model = torch.tensor([[5.0, -5.0]])
    silent = kind(bound / 2, 0.0, 1.0, float(count))

    def answer(x, y, mechanism=silent):
        query = MeanLoss(mechanism_of={0: mechanism}, models=model, row_of={0: 0}, loss_bound=bound)
        x, y = torch.tensor(x)[:, None], torch.tensor(y)
        return query.read(0, answers.answer(ChargedQuery.of(query), 0, module, x, y, None, passes_like(x, y)))

    x, y = [1.0] * 9, [0, 1] * 4 + [0]
    middle = answer(x, y)
    best, worst = answer([*x, 9.0], [*y, 0]), answer([*x, 9.0], [*y, 1])
    assert worst - best == pytest.approx(bound / count, rel=1e-6), "one record is another"
    assert max(abs(worst - middle), abs(best - middle)) == pytest.approx(bound / 2 / count, rel=1e-6)
    losses = torch.nn.functional.cross_entropy(torch.tensor(x)[:, None] @ model, torch.tensor(y), reduction="none")
    mean = losses.clamp(max=bound).mean().item()
    assert answer(x, y, kind(bound / 2, 0.0, 1.0, 9.0)) == pytest.approx(mean)


@pytest.mark.e2e
def test_quotas_of_the_second_stage_are_optimal_for_what_is_left(make_loop):
    """Computed again from the ledger: mu^2 that is left, ratio 0."""
    strategy = two_stages(ratio=0.0)
    loop = federation(make_loop, strategy)
    loop.plan_schedule()
    first = strategy._quota.copy()
    planned = loop.schedule
    loop.run()
    records, mu = np.array(loop.population.num_records), gaussian_mu(np.array(EPSILON), np.full(COUNT, DELTA))

    def square(events):
        return sum(event.steps / event.noise_multiplier**2 for event in events if event.noise_multiplier)

    left = []
    for client in range(COUNT):
        early = loop.clients.budgets.ledger.events(client)[
            : 2 * int(strategy._first[client])
        ]  # an update and a report each
        whole = square(planned.clients[client].events()) if first[client] else mu[client] ** 2
        left.append(whole - square(early))
    factor = np.where(np.array(left) > 1e-9, 83 / (np.maximum(left, 1e-300) * records**2), np.inf)
    expected = allocate_int(factor, COHORT * (ROUNDS - WARMUP), upper=ROUNDS - WARMUP)
    assert np.abs(strategy._quota - expected).max() <= 1 and strategy._quota.sum() == expected.sum() == COHORT * (
        ROUNDS - WARMUP
    )
    assert strategy._quota.max() <= ROUNDS - WARMUP


@pytest.mark.e2e
@pytest.mark.parametrize("accountant", ["pld", "laplace", "biased"])
def test_the_start_of_a_run_names_the_accountant_of_its_end(accountant, make_loop):
    """Also if the first client has quota 0, and where a privacy filter holds later."""

    class Watching(Callback):
        def on_fit_start(self, view):
            self.promise = view.expected_guarantee()

    watching, laplace = Watching(), accountant == "laplace"
    strategy = BiasedSelection(COHORT, dissimilarity=0.0) if accountant == "biased" else two_stages()
    loop = federation(make_loop, strategy, watching, laplace=laplace)
    result = loop.run()
    assert strategy._quota[0] == 0 or accountant != "biased"
    assert f"accounted by {watching.promise.accountant}." in str(result.guarantee)
