"""Two stages: reports planned and charged, budgets split and then spent to the last, quotas that follow from losses."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import FIXED_KEY, PowerCut, blobs, cut_at, small_net

from dpfl_lightning.algorithms.allocation import allocate_int
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client import answers
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.query import ChargedQuery, LossesAroundStep, MeanLoss, NoMechanism, event_of
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.folder import RunFolder
from dpfl_lightning.privacy.accounting.accountant import gaussian_mu
from dpfl_lightning.privacy.accounting.events import NonPrivateEvent
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.mechanism import Gaussian, Laplace
from dpfl_lightning.privacy.noise import RandomGenerator
from dpfl_lightning.strategies.selection.two_stage_selection import FILTER, UNSOUND, TwoStageSelection

EPSILON = [0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
COUNT, COHORT, ROUNDS, WARMUP, DELTA = len(EPSILON), 3, 12, 4, 1e-3


class Seen(Callback):
    def __init__(self):
        self._cohorts = []

    def on_round_end(self, view, report):
        self._cohorts.append(report.clients)


def federation(make_loop, own, *parts, laplace=False, population=None, clients=None, privacy=(), **more):
    usual = {"epsilon": EPSILON, "delta": DELTA, "accountant": "gdp", "noise_key": FIXED_KEY}
    if laplace:
        usual |= {"mechanism": "laplace", "delta": 0.0, "accountant": "rdp"}
    return make_loop(
        population=blobs(num_clients=COUNT) if population is None else population,
        clients=clients or ClientOptions(count=COUNT, batch_size=None, learning_rate=0.3),
        privacy=None if privacy is None else PrivacyOptions(**{**usual, **dict(privacy)}),
        parts=[own, *parts],
        **{"rounds": ROUNDS, **more},
    )


def two_stages(**more) -> TwoStageSelection:
    return TwoStageSelection(**{"clients_per_round": COHORT, "warmup_rounds": WARMUP, **more})


@pytest.mark.parametrize("estimates", ["shrunken", "least_difference"])
@pytest.mark.parametrize("accountant", ["gdp", "rdp", "laplace"])
def test_budgets_are_spent_in_two_stages_and_never_exceeded(accountant, estimates, make_loop):
    laplace = accountant == "laplace"
    privacy = {} if laplace else {"accountant": accountant}
    own, seen = two_stages(estimates=estimates), Seen()
    loop = federation(make_loop, own, seen, laplace=laplace, privacy=privacy)
    loop.plan_schedule()
    first, planned = own._quota.copy(), loop.schedule
    result = loop.run()
    assert [len(cohort) for cohort in seen._cohorts] == [COHORT] * ROUNDS
    parts = seen._cohorts[:WARMUP], seen._cohorts[WARMUP:]
    early, late = (Counter(n for cohort in part for n in cohort) for part in parts)
    reports = 1 if estimates == "shrunken" else 2
    charges = Counter((charge.client, charge.purpose) for charge in read_ledger(loop.clients.folder.ledger_file))
    for client, budget in enumerate(EPSILON):
        assert charges[client, "train"] == early[client] <= first[client]
        assert charges[client, "loss"] == reports * early[client]
        assert charges[client, "later_train"] == late[client] == own._quota[client]
        events, delta = loop.clients.budgets.ledger.events(client), loop.schedule.clients[client].delta
        spent = loop.accountant.epsilon(events, delta)
        whole = loop.accountant.epsilon(planned.clients[client].events(), delta)
        assert spent <= budget and whole <= budget, "the first plan alone would have fitted, too"
        if first[client]:
            assert whole > budget * (1 - 1e-4)
        if late[client]:
            assert spent > budget * (1 - 1e-4), "the second stage takes all that is left"
        if early[client] or late[client]:
            assert result.clients[client]["epsilon_spent"] == budget, "the budget is what holds"
            assert "as a privacy filter" in loop.clients.budgets.guarantees()[client].accountant
        assert FILTER.rstrip(".") in loop.clients.budgets.guarantees()[client].words()
    told = result.metrics
    assert told["participations"] == told["quota"] == [early[n] + late[n] for n in range(COUNT)]
    assert len(told["unlikeness"]) == COUNT


@pytest.mark.parametrize("laplace", [False, True], ids=["gaussian", "laplace"])
def test_each_participation_is_split_between_update_and_losses(laplace, make_loop):
    """Two reports have the share w of each participation: of epsilon (Laplace), or of mu^2 (Gaussian)."""
    share, own = 0.2, two_stages(loss_share=0.2, estimates="least_difference")
    loop = federation(make_loop, own, laplace=laplace)
    loop.plan_schedule()
    for client, quota in enumerate(own._quota):
        if quota:
            update, report = (loop.schedule.clients[client].noise_multiplier(name) for name in ("train", "loss"))
            power = 1 if laplace else 2  # epsilons add up, or inverse squares of noise do
            assert 2 * (update / report) ** power == pytest.approx(share / (1 - share), rel=1e-6)


def test_a_ratio_of_zero_is_least_noise_with_what_is_left(make_loop):
    own = two_stages(ratio=0.0)
    loop = federation(make_loop, own)
    loop.run()
    releases = [len(loop.clients.budgets.ledger.events(n)) for n in range(COUNT)]
    assert sum(releases) == COHORT * ROUNDS + COHORT * WARMUP
    assert own._quota.sum() == COHORT * (ROUNDS - WARMUP) and own._quota.max() <= ROUNDS - WARMUP


def odd_one_out() -> Population:
    """Eight clients; the labels of client 5 are turned by one: no model of the others fits it."""
    population = blobs(num_clients=COUNT)
    rows = population.train_of[5]
    population.y[rows] = (population.y[rows] + 1) % 3
    return population


def test_an_unlike_client_is_avoided_where_losses_show_it(make_loop):
    """Large budgets: reports have little noise."""
    quotas = {}
    for ratio in (0.0, 100.0):
        own = two_stages(ratio=ratio, loss_bound=6.0)
        federation(make_loop, own, population=odd_one_out(), privacy={"epsilon": 200.0}, rounds=30).run()
        quotas[ratio] = own._quota
        assert own._unlike.argmax() == 5 and own._unlike[5] > 1.2 * np.median(own._unlike)
    assert quotas[100.0][5] == 0 < quotas[0.0][5] and quotas[100.0].sum() == quotas[0.0].sum()


def test_the_papers_constants_give_some_ratio_and_the_run_goes_on(make_loop):
    own = two_stages(ratio=None, estimates="least_difference")
    result = federation(make_loop, own).run()
    assert result.finished and own._quota.sum() == COHORT * (ROUNDS - WARMUP)


def test_the_papers_reports_are_allowed_in_words_only(make_loop):
    """Epsilon is infinite for who reported; updates have the noise of their budgets."""
    with pytest.raises(UserError, match=r"allow_unsound` must be false with shrunken estimates"):
        two_stages(allow_unsound=True)
    own = two_stages(estimates="least_difference", allow_unsound=True, ratio=None)
    loop = federation(make_loop, own)
    start = loop.module.flat
    result = loop.run()
    charges = list(read_ledger(loop.clients.folder.ledger_file))
    reported = {charge.client for charge in charges if charge.purpose == "loss"}
    assert {charge.event for charge in charges if charge.purpose == "loss"} == {NonPrivateEvent(UNSOUND)} and reported
    for client, (row, budget) in enumerate(zip(result.clients, EPSILON, strict=True)):
        assert (row["epsilon_spent"] is None) == (client in reported)
        updates = [one.event for one in charges if one.client == client and one.purpose != "loss"]
        assert loop.accountant.epsilon(updates, loop.schedule.clients[client].delta) <= budget
    promises = loop.clients.budgets.guarantees()
    assert all((one.unprotected == (UNSOUND,)) == (client in reported) for client, one in enumerate(promises))
    purposes = Counter(charge.purpose for charge in read_ledger(loop.clients.folder.ledger_file))
    assert purposes["loss"] == COHORT * WARMUP and purposes["later_train"] == COHORT * (ROUNDS - WARMUP)
    assert len(own._reports) == COHORT * WARMUP and all(np.isfinite(one).all() for one in own._reports)
    # exact, without noise: the loss before and after a clipped full-batch step
    client, mechanism = 2, Gaussian(1.0, 0.0, 1.0, float(loop.population.num_records[2]))
    x, y = loop.population.records(client, torch.arange(loop.population.num_records[client]))
    silent = {client: NoMechanism("unbounded", mechanism)}
    query = LossesAroundStep(mechanism_of=silent, model=start, step_of={client: (math.inf, 2, 0.3)})
    before, after = query.read(client, answers.answer(ChargedQuery.of(query), client, loop.module, x, y, None))
    net = small_net()
    loss = torch.nn.functional.cross_entropy(net(x), y)
    assert before == pytest.approx(loss.item(), rel=1e-5)
    with torch.no_grad():
        for parameter, gradient in zip(
            net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True
        ):
            parameter -= 0.3 * gradient
    assert after == pytest.approx(torch.nn.functional.cross_entropy(net(x), y).item(), rel=1e-5) and after < before


def test_without_privacy_losses_are_exact(make_loop):
    own = two_stages(loss_bound=50.0)
    loop = federation(make_loop, own, privacy=None)
    start = loop.module.flat
    loop.run()
    _, client, reported, _ = own._reports[0]
    x, y = loop.population.records(client, torch.arange(loop.population.num_records[client]))
    net = small_net()
    torch.nn.utils.vector_to_parameters(start, net.parameters())
    assert reported == pytest.approx(torch.nn.functional.cross_entropy(net(x), y).item(), rel=1e-5)


@pytest.mark.parametrize("estimates", ["shrunken", "least_difference"])
@pytest.mark.parametrize("cut", [2, WARMUP + 1, WARMUP + 3])
def test_a_resumed_run_has_the_same_quotas_and_bits(cut, estimates, make_loop, tmp_path):
    def loop(name):
        own = two_stages(estimates=estimates)
        return federation(make_loop, own, output_dir=tmp_path / name)

    whole, first = loop("whole"), loop("cut")
    whole.run()
    cut_at(first, cut)
    with pytest.raises(PowerCut):
        first.run()
    again = loop("cut")
    result = again.run(resume=True)
    assert torch.equal(again.state.models, whole.state.models)
    assert again.strategies[1]._quota.tolist() == whole.strategies[1]._quota.tolist()
    assert [row["releases"] for row in result.clients] == [
        len(whole.clients.budgets.ledger.events(n)) for n in range(COUNT)
    ]


def test_a_run_pays_for_what_it_repeats(make_loop, tmp_path):
    def loop():
        privacy = {"noise_key": None, "reserve_rounds": 1}
        return federation(make_loop, two_stages(), privacy=privacy, output_dir=tmp_path / "run")

    first = loop()
    cut_at(first, WARMUP + 2)
    with pytest.raises(PowerCut):
        first.run()
    again = loop()
    again.run(resume=True)
    for client, budget in enumerate(EPSILON):
        assert again.accountant.epsilon(again.clients.budgets.ledger.events(client), DELTA) <= budget


def test_a_second_stage_that_was_paid_for_is_not_planned_again_with_other_noise(make_loop, tmp_path, monkeypatch):
    """Without its checkpoints the first stage is made anew; what later noise follows from is then another release."""

    def loop():
        privacy = {"noise_key": None, "reserve_rounds": WARMUP}
        return federation(make_loop, two_stages(), privacy=privacy, output_dir=tmp_path / "run")

    first, save = loop(), RunFolder.save_checkpoint
    monkeypatch.setattr(
        RunFolder, "save_checkpoint", lambda own, now: None if own.checkpoint.exists() else save(own, now)
    )
    cut_at(first, WARMUP + 3)
    with pytest.raises(PowerCut):  # as a kill: nothing is saved after the start
        first.run()
    monkeypatch.undo()
    again = loop()
    with pytest.raises(UserError, match=r"ledger.jsonl` must hold what the schedule of client \d plans now"):
        again.run(resume=True)
    for client, budget in enumerate(EPSILON):
        assert again.accountant.epsilon(again.clients.budgets.ledger.events(client), DELTA) <= budget


def test_a_loss_is_one_step_however_many_an_update_has(make_loop):
    clients = ClientOptions(count=COUNT, batch_size=None, local_epochs=2, learning_rate=0.3)
    loop = federation(make_loop, two_stages(), clients=clients)
    loop.run()
    for client, budget in enumerate(EPSILON):
        paid = loop.clients.budgets.ledger.paid(client)
        assert {event.steps for event in paid.get("train", ())} <= {2}
        assert {event.steps for event in paid.get("loss", ())} <= {1}
        assert loop.accountant.epsilon(loop.clients.budgets.ledger.events(client), DELTA) <= budget


@pytest.mark.parametrize(
    ("options", "loop", "words"),
    [
        ({"warmup_rounds": 1}, {}, r"`strategies\.two_stage_selection\.warmup_rounds` must be >= 2, got 1"),
        ({"warmup_rounds": ROUNDS}, {}, r"warmup_rounds` must be below the 12 rounds, got 12"),
        ({"ratio": -1.0}, {}, r"\.ratio` must be >= 0"),
        ({"ratio": None}, {}, r"\.ratio` must be a number with shrunken estimates"),
        ({"loss_share": 1.0}, {}, r"\.loss_share` must be in \(0, 1\)"),
        ({"loss_bound": 0.0}, {}, r"\.loss_bound` must be above 0"),
        ({"estimates": "minimum"}, {}, r"\.estimates` must be one of shrunken, least_difference"),
        ({}, {"clients": ClientOptions(count=COUNT, batch_size=16)}, r"`clients\.batch_size` must be null \(full"),
        ({}, {"laplace": True, "privacy": {"delta": 1e-3}}, r"with delta 0 if noise is Laplace"),
        (
            {},
            {"privacy": {"noise_multiplier": 2.0}},
            r"`privacy\.noise_multiplier` must be null for strategy two_stage",
        ),
        ({}, {"privacy": {"accountant": "prv"}}, r"`privacy\.accountant` must be gdp or rdp where later noise depends"),
    ],
)
def test_bad_options_are_one_sentence(options, loop, words, make_loop):
    with pytest.raises(UserError, match=words):
        federation(make_loop, two_stages(**options), **loop).run()


# ---- the query


@pytest.mark.parametrize("kind", [Gaussian, Laplace])
def test_one_record_moves_a_reported_loss_by_what_its_mechanism_says(kind):
    """Half of the bound / records for one more, the bound / records for another: extremes are reached."""
    module, bound, count = ClientModule(torch.nn.Linear(1, 2, bias=False)), 3.0, 10
    model = torch.tensor([[5.0, -5.0]])
    silent = kind(bound / 2, 0.0, 1.0, float(count))

    def answer(x, y, mechanism=silent):
        query = MeanLoss(mechanism_of={0: mechanism}, models=model, row_of={0: 0}, loss_bound=bound)
        return query.read(
            0, answers.answer(ChargedQuery.of(query), 0, module, torch.tensor(x)[:, None], torch.tensor(y), None)
        )

    x, y = [1.0] * 9, [0, 1] * 4 + [0]
    middle = answer(x, y)
    best, worst = answer([*x, 9.0], [*y, 0]), answer([*x, 9.0], [*y, 1])
    assert worst - best == pytest.approx(bound / count, rel=1e-6), "one record is another"
    assert max(abs(worst - middle), abs(best - middle)) == pytest.approx(bound / 2 / count, rel=1e-6)
    losses = torch.nn.functional.cross_entropy(torch.tensor(x)[:, None] @ model, torch.tensor(y), reduction="none")
    mean = losses.clamp(max=bound).mean().item()
    assert answer(x, y, kind(bound / 2, 0.0, 1.0, 9.0)) == pytest.approx(mean)


def test_the_noise_of_a_reported_loss_is_that_of_its_event():
    module = ClientModule(torch.nn.Linear(1, 2))
    mechanism = Gaussian(0.5, 4.0, 1.0, 10.0)
    query = MeanLoss(mechanism_of={3: mechanism}, models=module.flat[None], row_of={3: 0}, loss_bound=1.0)
    draw, x, y = RandomGenerator(bytes(32)), torch.zeros(10, 1), torch.zeros(10, dtype=torch.long)
    reports = [query.read(3, answers.answer(ChargedQuery.of(query), 3, module, x, y, draw)) for _ in range(2000)]
    assert np.std(reports) == pytest.approx(0.5 * 4.0 / 10, rel=0.06)  # seed 0; 3.8 standard errors
    assert event_of(query, 3) == mechanism.event(1)


def test_quotas_of_the_second_stage_are_optimal_for_what_is_left(make_loop):
    """Recomputed from the ledger: mu^2 that is left, ratio 0."""
    own = two_stages(ratio=0.0)
    loop = federation(make_loop, own)
    loop.plan_schedule()
    first = own._quota.copy()
    planned = loop.schedule
    loop.run()
    records, mu = np.array(loop.population.num_records), gaussian_mu(np.array(EPSILON), np.full(COUNT, DELTA))

    def square(events):
        return sum(event.steps / event.noise_multiplier**2 for event in events if event.noise_multiplier)

    left = []
    for client in range(COUNT):
        early = loop.clients.budgets.ledger.events(client)[: 2 * int(own._first[client])]  # an update and a report each
        whole = square(planned.clients[client].events()) if first[client] else mu[client] ** 2
        left.append(whole - square(early))
    factor = np.where(np.array(left) > 1e-9, 83 / (np.maximum(left, 1e-300) * records**2), np.inf)
    expected = allocate_int(factor, COHORT * (ROUNDS - WARMUP), upper=ROUNDS - WARMUP)
    assert np.abs(own._quota - expected).max() <= 1 and own._quota.sum() == expected.sum()
