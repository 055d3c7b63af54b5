"""Data distillation: the server learns a small synthetic set from class gradients, and trains models on it.

Wang and Wang (2024), https://arxiv.org/abs/2410.08665, Algorithm 1 "DistDD" with eq. 7. Their other choices are in
files beside this one: `centres` has the median and eq. 3, `distillation_as_printed` eqs. 10, 27 and 41, and
`local_distillation` their baseline.
"""

# Step of Algorithm 1                                          Here
#   S random, theta_0 ~ P_theta0                               `SetStrategy._of_noise`, the run's model
#   draw delta I participants I', send theta_t to them         `_cohort`, `plan_round`
#   g_{t,c,i} = grad L(theta_t; B_c), eqs. 1-2                 the clients' job `ClassGradients`
#   clip to C, add noise sigma C, eqs. 8-10                    the job's `Mechanism`, one release for all classes
#   G_{t,c} = sum_i g_{t,c,i}, eq. 3                           `weigh` and the weighted sum, or `combine`; `_target`
#   gradient on B_c^S, D(G_{t,c}, .), eqs. 4-5                 `Matching.slope` with `distances`
#   S_c <- opt-alg_S(D, steps, eta_S), eq. 6                   `_move_images`, `Matching.step`
#   theta_{t+1} <- opt-alg_theta(L^S), eq. 7 (not line 20)     `step`: `trained_on`, or a new initialisation
#
# Symbol                        Name
#   S_c, IPC                    `SyntheticSet.images[c]`, `images_per_class`
#   theta_t, T                  `state.models[0]`, the run's `rounds`
#   number of classes C         `facts.num_classes`
#   delta (share of clients)    `participation_fraction`
#   varsigma_S, eta_S           `image_steps`, `image_learning_rate`
#   varsigma_theta, eta_theta   `net_epochs` (epochs on the set; the paper counts steps), `net_learning_rate`
#   G_{t,c}                     row c of the target `[num_classes, d]`
#   clipping C, sigma           `clip_norm` and `noise_multiplier` of the mechanism

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from dpfl_lightning.algorithms.server_training import Training, public_generator, torch_seed, trained_on
from dpfl_lightning.errors import require, warn_user
from dpfl_lightning.federated.messages.jobs import ClassGradients
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.models.augmentation import OPERATIONS, ClassAugmentation
from dpfl_lightning.papers.distillation import costs
from dpfl_lightning.papers.distillation.centres import CENTRES, class_centres
from dpfl_lightning.papers.distillation.gradient_matching import (
    Matching,
    SyntheticSet,
    matched_names,
    noise_aware_rows,
    num_rows,
)
from dpfl_lightning.papers.distillation.sets import Count, Records, SetStrategy
from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.mechanism import Mechanism

PURPOSE = "class_gradients"
AUGMENTATIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "dsa": tuple(OPERATIONS),
    "dsa_without_flip": tuple(name for name in OPERATIONS if name != "flip"),
}
COUNTS = 2  # additional columns of a block without noise: records drawn, and records that the client has
#: images per class -> (rounds from one initialisation to the next, epochs on the set after a round), as in the
#: condensation paper
_LOOPS = {1: (1, 1), 10: (10, 50), 20: (20, 25), 30: (30, 20), 40: (40, 15), 50: (50, 10)}

_TRIMMED = 0.2  # share of the clients that `trimmed_mean` drops at each end
_Rate = Annotated[float, Interval(gt=0, lt=math.inf)]


@dataclass(frozen=True)
class Heard:
    """What the server knows of a round's combined release: the records that a weight of 1 stands for, and its noise."""

    records: float = 0.0
    noise_std: float = 0.0


@dataclass
class Distillation(SetStrategy):
    """DistDD: learns synthetic images whose gradients match those of the clients' records, class by class.

    In every round clients send one noisy sum of clipped gradients for each class, computed on the server's model. The
    server moves its images until the model's gradient on them is similar to the released one, and then trains the model
    on the images. The results of a run are the set (`distilled.safetensors`) and a new model trained on it.

    Args:
        matching: distance between two gradients: `layerwise_cosine`, or `mse` (the paper's eq. 27).
        image_steps: steps of the images for each release; more steps cost neither traffic nor privacy.
        image_learning_rate: learning rate of the images. It is multiplied by images_per_class / 10, and with
            `layerwise_cosine` divided by the model's output nodes: one rate serves sets and models of any size. The
            condensation paper's 0.1 is 39.4 for its model and ten images a class.
        image_momentum: momentum of the images.
        row_weights: `noise_aware` gives rows of the target less weight the more noise they contain; `equal` does not.
        augmentation: `dsa`, `dsa_without_flip` (for digits) or `none`. One operation is drawn for each class and round,
            and is applied to records and images.
        reinit_every: rounds between two initialisations of the model; 0 is never; null is the condensation paper's,
            about images_per_class. A run warns if it is not below the number of rounds.
        net_epochs: epochs on the set after a round; null is the condensation paper's number.
        net_learning_rate: learning rate of the model's SGD.
        aggregation: what becomes of the clients' gradients of a class. `sum` is over all drawn records. In the others
            each client counts once, by its mean gradient: `client_means`, `sum_of_client_means` (the paper's eq. 3),
            and against wrong labels `median` (the paper's defence) and `trimmed_mean`. With noise a mean is over the
            public number of records, so a client without the class counts, too, with noise alone.
        trimmed_share: share of the clients that `trimmed_mean` drops at each end; null is 0.2.
        participation_fraction: fraction of the clients that is drawn in every round; no privacy amplification is
            claimed for it.
        sampling: `full` (all records of a client), `poisson` (with its batch_size), or `fixed` (`records_per_class`
            without replacement, accounted without amplification); null is `full` with noise, and `fixed` without.
        records_per_class: number of records drawn from each class with `sampling: fixed`.
        min_participants: minimum number of clients in a round. The run is refused if cohorts are smaller. A round in
            which fewer clients are present or have budget left is skipped; the run ends if all later rounds are.

    **Privacy** Each round of a client is one step of the mechanism: one release with a block for each class, which
    together have the sensitivity of one gradient. The divisor is the public expected batch size, or the largest number
    of records that `fixed` may draw. A budget is divided among the rounds of the client's cohorts, which are drawn
    before the run. A run without noise also sends exact counts and gradients of few records, which reveal records.

    Reference: Wang and Wang (2024); Zhao, Mopuri and Bilen (2021) and Zhao and Bilen (2021) for matching and loops.
    """

    matching: Literal["layerwise_cosine", "mse"] = "layerwise_cosine"
    image_steps: Count = 1
    image_learning_rate: _Rate = 100.0
    image_momentum: Annotated[float, Interval(ge=0, lt=1)] = 0.5
    row_weights: Literal["equal", "noise_aware"] = "equal"
    augmentation: Literal["none", "dsa", "dsa_without_flip"] = "none"
    reinit_every: Annotated[int, Interval(ge=0)] | None = None
    net_epochs: Annotated[int, Interval(ge=0)] | None = None
    net_learning_rate: _Rate = 0.01
    aggregation: Literal["sum", "client_means", "sum_of_client_means", "median", "trimmed_mean"] = "sum"
    trimmed_share: Annotated[float, Interval(ge=0, lt=0.5)] | None = None
    participation_fraction: Annotated[float, Interval(gt=0, le=1)] = 1.0
    sampling: Literal["full", "poisson", "fixed"] | None = None
    records_per_class: Count = 256
    min_participants: Count = 5

    what = "synthetic images whose gradients match those of clients' records"
    jobs = (ClassGradients,)

    def __post_init__(self) -> None:
        super().__post_init__()
        must, given = "be equal unless matching is layerwise_cosine", self.row_weights
        require(self.matching == "layerwise_cosine" or given == "equal", self._key("row_weights"), must, given)
        self._centre = CENTRES.get(self.aggregation)
        must = "be equal unless aggregation is sum"
        require(self._centre is None or given == "equal", self._key("row_weights"), must, given)
        unused = self.aggregation != "trimmed_mean" and self.trimmed_share is not None
        must = f"be null with aggregation {self.aggregation}"
        require(not unused, self._key("trimmed_share"), must, self.trimmed_share, "It is of trimmed_mean alone.")
        self._trimmed_share = _TRIMMED if self.trimmed_share is None else self.trimmed_share
        every, epochs = loops(self.images_per_class)
        self._reinit_every = every if self.reinit_every is None else self.reinit_every
        epochs = epochs if self.net_epochs is None else self.net_epochs
        self._augmentations = AUGMENTATIONS[self.augmentation]
        self._between = Training(epochs, self.net_learning_rate, augmentations=self._augmentations)
        self._private = True
        self._matching: Matching | None = None
        self._made: dict[int, SyntheticSet] = {}  # row of the server's models -> its set
        self._ages: dict[int, int] = {}  # rounds since the model was initialised
        self._taken: list[int] = []  # number of rounds in which each client has taken part
        self._heard: dict[int, Heard] = {}  # row -> what the round's target is made of
        self._metrics: dict[str, float] = {}

    # -- the plan

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        self._check_population(view)
        view.new_model(view.seed)  # raises an error now instead of after the first round
        bare = sum(not client.adds_noise for client in schedule.clients)
        self._private = bare < len(schedule.clients)
        self._sampling = self.sampling or ("full" if self._private else "fixed")
        if bare:
            whose = f" from {bare} of {len(schedule.clients)} clients" if self._private else ""
            warn_user(
                f"strategy {self.config_name}: gradients of single classes are sent without noise{whose}. Records can "
                "be reconstructed from them more easily than from a usual update. Set privacy.epsilon unless this is "
                "a study."
            )
        if 1 < schedule.rounds <= self._reinit_every:
            warn_user(
                f"strategy {self.config_name}: {self._key('reinit_every')} is {self._reinit_every}, not below the "
                f"{schedule.rounds} rounds, so the set is made with one model alone. Set a smaller number."
            )
        self._taken = [0] * view.facts.num_clients
        rounds_of = Counter(client for round in range(1, schedule.rounds + 1) for client in self._cohort(view, round))

        def with_class_gradients(client: int, client_schedule: ClientSchedule) -> ClientSchedule:
            """Replace training by a release of class gradients in each of the client's rounds."""
            lines = []
            for line in client_schedule.planned:
                if line.purpose == "train" and isinstance(line.event, NoisedEvent):
                    rate = line.event.sample_rate if self._sampling == "poisson" else 1.0
                    noise = line.event.noise_multiplier
                    count = min(line.count, rounds_of[client] + max(0, line.count - schedule.rounds))
                    line = Planned(PURPOSE, line.event.of(rate, noise, 1), count)
                lines.append(line)
            return dataclasses.replace(client_schedule, planned=tuple(lines))

        return schedule.replan(with_class_gradients)

    def describe(self, view: View) -> tuple[str, ...]:
        cohorts = (self._cohort(view, round) for round in range(1, view.run.rounds + 1))
        releases = [schedule.count_of(PURPOSE) for schedule in view.schedule.clients]
        taken = costs.participations(cohorts, releases, self.min_participants)
        sizes = {name: p.numel() for name, p in view.module.named_trainable.items()}
        model, size = sum(sizes.values()), participants(view.facts.num_clients, self.participation_fraction)
        sent = costs.traffic(taken, model, self._job(view).size(sizes))
        return (costs.traffic_words(sent, costs.traffic(size, model, model), size),)

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        self._metrics = {}
        able = self._able(view, view.round)
        plan = view.plan(PURPOSE, [client for client in plan.clients if client in able], self._job(view))
        mechanisms = tuple(self._mechanism(client, view) for client in plan.clients)
        return dataclasses.replace(plan, mechanism_of=mechanisms, fewest=self.min_participants)

    def _mechanism(self, client: int, view: View) -> Mechanism:
        """Return the client's mechanism; with `fixed` its divisor is at most the public maximum of drawn records.

        Without noise the divisor is not changed, because it cancels: exact counts are divided by it, too.
        """
        mechanism = view.mechanism(client, PURPOSE)
        if not (self._private and self._sampling == "fixed"):
            return mechanism
        most = self.records_per_class * view.facts.num_classes
        return dataclasses.replace(mechanism, expected_batch_size=min(mechanism.expected_batch_size, float(most)))

    def _able(self, view: View, round: int) -> frozenset[int]:
        """Return the clients of a round's cohort that have a planned release left.

        Rounds are counted, not charges: a resumed run has already been charged for rounds that are still to come.
        """
        counts = [schedule.count_of(PURPOSE) for schedule in view.schedule.clients]
        return frozenset(client for client in self._cohort(view, round) if self._taken[client] < counts[client])

    def exhausted(self, view: View) -> str | None:
        fewest, left = self.min_participants, range(view.round, view.run.rounds + 1)
        if fewest == 1 or any(len(self._able(view, round)) >= fewest for round in left):  # mostly the first round
            return None
        since = f"in every round after {view.state.round} ({self._key('min_participants')})"
        return f"budgets pay for fewer than {fewest} clients {since}"

    def after_step(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        for client in (*updates.clients, *updates.lost):
            self._taken[client] += 1
        return state

    def _cohort(self, view: View, round: int) -> frozenset[int]:
        """Draw the clients that take part in a round, with public randomness."""
        num_clients = view.facts.num_clients
        size = participants(num_clients, self.participation_fraction)
        drawn = public_generator(view.seed, "participants", round).choice(num_clients, size, replace=False)
        return frozenset(drawn.tolist())

    def _job(self, view: View) -> ClassGradients:
        names = self._names(view)
        return ClassGradients(
            num_classes=view.facts.num_classes,
            parameters=None if names == tuple(view.module.named_trainable) else names,
            augmentation=self._augmentation(view),
            most_records=self.records_per_class if self._sampling == "fixed" else None,
            counts=not self._private,
        )

    def _names(self, view: View) -> tuple[str, ...]:
        """Return the names of the parameters whose gradients are used, and therefore sent."""
        return matched_names(_shapes(view), self.matching)

    def _augmentation(self, view: View) -> ClassAugmentation | None:
        """Draw the augmentation of this round, which clients and server both use."""
        if not self._between.augmentations:
            return None
        generator = public_generator(view.seed, "augmentation", view.round)
        return ClassAugmentation.draw(generator, view.facts.num_classes, self._between.augmentations)

    # -- the target

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return self._centre is not None

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor | None:
        """Weigh each release by its divisor, so that every drawn record counts alike, or every client for a centre."""
        clients_alike = [1.0] * len(updates.clients)
        return torch.tensor(divisors(updates) if self._centre is None else clients_alike, dtype=torch.float64)

    def combine(self, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor | None:
        """Return the centre of the clients' class means, divided as the sum would be; None for the sum."""
        if self._centre is None:
            return None
        self._check_models(weights)
        self._heard = {0: Heard()}
        counting = (weights[0] > 0).to(updates.released.device)
        sent = updates.released[counting]  # [C, G, d], all divided by the public numbers of records
        if self._private:
            held = torch.ones(sent.shape[:2], dtype=torch.bool, device=sent.device)
            return class_centres(self._centre, sent, held, self._trimmed_share)[None]
        divisor = torch.tensor(divisors(updates), dtype=torch.float64).to(sent)[counting]
        numbers = (sent[..., -COUNTS:] * divisor[:, None, None]).round()  # [C, G, 2]
        drawn = numbers[..., 0]
        means = sent[..., :-COUNTS] * (divisor[:, None] / drawn.clamp_min(1.0))[..., None]
        centres = class_centres(self._centre, means, drawn > 0, self._trimmed_share)
        records, sums = float(divisor.sum()), centres * drawn.sum(dim=0)[:, None]
        self._heard = {0: Heard(records)}
        return (torch.cat([sums, numbers.sum(dim=0)], dim=1) / records)[None]

    def scale(self, combined: Tensor, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor:
        """Note how many records a sum is of, and the standard deviation of its noise; sums stay as they are."""
        self._check_models(weights)
        divisor = torch.tensor(divisors(updates), dtype=torch.float64)
        noise_std = torch.tensor(updates.noise_std, dtype=torch.float64)
        self._heard = {}
        for row, own in enumerate(weights.cpu()):
            if own.any():
                noise = float((own * noise_std).square().sum().sqrt()) * view.facts.num_classes
                self._heard[row] = Heard(_records_of_sum(own, divisor), noise)
        return combined

    def _check_models(self, weights: Tensor) -> None:
        must = "not be combined with strategies that create several models"
        require(len(weights) == 1, f"strategies.{self.config_name}", must, f"{len(weights)} models")

    def _target(self, combined: Tensor, heard: Heard) -> tuple[Tensor, Tensor]:
        """Return each class's mean gradient `[num_classes, d]`, and which classes have one, `[num_classes]` bool.

        If clients add noise, the mean is over a public number of records.
        """
        if self._private:
            return combined * len(combined), torch.ones(len(combined), dtype=torch.bool, device=combined.device)
        records = combined[:, -COUNTS]
        present = (records * heard.records).round() >= self.min_records_per_target
        return combined[:, :-COUNTS] / records.clamp_min(torch.finfo(records.dtype).tiny)[:, None], present

    # -- the server's work

    def step(self, state: ServerState, combined: Tensor, view: View) -> ServerState:
        models, reports = state.models.clone(), []
        for row, heard in self._heard.items():
            models[row], report = self._one_step(row, state.models[row], combined[row], heard, view)
            reports.append(report)
        names = dict.fromkeys(name for report in reports for name in report)
        self._metrics = {name: fmean(one[name] for one in reports if name in one) for name in names}
        return dataclasses.replace(state, models=models)

    def _one_step(
        self, row: int, theta: Tensor, combined: Tensor, heard: Heard, view: View
    ) -> tuple[Tensor, dict[str, float]]:
        """Move the images of a model towards its target `[G, d]`; return the next model, and metrics."""
        target, present = self._target(combined, heard)
        params = view.module.unflatten(theta)
        names = self._names(view)
        sizes = [params[name].numel() for name in names]
        by_class = {
            name: part.view(-1, *params[name].shape)
            for name, part in zip(names, target.split(sizes, dim=1), strict=True)
        }
        before = self._move_images(row, params, by_class, present, heard, view)
        age = self._ages.get(row, 0) + 1
        reinitialised = age == self._reinit_every
        self._ages[row] = 0 if reinitialised else age
        report = {
            "matching_loss": float(before[present].sum()),
            "classes_left_out": float((~present).sum()),
            "net_reinitialised": float(reinitialised),
        }
        if self.matching == "layerwise_cosine" and bool(present.any()):
            report["matching_loss_per_row"] = float(before[present].mean()) / num_rows(_shapes(view))
        numbers = (view.round, *self._numbers(row))
        if reinitialised:
            return view.new_model(torch_seed(public_generator(view.seed, "initialisation", *numbers))), report
        seed = torch_seed(public_generator(view.seed, "net", *numbers))
        return trained_on(view.module, theta, self._synthetic(view, row).records, self._between, seed), report

    def _move_images(
        self,
        row: int,
        params: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        present: Tensor,
        heard: Heard,
        view: View,
    ) -> Tensor:
        """Move the images by some steps towards one target; return the distances `[num_classes]` before them.

        A step to images that are not finite is not taken, and ends the steps, because the next one would be the same.
        """
        matching = dataclasses.replace(self._matching_of(view), augment=self._augmentation(view))
        rows = noise_aware_rows(target, heard.noise_std) if self.row_weights == "noise_aware" else None
        distances = []
        for _ in range(self.image_steps):
            moved, before = matching.step(self._synthetic(view, row), params, target, present, rows)
            distances.append(before)
            if not moved.is_finite:
                warn_user(
                    f"strategy {self.config_name}: in round {view.round} the new images were not finite, so this step "
                    f"was skipped. Set a smaller {self._key('image_learning_rate')}."
                )
                break
            self._made[row] = moved
        return distances[0]

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        made = {row: {**vars(one), "age": self._ages.get(row, 0)} for row, one in self._made.items()}
        return {"made": made, "taken": list(self._taken)} if made else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._made = {row: SyntheticSet(one["images"], one["velocity"]) for row, one in state["made"].items()}
            self._ages = {row: one["age"] for row, one in state["made"].items()}
            self._taken = list(state["taken"])

    def _synthetic(self, view: View, row: int = 0) -> SyntheticSet:
        """Return the set of a model as it is now."""
        if row not in self._made:
            self._made[row] = self._of_noise(view, *self._numbers(row))
        return self._made[row]

    def _numbers(self, row: int) -> tuple[int, ...]:
        """Return what tells the public randomness of a model apart from that of other models."""
        return ()

    def _records(self, view: View) -> Records:
        return self._synthetic(view).records

    def _matching_of(self, view: View) -> Matching:
        if self._matching is None:
            rates = self.image_learning_rate, self.image_momentum
            shape = view.facts.input_shape
            self._matching = Matching.of(view.module, self._names(view), shape, self.matching, *rates)
        return self._matching

    def _check_population(self, view: View) -> None:
        facts = view.facts
        self._check_records(view)
        image, advice = len(facts.input_shape) == 3, f"Records of shape {facts.input_shape} are not images."
        must = "be none for these data"
        require(image or self.augmentation == "none", self._key("augmentation"), must, self.augmentation, advice)
        must = "be mse for a model without trainable parameters of two or more dimensions"
        require(bool(self._names(view)), self._key("matching"), must, self.matching)
        size = participants(facts.num_clients, self.participation_fraction)
        must = f"be at most the {size} clients of a round"
        advice = "Gradients of few clients reveal their records. Raise clients.count or participation_fraction."
        require(self.min_participants <= size, self._key("min_participants"), must, self.min_participants, advice)


def divisors(updates: ClientUpdates) -> list[float]:
    """Return the public number of records by which each client divided its sums."""
    return [mechanism.expected_batch_size for mechanism in updates.mechanism_of]


def _records_of_sum(weights: Tensor, divisors: Tensor) -> float:
    """Return the factor that converts a weighted sum of numbers divided by `divisors` `[C]` into a number of records.

    If the weights are proportional to the divisors, it is the sum of the divisors of the clients with a positive
    weight. Otherwise it is smaller, so that no record is counted twice.
    """
    counts = weights > 0
    return float((divisors[counts] / weights[counts]).min()) if bool(counts.any()) else 0.0


def _shapes(view: View) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in view.module.named_trainable.items()}


def loops(images_per_class: int) -> tuple[int, int]:
    """Return the entry of `_LOOPS`, or that of the next larger number of images; above 50 that of 50."""
    return _LOOPS[min((known for known in _LOOPS if known >= images_per_class), default=50)]


def participants(num_clients: int, fraction: float) -> int:
    """Return the number of clients in a round: the fraction of all, with halves rounded up, and at least one."""
    return max(1, math.floor(fraction * num_clients + 0.5))
