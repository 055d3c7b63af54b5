"""Every strategy, by registration: it runs, keeps to budgets, ignores order, resumes, and reads what it declared."""

import copy
import dataclasses
import io

import pytest
import torch
from conftest import FIXED_KEY, blobs

from dpfl_lightning import strategies
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState
from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.mechanism import Gaussian
from dpfl_lightning.strategies.aggregation.size_weighted import SizeWeighted

pytestmark = pytest.mark.usefixtures("over_the_wire")  # no strategy gets more than the messages of the wire
NAMES = sorted(strategies.STRATEGIES)
IN_STAGES = ("two_stage_selection", "two_stages_as_printed")
#: what a strategy needs of four clients: its options, and the loop's
OPTIONS = {
    "distillation": {"min_participants": 4, "evaluation_epochs": 5},
    "distillation_as_printed": {"min_participants": 4, "evaluation_epochs": 5},
    "local_distillation": {"min_participants": 4, "evaluation_epochs": 5},
    "feature_means": {"evaluation_epochs": 5, "image_steps": 2},
    **{name: {"warmup_rounds": 2, "clients_per_round": 2} for name in IN_STAGES},
}
LOOPS = {
    "feature_means": {"rounds": 1},
    **{
        name: {"rounds": 4, "clients": ClientOptions(count=4, batch_size=None, learning_rate=0.3)} for name in IN_STAGES
    },
}


@pytest.fixture
def make_loop(make_loop):
    """Clients with true groups, for strategies that read them."""
    population = dataclasses.replace(blobs(), groups=(0, 1, 0, 1))
    return lambda **options: make_loop(population, **options)


def first_view(loop):
    return loop.view(ServerState(loop.module.flat[None], (0,) * 4))


def in_a_loop(name, make_loop, **options):
    """The strategy, and a loop with it, and with an aggregation rule beside it if it is none."""
    (strategy,) = strategies.build({name: OPTIONS.get(name)})
    parts = [strategy] if strategy.role == "base" else [SizeWeighted(), strategy]
    return strategy, make_loop(parts=parts, **{**options, **LOOPS.get(name, {})})


def some_updates(order):
    deltas = torch.randn(4, 83, generator=torch.Generator().manual_seed(0))
    order = list(order)
    mechanism_of = tuple(Gaussian(1.0, 2.0, 0.1, expected_batch_size=5.0 + client) for client in order)
    same = {"steps": (3,) * 4, "noise_std": (0.1,) * 4, "model_of": (0,) * 4}
    return ClientUpdates(tuple(order), deltas=deltas[order], mechanism_of=mechanism_of, **same)


@pytest.mark.e2e
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_within_budgets(name, make_loop):
    _, loop = in_a_loop(name, make_loop, rounds=2)
    result = loop.run()
    assert result.finished and result.rounds == loop.config.rounds
    for client, schedule in zip(result.clients, loop.schedule.clients, strict=True):
        planned = sum(line.count for line in schedule.planned)
        sums = sum(line.count for line in schedule.planned if isinstance(line.event, NoisedEvent))
        assert sums <= client["releases"] <= planned, "who trains is planned; a choice may turn out to be needless"
        assert (client["epsilon_spent"] > 0) == (planned > 0) and client["epsilon_spent"] <= client["epsilon_budget"]
    assert sum(client["releases"] for client in result.clients) > 0


@pytest.mark.e2e
@pytest.mark.parametrize("name", NAMES)
def test_weights_follow_the_clients_in_any_order(name, make_loop):
    strategy, loop = in_a_loop(name, make_loop)
    loop.plan_schedule()
    view = first_view(loop)
    order = [2, 0, 3, 1]
    other = copy.deepcopy(strategy)  # some remember earlier rounds
    plain, mixed = strategy.weigh(some_updates(range(4)), view), other.weigh(some_updates(order), view)
    if plain is None:
        assert mixed is None
    else:
        assert bool((plain >= 0).all()) and plain.shape[-1] == 4
        torch.testing.assert_close(mixed, plain[..., order])


@pytest.mark.e2e
@pytest.mark.parametrize("name", NAMES)
def test_facts_are_enough_for_who_declared_so(name, make_loop):
    strategy, loop = in_a_loop(name, make_loop)
    loop.plan_schedule()
    view = first_view(loop)
    if not strategy.needs_updates(view.plan(loop.schedule.clients[0].planned[0].purpose), view):
        blind = dataclasses.replace(some_updates(range(4)), deltas=None)
        a, b = strategy.weigh(blind, view), strategy.weigh(some_updates(range(4)), view)
        assert a is b is None or torch.equal(a, b)


@pytest.mark.e2e
@pytest.mark.parametrize("name", NAMES)
def test_state_survives_a_checkpoint(name, make_loop):
    strategy, loop = in_a_loop(name, make_loop, rounds=2)
    loop.run()
    buffer = io.BytesIO()
    torch.save(strategy.state_dict(), buffer)
    buffer.seek(0)
    (fresh,) = strategies.build({name: OPTIONS.get(name)})
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert repr(fresh.state_dict()) == repr(strategy.state_dict())


@pytest.mark.e2e
def test_the_formulas(make_loop):
    def weights(name):
        strategy, loop = in_a_loop(name, make_loop)
        loop.plan_schedule()
        return strategy.weigh(some_updates(range(4)), first_view(loop)).tolist()

    assert weights("size_weighted") == list(make_loop().population.num_records)
    assert weights("uniform") == [1.0] * 4 and weights("epsilon_weighted") == [4.0, 6.0, 8.0, 10.0]
    with pytest.raises(UserError, match=r"privacy\.epsilon.*epsilon_weighted"):
        make_loop(parts=strategies.build({"epsilon_weighted": None}), privacy=None).run()


@pytest.mark.e2e
def test_minimum_epsilon_gives_everybody_the_smallest_budget(make_loop):
    result = make_loop(parts=strategies.build({"minimum_epsilon": None})).run()
    assert all(3.9 < client["epsilon_spent"] <= 4.0 for client in result.clients)
    assert [client["epsilon_budget"] for client in result.clients] == [4.0, 6.0, 8.0, 10.0]
    noisy = PrivacyOptions(epsilon=[2.0, 50.0, 50.0, 50.0], noise_multiplier=2.0, delta=1e-3, noise_key=FIXED_KEY)
    result = make_loop(parts=strategies.build({"minimum_epsilon": None}), privacy=noisy, rounds=30).run()
    assert all(client["epsilon_spent"] <= 2.0 for client in result.clients)


@pytest.mark.e2e
def test_a_strong_pull_keeps_clients_at_the_model(make_loop):
    def moved(pull):
        parts = strategies.build({"size_weighted": None, "fedprox": {"pull": pull}})
        loop = make_loop(parts=parts, privacy=None, rounds=1)
        start = loop.module.flat
        loop.run()
        return float((loop.state.models[0] - start).norm())

    assert moved(3.0) < 0.7 * moved(0.0)


@pytest.mark.e2e
def test_callbacks_may_hold_strategies(make_loop):
    def trained(**parts):
        loop = make_loop(rounds=2, **parts)
        loop.run()
        return [type(one).__name__ for one in loop.config.strategies], loop.state.models

    first, second = strategies.build({"uniform": None, "server_momentum": None})
    names, model = trained(strategies=[first, second])
    again = strategies.build({"uniform": None, "server_momentum": None})
    for parts in ({"strategies": [], "callbacks": again}, {"strategies": again[:1], "callbacks": again[1:]}):
        again[1].load_state_dict({"momentum": None})
        same, found = trained(**parts)
        assert same == names == ["Uniform", "ServerMomentum"] and torch.equal(found, model)


def test_strategies_are_found_by_name_and_by_path_and_mistakes_are_one_sentence():
    (uniform,) = strategies.build({"dpfl_lightning.strategies.aggregation.uniform.Uniform": {}})
    assert type(uniform).__name__ == "Uniform"
    for configuration, words in (
        ({"size_wieghted": {}}, "Did you mean `size_weighted`"),
        ({"fedprox": {"pul": 1}}, r"strategies\.fedprox\.pul.*Did you mean `pull`"),
        ({"no.such.Strategy": {}}, "importable"),
        ({"collections.OrderedDict": {}}, "Strategy"),
    ):
        with pytest.raises(UserError, match=words):
            strategies.build(configuration)


def test_a_strategy_states_few_things_about_itself():
    """What keeps strategies apart follows from their jobs and from the hooks that they override."""
    stated = {name for name in vars(Strategy) if not name.startswith("_") and not callable(getattr(Strategy, name))}
    assert stated - {"config_name"} == {"role", "default_base", "caveats", "jobs", "needs_noise_std"}
