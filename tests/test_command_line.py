"""The command as a user types it: the example of `init`, completion in a shell, and a terminal of 80 columns."""

import importlib
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpfl_lightning.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[1]


def test_init_writes_an_example_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine"]) == 0
    assert capsys.readouterr().out.splitlines()[1:][0] == "  cd mine"
    (tmp_path / "mine" / "config.yaml").write_text("rounds: 3")
    assert main(["init", "mine"]) == 2
    assert "It contains config.yaml, my_data.py already" in capsys.readouterr().err
    assert (tmp_path / "mine" / "config.yaml").read_text() == "rounds: 3", "nothing is overwritten"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_version_and_help_in_one_style(command, capsys):
    for words in (["--version"], ["--help"]):
        with pytest.raises(SystemExit) as end:
            main([command, *words])
        assert not end.value.code
    version, *text = capsys.readouterr().out.splitlines()
    assert version.startswith("dpfl_lightning ") and text[0].startswith(f"usage: dpfl {command} ")
    assert max(map(len, text)) <= 80 and "flags:" in text and "examples:" in text and len(text) < 130


@pytest.fixture
def shell(tmp_path):
    """`shell(command, **more)`: run a line in bash, where `dpfl` is this checkout's."""
    script = f"#!{sys.executable}\nfrom dpfl_lightning.__main__ import main\nraise SystemExit(main())\n"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dpfl").write_text(script)
    (tmp_path / "bin" / "dpfl").chmod(0o755)
    (tmp_path / "work").mkdir()
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}

    def run(line: str, **more) -> str:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **more}
        return subprocess.run(["bash", "-c", line], cwd=tmp_path / "work", env=env, **streams).stdout

    return run


@pytest.mark.e2e
def test_the_example_of_init_trains_and_is_evaluated(tmp_path, monkeypatch, capsys):
    def dpfl(words: str) -> str:
        assert main(words.split()) == 0, words
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert "Wrote config.yaml and my_data.py" in dpfl("init")
    assert "epsilon" in dpfl("plan --config config.yaml")
    text = dpfl("fit --config config.yaml --output_dir run --quiet")
    assert [line.partition(" ")[0] for line in text.splitlines()] == ["Mean", "Scores", "Guarantee:", "Not", "Output"]
    for line in ("evaluate run --json", "plan --config config.yaml --json", "ledger run --json"):
        assert json.loads(dpfl(line)), line
    assert [*importlib.import_module("my_data").hospitals()] == ["ghent", "malaga", "porto", "turin", "zagreb"]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("ev", ["evaluate"]),
        ("fit --config fmn", ["fmnist", "fmnist_paper"]),
        ("fit --privacy.eps", ["--privacy.epsilon"]),
        ("fit --data.partition.name di", ["dirichlet"]),
        ("sweep --sweep.sampler.name t", ["tpe"]),
        ("evaluate --ro", []),
    ],
)
def test_bash_completes(shell, words, offered):
    line = f"dpfl {words}".split()
    script = f"COMP_WORDS=({' '.join(line)}); COMP_CWORD={len(line) - 1}; _shtab_dpfl; echo ${{COMPREPLY[@]}}"
    script = f"shopt -s progcomp; compopt() {{ :; }}; {script}"
    assert shell(f'eval "$(dpfl completion bash)"; {script}').split() == offered


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_the_scripts_of_other_shells_are_valid(shell, name):
    script = shell(f"dpfl completion {name}")
    assert "--privacy.epsilon" in script or "-l privacy.epsilon" in script
    if shutil.which(name):
        assert subprocess.run([name, "-n"], input=script, text=True).returncode == 0


@pytest.mark.e2e
def test_errors_are_wrapped_on_a_terminal(shell):
    ours, theirs = pty.openpty()
    shell("stty cols 80; dpfl fit --strategies.pfaa.x 1", stdin=theirs, stdout=theirs, stderr=theirs)
    lines = os.read(ours, 10_000).decode().splitlines()
    os.close(ours), os.close(theirs)
    assert len(lines) > 3 and max(map(len, lines)) <= 80 and lines[0].startswith("error: `strategies` must name one of")
