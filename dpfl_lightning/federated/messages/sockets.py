"""Messages of `wire` on a stream, such as a Unix socket."""

from __future__ import annotations

import socket

from dpfl_lightning.federated.messages import wire

_PATIENCE = 60.0  # seconds between two parts of one message
_PART = 1 << 16  # bytes


def receive(connection: socket.socket, most: wire.Limits, wait: float | None = None) -> bytes | None:
    """Return the bytes of the next message; None if the other side has closed the connection.

    Raises WireError if it is none or longer than `most`, TimeoutError if it does not begin within `wait` seconds,
    and OSError if the connection breaks, or pauses within a message.
    """
    connection.settimeout(wait)
    if not (begun := connection.recv(1)):
        return None
    connection.settimeout(_PATIENCE)
    prefix = begun + _exactly(connection, wire.PREFIX.size - 1)
    return prefix + _exactly(connection, sum(wire.sizes(prefix, most)))


def send(connection: socket.socket, content: bytes) -> None:
    """Send the bytes of a message. Raises OSError if the connection breaks, or the other side does not read."""
    connection.settimeout(_PATIENCE)
    for start in range(0, len(content), _PART):  # the time of `sendall` is that of all that it sends
        connection.sendall(memoryview(content)[start : start + _PART])


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts, left = [], count
    while left:
        part = connection.recv(min(left, 1 << 20))
        if not part:
            raise ConnectionError("the message was cut off")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
