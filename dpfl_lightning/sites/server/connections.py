"""How bytes reach the node of a site and come back. A way is a class, registered with the scheme of its addresses."""

from __future__ import annotations

import socket
from collections.abc import Callable

from dpfl_lightning.errors import require_one_of
from dpfl_lightning.sites import sockets, wire


class Connection:
    """Brings requests to one node, and replies back. Signatures and sizes are checked by those who use it.

    Attributes:
        where: the node's address, for messages; empty if there is none.
        most: the greatest size of the next reply.
    """

    where = ""
    most = wire.Limits(0, 0)

    def __call__(self, request: bytes) -> bytes | bytearray:
        """Return the reply to a request, which may be sent twice.

        Raises TimeoutError if it is late, and another OSError if the node does not answer.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the connection."""


class OfFunction(Connection):
    """A function from the bytes of a request to those of the reply, as a node in the same process has it."""

    def __init__(self, handle: Callable[[bytes], bytes | bytearray]) -> None:
        self._handle = handle

    def __call__(self, request: bytes) -> bytes | bytearray:
        return self._handle(request)


class SocketConnection(Connection):
    """A connection to the Unix socket `where` of a node; made again when it breaks.

    `wait` is the number of seconds after which a reply counts as lost, beside the time that its numbers may take.
    """

    def __init__(self, where: str, wait: float) -> None:
        self.where, self.wait = where, wait
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
            self._connection = sockets.connected(self.where, self.wait)
        self._connection.settimeout(self.wait)
        self._connection.sendall(request)
        if (reply := sockets.receive(self._connection, self.most, self.wait)) is None:
            raise ConnectionError("the node has closed the connection")
        return reply

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


#: scheme of an address of `--nodes` -> its connection, given the address and `--node_wait`; a path has no scheme
CONNECTIONS: dict[str, Callable[[str, float], Connection]] = {}


def connection_to(address: str, wait: float) -> Connection:
    """Return the connection to a node: the path of its socket, or `scheme://...` with a scheme of `CONNECTIONS`."""
    scheme, separator, _ = address.partition("://")
    if not separator:
        return SocketConnection(address, wait)
    require_one_of(CONNECTIONS, "--nodes", scheme)
    return CONNECTIONS[scheme](address, wait)
