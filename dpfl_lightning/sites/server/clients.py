"""The clients of a real federation: connections to the nodes of the sites, and a mirror of their ledgers."""

from __future__ import annotations

import dataclasses
import math
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from dpfl_lightning.federated.messages.plan import Job, LocalTraining, RoundPlan
from dpfl_lightning.federated.messages.query import Answers, ChargedQuery, answer_fits
from dpfl_lightning.federated.messages.requests import Ask, Evaluate, Train, train_requests
from dpfl_lightning.federated.messages.schedule import RunSchedule
from dpfl_lightning.federated.messages.update import ClientUpdates, UpdateBuffer
from dpfl_lightning.privacy.accounting.guarantee import SIMULATED
from dpfl_lightning.privacy.ledger.ledger import Charge
from dpfl_lightning.privacy.noise import Streams
from dpfl_lightning.runtime.devices import use_exact_products
from dpfl_lightning.sites import signed, sockets, wire
from dpfl_lightning.sites.exchange import (
    MOST_ANSWER,
    MOST_HEADER,
    MOST_MODELS,
    REFUSALS,
    Hello,
    Refused,
    Released,
    Site,
    Terms,
    ToNode,
    Welcome,
    client_names,
    most_header,
    most_numbers,
)
from dpfl_lightning.sites.receipt import FILE as RECEIPTS
from dpfl_lightning.sites.receipt import Receipt, read_receipts, write_receipts
from dpfl_lightning.sites.signed import Answer

T = TypeVar("T")
Request = Hello | Train | Ask | Evaluate

#: sends the bytes of a request and returns those of the reply; raises TimeoutError if it is late, else OSError
Channel = Callable[[bytes], bytes | bytearray]


class LateClients(LostClients):
    """A node does not answer in time."""


class SocketChannel:
    """A connection to the Unix socket of a node; made again when it breaks. A request may be sent twice.

    `wait` is the number of seconds after which a reply counts as lost, beside the time that its numbers may take, and
    `most` the greatest size of the next reply.
    """

    most = wire.Limits(0, 0)

    def __init__(self, path: str, wait: float) -> None:
        self.path, self.wait = path, wait
        self._connection: socket.socket | None = None

    def __call__(self, request: bytes) -> bytes | bytearray:
        known = self._connection is not None
        try:
            return self._exchange(request)
        except TimeoutError:
            self.close()
            raise
        except OSError:
            self.close()
            if not known:
                raise
        return self._exchange(request)  # the node may have restarted: it resends what it has released

    def _exchange(self, request: bytes) -> bytes | bytearray:
        if self._connection is None:
            self._connection = sockets.connected(self.path, self.wait)
        self._connection.settimeout(self.wait)
        self._connection.sendall(request)
        if (reply := sockets.receive(self._connection, self.most, self.wait)) is None:
            raise ConnectionError("the node has closed the connection")
        return reply

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@dataclasses.dataclass(frozen=True)
class Sites:
    """The plan that all sites have accepted, and a channel to the node of each, in any order."""

    terms: Terms
    channels: tuple[Channel, ...]


class RemoteClients(RunLog):
    """Clients whose records, noise and logs are in the nodes of their sites; implements `Clients` for the server.

    Args:
        test: the test set of the run, if there is one, in the form of the sites' records; it has no clients.
        site_list: public facts of the sites, one for each client.
        nodes: the accepted plan and the channels; None: the run is only planned.

    The ledger in the run's folder holds what the nodes say that they have paid for, and `receipts.json` the last head
    of its ledger that each has signed. A reply without a signature for its request, or with an older ledger, ends the
    run. A node that refuses, or whose reply is late, is left out of the round. A node that is gone ends the run, which
    can be resumed: the other nodes then send their releases of that round again.

    Raises UserError if not every client has one node with the plan, and LostClients if a node is gone, its reply is
    forged or its ledger an older one, or if no node sends a release.
    """

    noise = Streams().words(torch.device("cpu"))  # of each site, by its own
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
        self._node_of: dict[int, Channel] = {}
        self._welcomes: list[Answer] = []
        self._receipts: dict[int, Receipt] = {}
        self._late: dict[int, tuple[int, str]] = {}  # client -> round and purpose of the reply that was late
        if nodes is not None:
            self._connect(nodes)

    def _connect(self, sites: Sites) -> None:
        self._terms, self._hash = sites.terms, wire.digest(sites.terms)
        count = len(self._keys)
        require(len(sites.channels) == count, "--nodes", f"be {count}, one for each client", len(sites.channels))
        with ThreadPoolExecutor(count, "site") as pool:  # all at the same time
            answers = list(pool.map(self._greet, sites.channels, range(count)))
        for channel, answer in zip(sites.channels, answers, strict=True):
            name = self.name_of(answer.client)
            if not isinstance(answer.reply, Welcome):
                means = REFUSALS.get(getattr(answer.reply, "code", ""), "it sent no welcome")
                raise UserError(f"`--nodes` must have accepted the plan {self._hash[:12]}, got from {name}: {means}.")
            fits = answer.client not in self._node_of
            where = f", at {channel.path}" if isinstance(channel, SocketChannel) else ""
            require(fits, "--nodes", "be of different clients of the plan", f"two of client {name}{where}")
            self._node_of[answer.client] = channel
            self._welcomes.append(answer)
            self.simulated = self.simulated or answer.reply.simulated
        self.caveats = (*((SIMULATED,) if self.simulated else ()), *self.test.caveats)

    @property
    def description(self) -> str:
        known = f", which have accepted plan {self._hash[:12]}" if self._node_of else ""
        return f"{len(self._keys)} nodes of sites{known}"

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def outlook(self, plan: RunPlan) -> str:
        """Nothing: the operators of the sites have accounts."""
        return ""

    def begin(self, folder: Path, plan: RunPlan, saved: Mapping[str, Any] | None, ended: bool) -> None:
        caveats = tuple(words for words in plan.caveats if words != SIMULATED)
        asked = dataclasses.replace(plan, options=deciding_options(plan.options), caveats=caveats)
        must = "give the plan that the sites have accepted; export it again, and let them accept it, for another one"
        same = wire.encode(asked) == wire.encode(self._terms.plan)
        require(same, "--config", must, f"other {wire.different_fields(self._terms.plan, asked)}")
        self.prepare(folder, plan)
        self.open(plan, self.module, lambda key: (), saved, ended)
        with closed_on_error(self):
            self._compare_accounts(folder)

    def _compare_accounts(self, folder: Path) -> None:
        """Write down what the nodes say that they have paid for. See `_record`."""
        self._receipts = read_receipts(folder, self._keys)
        for client in sorted(self.ledger.payers() - self._receipts.keys()):
            must = f"lie beside ledger.jsonl, with what the node of client {self.name_of(client)} has signed"
            require(False, str(folder / RECEIPTS), must, "nothing of it", "Restore it, or start a new run.")
        answers: Sequence[Answer | LostClients] = self._welcomes
        if self._receipts:  # which the nodes were not told yet
            answers = self._answers(range(len(self._keys)), [_hello() for _ in self._keys])
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
        if plan.optimizer != self._terms.plan.optimizer:
            raise RuntimeError("the optimiser of a round must be that of the accepted plan")
        inbox, models = UpdateBuffer(plan, raw_weights), models.cpu()
        plan = plan if plan.anchors is None else dataclasses.replace(plan, anchors=plan.anchors.cpu())
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
        clients = [client for client in self._node_of if client not in self._late]
        models = [final_models.models[final_models.model_of[client]].cpu() for client in clients]
        answers = self._answers(clients, [Evaluate(round, model) for model in models])
        for client, answer in zip(clients, answers, strict=True):
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
        for channel in self._node_of.values():
            if isinstance(channel, SocketChannel):
                channel.close()

    def _may_pay(self, client: int, round: int, purpose: str) -> bool:
        planned = self.budgets.schedule.planned(client, purpose)
        return self.ledger.used(client, purpose) < planned.count or bool(self.ledger.charges(client, round))

    def _ask_all(self, requests: Mapping[int, Train | Ask], round: int, purpose: str) -> list[tuple[int, Any]]:
        """Ask the nodes at the same time; return what each has released, None of one that refuses or is late."""
        lost = self._ask_late(tuple(client for client in requests if client in self._late))
        asked = [client for client in requests if client not in self._late]
        answers = self._answers(asked, [requests[client] for client in asked])
        values: list[tuple[int, Any]] = [(client, None) for client in requests if client in self._late]
        for client, answer in zip(asked, answers, strict=True):
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

    def _greet(self, channel: Channel, number: int) -> Answer:
        clients, most = range(len(self._keys)), max(map(most_header, self._terms.plan.schedule.clients))
        whose = channel.path if isinstance(channel, SocketChannel) else f"node {number + 1} of {len(self._keys)}"
        hello = wire.encode(ToNode(self._hash, _hello()))
        return self._exchange(channel, hello, whose, clients, wire.Limits(most, 0))

    def _ask_late(self, clients: Sequence[int]) -> list[LostClients]:
        """Write down what nodes that were late have paid for since then, so that they are asked again.

        A node that is still busy stays late. Returns the errors of those that are gone.
        """
        lost: list[LostClients] = []
        for answer in self._answers(clients, [_hello() for _ in clients]):
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

    def _answers(self, clients: Sequence[int], requests: Sequence[Request]) -> list[Answer | LostClients]:
        """Ask the nodes at the same time."""
        with ThreadPoolExecutor(max(1, len(clients)), "site") as pool:
            return list(pool.map(self._answer, clients, requests))

    def _answer(self, client: int, request: Request) -> Answer | LostClients:
        known = self._receipts[client].ledger if client in self._receipts else None
        content = wire.encode(ToNode(self._hash, request, known))
        schedule = self._terms.plan.schedule.clients[client]
        try:
            wire.sizes(content, wire.Limits(MOST_HEADER, most_numbers(schedule, self.module.flat)))
        except wire.WireError:
            must = f"ask nodes about at most {MOST_MODELS} models, of a gigabyte together"
            return LostClients(f"`strategies` must {must}, got {len(content)} bytes.")
        try:
            name = self.name_of(client)
            most = wire.Limits(most_header(schedule), self._most_numbers(request))
            return self._exchange(self._node_of[client], content, f"client {name}", [client], most)
        except LostClients as error:
            return error

    def _most_numbers(self, request: Request) -> int:
        """Return how many bytes of tensors the reply to a request may have."""
        if isinstance(request, Train):
            return math.prod(self._shape_of(request.job)) * request.model.element_size()
        return 0 if isinstance(request, Hello | Evaluate) else MOST_ANSWER

    def _shape_of(self, job: Job) -> tuple[int, ...]:
        if isinstance(job, LocalTraining):
            return (self.module.flat.numel(),)
        sizes = {name: one.numel() for name, one in self.module.named_trainable.items()}
        return (job.num_classes, job.size(sizes) // job.num_classes)

    def _exchange(
        self, channel: Channel, request: bytes, whose: str, clients: Iterable[int], most: wire.Limits
    ) -> Answer:
        """Return the reply to a request, of at most this size, signed by the node of one of these clients."""
        if isinstance(channel, SocketChannel):
            channel.most = signed.with_receipt(most)
        try:
            keys = {client: self._keys[client] for client in clients}
            return signed.answer(channel(request), request, self._hash, keys, most)
        except TimeoutError:
            raise LateClients(f"`--nodes` must answer within --node_wait, got nothing from {whose}.") from None
        except signed.Forged as forged:
            whose = whose if forged.client is None else f"client {self.name_of(forged.client)}"
            must = "sign each reply to its request with the key in the plan"
            advice = "Nothing of it was used. Check the connection to the site, and resume."
            raise LostClients(f"`--nodes` must {must}, got from {whose} {forged}. {advice}") from None
        except (OSError, wire.WireError) as error:
            reason = str(error) or type(error).__name__
            raise LostClients(f"`--nodes` must answer, got from {whose}: {reason}. Start its node again.") from None

    def _checked(self, value: Any, plan: RoundPlan, models: Tensor) -> Tensor:
        shape = self._shape_of(plan.job)
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
        account = answer if isinstance(answer.reply, Welcome) else self._answer(client, _hello())
        if isinstance(account, LostClients):
            raise account
        if account is answer or not isinstance(account.reply, Welcome):
            must = f"tell all {receipt.releases} releases that they have signed, got fewer from client {name}"
            raise LostClients(f"`--nodes` must {must}.")
        self._record(account)


def _hello() -> Hello:
    return Hello(secrets.token_hex(16))
