"""What a strategy can see: public facts and released values."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dpfl_lightning.federated.messages.evaluation import Score
from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.messages.jobs import Job, LocalTraining
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, Query
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.server.results import RunInfo
from dpfl_lightning.models.model import Model
from dpfl_lightning.models.optimizers import PLAIN_SGD, LocalOptimizer
from dpfl_lightning.privacy.accounting.guarantee import FILTER, Guarantee, leaks_of
from dpfl_lightning.privacy.mechanism import Mechanism, mechanism_of


@dataclass(frozen=True)
class ServerState:
    """The server's models `[K, P]`, the row of each client's model `[N]`, and the number of finished rounds."""

    models: Tensor
    model_of: tuple[int, ...]
    round: int = 0


@dataclass(frozen=True)
class View:
    """What strategies and callbacks receive: public facts and released values, never data and never the loop.

    Args:
        module: the server's copy of the model, for its architecture and loss. Its parameters may be overwritten.
        clip_norm: bound on the norm of one record's gradient, of each client.
        learning_rate: of each client in this round.
        optimizer: see `RoundPlan.optimizer`.
        test_score: of the state's models on the public test set; None without one, or if they were not evaluated.
        ask: `ask(query)` charges the clients, and returns their noisy answers.
        new_model: `new_model(seed)` returns the initial parameters `[P]` of the model for a public seed.
        solve: `solve(schedule)` returns the schedule with its free noise solved by the run's accountant.
        used: `used(client, purpose)` returns how many releases the client has paid for.
    """

    round: int
    state: ServerState
    facts: Facts
    module: Model = field(repr=False)
    schedule: RunSchedule
    run: RunInfo
    clip_norm: tuple[float, ...]
    learning_rate: tuple[float, ...]
    seed: int
    guarantees: Callable[[], tuple[Guarantee, ...]] = field(repr=False)
    ask: Callable[[Query], Answers] = field(repr=False)
    new_model: Callable[[int], Tensor] = field(repr=False)
    solve: Callable[[RunSchedule], RunSchedule] = field(repr=False)
    used: Callable[[int, str], int] = field(repr=False)
    optimizer: LocalOptimizer | None = PLAIN_SGD
    test_score: Score | None = None

    def expected_guarantee(self) -> Guarantee:
        """The first client's guarantee, with the accountant of what is planned for the first client that releases.

        Epsilon is infinite if a `NonPrivateEvent` is planned for any client.
        """
        now, clients = self.guarantees()[0], self.schedule.clients
        first = next((client for client in clients if any(client.releases)), clients[0])
        _, method = self.run.accountant.bound(first.events(), first.delta)
        now = dataclasses.replace(now, accountant=f"{method}, {FILTER}" if self.run.replans else method)
        planned = leaks_of([event for client in self.schedule.clients for event in client.events()])
        words = tuple(dict.fromkeys([*now.unprotected, *planned]))
        return dataclasses.replace(now, epsilon=math.inf, unprotected=words) if planned else now

    def mechanism(self, client: int, purpose: str = "train") -> Mechanism:
        """The client's mechanism for a purpose of its schedule."""
        event = self.schedule.noised(client, purpose)
        return mechanism_of(event, self.clip_norm[client], self.facts.num_records[client])

    def plan(self, purpose: str = "train", clients: Sequence[int] | None = None, job: Job | None = None) -> RoundPlan:
        """The default plan of a round: `clients` (None: all), each from its model, paid by `purpose`."""
        cohort = tuple(range(self.facts.num_clients)) if clients is None else tuple(sorted(clients))
        return RoundPlan(
            self.round,
            cohort,
            model_of=tuple(self.state.model_of[i] for i in cohort),
            mechanism_of=tuple(self.mechanism(i, purpose) for i in cohort),
            steps=tuple(self.schedule.noised(i, purpose).steps for i in cohort),
            learning_rate_of=tuple(self.learning_rate[i] for i in cohort),
            purpose=purpose,
            job=job or LocalTraining(),
            optimizer=self.optimizer,
        )
