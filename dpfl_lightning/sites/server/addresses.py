"""Which connection an address of `--nodes` means."""

import math
from collections.abc import Callable

from dpfl_lightning.errors import require, require_one_of
from dpfl_lightning.sites.server.connections import Connection, SocketConnection

#: scheme of an address -> the connection to it, given the address without its scheme and `--node_wait`
CONNECTIONS: dict[str, Callable[[str, float], Connection]] = {"unix": SocketConnection}


def connection_to(address: str, wait: float) -> Connection:
    """Return the connection to a node: `scheme://...` with a scheme of `CONNECTIONS`, or the path of a Unix socket.

    Raises UserError for another scheme, and unless `wait` is a number of seconds.
    """
    require(0 < wait < math.inf, "--node_wait", "be a number of seconds above 0", wait)
    scheme, separator, rest = address.partition("://")
    if not separator:
        return SocketConnection(address, wait)
    require_one_of(CONNECTIONS, "--nodes", scheme)
    return CONNECTIONS[scheme](rest, wait)
