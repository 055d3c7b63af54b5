"""How bytes reach the node of a site and come back. A way is a class; `addresses` registers it."""

from __future__ import annotations

import socket
from collections.abc import Callable

from dpfl_lightning.sites import sockets, wire


class Connection:
    """Brings requests to one node, and replies back. Replies are signed: an intermediary can only withhold them.

    Several connections are used at once, each by one thread at a time. A node answers at its socket after a time that
    says nothing of records: another way to it forwards to this socket, and does not call `Node.handle` itself.

    Attributes:
        where: the node's address, for messages; empty if there is none.
    """

    where = ""

    def __call__(self, request: bytes, most: wire.Limits) -> bytes | bytearray:
        """Return the reply to a request, which may be sent twice.

        Raises WireError, before it is read, for a reply of more than `most`, TimeoutError if it is late, and another
        OSError if the node does not answer.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the connection."""


class OfFunction(Connection):
    """A function from the bytes of a request to those of the reply, as a node in the same process has it."""

    def __init__(self, handle: Callable[[bytes], bytes | bytearray]) -> None:
        self._handle = handle

    def __call__(self, request: bytes, most: wire.Limits) -> bytes | bytearray:
        return self._handle(request)


class SocketConnection(Connection):
    """A connection to the Unix socket `where` of a node; made again when it breaks.

    `wait` is the number of seconds after which a reply counts as lost, beside the time that its numbers may take.
    """

    def __init__(self, where: str, wait: float) -> None:
        self.where, self.wait = where, wait
        self._connection: socket.socket | None = None

    def __call__(self, request: bytes, most: wire.Limits) -> bytes | bytearray:
        known = self._connection is not None
        try:
            return self._exchange(request, most)
        except TimeoutError:
            self.close()
            raise
        except OSError:
            self.close()
            if not known:
                raise
        return self._exchange(request, most)  # the node may have restarted: it resends what it has released

    def _exchange(self, request: bytes, most: wire.Limits) -> bytes | bytearray:
        if self._connection is None:
            self._connection = sockets.connected(self.where, self.wait)
        self._connection.settimeout(self.wait)
        self._connection.sendall(request)
        if (reply := sockets.receive(self._connection, most, self.wait)) is None:
            raise ConnectionError("the node has closed the connection")
        return reply

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
