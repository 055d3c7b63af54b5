"""Commands in processes of their own, which are killed at a moment, or within an operation on files."""

import itertools
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy
import torch
from killed_runs import forking

import dpfl_lightning.commands.fit
import dpfl_lightning.commands.node
import dpfl_lightning.commands.sweep
import dpfl_lightning.loop
import dpfl_lightning.search.search
import dpfl_lightning.sites.node.accept
import dpfl_lightning.sites.node.service
import dpfl_lightning.sites.server.deploy  # noqa: F401 (commands import what they need late: forked processes have it)
from dpfl_lightning.__main__ import main
from dpfl_lightning.privacy.ledger import account_file, ledger

KILLED = -signal.SIGKILL


class Command:
    """`dpfl WORDS` in a forked process, whose output is added to a file.

    It kills itself at its operation number `dies_at` on files, databases and connections; None lets it live. If it
    `connects`, they are counted from its first message on.
    """

    def __init__(
        self,
        words: Sequence[str],
        output: Path,
        environment: Mapping[str, str],
        dies_at: int | None = None,
        connects: bool = False,
    ) -> None:
        self._output, self._before = output, output.stat().st_size if output.is_file() else 0
        arguments = [*words], str(output), dict(environment), dies_at, connects
        self.process = forking().Process(target=_run, args=arguments, daemon=True)
        self.process.start()

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self.process.exitcode

    @property
    def text(self) -> str:
        """What it has printed, also into the same file as earlier ones."""
        return self._output.read_bytes()[self._before :].decode() if self._output.is_file() else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        """End it as `kill PROCESS` does."""
        self.process.terminate()
        self.process.join()


def _run(words: list[str], output: str, environment: dict[str, str], dies_at: int | None, connects: bool) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, sys.__stdout__.fileno())  # type: ignore[union-attr]
    os.dup2(file, sys.__stderr__.fileno())  # type: ignore[union-attr]
    os.environ.update(environment)
    torch.set_num_threads(1)
    if dies_at is not None:
        _die_at(dies_at, connects)
    sys.exit(main(words))


def _die_at(number: int, connects: bool) -> None:
    """Kill this process at one of its operations: before it, after it, or with the first half of its bytes written.

    A head is one write within a sector, which is made or not.
    """
    count, send, counting = itertools.count(), socket.socket.sendall, not connects

    def dying(do: Callable[..., Any], half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            nonlocal counting
            counting = counting or do is send
            if not counting or next(count) != number:
                return do(*args, **more)
            way = random.Random(os.urandom(8)).choice([None, do, half])
            if way is not None:
                way(*args, **more)
            os.kill(os.getpid(), signal.SIGKILL)

        return counted

    write_all, write_bytes = account_file.write_all, Path.write_bytes

    def some_lines(file: Any, parts: Sequence[bytes]) -> None:
        whole = b"".join(parts)
        write_all(file, [whole[: len(whole) // 2]])

    def some_text(path: Path, text: str, encoding: str = "utf-8") -> None:
        write_bytes(path, text.encode(encoding)[: len(text) // 2])

    account_file.write_all = ledger.write_all = dying(write_all, some_lines)
    ledger._sync, os.fsync, os.replace, os.pwrite = map(dying, (ledger._sync, os.fsync, os.replace, os.pwrite))
    Path.write_bytes = dying(write_bytes, lambda path, content: write_bytes(path, content[: len(content) // 2]))
    Path.write_text = dying(Path.write_text, some_text)
    Path.unlink, Path.touch, Path.mkdir = map(dying, (Path.unlink, Path.touch, Path.mkdir))
    socket.socket.sendall = dying(send)
    sqlalchemy.event.listen(sqlalchemy.Engine, "commit", dying(lambda connection: None))
