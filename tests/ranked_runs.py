"""Small runs that `federated/test_ranks.py` starts on one rank and on several: `python tests/ranked_runs.py FOLDER`.

Rank 0 writes `FOLDER/results.pt`: what each of `RUNS` came to.
"""

import dataclasses
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from conftest import FIXED_KEY, blobs, parts_of, small_net

from dpfl_lightning import ClientModule, ClientOptions, FederatedLoop, Population, PrivacyOptions, Strategy
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.federated.messages.jobs import ClassGradients, ProximalTraining
from dpfl_lightning.federated.messages.query import SelectModel
from dpfl_lightning.privacy.accounting.events import SelectionEvent
from dpfl_lightning.privacy.accounting.planned import Planned
from dpfl_lightning.privacy.mechanism import ExponentialMechanism
from dpfl_lightning.runtime.launcher import launched


def make_loop(
    folder: Path, *parts: Strategy, module: ClientModule | None = None, population: Population | None = None, **options
) -> FederatedLoop:
    privacy = PrivacyOptions(epsilon=[4.0, 6.0, 8.0, 10.0], delta=1e-3, noise_key=FIXED_KEY, accountant="rdp")
    clients = ClientOptions(count=4, batch_size=16, learning_rate=0.3)
    net = module or ClientModule(small_net())
    usual = {"rounds": 3, "clients": clients, "privacy": privacy, "device": "cpu"}
    return FederatedLoop(population or blobs(), net, output_dir=folder, **(usual | parts_of(parts) | options))


def one_step_each(folder: Path) -> FederatedLoop:
    """Twenty clients with full batches: most of them are trained in one of two groups."""
    population = blobs(num_clients=20, records=30)
    clients = ClientOptions(count=20, batch_size=list(population.num_records), learning_rate=0.3)
    privacy = PrivacyOptions(noise_multiplier=1.0, delta=1e-3, noise_key=FIXED_KEY, accountant="rdp")
    return make_loop(folder, population=population, clients=clients, privacy=privacy)


def with_broken_records() -> Population:
    """Some records of every client have no finite gradient."""
    population = blobs()
    x = population.x.clone()
    for rows in population.train_of:
        x[rows[:3]] = float("nan")
    return dataclasses.replace(population, x=x)


class Median(Strategy):
    """Reads every single update."""

    def needs_updates(self, plan, view):
        return True

    def combine(self, updates, weights, view):
        return updates.released.median(dim=0).values[None].repeat(len(weights), 1)


class EachItsOwn(Strategy):
    """K = N models, each client pulled to the mean of all; client 1 sits out every other round."""

    def after_step(self, state, updates, view):
        if len(state.models) == 4:
            return state
        return dataclasses.replace(state, models=state.models.repeat(4, 1), model_of=(0, 1, 2, 3))

    def plan_round(self, plan, view):
        plan = plan.only(lambda client: client != 1 or view.round % 2 == 0)
        mean = view.state.models.mean(dim=0, keepdim=True)
        return dataclasses.replace(plan, job=ProximalTraining(0.5, mean, dict.fromkeys(plan.clients, 0)))


class Selection(Strategy):
    """Asks every client which of two models fits it better."""

    def plan_run(self, schedule, view):
        def change(client, planned):
            return dataclasses.replace(planned, planned=(*planned.planned, Planned("select", SelectionEvent(0.5), 1)))

        return schedule.replan(change)

    def plan_round(self, plan, view):
        if view.round == 2:
            models = torch.stack([view.state.models[0], torch.zeros_like(view.state.models[0])])
            choice = dict.fromkeys(plan.clients, ExponentialMechanism(0.5))
            self.answers = dict(view.ask(SelectModel(mechanism_of=choice, models=models, loss_bound=2.0)))
        return plan

    def state_dict(self):
        return {"answers": getattr(self, "answers", {})}


class GradientsOfClasses(Strategy):
    def plan_run(self, schedule, view):
        def change(client, planned):
            event = dataclasses.replace(planned.planned[0].event, sample_rate=1.0, steps=1)
            return dataclasses.replace(planned, planned=(Planned("classes", event, planned.planned[0].count),))

        return schedule.replan(change)

    def plan_round(self, plan, view):
        return view.plan("classes", job=ClassGradients(view.facts.num_classes))

    def step(self, state, combined, view):
        return dataclasses.replace(state, models=state.models - combined.sum(dim=1))


class Losing(FastEngine):
    """What clients 1 and 3 release is never finite."""

    def compute(self, batch):
        released = zip(batch, super().compute(batch), strict=True)
        return [one * float("nan") if charged.client % 2 else one for charged, one in released]


class Failing(FastEngine):
    """Clients 1 and 3 fail, by an error that cannot be sent between ranks."""

    def release(self, client, *args):
        class Odd(Exception):
            pass

        if client.number % 2:
            raise Odd
        return super().release(client, *args)


def slurm(rank: int, hosts: int, ranks_on_each: int, port: int) -> dict[str, str]:
    """The variables of SLURM's `srun` for one rank, with all hosts on this machine."""
    size, host = hosts * ranks_on_each, rank // ranks_on_each
    names = {"NTASKS": size, "STEP_NUM_TASKS": size, "NTASKS_PER_NODE": ranks_on_each, "NNODES": hosts, "NODEID": host}
    names |= {"NODELIST": "127.0.0.1", "JOB_NAME": "fit", "JOB_ID": 1, "PROCID": rank, "LOCALID": rank % ranks_on_each}
    return {"MASTER_PORT": str(port)} | {f"SLURM_{name}": str(value) for name, value in names.items()}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


RUNS: dict[str, Callable[[Path], FederatedLoop]] = {
    "streamed": make_loop,
    "serial": lambda folder: make_loop(folder, engine=SerialEngine()),
    "one step": one_step_each,
    "deltas": lambda folder: make_loop(folder, Median()),
    "models": lambda folder: make_loop(folder, EachItsOwn(), rounds=4),
    "personal": lambda folder: make_loop(folder, module=ClientModule(small_net(), personal=["0.bias"])),
    "selection": lambda folder: make_loop(folder, Selection()),
    "classes": lambda folder: make_loop(folder, GradientsOfClasses()),
    "lost": lambda folder: make_loop(folder, engine=Losing()),
    "lost, deltas": lambda folder: make_loop(folder, Median(), engine=Losing()),
    "failing": lambda folder: make_loop(folder, engine=Failing()),
    "failing, deltas": lambda folder: make_loop(folder, Median(), engine=Failing()),
    "broken records": lambda folder: make_loop(folder, population=with_broken_records()),
    "other net": lambda folder: make_loop(folder, module=ClientModule(small_net(seed=launched().rank))),
}


#: no two runs of it are the same
PROTECTED = PrivacyOptions(epsilon=[4.0, 6.0, 8.0, 10.0], delta=1e-3, accountant="rdp")


def outcome(loop: FederatedLoop) -> dict:
    result = loop.run()
    saved = torch.load(loop.output_dir / "checkpoint.pt", weights_only=True)
    scores = {"accuracy": [client["accuracy"] for client in result.clients], "test": result.test_accuracy}
    saved["clients"].pop("ledger")  # of another run
    return scores | {name: saved[name] for name in ("models", "clients", "callbacks")}


def broken_client(folder: Path) -> dict:
    """What rank 0 hears of an error of clients of another rank that the user has to correct; it ends all ranks."""
    release = SerialEngine.release

    def failing(self, client, *args):
        if launched().rank == 1:
            raise UserError(f"client {client.number}")
        return release(self, client, *args)

    SerialEngine.release = failing
    try:
        make_loop(folder).run()
    except UserError as error:
        return {"error": str(error), "notes": getattr(error, "__notes__", [])}
    raise AssertionError("nothing was raised")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserNotice)  # of updates that are lost
    results = {}
    runs = {**RUNS, "protected": lambda folder: make_loop(folder, privacy=PROTECTED)}
    for name, make in runs.items():
        loop = make(folder / name)
        results[name] = outcome(loop) if launched().rank == 0 else loop.run().as_dict()
    trained = make_loop(folder / "trained")
    model = trained.run().model
    torch.save([trained.module.net.state_dict(), model.state_dict()], folder / f"trained_{launched().rank}.pt")
    if launched().size > 1:
        results["broken client"] = broken_client(folder / "broken client")  # ends the other ranks
    if launched().rank == 0:
        torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
