"""Views, reports and results without a loop, and strategies that watch or disturb a run."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from dpfl_lightning.federated.client.metrics import METRICS, measures_of
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import UpdateBuffer
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.curves import of_round
from dpfl_lightning.federated.server.results import PlannedClients, RoundReport, RunInfo, RunResult
from dpfl_lightning.federated.server.run import assumptions
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.models.tasks import TASKS
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent, SelectionEvent
from dpfl_lightning.privacy.accounting.guarantee import Guarantee, RunGuarantee
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.ledger.file import NO_CHAIN, Charge, charge_lines
from dpfl_lightning.privacy.ledger.operator import OperatedAccount

EVERY_MEASURE = {name: metric.measure() for name, metric in METRICS.items()} | measures_of({}, TASKS["binary"])
FRAME = {"sampling": "Poisson sampling", "accountant": "RDP (Opacus, orders 1.1 to 1024)"}


def a_view(folder: Path, num_clients: int = 3, rounds: int = 10, noise: float = 1.25, budgets=None, **info) -> View:
    """Client i: 100 + i records, batch 10, budget i + 1 (infinite without noise), delta 1e-3."""
    records = tuple(100 + client for client in range(num_clients))
    budgets = budgets or tuple(client + 1.0 if noise else math.inf for client in range(num_clients))
    schedules = tuple(
        ClientSchedule(budget, 1e-3, (Planned("train", GaussianEvent(10 / size, noise, math.ceil(size / 10)), rounds),))
        for budget, size in zip(budgets, records, strict=True)
    )
    facts = Facts(num_records=records, num_classes=10, input_shape=(4,))
    settings = [SimpleNamespace(epsilon=budget) for budget in budgets]
    clients = PlannedClients.of(facts, settings, schedules)
    usual = {
        **{"output_dir": folder, "rounds": rounds, "first_round": 1, "num_params": 1234, "clients": clients},
        **{"estimated_seconds": 200.0, "exact_times": True, "engine": "serial", "device": "cpu", "sampling": "poisson"},
        **{"accountant": get_accountant("rdp"), "noise": "keyed, not cryptographic", "options": {}},
        "measures": EVERY_MEASURE,
    }
    view = View(
        round=1,
        state=ServerState(torch.zeros(1, 2), (0,) * num_clients),
        facts=facts,
        module=ClientModule(nn.Linear(4, 10)),
        schedule=RunSchedule(schedules, rounds),
        run=RunInfo(**{**usual, **info}),
        clip_norm=(1.0,) * num_clients,
        learning_rate=(0.1,) * num_clients,
        seed=0,
        guarantees=lambda: tuple(Guarantee(epsilon=0.0, delta=1e-3, **FRAME) for _ in schedules),
        ask=None,
        new_model=None,
        solve=None,
        used=None,
    )
    return dataclasses.replace(view, run=dataclasses.replace(view.run, assumptions=assumptions(view)))


def a_report(view: View, round: int, **changed) -> RoundReport:
    """After `round` rounds a tenth of every client's budget is gone for each; accuracy is round / 20."""
    clients = tuple(range(view.facts.num_clients))
    usual = {
        "round": round,
        "rounds": view.run.rounds,
        "seconds": 0.5,
        "records": 1000,
        "clients": clients,
        "weights": torch.ones(1, len(clients)),
        "epsilon_spent": tuple(budget * round / 10 for budget in view.run.clients.budget),
        "test_accuracy": round / 20,
        "test_loss": 1 / round,
        "client_accuracy": tuple(round / 20 + client / 1000 for client in clients),
    }
    report = RoundReport(**{**usual, **changed})
    return dataclasses.replace(report, curves=of_round(report, view.facts))


def a_result(view: View, **changed) -> RunResult:
    """All rounds done, every budget spent to 99 %."""
    clients = tuple(
        {
            "client": client,
            "name": view.facts.name_of(client),
            "epsilon_spent": 0.99 * budget if math.isfinite(budget) else None,
            "epsilon_budget": budget if math.isfinite(budget) else None,
            "delta": 1e-3,
            "noise_multiplier": view.schedule.clients[client].planned[0].event.noise_multiplier,
            "noise_std": 0.01 * (client + 1),
            "model": 0,
            "batch_size": 10,
            "num_records": view.facts.num_records[client],
            "releases": 30,
            "steps": 100,
            "accuracy": 0.5 + client / 1000,
        }
        for client, budget in enumerate(view.run.clients.budget)
    )
    usual = {
        "output_dir": str(view.run.output_dir),
        "finished": True,
        "rounds": view.run.rounds,
        "wall_seconds": 61.0,
        "training_seconds": 60.0,
        "client_seconds": 50.0,
        "records_per_second": 2000.0,
        "reason": f"all {view.run.rounds} rounds are done",
        "guarantee": RunGuarantee(epsilon=3.0, delta=1e-3, **FRAME, clients=len(clients), unbounded=0),
        "ledger": {"run": "ab" * 16, "lines": 31, "chain": "cd" * 16},
        "noise": view.run.noise,
        "clients": clients,
        "test_accuracy": 0.5,
        "test_loss": 1.5,
        "measures": EVERY_MEASURE,
    }
    return RunResult(**{**usual, **changed})


def two_phases(schedule: RunSchedule, selections: int) -> RunSchedule:
    """Of the plain schedule: one full batch instead of the first round, and so many selections."""

    def change(client: int, planned: ClientSchedule) -> ClientSchedule:
        (train,) = planned.planned
        first = Planned("first", GaussianEvent(1.0, 5.0, steps=1), 1)
        rest = dataclasses.replace(train, count=train.count - 1)
        return dataclasses.replace(planned, planned=(rest, first, Planned("select", SelectionEvent(0.1), selections)))

    return schedule.replan(change)


def changed_releases(loop, change):
    """The loop; each update of a client becomes `change(round, client, delta)`."""
    send = loop.clients.channel.send

    def changing(requests, inbox):
        take, rounds = inbox.take, {charged.request.round for charged in requests}
        if isinstance(inbox, UpdateBuffer):
            (round,) = rounds
            inbox.take = lambda client, delta: take(client, change(round, client, delta))
        send(requests, inbox)

    loop.clients.channel.send = changing
    return loop


class Absent(Strategy):
    """Clients that miss a round: round -> clients."""

    def __init__(self, absent):
        self._absent = absent

    def plan_round(self, plan, view):
        return plan.only(lambda client: client not in self._absent.get(view.round, ()))


class Recorder(Strategy, Callback):
    """Keeps updates, models and report of every round; `updates` makes the round keep single updates."""

    def __init__(self, updates: bool = False):
        self._needs, self.updates, self.models, self.reports = updates, [], [], []

    def needs_updates(self, plan, view):
        return self._needs

    def on_fit_start(self, view):
        self.start = view.state

    def after_step(self, state, updates, view):
        self.updates.append(updates)
        return state

    def on_round_end(self, view, report):
        self.models.append(view.state.models.clone())
        self.reports.append(report)


def pay(account: OperatedAccount, releases) -> None:
    """Charge (client, event) pairs, each as a ledger with nothing else would."""
    for client, event in releases:
        charge = Charge(client, 1, "train", event)
        account.charge([charge], list(charge_lines([charge], NO_CHAIN)))
