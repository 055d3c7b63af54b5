"""Where what clients release arrives: an update or an answer of each, or the error by which it failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self


class Inbox:
    """Takes the reply of each client of a round, in any order.

    Attributes:
        failed: client -> the error by which it failed. Private: its type and text may depend on records.
    """

    def __init__(self) -> None:
        self.failed: dict[int, Exception] = {}

    def receive(self, client: int, reply: Any) -> None:
        """Take what a client has released, or lose it if the reply is the error by which the client failed."""
        if isinstance(reply, Exception):
            self.failed[client] = reply
            self.lose(client)
        else:
            self.take(client, reply)

    def take(self, client: int, released: Any) -> None:
        """Take a release."""
        raise NotImplementedError

    def lose(self, client: int) -> None:
        """Go on without the release of this client, which does not arrive."""

    def part(self, clients: Sequence[int]) -> Self:
        """Return an empty inbox for some of the clients, which another process fills."""
        raise NotImplementedError

    def merge(self, part: Self) -> None:
        """Add what has arrived in a `part`."""
        self.failed |= part.failed


class AnswerBox(Inbox):
    """Collects the answers to a question, by client."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[int, Any] = {}

    def take(self, client: int, released: Any) -> None:
        self.answers[client] = released

    def part(self, clients: Sequence[int]) -> AnswerBox:
        return AnswerBox()

    def merge(self, part: AnswerBox) -> None:
        super().merge(part)
        self.answers |= part.answers

    def of(self, clients: Sequence[int]) -> dict[int, Any]:
        """Return the answers of these clients that have arrived, in their order."""
        return {client: self.answers[client] for client in clients if client in self.answers}
