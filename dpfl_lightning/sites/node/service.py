"""A node that answers on a Unix socket: one request at a time, fixed codes, and replies at fixed times."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import stat
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from dpfl_lightning.errors import UserError, require
from dpfl_lightning.federated.messages.requests import Evaluate
from dpfl_lightning.privacy.ledger.file import holds
from dpfl_lightning.sites import signed, sockets, wire
from dpfl_lightning.sites.exchange import MOST_HEADER, Hello, Refused, Reply, ToNode
from dpfl_lightning.sites.node.state import StateFolder
from dpfl_lightning.sites.node.study import Study
from dpfl_lightning.sites.receipt import digest_of

MOST_CONNECTIONS = 16
_IDLE = 60.0  # seconds without a request after which a connection is closed; servers connect again
_LOOKS = 0.5  # seconds between looks for signals while no connection comes
_PAUSE = 0.1  # seconds after a connection that could not be accepted

#: opens the study of an accepted plan, by its hash
OpenStudy = Callable[[StateFolder, str], Study]


class Node:
    """Answers requests of a server by the plans that the operator of a site has accepted.

    **Privacy** A reply is a planned, charged and noisy release, an account of charges, or a code of
    `exchange.REFUSALS`. The text of an error stays in `error.log` of the plan's folder, and the plan is then halted.
    """

    def __init__(self, state: StateFolder, open_study: OpenStudy) -> None:
        self.state, self._open, self._key = state, open_study, state.key()
        self._studies: dict[str, Study] = {}
        self._one_at_a_time, self._closed = threading.Lock(), False
        self._one_header = threading.Lock()  # a hostile one takes many times its size while it is parsed
        self._halted: set[str] = set()  # those whose file could not be written

    @property
    def limits(self) -> wire.Limits:
        """The greatest size of a request that an accepted plan needs."""
        numbers = (one.most_numbers for one in self.state.plans().values())
        return wire.Limits(MOST_HEADER, max(numbers, default=0))

    def problem(self, plan: str) -> str | None:
        """Open an accepted plan before it is asked for; return why it cannot be opened, None if it is open."""
        with self._one_at_a_time, self.state.locked():
            try:
                self._study(plan)
            except (UserError, OSError, wire.WireError) as error:
                return str(error)
        return None

    def refusal(self, start: bytes | bytearray) -> Refused | None:
        """Return why the node does not read the numbers of a request, given its prefix and header; None if it does.

        Raises WireError if they are none.
        """
        with self._one_header:
            plan = wire.text_field(start, "plan")
        return self._refused(plan)

    def _refused(self, plan: str) -> Refused | None:
        reserved = self.state.plans().get(plan)
        if reserved is None:
            return Refused("unknown_plan")
        if reserved.withdrawn:
            return Refused("withdrawn")
        if plan in self._halted or self._error_log(plan).exists():
            return Refused("halted")
        return None

    def _error_log(self, plan: str) -> Path:
        return self.state.plan_folder(plan) / "error.log"

    def handle(self, content: bytes | bytearray) -> bytes:
        """Return the signed reply to a request. It never raises an error because of what it was sent.

        Raises ConnectionAbortedError after `close`.
        """
        sent = digest_of(content)
        try:
            request = wire.decode(ToNode, content, self.limits)
        except wire.WireError:
            return self.sign(Refused("malformed"), sent)
        with self._one_at_a_time, self.state.locked():
            if self._closed:
                raise ConnectionAbortedError("the node has stopped")
            reply = self._reply(request)
            study = self._studies.get(request.plan)
            ledger = None if study is None else study.clients.ledger.head
            return signed.sign(reply, sent, self._key, request.plan, ledger)

    def sign(self, reply: Refused, request: str) -> bytes:
        """Return the signed refusal of a request with this digest."""
        return signed.sign(reply, request, self._key)

    def _reply(self, request: ToNode) -> Reply:
        asked = request.request
        if (refused := self._refused(request.plan)) is not None:
            return refused
        try:
            study = self._study(request.plan)
            if request.known is not None and not holds(study.clients.ledger.path, request.known):
                return Refused("older_ledger")
            if isinstance(asked, Hello):
                return study.welcome()
            return study.evaluate(asked) if isinstance(asked, Evaluate) else study.reply(asked)
        except Exception:
            halted = self._error_log(request.plan)
            try:
                halted.touch(mode=0o600)
                halted.write_text(traceback.format_exc())
            except OSError:  # a full disk
                self._halted.add(request.plan)
            if (broken := self._studies.pop(request.plan, None)) is not None:
                broken.clients.close()
            return Refused("halted")

    def _study(self, plan: str) -> Study:
        if plan not in self._studies:
            self._studies[plan] = self._open(self.state, plan)
        return self._studies[plan]

    def close(self) -> None:
        """Wait for the request that is being computed, and answer no other one."""
        with self._one_at_a_time:
            self._closed = True
            for study in self._studies.values():
                study.close()
            self._studies.clear()


class Listener:
    """The Unix socket of a node. `slot` seconds after a request's turn, or a multiple of it, is when its reply leaves.

    A connection holds the header of a request. Only if that names an accepted plan are its models read, and those of
    one request at a time, until its turn has ended: all connections together hold `MOST_CONNECTIONS` headers and the
    models of one request. When all seats are taken, the next connection gets that of the one which has named no
    accepted plan, or has asked for nothing, for the longest time; servers connect again.

    **Privacy** The time of a computation depends on the sizes of batches, which are private. Replies show it in units
    of `slot`: choose it above the time of a round. Requests take turns; a turn ends when its reply begins to leave.
    """

    def __init__(self, node: Node, path: Path, slot: float) -> None:
        require(0 < slot < math.inf, "--slot", "be a number of seconds above 0", slot)
        self.node, self.path, self.slot = node, path, slot
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._seats, self._turn = threading.BoundedSemaphore(MOST_CONNECTIONS), threading.Lock()
        self._models = threading.Lock()
        self._idle: dict[socket.socket, tuple[bool, float]] = {}  # -> has named an accepted plan before; since when
        self._looking = threading.Lock()  # at the idle ones
        self._closed = False
        _remove_stale(path)
        try:
            self._socket.bind(str(path))
        except OSError as error:
            must = "be a path of at most about 100 characters in a folder that can be written"
            require(False, "--socket", must, str(path), f"({error.strerror or error})")
        os.chmod(path, 0o660)  # the forwarder's group may connect
        self._inode = path.lstat().st_ino
        self._socket.listen()
        self._socket.settimeout(_LOOKS)

    def serve(self) -> None:
        """Answer until `close`, or a signal."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue  # so that a signal which came just before the call is handled
            except OSError:
                if self._closed:
                    return
                time.sleep(_PAUSE)  # too many open files, for example
                continue
            self._take_seat()
            self._set_idle(connection, knows_plan=False)
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):  # nobody waits
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            if self.path.lstat().st_ino == self._inode:  # it may be another one's by now
                self.path.unlink()

    def _take_seat(self) -> None:
        free, dropped = self._seats.acquire(blocking=False), False
        while not (free or self._closed):
            dropped = dropped or self._drop_one()
            free = self._seats.acquire(timeout=_PAUSE)

    def _drop_one(self) -> bool:
        """End the connection that has been idle for the longest time, if there is one; strangers go first."""
        with self._looking:
            if not self._idle:
                return False
            one = min(self._idle, key=self._idle.__getitem__)
            del self._idle[one]
            with contextlib.suppress(OSError):  # the other side is gone
                one.shutdown(socket.SHUT_RDWR)
            return True

    def _set_idle(self, connection: socket.socket, knows_plan: bool) -> None:
        with self._looking:
            self._idle[connection] = knows_plan, time.monotonic()

    def _set_busy(self, connection: socket.socket) -> bool:
        """Return whether the connection keeps its seat: it was idle, and nobody has ended it."""
        with self._looking:
            return self._idle.pop(connection, None) is not None

    def _converse(self, connection: socket.socket) -> None:
        malformed = functools.partial(self.node.sign, Refused("malformed"), digest_of(b""))
        with connection:
            try:
                while (begun := sockets.receive_header(connection, self.node.limits, _IDLE)) is not None:
                    sockets.send(connection, self._reply(connection, *begun))
            except wire.WireError:  # the rest of the stream has no meaning
                with contextlib.suppress(OSError):
                    sockets.send(connection, self._at_a_slot(malformed))
            except OSError:  # the other side is gone
                pass
            finally:
                self._set_busy(connection)  # before its number can be that of another file
                self._seats.release()

    def _reply(self, connection: socket.socket, start: bytearray, numbers: int) -> bytes:
        if (refused := self.node.refusal(start)) is not None:  # in no turn: strangers delay nobody
            sent = sockets.skip(connection, numbers, start)
            return self._at_a_slot(functools.partial(self.node.sign, refused, sent))
        if not self._set_busy(connection):
            raise ConnectionAbortedError("another connection has its seat")
        with self._models if numbers else contextlib.nullcontext():
            content = sockets.receive_numbers(connection, start, numbers)
            with self._turn:
                reply = self._at_a_slot(functools.partial(self.node.handle, content))
        self._set_idle(connection, knows_plan=True)
        return reply

    def _at_a_slot(self, answer: Callable[[], bytes]) -> bytes:
        began = time.monotonic()
        reply = answer()
        slots = math.ceil((time.monotonic() - began) / self.slot)
        time.sleep(max(0.0, began + slots * self.slot - time.monotonic()))
        return reply


def _remove_stale(path: Path) -> None:
    """Remove the socket of a node that no longer runs. Raises UserError if one runs."""
    if not path.exists():
        return
    require(stat.S_ISSOCK(path.stat().st_mode), "--socket", "be a path for a new socket", str(path), "It is a file.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # the queue of a node that accepts nobody may be full
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            require(False, "--socket", "be a path for a new socket", str(path), f"({error.strerror})")
    require(False, "--socket", "be free", str(path), "Another node listens there.")
