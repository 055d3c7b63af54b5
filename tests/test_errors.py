"""A user's mistake is one sentence and a status; a bug keeps its traceback."""

import contextlib
import errno
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from dpfl_lightning import errors
from dpfl_lightning.errors import UserError, UserNotice, command, nearest, require
from dpfl_lightning.runtime import stopping
from dpfl_lightning.runtime.stopping import Terminated


def test_the_sentence():
    with pytest.raises(UserError, match=r"^`key` must be above 0, got -1\. Raise it\.$"):
        require(False, "key", "be above 0", -1, "Raise it.")
    require(True, "key", "be above 0", 1)


def test_the_nearest_name_or_none():
    assert nearest("rouns", ["rounds", "seed"]) == "Did you mean `rounds`?"
    assert nearest("xyz", ["rounds", "seed"]) == ""


def raising(error):
    def main(argv):
        raise error

    return command(main)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("no"), 2, "error: no\n"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C\n"),
        (Terminated(), 143, "stopped by SIGTERM\n"),
    ],
)
def test_a_users_mistake_is_a_line_and_a_status(error, status, line, capsys):
    assert raising(error)([]) == status
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(("error", "line"), [(UserError("no"), "error: no\n"), (None, "stopped by SIGTERM\n")])
def test_a_signal_while_a_command_ends_hides_nothing(error, line, monkeypatch, capsys):
    """A launcher ends the other ranks at the moment at which they tell that one is missing."""

    @contextlib.contextmanager
    def late():
        with stopping.terminable():
            yield
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(errors, "terminable", late)
    ended = raising(error) if error else command(lambda argv: 0)
    assert ended([]) in (2, 143)
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("error", [ZeroDivisionError, BrokenPipeError], ids=["any", "a pipe of the command"])
def test_a_bug_is_not_hidden(error, capsys):
    with pytest.raises(error):
        raising(error)([])


def test_a_notice_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def main(argv):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("mind the gap", UserNotice, stacklevel=1)

    assert command(main)([]) == 0
    assert capsys.readouterr().err == "warning: mind the gap\n"


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_closed_pipe_is_no_error(lines):
    """As `| head` does; a buffered line is written when the command ends."""
    code = (
        "import sys; from dpfl_lightning.errors import command\n"
        f"sys.exit(command(lambda argv: sys.stdin.readline() and print('word\\n' * {lines}))([]))"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        process.stdout.close()
        process.stdin.write("go\n")
        process.stdin.close()
        assert process.stderr.read() == "" and process.wait() == 141


def test_a_fault_of_the_machine_is_one_line_with_the_way_to_resume(capsys):
    def failing(argv):
        error = OSError(errno.ENOSPC, "No space left on device", "run/checkpoint.pt")
        error.add_note("The run was saved. When you have fixed the cause, resume with: x")
        raise error

    assert command(failing)([]) == 2
    words = "error: `run/checkpoint.pt` must be accessible, got: No space left on device. The run was saved. When you "
    assert capsys.readouterr().err == f"{words}have fixed the cause, resume with: x\n"
    with pytest.raises(FileNotFoundError):  # a bug keeps its traceback
        command(lambda argv: Path("/nowhere/at/all").stat())([])
