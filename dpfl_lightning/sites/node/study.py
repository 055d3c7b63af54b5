"""One accepted plan in a node: what the server asks for is checked, charged, computed, noised, kept and sent."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.errors import UserError, warn_user
from dpfl_lightning.federated.client.answers import check_answerable
from dpfl_lightning.federated.client.evaluation import evaluate_own
from dpfl_lightning.federated.client.local_clients import LocalClients
from dpfl_lightning.federated.messages.jobs import LARGEST, ClassGradients
from dpfl_lightning.federated.messages.query import (
    ChargedQuery,
    FeatureSums,
    MeanLoss,
    NoMechanism,
    ScoreCounts,
    SelectModel,
    event_of,
)
from dpfl_lightning.federated.messages.requests import Ask, Evaluate, Train
from dpfl_lightning.federated.messages.update import is_sound
from dpfl_lightning.models.augmentation import NUMBERS, OPERATIONS
from dpfl_lightning.privacy.accounting.events import NoisedEvent
from dpfl_lightning.privacy.accounting.noise_source import key_of, with_key
from dpfl_lightning.privacy.ledger.file import read_head
from dpfl_lightning.privacy.mechanism import mechanism_of
from dpfl_lightning.runtime.files import write_atomically
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import (
    MOST_MODELS,
    Paid,
    Refused,
    Released,
    Reply,
    Terms,
    Welcome,
)
from dpfl_lightning.sites.node.scores import KeptScores
from dpfl_lightning.sites.node.state import kept_releases
from dpfl_lightning.sites.terms import server_words

MOST_EDGES = 1000  # of bins
KEPT_ROUNDS = 2  # rounds of which a node keeps the releases, to send them again
MOST_RATE = 1e6  # learning rate or pull: a larger one only breaks the computation, after it was charged


class NotPlanned(Exception):
    """A request that the accepted plan does not contain, or whose values do not fit it."""

    code = "not_planned"


class UnfitModel(NotPlanned):
    """A model that no client can train: its release would be charged, and worth nothing."""

    code = "unfit_model"


@dataclass(frozen=True)
class Kept:
    """A release on disk, and what stays with the client since then; see `Client.kept`."""

    value: Tensor | int | float
    kept: Mapping[str, Tensor]


wire.register(Kept)


class Study:
    """The client of a node in the run of one accepted plan.

    `clients` hold the records of this client only, and the node's source of noise. Models that are trained from are
    scored every `score_every` rounds, if this is not 0.

    **Guarantees** Mechanisms and steps follow from the plan that the operator has accepted, never from a request. The
    charge of a release is on disk before the release is computed, and the release is on disk before it is sent: a
    request of the same meaning gets the same bytes again, free, in its round and the next.
    """

    def __init__(
        self,
        folder: Path,
        terms: Terms,
        client: int,
        clients: LocalClients,
        score_every: int = 0,
    ) -> None:
        self.clients, self._plan = clients, terms.plan
        self._num_classes, self._records = terms.sites[client].num_classes, terms.plan.settings[client].num_records
        self._score_every = score_every
        self._last = terms.plan.schedule.rounds + 1  # after the last round, too, a strategy may ask
        self._folder, self._releases = folder, folder / "releases"
        self._releases.mkdir(exist_ok=True)
        plan = dataclasses.replace(terms.plan, caveats=tuple(map(server_words, terms.plan.caveats)))
        if not clients.source.protects:  # as if the configuration had it: the streams follow from both
            options = {**plan.options, "privacy": with_key(plan.options["privacy"], key_of(clients.privacy))}
            plan = dataclasses.replace(plan, options=options, caveats=(*clients.source.caveats, *plan.caveats))
        head = read_head(folder / "ledger.jsonl")
        saved = None if head is None or head.lines == 0 else {"ledger": head.as_dict()}
        clients.begin(folder, plan, saved, ended=False)
        self.client = clients.client(client)
        if files := kept_releases(folder):
            self.client.keep(wire.decode(Kept, files[-1].read_bytes()).kept)

    def welcome(self) -> Welcome:
        """Return all that the client has paid for."""
        paid = tuple(one for round in self.clients.ledger.rounds(self.client.number) for one in self._paid(round))
        return Welcome(self.clients.source.protects, paid)

    def reply(self, request: Train | Ask) -> Reply:
        """Return the release that is asked for, or why it is refused.

        Raises an error if a charged computation fails; its text may be private.

        **Privacy** One release of the planned purpose, charged, unless it was released before.
        """
        try:
            if not 1 <= request.round <= self._last:
                raise NotPlanned("round")
            request = self._training(request) if isinstance(request, Train) else self._question(request)
            key = wire.digest(request)
            if known := next(self._releases.glob(f"*-{key}.bin"), None):
                return self._released(wire.decode(Kept, known.read_bytes()).value, request.round)
        except NotPlanned as refused:
            return Refused(refused.code)
        if (charged := self._release(request)) is None:
            return Refused("spent")
        self._keep(request.round, key, charged)
        if isinstance(request, Train) and self._score_every and request.round % self._score_every == 0:
            self._score(request.round - 1, request.model)
        return self._released(charged, request.round)

    def evaluate(self, request: Evaluate) -> Reply:
        """Write down what was sent, and a model's scores on held-out records; return what `welcome` does."""
        try:
            if not 0 <= request.round <= self._last:
                raise NotPlanned("round")
            model = self._model(request.model, self.clients.module.flat.shape)
        except NotPlanned as refused:
            return Refused(refused.code)
        self._score(request.round, model)
        return self.welcome()

    def _score(self, round: int, model: Tensor) -> None:
        """Score held-out records, if there are any, and say what was sent; the reply is the same if this fails."""
        clients, number = self.clients, self.client.number
        held_out = self.client.records.num_held_out
        try:
            from dpfl_lightning.sites.node.consent import write_report, write_scores  # only now: replies need no pages

            write_report(self._folder, clients.population)
            if held_out:
                scores = evaluate_own(clients.module, clients.held, model, number, clients.channel)
                kept = KeptScores(round, held_out, scores.test, scores.baseline, scores.measures)
                write_scores(self._folder, kept, clients.guarantees()[number])
        except Exception as error:
            warn_user(f"scores of held-out records are not computed: {type(error).__name__}")

    def _released(self, value: Tensor | int | float, round: int) -> Released:
        return Released(value, self._paid(round))

    def _training(self, request: Train) -> Train:
        """Return the request in the one form of its meaning, after all checks of its values.

        What does not change the release is left out: an anchor or its strength alone, and both and the learning rate
        if gradients are asked for.
        """
        event, job = self._planned(request.purpose), request.job
        if not isinstance(event, NoisedEvent) or event.scores:
            raise NotPlanned("event")
        mechanism = mechanism_of(event, self._plan.settings[self.client.number].clip_norm, self._records)
        divisor = request.mechanism.expected_batch_size  # a strategy that draws fewer records may have a smaller one
        if divisor <= mechanism.expected_batch_size:
            mechanism = dataclasses.replace(mechanism, expected_batch_size=divisor)
        planned = mechanism, event.steps, self._plan.optimizer
        if (request.mechanism, request.steps, request.optimizer) != planned:
            raise NotPlanned("mechanism")
        if not (0 < request.learning_rate <= MOST_RATE and 0 <= request.pull <= MOST_RATE):
            raise NotPlanned("learning_rate")
        shape = self.clients.module.flat.shape
        model = self._model(request.model, shape)
        anchor = None if request.anchor is None else self._model(request.anchor, shape)
        rate = request.learning_rate
        if isinstance(job, ClassGradients):
            self._check_class_gradients(job, event)
            named = [name for name in self.clients.module.named_trainable if name in (job.parameters or ())]
            some = 0 < len(named) < len(self.clients.module.named_trainable)
            job, rate, anchor = dataclasses.replace(job, parameters=tuple(named) if some else None), 1.0, None
        pull = 0.0 if anchor is None else request.pull
        anchor = anchor if pull else None
        try:
            request.sampler()
        except ValueError:  # a job that the mechanism does not cover
            raise NotPlanned("job") from None
        free: dict[str, Any] = {"job": job, "learning_rate": rate, "model": model, "anchor": anchor, "pull": pull}
        return dataclasses.replace(request, mechanism=mechanism, **free)

    def _model(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a model, or several, in the one form of its meaning: no parameter is -0.

        A larger parameter than `LARGEST` is none of an honest server, which drops such a model, and its gradients are
        hardly finite: the noisy release would be worth nothing. This saves budget and protects nobody.
        """
        if value.shape != shape or value.dtype != self.clients.module.flat.dtype:
            raise UnfitModel("shape")
        least, most = value.aminmax()  # NaN if any number is
        if not (least >= -LARGEST and most <= LARGEST):
            raise UnfitModel("size")
        return value + 0.0

    def _release(self, request: Train | Ask) -> Tensor | int | float | None:
        """Return what the client releases; an update whose numbers are not finite becomes NaN, None if all is spent."""
        released = self.client.handle(request)
        if released is None or isinstance(request, Ask) or is_sound(released, request.job):
            return released  # in a simulation other updates are lost
        return torch.full_like(request.model, math.nan)

    def _check_class_gradients(self, job: ClassGradients, event: NoisedEvent) -> None:
        module, images = self.clients.module, job.augmentation
        named = job.parameters is None or set() < {*job.parameters} <= module.named_trainable.keys()
        counted = job.counts or not (job.most_records is None or job.most_records >= 1)
        fits = job.num_classes == self._num_classes and named and event.steps == 1 and not counted
        fits = fits and not self.clients.unit.is_group
        if images is not None:
            rows = len(images.operations) == len(images.numbers) == job.num_classes
            numbers = all(len(row) == NUMBERS and all(0 <= one < 1 for one in row) for row in images.numbers)
            shape = self.clients.population.input_shape
            is_image = isinstance(shape, tuple) and len(shape) == 3 and all(isinstance(size, int) for size in shape)
            fits = fits and rows and numbers and is_image and {*images.operations} <= OPERATIONS.keys()
        if not fits:
            raise NotPlanned("job")

    def _question(self, request: Ask) -> Ask:
        """Return the request in the one form of its meaning, after all checks of its values; see `_training`.

        Questions of other classes check their values themselves.
        """
        question, client = request.question, self.client.number
        plain = [one for one in question.mechanism_of.values() if isinstance(one, NoMechanism)]
        if question.clients != (client,) or plain:
            raise NotPlanned("mechanism")
        try:
            query = ChargedQuery.of(question)
            check_answerable(query, self.clients.unit)
            planned = event_of(query, client) == self._planned(query.purpose)
        except (TypeError, ValueError, UserError):
            raise NotPlanned("question") from None
        fits = planned and (not isinstance(question, FeatureSums) or question.num_classes == self._num_classes)
        if not fits or (isinstance(question, SelectModel | MeanLoss) and not 0 < question.loss_bound < math.inf):
            raise NotPlanned("question")
        free: dict[str, Any] = {}
        name = "nets" if isinstance(question, FeatureSums) else "models"
        if isinstance(models := getattr(question, name, None), Tensor):
            if models.ndim == 0 or not 1 <= len(models) <= MOST_MODELS:
                raise NotPlanned("question")
            free[name] = self._model(models, (len(models), *self.clients.module.flat.shape))
        if isinstance(question, ScoreCounts):
            edges = question.edges
            rising = all(one < other for one, other in itertools.pairwise((0.0, *edges, 1.0)))
            task = self.clients.module.task
            if not rising or len(edges) > MOST_EDGES or task is None or not task.one_class:
                raise NotPlanned("question")
        if isinstance(question, MeanLoss | ScoreCounts):
            row = question.row_of.get(client, -1)
            if not 0 <= row < len(question.models):
                raise NotPlanned("question")
            free = {"models": free["models"][row : row + 1], "row_of": {client: 0}}
        return dataclasses.replace(request, question=dataclasses.replace(question, **free))

    def _planned(self, purpose: str) -> Any:
        try:
            return self._plan.schedule.planned(self.client.number, purpose).event
        except KeyError:
            raise NotPlanned("purpose") from None

    def _paid(self, round: int) -> tuple[Paid, ...]:
        charges = self.clients.ledger.charges(self.client.number, round)
        return tuple(Paid(one.round, one.number, one.purpose, one.event) for one in charges)  # type: ignore[arg-type]

    def _keep(self, round: int, key: str, value: Any) -> None:
        files = kept_releases(self._folder)
        number = int(files[-1].name.partition("-")[0]) + 1 if files else 0
        content = wire.encode(Kept(value, self.client.kept))
        name = f"{number:010d}-{round}-{key}.bin"
        write_atomically(self._releases / name, lambda partial: partial.write_bytes(content), private=True)
        for file in files:
            if int(file.name.split("-")[1]) <= round - KEPT_ROUNDS:
                file.unlink()

    def close(self) -> None:
        self.clients.end(finished=False)
        self.clients.close()
