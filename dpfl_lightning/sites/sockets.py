"""Messages of `wire` on a stream, such as a Unix socket. The other side may be slow, or never end."""

from __future__ import annotations

import hashlib
import math
import socket
import time

from dpfl_lightning.sites import wire

_PATIENCE = 60.0  # seconds for a message of no length
_SLOWEST = 1 << 17  # bytes in each further second, about 1 Mbit/s
_PART = 1 << 16  # bytes
_PAUSE = 0.05  # seconds between two attempts to connect


def connected(path: str, wait: float) -> socket.socket:
    """Return a connection to a Unix socket.

    Raises TimeoutError if the other side accepts none for `wait` seconds, and OSError if nobody listens.
    """
    connection, end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), time.monotonic() + wait
    try:
        connection.setblocking(False)  # a blocking one waits for ever while the queue of the other side is full
        while True:
            try:
                connection.connect(path)
                return connection
            except BlockingIOError:
                time.sleep(min(_PAUSE, _left(end)))
    except OSError:
        connection.close()
        raise


def receive(connection: socket.socket, most: wire.Limits, wait: float | None = None) -> bytearray | None:
    """Return the bytes of the next message; None if the other side has closed the connection.

    Raises WireError if it is none or longer than `most`, TimeoutError if it is not there after `wait` seconds and the
    time that its numbers may take, and OSError if the connection breaks.
    """
    end = math.inf if wait is None else time.monotonic() + wait
    if (begun := receive_header(connection, most, wait, end)) is None:
        return None
    start, numbers = begun
    return _extended(connection, start, numbers, end + numbers / _SLOWEST)


def receive_header(
    connection: socket.socket, most: wire.Limits, wait: float | None = None, end: float = math.inf
) -> tuple[bytearray, int] | None:
    """Return the prefix and the header of the next message, and how many bytes of numbers follow. See `receive`.

    It begins within `wait` seconds, and is there before `end`.
    """
    connection.settimeout(wait)
    if not (begun := connection.recv(1)):
        return None
    prefix = _extended(connection, bytearray(begun), wire.PREFIX.size - 1, end)
    header, numbers = wire.sizes(prefix, most)
    return _extended(connection, prefix, header, end), numbers


def receive_numbers(connection: socket.socket, start: bytearray, numbers: int) -> bytearray:
    """Return the message that begins with `start`. Memory grows with what has arrived."""
    return _extended(connection, start, numbers)


def skip(connection: socket.socket, numbers: int, start: bytearray) -> str:
    """Read the rest of the message that begins with `start`, keep none of it, and return the SHA-256 of the whole."""
    end, found = _end(numbers), hashlib.sha256(start)
    while numbers:
        part = _part(connection, numbers, end)
        numbers -= len(part)
        found.update(part)
    return found.hexdigest()


def send(connection: socket.socket, content: bytes) -> None:
    """Send the bytes of a message.

    Raises TimeoutError if the other side reads more slowly than its length allows, and OSError if the connection
    breaks.
    """
    end = _end(len(content))
    for start in range(0, len(content), _PART):  # the time of `sendall` is that of all that it sends
        connection.settimeout(_left(end))
        connection.sendall(memoryview(content)[start : start + _PART])


def _extended(connection: socket.socket, content: bytearray, count: int, end: float = math.inf) -> bytearray:
    end, size = min(end, _end(count)), len(content) + count
    while len(content) < size:
        content += _part(connection, size - len(content), end)
    return content


def _part(connection: socket.socket, most: int, end: float) -> bytes:
    connection.settimeout(_left(end))
    if not (part := connection.recv(min(most, _PART))):
        raise ConnectionError("the message was cut off")
    return part


def _end(count: int) -> float:
    """Return when so many bytes must have crossed."""
    return time.monotonic() + _PATIENCE + count / _SLOWEST


def _left(end: float) -> float:
    if (left := end - time.monotonic()) <= 0:
        raise TimeoutError("the message takes too long")
    return left
