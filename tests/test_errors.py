"""One sentence, the right status, no traceback; a bug keeps its own."""

import subprocess
import sys
import warnings

import pytest

from dpfl_lightning.errors import UserError, UserNotice, command, nearest, require
from dpfl_lightning.runtime.stopping import Terminated


def test_the_sentence():
    with pytest.raises(UserError, match=r"^`key` must be above 0, got -1\. Raise it\.$"):
        require(False, "key", "be above 0", -1, "Raise it.")
    require(True, "key", "be above 0", 1)


def test_the_nearest_name_or_none():
    assert nearest("rouns", ["rounds", "seed"]) == "Did you mean `rounds`?"
    assert nearest("xyz", ["rounds", "seed"]) == ""


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("no"), 2, "error: no\n"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C\n"),
        (Terminated(), 143, "stopped by SIGTERM\n"),
    ],
)
def test_a_users_mistake_is_a_line_and_a_status(error, status, line, capsys):
    def main(argv):
        raise error

    assert command(main)([]) == status
    assert capsys.readouterr().err == line


def test_a_bug_is_not_hidden():
    def main(argv):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command(main)([])


def test_a_notice_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def main(argv):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("mind the gap", UserNotice, stacklevel=1)

    assert command(main)([]) == 0
    assert capsys.readouterr().err == "warning: mind the gap\n"


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_who_has_seen_enough_is_no_error(lines):
    """As `| head` does; a line that is still kept back goes out when the command ends."""
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


def test_a_pipe_of_ones_own_that_broke_is_a_bug(capsys):
    def main(argv):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        command(main)([])
