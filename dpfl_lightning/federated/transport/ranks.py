"""The processes of one run: their setup by Lightning Fabric, and the messages between rank 0 and the other ranks."""

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

_JOINING = timedelta(minutes=5)  # timeout of the start: the longest time between the first rank and the last one
_PATIENCE = timedelta(weeks=1)  # timeout of a message: a round may be long, and a rank that dies closes its socket
_FAREWELL = 10.0  # seconds to wait for the end of the other ranks
_MESSAGE, _END = 0, 1  # kind of a header: a message of so many bytes, or the end of the run with an exit status


class LostRank(LostClients):
    """A rank ended before the run did. Only the current round is lost."""


class Ranks:
    """This process among the processes of its launcher, or alone.

    Every rank creates this object at the same point of the program; `device` is "auto" or an accelerator of Lightning
    Fabric. Tensors in messages arrive on the receiver's device. One thread for each peer waits for messages, so that
    the main thread can always be interrupted, and the loss of a peer is noticed immediately.

    **Privacy** Outputs of evaluation and personal parameters are sent between ranks without encryption: the network
    between them must be trusted as much as the ranks' memory. Messages are unpickled, so anyone who can send a message
    can run code.
    """

    def __init__(self, device: str) -> None:
        launch = launched()
        self.rank, self.size, self.command = launch.rank, launch.size, launch.command
        self.fabric = _fabric(device, launch)
        self.cores = _cores_of_rank(self.size) if self.size > 1 else None
        self._inbox: queue.SimpleQueue[tuple[int, Tensor | None]] = queue.SimpleQueue()
        self._leaving = threading.Lock()
        self._sending = False
        self._stop: BaseException | None = None  # exception of a signal, which is raised after the current message

    @property
    def others(self) -> range:
        """The ranks with which this rank communicates: all others for rank 0, and rank 0 for the others."""
        return range(1, self.size) if self.rank == 0 else range(1)

    def broadcast(self, value: T) -> T:
        """Rank 0's `value` on every rank; only outside of runs."""
        if self.rank == 0:
            for rank in self.others:
                self.send(rank, value)
            return value
        try:
            return self._unpacked(self._hear(0))
        except RuntimeError:
            self._gone(0)

    def lead(self, work: Callable[[], T]) -> T:
        """Run rank 0's `work`, which the other ranks serve. They return its result, too, or end with the same status.

        SIGTERM (with which a launcher ends the remaining ranks when one dies) and Ctrl-C are raised once, within a
        round at the second signal (`stopping.between_rounds`). After an exception of the work both are ignored, so that
        saving the run is not interrupted; the ranks are then disconnected, and no other run can follow.
        """
        with self._listening(), _handled(self._stop_once):
            try:
                result = work()
            except BaseException as error:
                self._end_others(error)
                raise
            for rank in self.others:
                self.send(rank, (None, result))
                self._header(rank, _END, 0)
        return result

    def serve(self, handle: Callable[[str, tuple], Any]) -> Any:
        """Answer rank 0's messages `(command, arguments)` by `handle` until its run has ended; return its result.

        An exception of `handle` is the answer. If rank 0 fails, this process ends.
        """
        with self._listening(), _handled(signal.SIG_IGN):  # rank 0 handles signals for all
            while True:
                _, (command, content) = self.receive()
                if command is None:
                    return content
                try:
                    answer = handle(command, content)
                except Exception as error:
                    answer = self.portable(error)
                self.send(0, answer)

    def send(self, rank: int, message: object) -> None:
        """Send `message` to `rank`; LostRank if it is gone."""
        packed = io.BytesIO()
        torch.save(message, packed)  # pickle, with each tensor's bytes once; tensors may lie on any device
        data = torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)
        self._sending = True
        try:
            self._header(rank, _MESSAGE, len(data))
            _sent(data, rank)
        except RuntimeError:
            self._gone(rank)
        finally:
            self._sending = False
        if self._stop is not None:
            raise self._stop

    def receive(self) -> tuple[int, Any]:
        """The next message in the order of arrival, and the rank that sent it; LostRank if a rank is gone."""
        rank, data = self._inbox.get()
        if data is None:
            self._gone(rank)
        return rank, self._unpacked(data)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Listen to the other ranks until they have confirmed the end of the run, or are gone."""
        threads = [threading.Thread(target=self._listen, args=(rank,), daemon=True) for rank in self.others]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:  # a thread that returns from torch during interpreter shutdown would abort the process
            for thread in threads:
                thread.join(_FAREWELL)

    def _listen(self, rank: int) -> None:
        try:
            while not isinstance(heard := self._hear(rank), int):
                self._inbox.put((rank, heard))
            if self.rank > 0 and heard != 0:
                self._leave(heard)
            if self.rank > 0:  # confirm the end, so that rank 0 stops listening
                self._header(0, _END, 0)
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
        return torch.load(packed, map_location=self.fabric.device, weights_only=False)  # any object of a trusted peer

    def _stop_once(self, number: int, frame: object) -> None:
        """Handle a signal once; after the message that is being sent, because the receiver waits for its rest."""
        _install(signal.SIG_IGN)
        reason = "`ranks` must all run until the run ends, got SIGTERM: the launcher lost one, or was stopped."
        error = KeyboardInterrupt() if number == signal.SIGINT else LostRank(reason)
        if not self._sending:
            raise error
        self._stop = error

    def _end_others(self, error: BaseException) -> None:
        _install(signal.SIG_IGN)
        status = 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, UserError) else 1
        for rank in self.others:
            with suppress(RuntimeError):  # it may be the lost rank
                self._header(rank, _END, status)

    def _header(self, rank: int, kind: int, number: int) -> None:
        _sent(torch.tensor([kind, number]), rank)

    def _gone(self, rank: int) -> NoReturn:
        if self.rank > 0:
            self._leave(1, f"rank {self.rank}: rank 0 has stopped, so this rank stops, too")
        _install(signal.SIG_IGN)
        raise LostRank(f"`ranks` must all run until the run ends, got the end of rank {rank}.")

    def _leave(self, status: int, words: str = "") -> NoReturn:
        """End this process immediately: the main thread, which may train a client, has no open files."""
        self._leaving.acquire()  # never released: two threads may notice that rank 0 is gone
        if words:
            print(words, file=sys.stderr, flush=True)
        os._exit(status)

    def portable(self, error: Exception) -> Exception:
        """The exception in a form that rank 0 can raise, with a note on where it was raised."""
        where = f"On rank {self.rank}:\n{''.join(traceback.format_exception(error))}"
        try:
            error = pickle.loads(pickle.dumps(error))
        except Exception:  # the class may raise anything when it is pickled
            error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(where)
        return error


def _cores_of_rank(ranks: int) -> int:
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    host_and_cores = (socket.gethostname(), sorted(affinity))
    all_ranks: list[Any] = [None] * ranks
    dist.all_gather_object(all_ranks, host_and_cores)
    return max(1, len(affinity) // all_ranks.count(host_and_cores))


def _fabric(device: str, launch: Launch) -> Fabric:
    try:
        if launch.size == 1:
            return Fabric(accelerator=device, devices=1, plugins=[LightningEnvironment()])
        by_torchrun = TorchElasticEnvironment.detect()
        environment = TorchElasticEnvironment() if by_torchrun else SLURMEnvironment(auto_requeue=False)
        # gloo (between CPUs): messages are few, contain arbitrary objects, and must fail when a peer dies. Tensors on a
        # GPU stay there until the end of a client's round.
        strategy = DDPStrategy(cluster_environment=environment, process_group_backend="gloo", timeout=_JOINING)
        hosts = launch.size // launch.local_size
        fabric = Fabric(accelerator=device, devices=launch.local_size, num_nodes=hosts, strategy=strategy)
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise UserError(f"`engine.device` must be a device of this machine, got {device!r}: {_first(error)}") from None
    logging.disable(logging.INFO)  # otherwise each rank logs a line about every rank
    try:
        fabric.launch()
    except (ValueError, RuntimeError) as error:
        words = f"`ranks` must all find each other, got on rank {launch.rank} of {launch.size}: {_first(error)}"
        if launch.local_rank > 0:
            print(f"error: {words}", file=sys.stderr, flush=True)  # the rank that prints for all may never have started
        raise UserError(words) from None
    finally:
        logging.disable(logging.NOTSET)
    return fabric


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _sent(data: Tensor, rank: int) -> None:
    work = dist.isend(data, rank)
    assert work is not None  # for mypy: this process belongs to the group
    work.wait(_PATIENCE)


def _received(buffer: Tensor, rank: int) -> Tensor:
    work = dist.irecv(buffer, rank)
    assert work is not None
    work.wait(_PATIENCE)
    return buffer


def _install(handler: Any) -> dict[signal.Signals, Any]:
    """Handle SIGTERM and Ctrl-C by `handler`, and return the handlers before; only the main thread may do so."""
    main = threading.current_thread() is threading.main_thread()
    return {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT) if main}


@contextmanager
def _handled(handler: Any) -> Iterator[None]:
    before = _install(handler)
    yield  # after an exception the old handlers are not restored: the process still has to report the reason, and ends
    for number, old_handler in before.items():
        signal.signal(number, old_handler)
