"""The clients of a real federation: connections to the nodes of the sites, and a mirror of their ledgers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError, require, warn_user
from dpfl_lightning.federated.client.checks import check_fits
from dpfl_lightning.federated.client.evaluation import PlainScorer, evaluate
from dpfl_lightning.federated.client.identity import deciding_options
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.client.run_log import RunLog, closed_on_error
from dpfl_lightning.federated.messages.clients import LostClients, RunPlan
from dpfl_lightning.federated.messages.evaluation import ClientModels, Evaluation
from dpfl_lightning.federated.messages.plan import RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery, answer_fits
from dpfl_lightning.federated.messages.requests import Ask, Evaluate, Train, train_requests
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates, UpdateBuffer
from dpfl_lightning.privacy.accounting.noise_source import FRESH, KEYED
from dpfl_lightning.privacy.ledger.ledger import Charge
from dpfl_lightning.runtime.devices import use_exact_products
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import (
    REFUSALS,
    Refused,
    Released,
    Site,
    Welcome,
    client_names,
)
from dpfl_lightning.sites.receipt import FILE as RECEIPTS
from dpfl_lightning.sites.receipt import Receipt, read_receipts, write_receipts
from dpfl_lightning.sites.server.channel import LateClients, Request, SiteChannel, Sites, hello
from dpfl_lightning.sites.signed import Answer

T = TypeVar("T")


class RemoteClients(RunLog):
    """Clients whose records, noise and logs are in the nodes of their sites; implements `Clients` for the server.

    Args:
        test: the test set of the run, if there is one, in the form of the sites' records; it has no clients.
        site_list: public facts of the sites, one for each client.
        nodes: the accepted plan and the connections; None: the run is only planned.

    The ledger in the run's folder holds what the nodes say that they have paid for, and `receipts.json` the last head
    of its ledger that each has signed. A reply without a signature for its request, or with an older ledger, ends the
    run. A node that refuses, or whose reply is late, is left out of the round. A node that is gone ends the run, which
    can be resumed: the other nodes then send their releases of that round again.

    Raises UserError if not every client has one node with the plan, and LostClients if a node is gone, its reply is
    forged or its ledger an older one, or if no node sends a release.
    """

    noise = FRESH.words("cpu")  # of each site, by its own
    account_words = ""  # the operators of the sites have accounts

    def __init__(
        self,
        test: Population,
        module: ClientModule,
        privacy: PrivacyOptions | None,
        site_list: Sequence[Site],
        nodes: Sites | None = None,
    ) -> None:
        if module.device.type == "cuda":
            use_exact_products()
        check_fits(module, test)
        super().__init__(privacy, client_names(site_list), test.caveats)
        self.test, self.module, self.device = test, module, module.device
        self._scorer = PlainScorer(module, test)
        self._baseline: Mapping[str, float | None] | None = None  # known after the first evaluation
        self._keys = [site.public_key for site in site_list]
        self._receipts: dict[int, Receipt] = {}
        self._late: dict[int, tuple[int, str]] = {}  # client -> round and purpose of the reply that was late
        self._channel = None if nodes is None else SiteChannel(nodes, module)
        welcomes = () if self._channel is None else self._channel.welcomes
        if any(isinstance(one.reply, Welcome) and not one.reply.protects for one in welcomes):
            self.source = KEYED
        self.caveats = (*self.source.caveats, *test.caveats)

    @property
    def channel(self) -> SiteChannel:
        assert self._channel is not None, "a run that is only planned asks nobody"
        return self._channel

    @property
    def description(self) -> str:
        known = "" if self._channel is None else f", which have accepted plan {self._channel.plan[:12]}"
        return f"{len(self._keys)} nodes of sites{known}"

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def outlook(self, plan: RunPlan) -> str:
        """Nothing: the operators of the sites have accounts."""
        return ""

    def begin(self, folder: Path, plan: RunPlan, saved: Mapping[str, Any] | None, ended: bool) -> None:
        with closed_on_error(self.channel):
            self._require_accepted(plan)
            self.prepare(folder, plan)
            self.open(plan, self.module, lambda key: (), saved, ended)
        with closed_on_error(self):
            self._compare_accounts(folder)

    def _require_accepted(self, plan: RunPlan) -> None:
        """Raise UserError unless the sites have accepted this plan."""
        caveats = tuple(words for words in plan.caveats if words not in self.source.caveats)
        asked = dataclasses.replace(plan, options=deciding_options(plan.options), caveats=caveats)
        must = "give the plan that the sites have accepted; export it again, and let them accept it, for another one"
        accepted = self.channel.terms.plan
        same = wire.encode(asked) == wire.encode(accepted)
        require(same, "--config", must, f"other {wire.different_fields(accepted, asked)}")

    def _compare_accounts(self, folder: Path) -> None:
        """Write down what the nodes say that they have paid for. See `_record`."""
        self._receipts = read_receipts(folder, self._keys)
        for client in sorted(self.ledger.payers() - self._receipts.keys()):
            must = f"lie beside ledger.jsonl, with what the node of client {self.name_of(client)} has signed"
            require(False, str(folder / RECEIPTS), must, "nothing of it", "Restore it, or start a new run.")
        answers: Sequence[Answer | LostClients] = self.channel.welcomes
        if self._receipts:  # which the nodes were not told yet
            answers = [answer for _, answer in self._send({client: hello() for client in range(len(self._keys))})]
        for answer in answers:
            if isinstance(answer, LostClients):
                raise answer
            self._record(answer)

    def change(self, schedule: RunSchedule) -> None:
        raise RuntimeError("the plan that sites have accepted cannot be changed during the run")

    def accept(self, plan: RoundPlan) -> RoundPlan:
        """The plan without clients that have paid for all planned releases; nodes charge when they train."""
        return plan.only(lambda client: self._may_pay(client, plan.round, plan.purpose))

    def train(self, plan: RoundPlan, models: Tensor, raw_weights: Tensor | None) -> ClientUpdates:
        if plan.optimizer != self.channel.terms.plan.optimizer:
            raise RuntimeError("the optimiser of a round must be that of the accepted plan")
        inbox, models = UpdateBuffer(plan, raw_weights), models.cpu()
        plan = dataclasses.replace(plan, job=plan.job.to("cpu"))
        requests = dict(zip(plan.clients, train_requests(plan, models), strict=True))
        for client, value in self._ask_all(requests, plan.round, plan.purpose):
            if value is None:
                inbox.lose(client)
            else:
                inbox.take(client, self._checked(value, plan, models).to(self.device))
        return inbox.updates()

    def ask(self, query: ChargedQuery, round: int) -> Answers:
        clients = tuple(one for one in query.clients if self._may_pay(one, round, query.purpose))

        def question(client: int) -> Ask:
            asked = {client: query.mechanism_of[client]}
            return Ask(round, dataclasses.replace(query.question, mechanism_of=asked))

        replies = self._ask_all({client: question(client) for client in clients}, round, query.purpose)
        answers = {client: value for client, value in replies if value is not None}
        for client, value in answers.items():
            if not answer_fits(query.question, client, value):
                name = self.name_of(client)
                raise LostClients(f"`--nodes` must answer what they are asked, got another value from client {name}.")
        if len({value.shape for value in answers.values() if isinstance(value, Tensor)}) > 1:
            raise LostClients("`--nodes` must give answers of one length, got others.")
        return answers

    def seconds_per_record(self, batch_size: int) -> float:
        """NaN: the server does not know the machines of the sites."""
        return math.nan

    def was_charged(self, round: int) -> bool:
        """False: a node sends a release of the last rounds again, so that it is not charged again."""
        return False

    def diagnostics(self) -> None:
        """None: sites show no counts."""

    def state_dict(self) -> dict[str, Any]:
        return {"ledger": self.ledger_head()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: what stays with a client is at its node."""

    def personalised(self, model: Tensor, client: int) -> Tensor:
        """The model: personal parameters are at the nodes."""
        return model

    def evaluate(self, final_models: ClientModels) -> Evaluation:
        """Scores on the test set; those on held-out records stay at the sites."""
        scores = evaluate(self.module, self.test, final_models, self._scorer, self._baseline)
        self._baseline = scores.baseline
        return scores

    def keep_scores(self, final_models: ClientModels, round: int) -> None:
        """Send each node its final model. One that does not answer, or refuses, has no scores, and the run goes on."""
        clients = [client for client in range(len(self._keys)) if client not in self._late]
        models = [final_models.models[final_models.model_of[client]].cpu() for client in clients]
        requests = {client: Evaluate(round, model) for client, model in zip(clients, models, strict=True)}
        for client, answer in self._send(requests):
            why = str(answer)
            if isinstance(answer, Answer):
                why = REFUSALS.get(getattr(answer.reply, "code", ""), "")
                self._record(answer)
            if why:
                name = self.name_of(client)
                warn_user(f"the node of client {name} has not scored the final model on its held-out records: {why}")

    def end(self, finished: bool) -> None:
        """Ask the nodes that were late what they have paid for; what one does not tell counts as paid."""
        if not finished:
            return
        self._ask_late(tuple(self._late))
        for client, (round, purpose) in self._late.items():
            planned, name = self.budgets.schedule.planned(client, purpose), self.name_of(client)
            if self.ledger.used(client, purpose) < planned.count:
                warn_user(f"the node of client {name} does not answer: its release of round {round} counts as paid")
                number = len(self.ledger.charges(client, round))
                self.budgets.record([Charge(client, round, purpose, planned.event, number)])
        self.folder.forget_data_key()

    def close(self) -> None:
        super().close()
        self.channel.close()

    def _send(self, requests: Mapping[int, Request]) -> list[tuple[int, Answer | LostClients]]:
        return self.channel.send(requests, {client: one.ledger for client, one in self._receipts.items()})

    def _may_pay(self, client: int, round: int, purpose: str) -> bool:
        planned = self.budgets.schedule.planned(client, purpose)
        return self.ledger.used(client, purpose) < planned.count or bool(self.ledger.charges(client, round))

    def _ask_all(self, requests: Mapping[int, Train | Ask], round: int, purpose: str) -> list[tuple[int, Any]]:
        """Ask the nodes at the same time; return what each has released, None of one that refuses or is late."""
        lost = self._ask_late(tuple(client for client in requests if client in self._late))
        asked = {client: request for client, request in requests.items() if client not in self._late}
        values: list[tuple[int, Any]] = [(client, None) for client in requests if client in self._late]
        for client, answer in self._send(asked):
            value, name = None, self.name_of(client)
            if isinstance(answer, LateClients):
                warn_user(f"round {round}: {answer} It is left out of this round.")
                self._late[client] = (round, purpose)
            elif isinstance(answer, LostClients):
                lost.append(answer)
            elif isinstance(answer.reply, Welcome):
                lost.append(LostClients(f"`--nodes` must send releases, got an account from client {name}."))
            else:
                try:
                    self._record(answer, round)
                except LostClients as error:
                    lost.append(error)
                if isinstance(answer.reply, Released):
                    value = answer.reply.value
                else:
                    means = REFUSALS.get(answer.reply.code, "the site states no known reason")
                    warn_user(f"the node of client {name} refuses: {means}")
                    if answer.receipt.ledger is None:  # it does not tell what it has paid for
                        self._late[client] = (round, purpose)
            values.append((client, value))
        if lost:  # after what the others have paid is on record
            raise lost[0]
        if values and all(value is None for _, value in values):
            raise LostClients(f"`--nodes` must send releases, got none in round {round}.")
        return values

    def _ask_late(self, clients: Sequence[int]) -> list[LostClients]:
        """Write down what nodes that were late have paid for since then, so that they are asked again.

        A node that is still busy stays late. Returns the errors of those that are gone.
        """
        lost: list[LostClients] = []
        for _, answer in self._send({client: hello() for client in clients}):
            try:
                if isinstance(answer, LostClients):
                    raise answer
                self._record(answer)
                if answer.receipt.ledger is not None:
                    del self._late[answer.client]
            except LateClients:
                continue
            except LostClients as error:
                lost.append(error)
        return lost

    def _checked(self, value: Any, plan: RoundPlan, models: Tensor) -> Tensor:
        shape = self.channel.shape_of(plan.job)
        fits = isinstance(value, Tensor) and value.dtype == models.dtype and value.numel() > 0
        if fits and value.ndim == 1 and value.isnan().all():  # a release that was not finite
            return value.new_full(shape, torch.nan)
        if not fits or tuple(value.shape) != shape:
            raise LostClients("`--nodes` must send updates of the shape of the model, got another one.")
        return value

    def _record(self, answer: Answer, round: int | None = None) -> None:
        """Write down what a node has paid for, in one `round` if it is given, and the head that it has signed.

        Raises LostClients if the node's ledger is older than one before, or does not tell all that it has paid for;
        and, before anything is written, for releases that the plan does not have.
        """
        client, receipt = answer.client, answer.receipt
        if receipt.ledger is None:
            return
        before, name = self._receipts.get(client), self.name_of(client)
        paid = () if isinstance(answer.reply, Refused) else answer.reply.paid
        charges = [Charge(client, one.round, one.purpose, one.event, one.number) for one in paid]
        other = [charge for charge in charges if round not in (None, charge.round)]
        must = f"tell what they have paid for in round {round}, got from client {name}"
        if other:
            raise LostClients(f"`--nodes` must {must} a release of round {other[0].round}.")
        try:
            new = self.budgets.unrecorded(client, charges)
        except UserError as error:
            raise LostClients(str(error)) from None
        follows = answer.reply != Refused("older_ledger") and (before is None or receipt.follows(before))
        if follows:
            self._receipts[client] = receipt
            write_receipts(self.folder.path, self._receipts, self._keys)  # first: the mirror is not ahead of it
        self.budgets.record(new)
        if not follows:
            had = 0 if before is None else before.releases
            got = f"{receipt.releases} of {had}" if receipt.releases < had else f"others than the {had} of before"
            must = f"know all releases that they have made, got from client {name} {got}"
            copy = "the folder of its node is an older copy, which spends budget twice"
            advice = "Its operator has to stop the node and to restore the newest copy, or to leave the study."
            raise LostClients(f"`--nodes` must {must}: {copy}. {advice}")
        if len(self.ledger.events(client)) >= receipt.releases:
            return
        account = answer if isinstance(answer.reply, Welcome) else self._send({client: hello()})[0][1]
        if isinstance(account, LostClients):
            raise account
        if account is answer or not isinstance(account.reply, Welcome):
            must = f"tell all {receipt.releases} releases that they have signed, got fewer from client {name}"
            raise LostClients(f"`--nodes` must {must}.")
        self._record(account)
