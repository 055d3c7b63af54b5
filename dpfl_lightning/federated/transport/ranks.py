"""The processes of one run: their setup by Lightning Fabric, and the objects that they exchange."""

import atexit
import io
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.distributed_c10d import _set_pg_timeout

from dpfl_lightning.errors import UserError, in_one_line
from dpfl_lightning.federated.messages.clients import LostClients
from dpfl_lightning.runtime.launcher import Launch, launched
from dpfl_lightning.runtime.stopping import handled, handlers, part_of

T = TypeVar("T")

_JOINING = timedelta(minutes=5)  # timeout of the start: the longest time between the first rank and the last one
_PATIENCE = timedelta(weeks=1)  # timeout of a collective: a round may be long, and a rank that dies closes its socket
_FAREWELL = 5.0  # seconds


class LostRank(LostClients):
    """A rank ended before the run did. Only the current round is lost."""


class Ranks:
    """This process among the processes of its launcher, or alone.

    Every rank creates this object, and calls its methods, at the same points of the program. `device` is "auto" or an
    accelerator of Lightning Fabric. Tensors arrive on the receiver's device. The main thread is blocked in a method
    until all ranks have called it, or one of them has ended: then LostRank is raised.

    **Privacy** Outputs of evaluation and personal parameters are sent between ranks without encryption: the network
    between them must be trusted as much as the ranks' memory. Objects are unpickled, so anyone who can send one can run
    code.
    """

    def __init__(self, device: str) -> None:
        launch = launched()
        self.rank, self.size, self.command = launch.rank, launch.size, launch.command
        self.fabric = _fabric(device, launch)
        self.cores = _cores_of_rank(self.size) if self.size > 1 else None
        if self.size > 1:
            self._watch = dist.new_group(timeout=_PATIENCE)
        if self.rank > 0:
            threading.Thread(target=self._end_with_rank_0, daemon=True).start()
        atexit.register(self.leave)  # a process that ends with open connections may abort

    def broadcast(self, value: T) -> T:
        """Rank 0's `value` on every rank."""
        if self.size == 1:
            return value
        ours = _packed(value) if self.rank == 0 else b""
        packed = self._together(lambda: self.fabric.broadcast(ours))
        return value if self.rank == 0 else self._unpacked(packed)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order, on rank 0; other ranks get an empty list."""
        packed: list[bytes] | None = [b""] * self.size if self.rank == 0 else None
        ours = b"" if self.rank == 0 else _packed(value)
        self._together(lambda: dist.gather_object(ours, packed))
        return [value, *map(self._unpacked, packed[1:])] if packed else []

    def leave(self) -> None:
        """Close the connections, so that the other ranks end, too; no other run can follow."""
        if dist.is_initialized():
            for rank in range(1, self.size if self.rank == 0 else 1):
                with suppress(RuntimeError):  # it may be the lost rank
                    dist.send(torch.zeros(1), rank, self._watch)
            dist.destroy_process_group()

    def _end_with_rank_0(self) -> None:
        """End this process soon after rank 0 was killed, because the main thread may train for hours."""
        try:
            dist.recv(torch.zeros(1), 0, self._watch)
        except RuntimeError:
            time.sleep(_FAREWELL)  # a main thread that waits for rank 0 notices it, and ends in order
            print(f"rank {self.rank}: rank 0 has stopped, so this rank stops, too", file=sys.stderr, flush=True)
            os._exit(1)

    def portable(self, error: Exception) -> Exception:
        """The exception in a form that rank 0 can raise, with a note on where it was raised."""
        where = f"On rank {self.rank}:\n{''.join(traceback.format_exception(error))}"
        try:
            error = pickle.loads(pickle.dumps(error))
        except Exception:  # the class may raise anything when it is pickled
            error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(where)
        return error

    def _together(self, collective: Callable[[], T]) -> T:
        try:
            return collective()
        except (RuntimeError, ValueError):  # a connection was closed, by a rank that ended or by `leave`
            self.leave()
            raise LostRank("`ranks` must all run until the run ends, got the end of another rank.") from None

    def _unpacked(self, packed: bytes) -> Any:
        return torch.load(io.BytesIO(packed), map_location=self.fabric.device, weights_only=False)  # of a trusted peer


def _packed(value: object) -> bytes:
    packed = io.BytesIO()
    torch.save(value, packed)  # pickle, with each tensor's bytes once; tensors may lie on any device
    return packed.getvalue()


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
        # gloo (between CPUs): objects are arbitrary, and collectives must fail when a peer dies. Tensors on a GPU stay
        # there until the end of a client's round.
        strategy = DDPStrategy(cluster_environment=environment, process_group_backend="gloo", timeout=_JOINING)
        hosts = launch.size // launch.local_size
        fabric = Fabric(accelerator=device, devices=launch.local_size, num_nodes=hosts, strategy=strategy)
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        advice = "Write --engine.device cpu, or auto, which takes a GPU if there is one."
        got = f"got {device!r}: {in_one_line(error)}. {advice}"
        raise UserError(f"`engine.device` must be a device of this machine, {got}") from None
    part_of(os.getppid())  # its launcher, without which the ranks could not join
    logging.disable(logging.INFO)  # otherwise each rank logs a line about every rank
    try:
        with handled(signal.SIG_DFL, handlers()):  # Python could not handle them until all ranks have started
            fabric.launch()
    except (ValueError, RuntimeError) as error:
        words = f"`ranks` must all find each other, got on rank {launch.rank} of {launch.size}: {in_one_line(error)}"
        if launch.local_rank > 0:
            print(f"error: {words}", file=sys.stderr, flush=True)  # the rank that prints for all may never have started
        raise UserError(words) from None
    finally:
        logging.disable(logging.NOTSET)
    _set_pg_timeout(_PATIENCE)
    return fabric
