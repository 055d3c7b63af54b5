"""Robust clustered DPFL: groups of clients are found by full-batch updates in round 1, then train separate models."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.algorithms.server_training import public_generator
from dpfl_lightning.algorithms.update_groups import GroupOptions
from dpfl_lightning.algorithms.update_mixture import (
    CONFIDENT,
    Mixture,
    paper_mixture,
    robust_mixture,
    switch_round,
)
from dpfl_lightning.errors import UserError, require, require_one_of, warn_user
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates
from dpfl_lightning.federated.server import aggregate
from dpfl_lightning.federated.server.results import ClientEmbedding
from dpfl_lightning.federated.server.summary import of_all
from dpfl_lightning.federated.server.view import ServerState, View
from dpfl_lightning.runtime.text import counted
from dpfl_lightning.strategies.clustering import first_round
from dpfl_lightning.strategies.clustering.cluster_metrics import GroupingStrategy
from dpfl_lightning.strategies.clustering.late_clients import LateClients
from dpfl_lightning.strategies.clustering.model_selection import (
    SELECTIONS,
    ModelSelection,
    is_number,
    refuse_unused,
)

_KEY = "strategies.clustered"
_SIMILARITY = "server_similarity"
_KEPT = (
    *("responsibilities", "embedding", "separation", "overlap", "confident", "probability"),
    *("last_drawn_round", "diagnostics", "_found_in"),
)
_LOOK = ("clients", "steps", "noise_std", "deltas", "model_of")


def drawn_groups(responsibilities: Tensor, clients: Sequence[int], round: int, seed: int) -> tuple[int, ...]:
    """Draw each client's group from its row of `responsibilities` `[N, M]`; depends only on (seed, round, client)."""
    drawn = []
    for client in clients:
        row = responsibilities[client].double().numpy()
        drawn.append(int(public_generator(seed, "stage2", round, client).choice(len(row), p=row / row.sum())))
    return tuple(drawn)


class Clustered(GroupingStrategy):
    """R-DPCFL: groups of clients are found by their updates from full batches, and then train separate models.

    It suits clients of a few very different kinds, some of which may be rare, that have enough records for a full batch
    to be nearly free of noise. In round 1 all clients compute a full-batch update of one model, and the server groups
    the updates. If it is not sure of the groups, round 2 repeats this with the same model and new noise, and the server
    averages the updates. Up to `switch_round` each client's model is drawn from its memberships. After that each client
    chooses a model by its loss.

    The aggregation rule works within each group. Name this strategy before selections (`uniform_selection`), whose
    quotas are for the later rounds, and before strategies that pull towards the round's model. In later rounds, clients
    that do not take part are asked to choose, too.

    Args:
        num_clusters: number M of groups, or `auto`, which estimates it. 1 is the aggregation rule alone.
        mixture: `robust` finds only groups that neither noise nor a gradual difference of clients explains; `paper`
            works in two dimensions and never reports that it is uncertain.
        min_cluster_size: `robust`: smallest number of clients of a group, >= 1. Unless it is 1, a client far from all
            others belongs to the nearest group.
        smallest_distance: least distance of groups that are worth finding, in (0, 2]: of their mean clipped gradients
            at the start, in units of the clip norm. Rotated Fashion-MNIST images have 0.11. It determines each client's
            noise of the full batch: the largest that separates such groups.
        first_round_share: limit of that price, in (0, 1): the epsilon of the full batch and its repetition alone, as a
            share of the client's budget. At 0.5 the noise multiplier of later rounds grows by about a fifth at most.
        first_round_noise_multiplier: noise multiplier of the full batch, > 0; null is what the two options above
            determine. `same` uses one multiplier for all rounds (as in the papers): later rounds pay for the first.
        second_look: whether the full batch may be repeated (with `robust` and noise that is not `same`, in runs of at
            least 3 rounds). The repetition is planned and its budget reserved; if it is not needed, it is not charged.
            If it brings no update, the first full batch decides in the next round that brings any.
        reuse_first_round: true applies the mean of the first updates to the new models, in which no update counts as
            longer than twice the median one; false starts all models from the initial parameters of the run.
        switch_round: last round in which models are drawn, or `auto`: half of the run, or less the more the groups
            overlap. `auto` is known only after round 1, so choices are planned for all rounds after it. With
            `selection: exponential` clearly separated groups use half of them, and the budget of the others is lost:
            set a number in that case.
        selection: how clients choose after `switch_round`: `exponential_frozen` (the exponential mechanism in the first
            `selection_rounds` rounds, then the last choice is kept), `exponential` (in every round), `paper_argmin`
            (without noise) or `server_similarity` (clients are not asked; each keeps its most likely group).
        selection_epsilon: bounded range of one choice with noise, > 0; null is 0.03 of each client's budget.
        selection_rounds: number of rounds with choices for `exponential_frozen`, >= 1; null is a tenth of the run's.
        loss_bound: losses of choices with noise are clipped to [0, loss_bound], > 0; null is 2 log(classes).

    While all models are the same, clients are not asked to choose; the models of such a round are drawn. Models that no
    client trains are not changed. A client that missed the full batches has equal memberships in all groups. With
    `robust` it first trains the groups' models, without weight, until its updates were compared with those of each
    group's members, or of some groups' in three rounds. Its memberships are then the probabilities of these groups to
    be the nearest one in the noise, without a prior, unless it has chosen a group by its loss. If `auto` finds M = 1,
    training continues as under the aggregation rule, and the budget planned for choices is not spent.

    **Guarantees** The whole run fits each budget: full batches, later rounds and choices are solved together.

    **Privacy** Mixture, draws and models are post-processing of released updates; noise levels are public.
    `selection: paper_argmin` has no noise and makes every epsilon infinite.

    Reference: Malekmohammadi, Taik and Farnadi (2024), "Mitigating Disparate Impact of Differential Privacy in
    Federated Learning through Robust Clustering", and its revision with an unknown M. The papers' form is `mixture:
    paper, first_round_noise_multiplier: same, selection: paper_argmin, reuse_first_round: false`.
    """

    role = "mask"
    before_pulls = True

    def __init__(
        self,
        num_clusters: int | str = "auto",
        mixture: str = "robust",
        min_cluster_size: int = 2,
        smallest_distance: float = 0.1,
        first_round_share: float = 0.5,
        first_round_noise_multiplier: float | str | None = None,
        second_look: bool = True,
        reuse_first_round: bool = True,
        switch_round: int | str = "auto",
        selection: str = "exponential_frozen",
        selection_epsilon: float | None = None,
        selection_rounds: int | None = None,
        loss_bound: float | None = None,
    ) -> None:
        require_one_of(("robust", "paper"), f"{_KEY}.mixture", mixture)
        known = _count(num_clusters, f"{_KEY}.num_clusters")
        try:
            self._options = GroupOptions(known, min_cluster_size)
        except UserError as error:  # add the prefix of this strategy to the key
            raise UserError(str(error).replace("`", f"`{_KEY}.", 1)) from None
        in_range, must = is_number(smallest_distance) and 0 < smallest_distance <= 2, "be above 0 and at most 2"
        require(in_range, f"{_KEY}.smallest_distance", must, smallest_distance)
        in_range, must = is_number(first_round_share) and 0 < first_round_share < 1, "be above 0 and below 1"
        require(in_range, f"{_KEY}.first_round_share", must, first_round_share)
        require(isinstance(second_look, bool), f"{_KEY}.second_look", "be true or false", second_look)
        noise, must = first_round_noise_multiplier, "be a number above 0, `same` or null"
        number = is_number(noise) and 0 < noise < math.inf
        require(noise in (None, "same") or number, f"{_KEY}.first_round_noise_multiplier", must, noise)
        looks, distance = {"second_look": (second_look, True)}, {"smallest_distance": (smallest_distance, 0.1)}
        if mixture == "paper":
            beside = "mixture paper, which finds groups by another method"
            refuse_unused(_KEY, beside, min_cluster_size=(min_cluster_size, GroupOptions().min_size), **looks)
        if noise is not None:
            beside = f"first_round_noise_multiplier {noise}, which is the noise of the full batch"
            unused = (looks if noise == "same" else {}) | (distance if mixture == "paper" else {})
            refuse_unused(_KEY, beside, first_round_share=(first_round_share, 0.5), **unused)
        require(isinstance(reuse_first_round, bool), f"{_KEY}.reuse_first_round", "be true or false", reuse_first_round)
        self._mixture, self._first_noise, self._reuse = mixture, noise, reuse_first_round
        self._distance, self._share, self._second_look = smallest_distance, first_round_share, second_look
        self.needs_noise_std = mixture == "robust"
        self._last_drawn = _count(switch_round, f"{_KEY}.switch_round")
        require_one_of((*SELECTIONS, _SIMILARITY), f"{_KEY}.selection", selection)
        self._by_similarity = selection == _SIMILARITY
        if self._by_similarity:
            refuse_unused(
                _KEY,
                f"selection {_SIMILARITY}, which does not ask clients",
                selection_epsilon=(selection_epsilon, None),
                selection_rounds=(selection_rounds, None),
                loss_bound=(loss_bound, None),
            )
        by_loss = SELECTIONS[0] if self._by_similarity else selection
        self._choice = ModelSelection(by_loss, selection_epsilon, selection_rounds, loss_bound, _KEY)
        self._looks = 1  # number of rounds that may be full batches
        self._first_look: ClientUpdates | None = None  # while the server is not sure of the groups
        # results of the full batches; absent clients have equal memberships, and NaN in `embedding`
        self.responsibilities: Tensor | None = None  # [N, M]
        self.embedding = torch.empty(0, 2)  # [N, 2]
        self.separation, self.overlap, self.confident, self.probability = 0.0, 1.0, False, 0.0
        self.last_drawn_round = 1
        self.diagnostics: dict[str, float] = {}
        self._found_in = 0  # round
        self._late = LateClients()

    @property
    def _alone(self) -> bool:
        return self._options.num_groups == 1

    def _looking(self, view: View) -> bool:
        """Whether this round is a full batch of all clients, after which the server may group them."""
        return not self._alone and self.responsibilities is None and view.round <= self._looks

    def plan_run(self, schedule: RunSchedule, view: View) -> RunSchedule:
        if self._alone:
            return schedule
        self._check(schedule, view)
        repeats = self._second_look and self._mixture == "robust" and self._first_noise != "same"
        self._looks = 2 if repeats and schedule.rounds > 2 else 1
        options = self._first_noise, self._distance, self._share, self._looks
        schedule = first_round.with_full_batches(schedule, view, *options)
        first_round.warn_if_blind(schedule, view, self._distance)
        if self._by_similarity:
            return schedule
        # if groups overlap, clients may choose from round 2 on, so these choices must be in the plan
        return self._choice.plan_run(schedule, view, max(0, schedule.rounds - (self._last_drawn or 1)))

    def initialise(self, state: ServerState, view: View) -> ServerState:
        """Start from one model; as this hook is exclusive, no other strategy can create models."""
        return state

    def plan_round(self, plan: RoundPlan, view: View) -> RoundPlan:
        if self._alone:
            return plan
        if self._looking(view):
            return view.plan(first_round.PURPOSE, plan.clients)
        models, memberships = view.state.models, self.responsibilities
        if memberships is None or len(models) == 1:
            return plan
        exploring = self._late.next_models(plan.clients)
        plan = dataclasses.replace(
            plan, model_of=tuple(exploring.get(i, row) for i, row in zip(plan.clients, plan.model_of, strict=True))
        )
        if view.round <= self.last_drawn_round:
            model_of = drawn_groups(memberships, plan.clients, view.round, view.seed)
        elif self._by_similarity:
            model_of = tuple(memberships[list(plan.clients)].argmax(dim=1).tolist())
        elif not bool((models[1:] != models[:1]).any()):  # choices would assign all clients to one model for good
            even = memberships if self.confident else torch.ones_like(memberships)
            model_of = drawn_groups(even, plan.clients, view.round, view.seed)
        else:
            model_of = self._choice.models_of(plan, view, models)
            for client in self._choice.answered & exploring.keys():
                del self._late.seen[client], exploring[client]
        rows = zip(plan.clients, model_of, strict=True)
        return dataclasses.replace(plan, model_of=tuple(exploring.get(client, row) for client, row in rows))

    def needs_updates(self, plan: RoundPlan, view: View) -> bool:
        return self._looking(view) or any(client in self._late.seen for client in plan.clients)

    def weigh(self, updates: ClientUpdates, view: View) -> Tensor | None:
        if self._looking(view):  # the model is not changed
            return torch.zeros(len(updates.clients), dtype=torch.float64)
        if not any(client in self._late.seen for client in updates.clients):
            return None
        return torch.tensor([float(client not in self._late.seen) for client in updates.clients], dtype=torch.float64)

    def after_step(self, state: ServerState, updates: ClientUpdates, view: View) -> ServerState:
        state = super().after_step(state, updates, view)
        if self._looking(view):
            return self._divided(state, updates, view)
        if self._first_look is not None:  # the second full batch brought no update
            return self._divided(state, None, view)
        if not (placed := self._late.placed(updates, view)):
            return state
        assert self.responsibilities is not None  # for mypy
        self.responsibilities, model_of = self.responsibilities.clone(), list(state.model_of)
        for client, memberships in placed.items():
            self.responsibilities[client], model_of[client] = memberships, int(memberships.argmax())
        return dataclasses.replace(state, model_of=tuple(model_of))

    def metrics(self, view: View) -> Mapping[str, float | Tensor]:
        metrics = dict(super().metrics(view))
        if (memberships := self.responsibilities) is None:
            return metrics
        metrics |= {
            "num_clusters": memberships.shape[1],
            "confident": self.confident,
            "probability": self.probability,
            "separation": self.separation,
            "overlap": self.overlap,
            "switch_round": self.last_drawn_round,
            "membership_entropy": float(-(memberships * memberships.clamp_min(1e-300).log()).sum(dim=1).mean()),
        }
        return metrics | (self.diagnostics if view.state.round == self._found_in else {})

    def client_embedding(self, view: View) -> ClientEmbedding | None:
        if self.responsibilities is None:
            return None
        clients = self.embedding.isfinite().all(dim=1).nonzero().flatten()
        membership, cluster = self.responsibilities[clients].max(dim=1)
        return ClientEmbedding(
            title="Updates of round 1 along the two directions in which they differ most",
            clients=tuple(clients.tolist()),
            points=tuple((x, y) for x, y in self.embedding[clients].tolist()),
            cluster=tuple(cluster.tolist()),
            membership=tuple(membership.tolist()),
            num_clusters=self.responsibilities.shape[1],
            separation=self.separation if math.isfinite(self.separation) else None,
            confident=self.confident,
        )

    def state_dict(self) -> dict[str, Any]:
        kept = () if self.responsibilities is None else _KEPT
        look = None if self._first_look is None else {name: getattr(self._first_look, name) for name in _LOOK}
        states = {
            "choice": self._choice.state_dict(),
            "look": look,
            "late": {client: seen.clone() for client, seen in self._late.seen.items()},
        }
        return states | {name: getattr(self, name) for name in kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._choice.load_state_dict(state["choice"])
        self._first_look = None if state["look"] is None else ClientUpdates(**state["look"])
        self._late = LateClients({client: seen.cpu() for client, seen in state["late"].items()})
        for name in _KEPT if "responsibilities" in state else ():
            value = state[name]
            setattr(self, name, value.cpu() if isinstance(value, Tensor) else value)

    def _check(self, schedule: RunSchedule, view: View) -> None:
        """Check the number of groups, and that no quotas were planned before, which round 1 would spend."""
        key, number, count = f"{_KEY}.num_clusters", self._options.num_groups, view.facts.num_clients
        robust, least = self._mixture == "robust", self._options.min_size
        if number is None:
            advice = "Set num_clusters: 1 for one model."
            must = f"be at most half of the {count} clients, so that there may be two groups"
            require(not robust or 2 * least <= count, f"{_KEY}.min_cluster_size", must, least, advice)
        else:
            must = (
                f"be at most {count // least}, as groups have at least min_cluster_size {least} of the {count} clients"
            )
            must = must if robust and least > 1 else f"be at most the {count} clients"
            require(number * (least if robust else 1) <= count, key, must, number)
        blind = number is None and robust and math.inf in view.clip_norm
        advice = "The number of groups is estimated from noise and clipping, and there is neither."
        require(not blind, key, "be a number without privacy", "auto", advice)
        for client, client_schedule in enumerate(schedule.clients):
            for line in client_schedule.planned:
                if line.purpose == "train" and line.count != schedule.rounds + schedule.reserve:
                    quota = max(0, line.count - schedule.reserve)
                    raise UserError(
                        f"`{_KEY}` must be named before strategies that limit how often clients train "
                        f"(uniform_selection, biased_selection), got it after one: client "
                        f"{view.facts.name_of(client)} trains in {quota} of {schedule.rounds} rounds."
                    )

    def _divided(self, state: ServerState, updates: ClientUpdates | None, view: View) -> ServerState:
        """Return the state with M models instead of one, or the same state if another full batch is needed.

        Without `updates`, the first full batch alone decides.
        """
        if updates is not None and self._mixture != "paper":
            updates = first_round.without_impossible(updates, view)
        looks = [one for one in (self._first_look, updates) if one is not None]
        updates = first_round.averaged(*looks) if len(looks) == 2 else looks[0]
        sent = view.module.sent(updates.released)
        if self._mixture == "paper":
            mixture = paper_mixture(sent, self._options.num_groups, view.seed)
        else:
            distance = first_round.distance_of_updates(self._distance, updates.clients, updates.steps, view)
            mixture = robust_mixture(sent, updates.noise_std, self._options, distance)
            if not mixture.confident and view.round < self._looks:
                self._first_look = updates
                return state
        self._first_look = None
        memberships = self._keep(mixture, updates.clients, len(looks), view)
        models = state.models.repeat(mixture.num_groups, 1)
        if self._reuse:
            models = models + aggregate.combine(mixture.responsibilities.T, first_round.limited(updates))
        return dataclasses.replace(state, models=models, model_of=tuple(memberships.argmax(dim=1).tolist()))

    def _keep(self, mixture: Mixture, clients: Sequence[int], looks: int, view: View) -> Tensor:
        """Store the fitted mixture, and return the memberships of all clients, `[N, M]`."""
        count, groups = view.facts.num_clients, mixture.num_groups
        self.responsibilities = torch.full((count, groups), 1 / groups, dtype=torch.float64)
        self.responsibilities[list(clients)] = mixture.responsibilities
        self.embedding = torch.stack([of_all(clients, coordinate, count) for coordinate in mixture.embedding.T], dim=1)
        self.separation, self.overlap = mixture.separation, mixture.overlap
        self.confident, self.probability = mixture.confident, mixture.probability
        if groups > 1 and self._mixture == "robust":
            self._late = LateClients.of(sorted({*range(count)} - {*clients}), groups)
        self.last_drawn_round = self._last_drawn or switch_round(mixture.overlap, view.schedule.rounds)
        self.diagnostics, self._found_in = {"looks": looks, **mixture.diagnostics}, view.round
        if groups < (wanted := self._options.num_groups or 1):
            arrived = counted(len(clients), "client")
            warn_user(f"strategy clustered: {groups} of {wanted} groups, as {arrived} sent an update of a full batch")
        if not mixture.confident:
            then = "all clients share one model" if groups == 1 else "models begin with groups that may be wrong"
            found = "the clients are one group" if groups == 1 else f"these {groups} groups of clients are right"
            why = ", as a group is smaller than min_cluster_size or not found again in simulated noise"
            why = why if groups > 1 and mixture.probability == 0 else ""
            warn_user(
                f"strategy clustered: the probability that {found} is {mixture.probability:.2g}{why}, below "
                f"{CONFIDENT:g} (separation {mixture.separation:.3g}): {then}."
            )
        return self.responsibilities


def _count(value: int | str, key: str) -> int | None:
    """Return the whole number, or None for `auto`."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(whole or value == "auto", key, "be `auto` or a whole number of at least 1", value)
    return None if isinstance(value, str) else value
