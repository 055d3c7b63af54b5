"""Connections to the nodes of sites over Flower, whose SuperNodes forward messages to the sockets of the nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol

from dpfl_lightning.errors import require
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.server.connections import Connection

POLL = 0.5  # seconds between two looks for replies


class Grid(Protocol):
    """What is used of `flwr.serverapp.Grid`."""

    def get_node_ids(self) -> Iterable[int]: ...
    def push_messages(self, messages: Iterable[Any]) -> Iterable[str | None]: ...
    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]: ...


class GridConnection(Connection):
    """Sends a request to a SuperNode and waits at most `wait` seconds for the reply. `turn` is for one grid.

    Raises ConnectionError if the SuperNode, or the node behind it, does not answer, and TimeoutError after `wait`. A
    later reply is never read: each call looks for the reply to its message only.
    """

    def __init__(self, grid: Grid, supernode: int, wait: float, turn: threading.Lock) -> None:
        self.grid, self.supernode, self.wait, self._turn = grid, supernode, wait, turn

    def __call__(self, request: bytes, most: wire.Limits | None = None) -> bytes:
        end = time.monotonic() + self.wait
        with self._turn:  # a grid is not made for threads
            (number,) = self.grid.push_messages([packed(request, self.supernode, self.wait)])
        if not number:
            raise ConnectionError(f"Flower knows no SuperNode {self.supernode}")
        while time.monotonic() < end:
            with self._turn:
                replies = list(self.grid.pull_messages([number]))
            for reply in replies:
                if reply.metadata.reply_to_message_id == number:
                    return self._unpacked(reply)
            time.sleep(POLL)
        raise TimeoutError(f"no reply of SuperNode {self.supernode} within {self.wait:g} s")

    def _unpacked(self, reply: Any) -> bytes:
        if reply.has_error():
            raise ConnectionError(f"error {reply.error.code} of Flower from SuperNode {self.supernode}")
        try:
            content: bytes = reply.content["message"]["bytes"].data
        except (KeyError, AttributeError):
            raise ConnectionError(f"SuperNode {self.supernode} runs another app") from None
        return content


def packed(request: bytes, supernode: int, wait: float) -> Any:
    """Return a message of Flower; an array is sent in parts, so that it can be large."""
    from flwr.app import Array, ArrayRecord, Message, RecordDict

    array = Array(dtype="uint8", shape=(len(request),), stype="bytes", data=request)
    return Message(RecordDict({"message": ArrayRecord({"bytes": array})}), supernode, "query.forward", ttl=wait)


def connected(grid: Grid, count: int, wait: float) -> tuple[GridConnection, ...]:
    """Wait until `count` SuperNodes are connected, and return a connection to each.

    Raises UserError if there are fewer or more after `wait` seconds.
    """
    end, before = time.monotonic() + wait, -1
    while len(supernodes := sorted(grid.get_node_ids())) != count and time.monotonic() < end:
        if len(supernodes) != before:
            print(f"Waiting for {count} SuperNodes, one for each site: {len(supernodes)} are connected.", flush=True)
            before = len(supernodes)
        time.sleep(POLL)
    must = f"be connected within --node_wait, {count} of them, one for each site"
    require(len(supernodes) == count, "SuperNodes", must, len(supernodes))
    turn = threading.Lock()
    return tuple(GridConnection(grid, supernode, wait, turn) for supernode in supernodes)
