"""What was planned is what happens: rates given to the sampler and noisy steps taken, of every engine."""

import dataclasses
import math
import tempfile
from collections import Counter

import pytest
import torch
from conftest import FIXED_KEY, small_net
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.privacy import sampling
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.mechanism import Gaussian


class Witness:
    """Counts what passes the sampler and the mechanism, by (records, rate) and by mechanism."""

    def __init__(self, monkeypatch):
        self.drawn, self.noised = Counter(), Counter()
        draw, alone = sampling.poisson_rows, Gaussian.privatise

        def poisson_rows(num_records, sample_rate, generator):
            self.drawn[num_records, sample_rate] += 1
            return draw(num_records, sample_rate, generator)

        def privatise(mechanism, *args, **more):
            self.noised[mechanism] += 1
            return alone(mechanism, *args, **more)

        monkeypatch.setattr(sampling, "poisson_rows", poisson_rows)
        monkeypatch.setattr(Gaussian, "privatise", privatise)

    def forget(self):
        self.drawn.clear()
        self.noised.clear()


def population_of(sizes) -> Population:
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 6, generator=generator), torch.arange(n) % 3) for n in sizes]
    return Population.from_datasets(pairs, test=pairs[0], held_out=0.2, num_classes=3)


class Generous(Strategy):
    """Plans another budget than the client's."""

    def __init__(self, **budget):
        self._budget = budget

    def plan_run(self, schedule, view):
        return schedule.replan(lambda client, planned: dataclasses.replace(planned, **self._budget))


@pytest.mark.parametrize("budget", [{"target_epsilon": 100.0}, {"target_epsilon": math.inf}, {"delta": 0.01}])
def test_a_strategy_cannot_raise_a_budget(budget, make_loop):
    loop = make_loop(parts=[Generous(**budget)])
    with pytest.raises(UserError, match="`plan_run` must plan at most the budget of client 0"):
        loop.run()
    assert not list(loop.output_dir.glob("ledger*"))


def test_a_later_schedule_has_a_budget_and_keeps_it(make_loop):
    loop = make_loop(clients=ClientOptions(count=4, batch_size=None))
    loop.run()
    budgets = loop.clients.budgets

    def longer(client, planned):
        lines = tuple(dataclasses.replace(line, count=5 * line.count) for line in planned.planned)
        return dataclasses.replace(planned, planned=lines)

    def unbounded(client, planned):
        return dataclasses.replace(planned, target_epsilon=math.inf)

    budgets.change(budgets.schedule)
    with pytest.raises(UserError, match="`plan_run` must plan releases of client 0 that cost at most its budget"):
        budgets.change(budgets.schedule.replan(longer))
    budgets.schedule = budgets.schedule.replan(unbounded)
    with pytest.raises(UserError, match=r"`privacy\.epsilon` must be a number where later noise follows from releases"):
        budgets.change(budgets.schedule)


def test_a_simulation_relies_on_no_charge_of_another_release(make_loop):
    loop = make_loop(rounds=1)
    loop.run()
    budgets = loop.clients.budgets
    (paid,) = budgets.ledger.charges(0, 1)
    assert budgets._is_charged(paid) and not budgets._is_charged(dataclasses.replace(paid, number=1))
    for other in ({"purpose": "other"}, {"event": dataclasses.replace(paid.event, noise_multiplier=9.0)}):
        with pytest.raises(UserError, match="must hold what charge 0 of client 0 in round 1 pays for"):
            budgets._is_charged(dataclasses.replace(paid, **other))


QUICK = sorted(set(ENGINES) - {"trainer"})


@pytest.mark.e2e
@pytest.mark.parametrize("engines", [QUICK, ["trainer"]], ids=" ".join)  # one example for all: it is calibrated once
def test_rates_and_steps_are_those_of_the_schedule(engines, make_loop, monkeypatch):
    witness = Witness(monkeypatch)
    few = engines == ["trainer"]  # slow to start, and `serial` otherwise

    @settings(deadline=None, max_examples=2 if few else 3, suppress_health_check=list(HealthCheck))
    @given(
        sizes=st.lists(st.integers(5, 60), min_size=2, max_size=4, unique_by=lambda n: n - round(0.2 * n)),
        share=st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4),
        local_epochs=st.integers(1, 2),
        rounds=st.integers(1, 3),
    )
    def check(sizes, share, local_epochs, rounds):
        population = population_of(sizes)
        records = population.num_records
        batches = [max(1, round(part * n)) for part, n in zip(share, records, strict=False)]
        for engine in engines:
            witness.forget()
            with tempfile.TemporaryDirectory() as folder:
                privacy = PrivacyOptions(epsilon=8.0, delta=1e-3, noise_key=FIXED_KEY, accountant="rdp")
                clients = ClientOptions(batch_size=batches, local_epochs=local_epochs)
                options = {"engine": ENGINES[engine](), "rounds": rounds, "output_dir": f"{folder}/run"}
                loop = make_loop(population, ClientModule(small_net()), privacy, clients, **options)
                loop.run()
            expected_draws, expected_noise = Counter(), Counter()
            for client, (n, batch) in enumerate(zip(records, batches, strict=True)):
                (line,) = loop.schedule.clients[client].planned
                event = line.event
                assert (event.sample_rate, event.steps) == (batch / n, local_epochs * math.ceil(n / batch))
                steps = event.steps * line.count
                assert line.count == rounds and steps == loop.clients.account(client).steps
                expected_draws[n, event.sample_rate] += steps
                mechanism = Gaussian(1.0, event.noise_multiplier, event.sample_rate, event.sample_rate * n)
                expected_noise[mechanism] += steps
                spent = get_accountant("rdp").epsilon(loop.clients.budgets.ledger.events(client), 1e-3)
                assert spent == loop.clients.budgets.guarantees()[client].epsilon <= 8.0
            assert witness.drawn == expected_draws, engine
            assert witness.noised == expected_noise, engine

    check()
