"""The processes of one run: who they are (Lightning Fabric), and what rank 0 and the others say to each other."""

from __future__ import annotations

import io
import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages.clients import LostClients
from dpfl_lightning.runtime.launcher import Launch, launched

T = TypeVar("T")

_PATIENCE = timedelta(weeks=1)  # for a message: a round may be long, and a rank that dies closes its socket anyway
_FAREWELL = 10.0  # seconds for the others to end
_MESSAGE, _END = 0, 1  # what a header announces: so many bytes; the end of the run with this exit status


class LostRank(LostClients):
    """A rank ended before the run did. Nothing is lost but the round in hand."""


@dataclass(frozen=True)
class Failed:
    """The answer of a rank to which an exception came."""

    error: Exception


@dataclass(frozen=True)
class Finished:
    """Rank 0's last message of a run that ended well."""

    result: Any


class Ranks:
    """This process among those of its launcher, or alone. Every rank builds its own in step with the others.

    Rank 0 leads: `lead` runs the verbs while the others `serve`, that is, answer its messages. Messages are any
    objects, tensors in them arrive on the receiver's device. A thread for each peer waits for them, so that the main
    thread can always be interrupted, and a rank is gone as soon as its peer is.

    Args:
        device: "auto", or what Lightning Fabric takes as accelerator; each rank has one device.

    **Privacy** Outputs of evaluation and personal parameters travel between ranks, unencrypted: trust the network
    between them as the ranks' memory. Messages are unpickled, so whoever can send one can run code.

    Raises:
        UserError: the device is not there, or the ranks do not find each other.
    """

    def __init__(self, device: str) -> None:
        launch = launched()
        self.rank, self.size, self.command = launch.rank, launch.size, launch.command
        self.fabric = _fabric(device, launch)
        self.cores: int | None = None
        if self.size > 1:
            self.cores = self._own_cores()
        self._inbox: queue.SimpleQueue[tuple[int, Tensor | None]] = queue.SimpleQueue()
        self._leaving = threading.Lock()
        self._sending = False
        self._stop: BaseException | None = None  # a signal's exception that waits for the end of a message

    @property
    def others(self) -> range:
        """Those that this rank talks with: all but itself for rank 0, which alone the others know."""
        return range(1, self.size) if self.rank == 0 else range(1)

    def broadcast(self, value: T) -> T:
        """Rank 0's `value`, on every rank, outside of runs."""
        if self.rank == 0:
            for rank in self.others:
                self.send(rank, value)
            return value
        try:
            return self._unpacked(self._hear(0))
        except RuntimeError:
            self._gone(0)

    # -- a run

    def lead(self, work: Callable[[], T]) -> T:
        """Rank 0's `work`, which the others serve; they return its result too, or end as it ends.

        SIGTERM (by which a launcher ends the ranks that are left when one dies) and Ctrl-C come once, as exceptions,
        within a round at the second signal (`stopping.between_rounds`).
        When it ends by any exception both are ignored for good: saving the run and saying why it ended are not
        interrupted, and no other run can follow, since the ranks have left each other.
        """
        if self.size == 1:
            return work()
        with self._listening(), _handled(self._stop_once, signal.SIGTERM, signal.SIGINT):
            try:
                result = work()
            except BaseException as error:
                self._end_others(error)
                raise
            for rank in self.others:
                self.send(rank, Finished(result))
                self._header(rank, _END, 0)
        return result

    def serve(self, handle: Callable[[Any], Any]) -> Any:
        """Answer rank 0's messages by `handle(message)` until its run has ended well; returns its result.

        An exception of `handle` is sent to rank 0, which raises it. If rank 0 fails, this process ends.
        """
        with self._listening(), _handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):  # rank 0 hears them for all
            while True:
                _, message = self.receive()
                if isinstance(message, Finished):
                    return message.result
                try:
                    answer = handle(message)
                except Exception as error:
                    answer = Failed(self._portable(error))
                self.send(0, answer)

    def send(self, rank: int, message: object) -> None:
        """To `rank`.

        Raises:
            LostRank: it is gone.
        """
        packed = io.BytesIO()
        torch.save(message, packed)  # pickle, with each tensor's bytes once; tensors may lie on any device
        data = torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)
        self._sending = True
        try:
            self._header(rank, _MESSAGE, len(data))
            dist.send(data, rank)
        except RuntimeError:
            self._gone(rank)
        finally:
            self._sending = False
        if self._stop is not None:
            raise self._stop

    def receive(self) -> tuple[int, Any]:
        """The next message and the rank it came from, in the order of arrival.

        Raises:
            LostRank: a rank is gone.
        """
        rank, data = self._inbox.get()
        if data is None:
            self._gone(rank)
        return rank, self._unpacked(data)

    # -- below messages

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Hear the others, until they have answered the end of the run, or are gone."""
        threads = [threading.Thread(target=self._listen, args=(rank,), daemon=True) for rank in self.others]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:  # a thread that comes back from torch while the interpreter ends would abort the process
            for thread in threads:
                thread.join(_FAREWELL)

    def _listen(self, rank: int) -> None:
        try:
            while not isinstance(heard := self._hear(rank), int):
                self._inbox.put((rank, heard))
            self._ended(heard)
        except RuntimeError:  # the connection was closed
            if self.rank > 0:
                self._gone(rank)
            self._inbox.put((rank, None))

    def _hear(self, rank: int) -> Any:
        """The bytes of the next message of `rank`, or the exit status with which the run has ended."""
        kind, number = _received(torch.empty(2, dtype=torch.int64), rank).tolist()
        return number if kind == _END else _received(torch.empty(number, dtype=torch.uint8), rank)

    def _unpacked(self, data: Tensor) -> Any:
        packed = io.BytesIO(data.numpy().data)
        return torch.load(packed, map_location=self.fabric.device, weights_only=False)  # any object, of a trusted peer

    def _ended(self, status: int) -> None:
        """Rank 0's run has ended: answer, so that it may stop listening too; or end with it."""
        if self.rank > 0 and status != 0:
            self._leave(status)
        if self.rank > 0:
            self._header(0, _END, 0)

    def _stop_once(self, number: int, frame: object) -> None:
        """Handles a signal; one that comes while a message goes out waits, or the next would be read as its rest."""
        _ignore(signal.SIGTERM, signal.SIGINT)
        words = "`ranks` must all live until the run ends, got SIGTERM: the launcher lost one, or was stopped."
        error = KeyboardInterrupt() if number == signal.SIGINT else LostRank(words)
        if not self._sending:
            raise error
        self._stop = error

    def _end_others(self, error: BaseException) -> None:
        _ignore(signal.SIGTERM, signal.SIGINT)
        status = 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, UserError) else 1
        for rank in self.others:
            with suppress(RuntimeError):  # it may be the one that was lost
                self._header(rank, _END, status)

    def _header(self, rank: int, kind: int, number: int) -> None:
        dist.send(torch.tensor([kind, number]), rank)

    def _gone(self, rank: int) -> NoReturn:
        if self.rank > 0:
            self._leave(1, f"rank {self.rank}: rank 0 is gone, so this rank ends too")
        _ignore(signal.SIGTERM, signal.SIGINT)
        raise LostRank(f"`ranks` must all live until the run ends, got the end of rank {rank}.")

    def _leave(self, status: int, words: str = "") -> NoReturn:
        """End this process now. The main thread may be deep in a client's round and cannot be told; it owns no file."""
        self._leaving.acquire()  # for good: two threads may find that rank 0 is gone
        if words:
            print(words, file=sys.stderr, flush=True)
        os._exit(status)

    def _portable(self, error: Exception) -> Exception:
        """The exception as rank 0 may raise it, with where it came from."""
        where = f"On rank {self.rank}:\n{''.join(traceback.format_exception(error))}"
        try:
            error = pickle.loads(pickle.dumps(error))
        except Exception:  # whatever a class of exceptions does when it is pickled
            error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(where)
        return error

    def _own_cores(self) -> int:
        """This rank's share of the cores it may run on: SLURM may have bound each rank to its own, torchrun has not."""
        affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        own = (socket.gethostname(), sorted(affinity))
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, own)
        return max(1, len(affinity) // everyone.count(own))


def _fabric(device: str, launch: Launch) -> Fabric:
    """Fabric with one device of this machine for each rank; the ranks have then found each other."""
    try:
        if launch.size == 1:
            return Fabric(accelerator=device, devices=1, plugins=[LightningEnvironment()])
        by_torchrun = TorchElasticEnvironment.detect()
        environment = TorchElasticEnvironment() if by_torchrun else SLURMEnvironment(auto_requeue=False)
        # gloo, between CPUs: messages are few, of any size and of any object, and notice when a peer dies; whatever
        # is on a GPU stays there until the end of a client's round.
        strategy = DDPStrategy(cluster_environment=environment, process_group_backend="gloo")
        hosts = launch.size // launch.local_size
        fabric = Fabric(accelerator=device, devices=launch.local_size, num_nodes=hosts, strategy=strategy)
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise UserError(f"`engine.device` must be a device of this machine, got {device!r}: {_first(error)}") from None
    logging.disable(logging.INFO)  # it would tell of each rank on each rank
    try:
        fabric.launch()
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"`ranks` must all find each other, got on rank {launch.rank} of {launch.size}: {_first(error)}"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    return fabric


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _received(buffer: Tensor, rank: int) -> Tensor:
    """The buffer, filled with what `rank` sends next."""
    work = dist.irecv(buffer, rank)
    assert work is not None  # for mypy: this process is in the group
    work.wait(_PATIENCE)
    return buffer


# -- signals: only the main thread may handle them


@contextmanager
def _handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    yield  # after an exception the process is about to end, and must still say why: the old handlers stay away
    for number, own in before.items():
        signal.signal(number, own)


def _ignore(*numbers: signal.Signals) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
