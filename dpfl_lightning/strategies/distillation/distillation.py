"""Data distillation: the server learns a small synthetic set from class gradients, and trains models on it."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.algorithms.gradient_matching import (
    Matching,
    SyntheticSet,
    coordinate_median,
    matched_names,
    noise_aware_rows,
    num_rows,
)
from dpfl_lightning.algorithms.server_training import Training, public_generator, torch_seed, trained_on
from dpfl_lightning.errors import require, warn_user
from dpfl_lightning.federated.messages.plan import ClassGradients, RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.models.augmentation import ClassAugmentation
from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned
from dpfl_lightning.privacy.mechanism import Mechanism
from dpfl_lightning.strategies.distillation import costs
from dpfl_lightning.strategies.distillation.options import AUGMENTATIONS, KEY, loops, participants, switches
from dpfl_lightning.strategies.distillation.sets import SetStrategy

PURPOSE = "class_gradients"

_COUNTS = 2  # additional columns of a block: records drawn, and records that the client has


def mean_of_holders(blocks: Tensor, shares: Tensor) -> Tensor:
    """Return `sum_i share_i block_i / sum_i share_i` of every class, `[G, d]`; zeros if no client has a share.

    `blocks` is `[C, G, d]`, and `shares` `[C, G]`, >= 0.
    """
    shares = shares.to(blocks.dtype)
    total = torch.einsum("cg,cgd->gd", shares, blocks)
    return total / shares.sum(dim=0).clamp_min(torch.finfo(blocks.dtype).tiny)[:, None]


class Distillation(SetStrategy):
    """DistDD: learns synthetic images whose gradients match those of the clients' records, class by class.

    In every round clients send one noised sum of clipped gradients for each class, computed on the server's model. The
    server moves its images until the model's gradient on them is similar to the released one, and then trains the model
    on the images. The results of a run are the set (`distilled.pt`) and a new model trained on it. It pays if many
    trainings follow, such as a search for hyperparameters: they use the set without clients or privacy loss.

    Args:
        mode: defaults of the options that are not set: `default`, or `paper_literal` (aggregation `uniform`, sampling
            `fixed`, no new initialisation, image_learning_rate 39.4).
        images_per_class: number of images of each class, >= 1.
        matching: distance between two gradients: `layerwise_cosine`, `cos` or `mse`.
        image_steps: steps of the images for each release, >= 1; more steps cost neither traffic nor privacy.
        image_learning_rate: learning rate of the images, > 0; null is 100. It is multiplied by images_per_class / 10,
            and with `layerwise_cosine` divided by the net's output nodes: one rate serves sets and nets of any size.
            The condensation paper's 0.1 is 39.4 for its net and ten images a class.
        image_momentum: momentum of the images, in [0, 1).
        row_weights: `noise_aware` gives rows of the target less weight the more noise they contain; `equal` does not.
        augmentation: `dsa`, `dsa_without_flip` (for digits) or `none`. One operation is drawn for each class and round,
            and is applied to records and images.
        net_update: how the model changes between rounds: `synthetic` (epochs on the set) or `aggregate` (one step along
            the released gradients).
        reinit_every: rounds between two initialisations of the model; 0 is never; null is the condensation paper's,
            about images_per_class. A run warns if it is not below the number of rounds.
        net_epochs: epochs on the set after a round, >= 0; null is the condensation paper's number.
        net_learning_rate: learning rate of the model's SGD, > 0.
        aggregation: `sampled` (the sum over clients: each drawn record has the same weight), `uniform` (each client's
            mean has the same weight), `class_count` (each client's mean is weighted by its number of records; only
            without noise), `median` (of every coordinate, over the clients that have the class; over all clients if
            there is noise), or `by_base_rule` (weights of an aggregation rule that is combined with this strategy).
        participation_fraction: fraction of the clients that is drawn in every round, in (0, 1]; no privacy
            amplification is claimed for it.
        sampling: `full` (all records of a client), `poisson` (with its batch_size), or `fixed` (`records_per_class`
            without replacement, accounted without amplification); null is `full` with noise, and `fixed` without.
        records_per_class: number of records drawn from each class with `sampling: fixed`, >= 1.
        noise_scale: `sum`, or `paper_mean`: given noise multipliers refer to the mean of a class, as in the paper's
            appendix; the ledger holds those of the sum.
        min_participants: minimum number of clients in a round, >= 1. The run is refused if cohorts are smaller. A round
            in which fewer clients are present or have budget left is skipped; the run ends if all later rounds are.
        min_records_per_target: without noise, a class with fewer drawn records in a round is left out of it, >= 1.
        evaluation_epochs: epochs on the set with which the final model is trained, >= 1.

    **Guarantees** A client makes one release in a round, with one block for each class, including classes that it does
    not have: the stack of all blocks has the sensitivity of one gradient. The divisor is the public expected batch
    size, or the largest number of records that `fixed` may draw. The cohorts of all rounds are drawn before the first
    one, so a client's budget is divided among the rounds in which it takes part.

    **Privacy** Each round of a client is one step of the mechanism. Images, models and everything derived from them are
    post-processing; images are initialised as noise. A run without noise also sends exact counts, and gradients of few
    records, from which these can be reconstructed.

    Reference: Wang and Wang (2024), https://arxiv.org/abs/2410.08665, with its eq. 7 in place of the last line of its
    Algorithm 1; Zhao, Mopuri and Bilen (2021) and Zhao and Bilen (2021) for matching, loops and augmentation. Clipping,
    Poisson draws, accounting over all rounds, row weights and several image steps are additions of this package.
    """

    key, what = KEY, "synthetic images whose gradients match those of clients' records"
    in_place_of_training = f"clients send class gradients, a share `{KEY}.participation_fraction` of them in each round"

    def __init__(
        self,
        mode: str = "default",
        images_per_class: int = 10,
        matching: str = "layerwise_cosine",
        image_steps: int = 1,
        image_learning_rate: float | None = None,
        image_momentum: float = 0.5,
        row_weights: str = "equal",
        augmentation: str = "none",
        net_update: str = "synthetic",
        reinit_every: int | None = None,
        net_epochs: int | None = None,
        net_learning_rate: float = 0.01,
        aggregation: str | None = None,
        participation_fraction: float = 1.0,
        sampling: str | None = None,
        records_per_class: int = 256,
        noise_scale: str = "sum",
        min_participants: int = 5,
        min_records_per_target: int = 32,
        evaluation_epochs: int = 300,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self._switches = given = switches(given)
        every, epochs = loops(images_per_class)
        self._reinit_every = every if given["reinit_every"] is None else given["reinit_every"]
        augmentations = AUGMENTATIONS[augmentation]
        epochs = epochs if net_epochs is None else net_epochs
        self._between = Training(epochs, net_learning_rate, augmentations=augmentations)
        super().__init__(evaluation_epochs, augmentations)
        self.role = "correction" if given["aggregation"] == "by_base_rule" else "base"
        self._private, self._sampling = True, ""
        self._matching: Matching | None = None
        self._set: SyntheticSet | None = None
        self._age = 0  # rounds since the net was initialised
        self._taken: list[int] = []  # number of rounds in which each client has taken part
        self._target_noise_std = self._records_of_sum = 0.0  # of the round
        self._drawn: Tensor | None = None  # records of each class in the round, if weights hide them: `[num_classes]`
        self._metrics: dict[str, float] = {}

    def _told(self) -> tuple[Mapping[str, Any], str]:
        return self._switches, self._sampling

    # -- the plan

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        self._check_population(view)
        view.new_model(view.seed)  # raises an error now instead of after the first round
        bare = sum(not client.adds_noise for client in schedule.clients)
        self._private = bare < len(schedule.clients)
        self._sampling = self._switches["sampling"] or ("full" if self._private else "fixed")
        if bare:
            whose = f" from {bare} of {len(schedule.clients)} clients" if self._private else ""
            warn_user(
                f"strategy distillation: gradients of single classes are sent without noise{whose}. Records can be "
                "reconstructed from them more easily than from a usual update. Set privacy.epsilon unless this is a "
                "study."
            )
        must_be_sum = "be sum without privacy.noise_multiplier"
        advice = "A budget is solved for noise on the sum. Set privacy.noise_multiplier, or do not set this option."
        must = "not be class_count if clients add noise, because their numbers of records of a class are private"
        allowed = not (self._private and self._switches["aggregation"] == "class_count")
        require(allowed, f"{KEY}.aggregation", must, self._switches["aggregation"])
        if 1 < schedule.rounds <= self._reinit_every:
            warn_user(
                f"strategy distillation: {KEY}.reinit_every is {self._reinit_every}, not below the {schedule.rounds} "
                "rounds, so the set is made with one net alone. Set a smaller number."
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
                    if self._switches["noise_scale"] == "paper_mean":
                        require(noise is not None, f"{KEY}.noise_scale", must_be_sum, "paper_mean", advice)
                        noise = (noise or 0.0) * self._records_of_a_class(client, rate, view)
                    count = min(line.count, rounds_of[client] + max(0, line.count - schedule.rounds))
                    line = Planned(PURPOSE, line.event.of(rate, noise, 1), count)
                lines.append(line)
            return dataclasses.replace(client_schedule, planned=tuple(lines))

        return schedule.replan(with_class_gradients)

    def _records_of_a_class(self, client: int, rate: float, view: View) -> float:
        """Return the public number of records of a class that the client is expected to draw in a round."""
        expected = rate * view.facts.num_records[client] / view.facts.num_classes
        return min(expected, self._switches["records_per_class"]) if self._sampling == "fixed" else expected

    def describe(self, view: View) -> tuple[str, ...]:
        options = self._switches
        cohorts = (self._cohort(view, round) for round in range(1, view.run.rounds + 1))
        releases = [schedule.count_of(PURPOSE) for schedule in view.schedule.clients]
        taken = costs.participations(cohorts, releases, options["min_participants"])
        sizes = {name: p.numel() for name, p in view.module.named_trainable.items()}
        model, size = sum(sizes.values()), participants(view.facts.num_clients, options["participation_fraction"])
        sent = costs.traffic(taken, model, self._job(view).size(sizes))
        return (costs.traffic_words(sent, costs.traffic(size, model, model), size), *self._papers_words(view))

    def _papers_words(self, view: View) -> tuple[str, ...]:
        """Describe the largest epsilon of the paper's formula, if the mode is the paper's."""
        if self._switches["mode"] != "paper_literal":
            return ()
        settings = []
        for client, schedule in enumerate(view.schedule.clients):
            mechanism = view.mechanism(client, PURPOSE)
            if mechanism.clip_order == 2 and mechanism.noise_multiplier > 0:
                clip_norm = self._job(view).sampler(mechanism).clip_norm  # of one record's gradient, as in the paper
                noise = mechanism.noise_multiplier * mechanism.clip_norm / clip_norm
                if self._switches["noise_scale"] == "paper_mean":
                    noise /= self._records_of_a_class(client, mechanism.sample_rate, view)
                settings.append((noise, schedule.delta, clip_norm))
        worst = max(settings, key=lambda one: costs.paper_epsilon(*one), default=None)
        return () if worst is None else (costs.paper_epsilon_words(*worst),)

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        self._metrics = {}
        able = self._able(view, view.round)
        plan = view.plan(PURPOSE, [client for client in plan.clients if client in able], self._job(view))
        mechanisms = tuple(self._mechanism(client, view) for client in plan.clients)
        return dataclasses.replace(plan, mechanism_of=mechanisms, fewest=self._switches["min_participants"])

    def _mechanism(self, client: int, view: View) -> Mechanism:
        """Return the client's mechanism; with `fixed` its divisor is at most the public maximum of drawn records.

        Without noise the divisor is not changed, because it cancels: exact counts are divided by it, too.
        """
        mechanism = view.mechanism(client, PURPOSE)
        if not (self._private and self._sampling == "fixed"):
            return mechanism
        most = self._switches["records_per_class"] * view.facts.num_classes
        return dataclasses.replace(mechanism, expected_batch_size=min(mechanism.expected_batch_size, float(most)))

    def _able(self, view: View, round: int) -> frozenset[int]:
        """Return the clients of a round's cohort that have a planned release left.

        Rounds are counted, not charges: a resumed run has already been charged for rounds that are still to come.
        """
        counts = [schedule.count_of(PURPOSE) for schedule in view.schedule.clients]
        return frozenset(client for client in self._cohort(view, round) if self._taken[client] < counts[client])

    def stop(self, view: View) -> str | None:
        fewest, left = self._switches["min_participants"], range(view.round, view.run.rounds + 1)
        if fewest == 1 or any(len(self._able(view, round)) >= fewest for round in left):  # mostly the first round
            return None
        since = f"in every round after {view.state.round} ({KEY}.min_participants)"
        return f"budgets pay for fewer than {fewest} clients {since}"

    def after_step(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        for client in (*updates.clients, *updates.lost):
            self._taken[client] += 1
        return state

    def _cohort(self, view: View, round: int) -> frozenset[int]:
        """Draw the clients that take part in a round, with public randomness."""
        num_clients = view.facts.num_clients
        size = participants(num_clients, self._switches["participation_fraction"])
        drawn = public_generator(view.seed, "participants", round).choice(num_clients, size, replace=False)
        return frozenset(drawn.tolist())

    def _job(self, view: View) -> ClassGradients:
        names = self._names(view)
        return ClassGradients(
            num_classes=view.facts.num_classes,
            parameters=None if names == tuple(view.module.named_trainable) else names,
            augmentation=self._augmentation(view),
            most_records=self._switches["records_per_class"] if self._sampling == "fixed" else None,
            counts=not self._private,
        )

    def _names(self, view: View) -> tuple[str, ...]:
        """Return the names of the parameters whose gradients are used, and therefore sent."""
        if self._switches["net_update"] == "aggregate":
            return tuple(view.module.named_trainable)
        return matched_names(_shapes(view), self._switches["matching"])

    def _augmentation(self, view: View) -> ClassAugmentation | None:
        """Draw the augmentation of this round, which clients and server both use."""
        if not self._between.augmentations:
            return None
        generator = public_generator(view.seed, "augmentation", view.round)
        return ClassAugmentation.draw(generator, view.facts.num_classes, self._between.augmentations)

    # -- the target

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return self._reads_single_updates or (not self._private and self.role != "base")

    @property
    def _reads_single_updates(self) -> bool:
        """Whether single updates are needed: clients' means or their median are not a weighted sum of the releases."""
        aggregation = self._switches["aggregation"]
        return aggregation == "median" or (not self._private and aggregation in ("uniform", "class_count"))

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor | None:
        if self.role != "base":
            return None
        if self._switches["aggregation"] != "sampled":
            return torch.ones(len(updates.clients), dtype=torch.float64)
        return torch.tensor(_divisors(updates), dtype=torch.float64)

    def combine(self, updates: ClientUpdates, weights: Tensor, view: View) -> Tensor | None:
        must = "not be combined with strategies that create several models"
        require(len(weights) == 1, KEY, must, f"{len(weights)} models")
        divisors = torch.tensor(_divisors(updates), dtype=torch.float64)
        noise_std = torch.tensor(updates.noise_std, dtype=torch.float64)
        single = self._reads_single_updates  # which are then summed here
        self._records_of_sum = float(divisors.sum()) if single else _records_of_sum(weights[0].double().cpu(), divisors)
        self._target_noise_std = float((weights[0] * noise_std).square().sum().sqrt()) * view.facts.num_classes
        if not self._private and self.role != "base":
            counts = updates.released[..., -_COUNTS].cpu().double()  # the rule weights means of drawn records
            self._drawn = torch.einsum("cg,c->g", counts, divisors * (weights[0].cpu() > 0)).round()
        if not single:
            return None
        weigh, deltas = weights[0].to(updates.released), updates.released
        if self._private:
            return self._of_holders(deltas, weigh[:, None].expand(-1, deltas.shape[1]))[None]
        counted = divisors.to(deltas) * (weigh > 0)
        numbers = deltas[..., -_COUNTS:] * counted[:, None, None]  # [C, num_classes, 2]
        drawn, records = numbers.round().unbind(dim=2)
        means = deltas[..., :-_COUNTS] * (divisors.to(deltas)[:, None] / drawn.clamp_min(1.0))[..., None]
        shares = weigh[:, None] * (records if self._switches["aggregation"] == "class_count" else 1.0) * (drawn > 0)
        total = drawn.sum(dim=0)[:, None]
        sums = torch.cat([self._of_holders(means, shares) * total, numbers.sum(dim=0)], dim=1)
        return (sums / self._records_of_sum)[None]

    def _of_holders(self, blocks: Tensor, shares: Tensor) -> Tensor:
        if self._switches["aggregation"] == "median":
            return coordinate_median(blocks, shares > 0)
        return mean_of_holders(blocks, shares)

    def _target(self, combined: Tensor) -> tuple[Tensor, Tensor]:
        """Return each class's mean gradient `[num_classes, d]`, and which classes have one, `[num_classes]` bool.

        If clients add noise, the mean is over a public number of records.
        """
        if self._private:
            return combined * len(combined), torch.ones(len(combined), dtype=torch.bool, device=combined.device)
        records = combined[:, -_COUNTS]
        drawn = (records * self._records_of_sum).round() if self._drawn is None else self._drawn.to(records)
        present = drawn >= self._switches["min_records_per_target"]
        return combined[:, :-_COUNTS] / records.clamp_min(torch.finfo(records.dtype).tiny)[:, None], present

    # -- the server's work

    def step(self, state: ServerState, combined: Tensor, view: View) -> ServerState:
        target, present = self._target(combined[0])
        params = view.module.unflatten(state.models[0])
        names = self._names(view)
        sizes = [params[name].numel() for name in names]
        by_class = {
            name: part.view(-1, *params[name].shape)
            for name, part in zip(names, target.split(sizes, dim=1), strict=True)
        }
        before = self._move_images(params, by_class, present, view)
        reinitialised = self._age + 1 == self._reinit_every
        self._metrics = {
            "matching_loss": float(before[present].sum()),
            "classes_left_out": float((~present).sum()),
            "net_reinitialised": float(reinitialised),
        }
        if self._switches["matching"] == "layerwise_cosine" and bool(present.any()):
            self._metrics["matching_loss_per_row"] = float(before[present].mean()) / num_rows(_shapes(view))
        self._age = 0 if reinitialised else self._age + 1
        theta = state.models[0]
        if reinitialised:
            theta = view.new_model(torch_seed(public_generator(view.seed, "initialisation", view.round)))
        elif self._switches["net_update"] == "aggregate":
            theta = theta - self._between.learning_rate * (target * present[:, None]).mean(dim=0)
        else:
            seed = torch_seed(public_generator(view.seed, "net", view.round))
            theta = trained_on(view.module, theta, self._synthetic(view).records, self._between, seed)
        return dataclasses.replace(state, models=theta[None])

    def _move_images(
        self, params: Mapping[str, Tensor], target: Mapping[str, Tensor], present: Tensor, view: View
    ) -> Tensor:
        """Move the images by some steps towards one target; return the distances `[num_classes]` before them.

        A step to images that are not finite is not taken, and ends the steps, because the next one would be the same.
        """
        matching = dataclasses.replace(self._matching_of(view), augment=self._augmentation(view))
        noise_aware = self._switches["row_weights"] == "noise_aware"
        rows = noise_aware_rows(target, self._target_noise_std) if noise_aware else None
        distances = []
        for _ in range(self._switches["image_steps"]):
            moved, before = matching.step(self._synthetic(view), params, target, present, rows)
            distances.append(before)
            if not moved.is_finite:
                warn_user(
                    f"strategy distillation: in round {view.round} the new images were not finite, so this step was "
                    f"skipped. Set a smaller {KEY}.image_learning_rate."
                )
                break
            self._set = moved
        return distances[0]

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        return {} if self._set is None else {**vars(self._set), "age": self._age, "taken": list(self._taken)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._set = SyntheticSet(state["images"], state["velocity"])
            self._age, self._taken = state["age"], list(state["taken"])

    def _synthetic(self, view: View) -> SyntheticSet:
        if self._set is None:
            self._set = self._of_noise(self._switches["images_per_class"], view)
        return self._set

    def _matching_of(self, view: View) -> Matching:
        if self._matching is None:
            options = self._switches
            self._matching = Matching.of(
                view.module,
                self._names(view),
                view.facts.input_shape,
                options["matching"],
                learning_rate=options["image_learning_rate"],
                momentum=options["image_momentum"],
            )
        return self._matching

    def _check_population(self, view: View) -> None:
        facts, given = view.facts, self._switches
        self._check_records(view)
        image, advice = len(facts.input_shape) == 3, f"Records of shape {facts.input_shape} are not images."
        must = "be none for these data"
        require(image or given["augmentation"] == "none", f"{KEY}.augmentation", must, given["augmentation"], advice)
        must = "be cos or mse for a net without trainable parameters of two or more dimensions"
        require(bool(matched_names(_shapes(view), given["matching"])), f"{KEY}.matching", must, given["matching"])
        size = participants(facts.num_clients, given["participation_fraction"])
        must = f"be at most the {size} clients of a round"
        advice = "Gradients of few clients reveal their records. Raise clients.count or participation_fraction."
        require(given["min_participants"] <= size, f"{KEY}.min_participants", must, given["min_participants"], advice)


def _divisors(updates: ClientUpdates) -> list[float]:
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
