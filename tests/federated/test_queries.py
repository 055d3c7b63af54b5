"""Answers of clients: the framework bounds, sums and noises them, or epsilon is infinite wherever it is shown."""

import ast
import dataclasses
import io
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import blobs, small_net
from contracts.test_strategies import LOOPS, OPTIONS
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import passes_like
from rich.console import Console

from dpfl_lightning import strategies
from dpfl_lightning.build import ENGINES
from dpfl_lightning.commands.ledger import main as ledger_command
from dpfl_lightning.federated.client import answers
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.query import (
    ChargedQuery,
    FeatureSums,
    MeanLoss,
    NoMechanism,
    Query,
    SelectModel,
    answer_fits,
    event_of,
)
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.curves import of_round
from dpfl_lightning.federated.server.results import read_guarantees
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.models.model import FORWARD_CHUNK
from dpfl_lightning.papers.clustered.model_selection import PLAIN_CHOICES
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.client_plan import client_plans
from dpfl_lightning.privacy.accounting.events import (
    Caveat,
    GaussianEvent,
    LaplaceEvent,
    NonPrivateEvent,
    SelectionEvent,
)
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.accounting.schedule import calibrate
from dpfl_lightning.privacy.mechanism import ExponentialMechanism, Gaussian, Laplace
from dpfl_lightning.privacy.noise import RandomGenerator
from dpfl_lightning.reporting.progress import Progress
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted

pytestmark = pytest.mark.e2e

MODULE = ClientModule(small_net())


@dataclass(frozen=True, kw_only=True)
class Columns(Query):
    """Its rows are what `make` gives for the records: by default their columns."""

    make: Callable = lambda x: x
    purpose: str = "columns"


@answers.rows_of(Columns)
def _columns(query, client, module, x, y):
    return query.make(x)


def silent(kind=Gaussian, clip_norm=1.0):
    """A mechanism that adds nothing and divides by 1."""
    return kind(clip_norm, 0.0, 1.0, 1.0)


def lists_of_rows(*special):
    numbers = st.floats(width=32) | st.sampled_from([*special, math.nan])
    return st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=2, max_size=6)


def released(query, x, y=None, generator=None, passes=None):
    """What leaves client 0."""
    y = torch.zeros(len(x), dtype=torch.long) if y is None else y
    return answers.answer(ChargedQuery.of(query), 0, MODULE, x, y, generator, passes or passes_like(x, y))


# ---- the bounds


@settings(deadline=None, max_examples=60)
@given(
    rows=lists_of_rows(1e30, -1e38, 1e-45),
    kind=st.sampled_from([Gaussian, Laplace]),
    clip_norm=st.sampled_from([1e-6, 0.5, 1e3]),
)
def test_one_record_moves_a_sum_by_at_most_the_clip_norm(rows, kind, clip_norm):
    query = Columns(mechanism_of={0: silent(kind, clip_norm)})
    x = torch.tensor(rows)
    whole, without = released(query, x), released(query, x[1:])
    moved = float(torch.linalg.vector_norm(whole - without, ord=kind.clip_order))
    assert bool(whole.isfinite().all()) and moved <= clip_norm * (1 + 1e-12) + 1e-15 * len(rows) * clip_norm


@settings(deadline=None, max_examples=60)
@given(rows=lists_of_rows(0.3, 0.7))
def test_one_record_gives_each_candidate_between_nothing_and_one(rows):
    query, x = Columns(mechanism_of={0: ExponentialMechanism(1.0)}), torch.tensor(rows)
    y = torch.zeros(len(x), dtype=torch.long)
    sums = [
        answers._bounded_sum(ChargedQuery.of(query), 0, MODULE, own, y[: len(own)], passes_like(x, y), answers._scores)
        for own in (x, x[1:])
    ]
    moved = sums[0] - sums[1]
    assert bool((moved >= -1e-12).all()) and bool((moved <= 1 + 1e-12).all())


def test_rows_within_the_bound_are_summed_exactly_and_others_scaled():
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [math.nan, 0.0], [math.inf, 0.0], [6e29, 8e29]])
    query = Columns(mechanism_of={0: silent(clip_norm=1.0)})
    torch.testing.assert_close(released(query, x), torch.tensor([0.6 + 0.3 + 0.6, 0.8 + 0.4 + 0.8]).double())
    in_l1 = Columns(mechanism_of={0: silent(Laplace, clip_norm=0.7)})
    torch.testing.assert_close(released(in_l1, x[:2]), torch.tensor([0.3 + 0.3, 0.4 + 0.4]).double())


def test_noise_and_divisor_are_the_mechanisms():
    x, draw = torch.zeros(5, 400), RandomGenerator(bytes(32))
    query = Columns(mechanism_of={0: Gaussian(0.5, 4.0, 1.0, 10.0)})
    passes = passes_like(x, torch.zeros(5, dtype=torch.long))
    values = torch.stack([released(query, x, None, draw, passes) for _ in range(10)])
    assert float(values.std()) == pytest.approx(0.5 * 4.0 / 10, rel=0.05)  # 4,000 draws of one key


def test_a_row_sees_its_record_alone():
    x = torch.randn(2 * FORWARD_CHUNK + 3, 2, generator=torch.Generator().manual_seed(0))
    query = Columns(
        mechanism_of={0: silent(clip_norm=1e9)},
        make=lambda x: torch.cat([x - x.mean(dim=0), x.sum(dim=0)[None]], dim=1),
    )
    expected = torch.cat([torch.zeros(2), x.sum(dim=0)]).double()
    torch.testing.assert_close(released(query, x), expected, rtol=1e-5, atol=1e-5)


def test_anything_but_one_row_a_record_is_refused():
    for make, got in (
        (lambda x: x[0], r"got shape \(2,\)"),
        (lambda x: x.sum(), r"got shape \(\)"),
        (lambda x: x[:, :, None], r"got shape \(1, 2, 1\)"),
        (lambda x: torch.cat([x, x]), r"got shape \(2, 2\)"),
        (lambda x: x.to(torch.complex64), r"got shape \(1, 2\)"),
        (lambda x: (x, x), "got tuple"),
        (lambda x: None, "got NoneType"),
    ):
        for mechanism in (silent(), ExponentialMechanism(1.0)):
            with pytest.raises(ValueError, match=rf"the rows of Columns must be one row of real numbers.* {got}"):
                released(Columns(mechanism_of={0: mechanism}, make=make), torch.ones(3, 2))
    passes, lengths = passes_like(torch.ones(1, 2), torch.zeros(1)), itertools.chain([2], itertools.repeat(1))
    passes.size = lambda what, rows_of: 8  # no check, which would see the lengths
    query = ChargedQuery.of(Columns(mechanism_of={0: silent()}, make=lambda x: x[:, : next(lengths)]))
    with pytest.raises(ValueError, match=r"must have one length, got 2 and 1"):
        answers.answer(query, 0, MODULE, torch.ones(9, 2), torch.zeros(9, dtype=torch.long), None, passes)


# ---- what is charged


class Looser(Gaussian):
    """States less than it releases."""

    def event(self, steps):
        return GaussianEvent(1.0, 1e6, steps)


def test_events_follow_from_mechanisms_of_the_framework_alone():
    known = {
        Gaussian(1.0, 2.0, 1.0, 9.0): GaussianEvent(1.0, 2.0),
        Laplace(1.0, 2.0, 1.0, 9.0): LaplaceEvent(2.0),
        ExponentialMechanism(0.3): SelectionEvent(0.3),
        NoMechanism("shown"): NonPrivateEvent("shown"),
    }
    assert [event_of(Columns(mechanism_of={3: one}), 3) for one in known] == list(known.values())
    caveat, looser = Caveat("sizes are public"), Looser(1.0, 0.1, 1.0, 1.0)
    for mechanism in (caveat, NonPrivateEvent("anything"), GaussianEvent(1.0, 5.0), looser, None):
        with pytest.raises(TypeError):
            event_of(Columns(mechanism_of={0: mechanism}), 0)
    with pytest.raises(ValueError):  # sampled, which an answer is not
        event_of(Columns(mechanism_of={0: Gaussian(1.0, 1.0, 0.5, 1.0)}), 0)
    with pytest.raises(TypeError, match="must have noise or be `NonPrivateEvent`, got Caveat"):
        Planned("columns", caveat, 1)


@dataclass(frozen=True, kw_only=True)
class Steals(Query):
    """Tries to get the records themselves."""

    purpose: str = "steal"


@answers.rows_of(Steals)
@answers.plain_answer_of(Steals)
def _steal(query, client, module, x, y):
    return torch.cat([x, y[:, None]], dim=1)


class Spies(Steals):
    """A subclass, which could run other code beside the records."""


class OldStyle:
    """A question that answers by itself, and says what that costs."""

    purpose = "steal"

    def __init__(self, clients):
        self.clients = clients

    def event_of(self, client):
        return Caveat("sizes are public")

    def answer(self, client, module, x, y, generator=None):
        return x, y


class Asks(Strategy, Callback):
    """Asks one question in round 2, having planned `event` for it."""

    def __init__(self, event, question):
        self._event, self._question, self._answers, self._spent = event, question, None, []

    def plan_run(self, schedule, view):
        line = Planned("steal", self._event, 1)
        return schedule.replan(lambda _, own: dataclasses.replace(own, planned=(*own.planned, line)))

    def plan_round(self, plan, view):
        if view.round == 2:
            self._answers = view.ask(self._question(plan.clients))
        return plan

    def on_round_end(self, view, report):
        self._spent.append(report.epsilon_spent)


@pytest.mark.parametrize("engine", ENGINES)
def test_who_asks_for_the_records_gets_a_clipped_and_noised_sum(engine, make_loop):
    noise = Gaussian(0.5, 6.0, 1.0, 1.0)
    asks = Asks(noise.event(1), lambda clients: Steals(mechanism_of=dict.fromkeys(clients, noise)))
    loop = make_loop(parts=[SizeWeighted(), asks], engine=ENGINES[engine]())
    result = loop.run()
    for client in range(4):
        got = asks._answers[client]
        x, y = loop.population.records(client, torch.arange(loop.population.num_records[client]))
        rows = torch.cat([x, y[:, None]], dim=1).double()
        exact = (rows * (0.5 / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)).sum(dim=0)
        assert got.shape == (7,) and bool((got - exact).abs().gt(1e-3).all()), "every number is noised"
        assert float((got - exact).norm()) < 6 * 0.5 * 6.0 * math.sqrt(7)  # six standard deviations
    assert all(0 < one["epsilon_spent"] <= one["epsilon_budget"] for one in result.clients)


def test_who_shows_the_records_has_no_privacy_from_then_on(make_loop):
    asks = Asks(NonPrivateEvent("records"), lambda one: Steals(mechanism_of=dict.fromkeys(one, NoMechanism("records"))))
    result = make_loop(parts=[SizeWeighted(), asks]).run()
    assert asks._answers[0].shape[1] == 7
    assert max(asks._spent[0]) < 10.0 and all(math.isinf(min(spent)) for spent in asks._spent[1:])
    assert all(one["epsilon_spent"] is None for one in result.clients) and "records" in str(result.guarantee)


def test_a_question_that_cannot_be_priced_or_answered_is_refused_before_anything_is_charged(make_loop):
    @dataclass(frozen=True, kw_only=True)
    class Unknown(Query):
        purpose: str = "steal"

    noise, bare = Gaussian(0.5, 6.0, 1.0, 1.0), NoMechanism("all")
    unknown = "cannot answer Unknown: register a function with "
    for event, question, words in (
        (SelectionEvent(0.1), OldStyle, "a question to clients must be a `Query`, got OldStyle"),
        (noise.event(1), lambda to: Unknown(mechanism_of=dict.fromkeys(to, noise)), unknown + "`rows_of"),
        (bare.event(1), lambda to: Unknown(mechanism_of=dict.fromkeys(to, bare)), unknown + "`plain_answer_of"),
        (noise.event(1), lambda to: Spies(mechanism_of=dict.fromkeys(to, noise)), "cannot answer Spies"),
    ):
        asks = Asks(event, question)
        loop = make_loop(parts=[SizeWeighted(), asks])
        with pytest.raises(TypeError, match=words):
            loop.run()
        assert asks._answers is None and loop.clients.budgets.ledger.used(0, "steal") == 0


def test_another_mechanism_than_the_planned_one_is_refused(make_loop):
    noise = Gaussian(0.5, 0.01, 1.0, 1.0)
    asks = Asks(GaussianEvent(1.0, 6.0), lambda clients: Steals(mechanism_of=dict.fromkeys(clients, noise)))
    with pytest.raises(RuntimeError, match="but its schedule plans GaussianEvent"):
        make_loop(parts=[SizeWeighted(), asks]).run()


# ---- planned and spent


def test_training_gets_the_noise_with_which_it_alone_fits_the_budget():
    judge, train = get_accountant("rdp"), Planned("train", GaussianEvent(0.1, None, 10), 8)
    chosen = Planned("select", SelectionEvent(0.05), 2)
    for others in ((train,), (train, chosen)):
        bare = ClientSchedule(2.0, 1e-3, (*others, Planned("show", NonPrivateEvent("all"), 8)))
        with_it, without = calibrate([bare, dataclasses.replace(bare, planned=others)], judge)
        assert with_it.noise_multiplier("train") == without.noise_multiplier("train")
        assert judge.epsilon(without.events(), 1e-3) <= 2.0
        assert math.isinf(judge.epsilon(with_it.events(), 1e-3))


def test_an_answer_that_is_planned_but_never_given_costs_nothing():
    train, show = Planned("train", GaussianEvent(0.1, 1.5, 10), 3), Planned("show", NonPrivateEvent("all"), 0)
    (plan,) = client_plans([ClientSchedule(8.0, 1e-3, (train, show))], get_accountant("rdp"), [(100, 10)])
    assert math.isfinite(plan.guarantee.epsilon) and plan.epsilon_alone[1] == 0.0


# ---- every answer of every strategy

MORE = {
    **OPTIONS,
    "ifca": {"num_clusters": 2, "selection_rounds": 1},
    "clustered": {"num_clusters": 2, "switch_round": 1},
}
#: strategy and options -> what its guarantee says where nothing protects its answers
ASKING = (
    "clustered",
    "distillation",
    "feature_means",
    "ifca",
    "minimum_epsilon",
    "noise_aware",
    "released_scores",
    "two_stage_selection",
    "two_stages_as_printed",
)
VARIANTS = [
    *(
        pytest.param(name, {}, "", marks=[pytest.mark.e2e] * (name not in ASKING))
        for name in sorted(strategies.STRATEGIES)
    ),
    ("ifca", {"selection": "exponential", "selection_rounds": None}, ""),
    ("ifca", {"selection": "paper_argmin", "selection_rounds": None}, PLAIN_CHOICES),
    ("clustered", {"selection": "exponential"}, ""),
    ("clustered", {"selection": "paper_argmin"}, PLAIN_CHOICES),
    ("clustered", {"selection": "server_similarity"}, ""),
    ("two_stages_as_printed", {"second_loss": "noiseless_step"}, "losses after a step without noise"),
]


class Live(Callback):
    def __init__(self):
        self._reports, self._promise = [], None

    def on_fit_start(self, view):
        self._promise = view.expected_guarantee()

    def on_round_end(self, view, report):
        self._reports.append(report)


@pytest.mark.parametrize(("name", "options", "words"), VARIANTS, ids=lambda one: str(one)[:40])
def test_every_answer_is_noised_or_makes_epsilon_infinite_in_every_place(name, options, words, make_loop, capsys):
    (strategy,) = strategies.build({name: {**MORE.get(name, {}), **options}})
    live, paper = Live(), Console(file=io.StringIO(), width=200)
    base = [] if strategy.role == "base" else [SizeWeighted()]
    loop = make_loop(
        dataclasses.replace(blobs(), groups=(0, 1, 0, 1)),
        parts=[*base, strategy, live, Progress(paper)],
        **{"rounds": 4, **LOOPS.get(name, {})},
    )
    asked, ask = [], loop.clients.ask
    loop.clients.ask = lambda query, *rest: asked.append((query, ask(query, *rest))) or asked[-1][1]
    planned = client_plans(loop.plan_schedule().clients, loop.config.accountant, [(100, 10)] * 4)
    result, printed = loop.run(), paper.file.getvalue()
    capsys.readouterr()
    assert ledger_command([str(loop.output_dir), "--json"]) == 0
    report = capsys.readouterr().out
    bare = set()
    for query, given_ in asked:
        for client, mechanism in query.mechanism_of.items():
            if isinstance(mechanism, NoMechanism):
                bare.add(client)
            elif isinstance(mechanism, ExponentialMechanism):
                assert isinstance(given_[client], int)
            else:
                assert mechanism.noise_multiplier > 0 and type(mechanism) in (Gaussian, Laplace)
    assert bool(bare) == bool(words)
    assert bool(asked) or name not in (
        "feature_means",
        "ifca",
        "released_scores",
        "two_stage_selection",
        "two_stages_as_printed",
    )

    def is_bare(values):
        return {client for client, value in enumerate(values) if value is None or math.isinf(value)}

    folder, last = loop.output_dir, live._reports[-1]
    promises = read_guarantees(folder)
    page, ledger = (folder / "guarantee.html").read_text(), json.loads(report.splitlines()[-1])
    for place, epsilons in {
        "result": [one["epsilon_spent"] for one in json.loads((folder / "result.json").read_text())["clients"]],
        "guarantees": [one["epsilon"] for one in promises],
        "ledger": [one["epsilon"] for one in ledger["clients"]],
        "account": [one.epsilon for one in loop.clients.budgets.guarantees()],
        "live": last.epsilon_spent,
    }.items():
        assert is_bare(epsilons) == bare, place
    curves = of_round(last, loop.config.facts).values
    assert (curves["train_epsilon_max"] is None) == bool(bare), "no bound, and not the largest of the others"
    assert bare <= is_bare([one.guarantee.epsilon for one in planned]), "what is planned may not happen"
    assert ("do not have differential privacy" in page or "No client has" in page) == bool(bare)
    if words:
        assert all(one.noise_multiplier > 0 for one in planned if any(one.schedule.releases)), "training is noised"
        weakest = max((one.guarantee for one in planned), key=lambda one: one.epsilon)
        places = [result.guarantee.words(), page, report, printed, weakest.words(), live._promise.words()]
        assert all(words in place for place in [*places, (folder / "ledger.jsonl").read_text()])
        assert "no bound on epsilon" in printed
        assert math.isinf(live._promise.epsilon)


def test_strategies_ask_in_no_other_way_and_nothing_that_was_not_walked():
    """Every class that strategies ask with is one of those that the runs above ask with."""
    package, asking = Path(strategies.__file__).parents[1], {}
    for file in (one for room in ("strategies", "papers") for one in (package / room).rglob("*.py")):
        tree = ast.parse(file.read_text())
        calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)]
        if any(isinstance(one.func, ast.Attribute) and one.func.attr == "ask" for one in calls):
            asking[file.stem] = {one.func.id for one in calls if isinstance(one.func, ast.Name)}
    mine = {kind.__name__ for kind in Query.__subclasses__() if kind.__module__.startswith("dpfl_lightning.")}
    assert mine - {"ChargedQuery"} == {
        "FeatureSums",
        "SelectModel",
        "LowestLoss",
        "LossOfOwnStep",
        "MeanLoss",
        "ScoreCounts",
    }
    assert {name: used & mine for name, used in asking.items()} == {
        "feature_means": {"FeatureSums"},
        "model_selection": {"SelectModel", "LowestLoss"},
        "released_scores": {"ScoreCounts"},
        "two_stage_selection": {"MeanLoss"},
        "two_stages_as_printed": {"LossOfOwnStep"},
    }


def test_answers_of_other_machines_fit_their_question():
    models, noise = torch.zeros(2, 5), {0: Gaussian(1.0, 1.0, 1.0, 9.0)}
    choice = SelectModel(mechanism_of={0: ExponentialMechanism(0.1)}, models=models, loss_bound=1.0)
    loss = MeanLoss(mechanism_of=noise, models=models, row_of={0: 0}, loss_bound=1.0)
    sums = FeatureSums(mechanism_of=noise, nets=models, num_classes=3)
    one, six = torch.zeros(1).double(), torch.zeros(6).double()
    for question, good in ((choice, 1), (loss, one), (sums, six)):
        assert answer_fits(question, 0, good)
        for other in (2, -1, True, 0.5, torch.zeros(6), six.view(2, 3), six[:0], six[:2], six + math.nan, one / 0):
            assert not answer_fits(question, 0, other), (question, other)
