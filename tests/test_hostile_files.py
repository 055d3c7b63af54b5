"""Configurations and files of any content: one line, quickly, without a traceback and without a file written.

`DPFL_MUTANTS=10000 DPFL_DAMAGES=1000 python -m pytest tests/test_hostile_files.py -m "e2e or not e2e"` is the full
search; the seeds of what it changes are fixed.
"""

import gzip
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import struct
from contextlib import contextmanager
from pathlib import Path

import pytest

from dpfl_lightning.commands.evaluate import main as evaluate
from dpfl_lightning.commands.fit import main as fit
from dpfl_lightning.commands.ledger import main as ledger
from dpfl_lightning.commands.report import main as report
from dpfl_lightning.config import reading
from dpfl_lightning.config.load import load
from dpfl_lightning.config.mapping import to_yaml
from dpfl_lightning.config.yaml_text import presets
from dpfl_lightning.errors import UserError

MUTANTS = int(os.environ.get("DPFL_MUTANTS", 100))
DAMAGES = int(os.environ.get("DPFL_DAMAGES", 11))


@contextmanager
def at_most(seconds: int):
    def stop(*args):
        raise TimeoutError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def loaded(path: Path) -> str:
    """The error of a configuration; empty if it is accepted, and then it is what its own YAML gives again."""
    with at_most(10):
        try:
            options, _ = load(["--config", str(path)])
        except UserError as error:
            return str(error)
    again = path.with_name("again.yaml")
    again.write_text(to_yaml(options))
    assert load(["--config", str(again)])[0] == options
    again.unlink()
    return ""


def _bomb(levels: int, by: str) -> str:
    names = "abcdefghijklmnop"[:levels]
    pairs = itertools.pairwise(names)
    lines = [f"{here}: &{here} {by.format(*[f'*{before}'] * 9)}" for before, here in pairs]
    return "data:\n  init_args:\n    " + "\n    ".join(["a: &a [1, 1, 1]", *lines]) + "\n"


PRIVATE = "privacy: {epsilon: 1}\n"
HOSTILE = {
    "[1]: 2": "a key that is a list or a mapping on line 1",
    "data: {? {a: 1} : 2}": "a key that is a list or a mapping",
    "rounds: 2001-99-99": "a value that cannot be read .month must be in 1..12. on line 1",
    "rounds: !!int abc": "a value that cannot be read",
    "rounds: !!float abc": "a value that cannot be read",
    "rounds: !!timestamp abc": "a value that cannot be read",
    "rounds: !!bool abc": "a value that cannot be read",
    "rounds: 0x_": "a value that cannot be read",
    "rounds: " + "9" * 5000: "a value that cannot be read",
    "rounds: a\0b": "must be valid YAML, got unacceptable character",
    'output_dir: "a\\0b"': "`output_dir` must have no null character",
    "data: &a\n  init_args: *a": "or an alias of what contains it",
    "clients:\n  batch_size: &a [*a]": "or an alias of what contains it",
    _bomb(10, "[{}, {}, {}, {}, {}, {}, {}, {}, {}]"): "more than 1,000,000 values",
    _bomb(10, "{{<<: [{}, {}, {}, {}, {}, {}, {}, {}]}}"): "more than 1,000,000 values",
    "rounds: " + "[" * 51 + "]" * 51: "more than 50 levels",
    "rounds: " + "[" * 900 + "]" * 900: "too many levels|more than 50 levels",
    "rounds: " + "[" * 20_000: "too many levels",
    "a: 1\n" * 1_000_000: "must have at most 4,000,000 bytes",
    PRIVATE
    + "clients: {count: 1000000000}": "`clients.count` must be a whole number in .1, 1e6. or null, got 1000000000",
    PRIVATE + "rounds: 1000000000000": "`rounds` must be a whole number in .1, 1e6., got",
    PRIVATE + "model: {name: convnet, depth: 10000000000}": "`model.depth` must be a finite number of at most 1,000",
    PRIVATE + "engine: {workers: 100000}": "`engine.workers` must be a whole number in .1, 1024. or null",
    "privacy: {epsilon: " + "9" * 400 + "}": "`privacy.epsilon` must be a number > 0 .* got 99999",
    PRIVATE + "strategies: {fedprox: {pull: .inf}}": "`strategies.fedprox.pull` must be a finite number .* got inf",
    PRIVATE + "strategies: {mr_mtl: {pull: .nan}}": "`strategies.mr_mtl.pull` must be a finite number .* got nan",
    PRIVATE
    + "strategies: {clustered: {data_floor: .inf}}": "`strategies.clustered.data_floor` must be a finite number",
    PRIVATE + "data: {partition: {name: dirichlet, alpha: .inf}}": "`data.partition.alpha` must be a finite number",
}


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_configuration_is_one_short_line(text, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(text + "\n")
    with pytest.raises(UserError, match=HOSTILE[text]) as error, at_most(60):
        load(["--config", str(path)])
    assert "\n" not in str(error.value) and len(str(error.value).replace(str(tmp_path), "")) < 500


@pytest.mark.parametrize(
    "words", [["--config", "x" * 1500], ["--" + "x" * 1500], ["--rounds", "x" * 1500], ["--config", "\0"]]
)
def test_a_long_value_is_cut(words):
    with pytest.raises(UserError) as error:
        load(words)
    assert len(str(error.value)) < 500


def mutated(text: str, rng: random.Random) -> str:
    """A configuration with one to four edits: of characters, lines and values."""
    values = ["[", "*a", "&a ", "null", ".inf", "-.nan", "-1", "0", "9" * 30, "9" * 4400, "''", "\0", "\t", "é" * 300]
    values += ["!!python/object/apply:os.system [touch x]", "<<: *a", "[[1]]", "{a: 1}", "- 1", "2001-99-99"]
    for _ in range(rng.randint(1, 4)):
        lines = text.split("\n")
        row, kind = rng.randrange(len(lines)), rng.randrange(5)
        if kind == 0:
            lines[row] = lines[row].partition(":")[0] + ": " + rng.choice(values)
        elif kind == 1:
            lines.insert(row, rng.choice(lines))
        elif kind == 2:
            place = rng.randint(0, len(lines[row]))
            lines[row] = lines[row][:place] + rng.choice(values) + lines[row][place:]
        elif kind == 3:
            del lines[row]
        else:
            lines[row] = " " * rng.randint(0, 6) + lines[row].strip()
        text = "\n".join(lines) or "x"
    return text


@pytest.mark.e2e
def test_mutated_configurations_are_accepted_or_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [path.read_text() for path in presets().values()]
    accepted, path = 0, tmp_path / "c.yaml"
    for number in range(MUTANTS):
        rng = random.Random(number)
        path.write_text(mutated(rng.choice(texts), rng))
        error = loaded(path)
        accepted += not error
        assert "\n" not in error and len(error) < 1000, (number, error)
    assert 0 < accepted < MUTANTS and {one.name for one in tmp_path.iterdir()} == {"c.yaml"}


# ---- files of a run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run of a command."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    words = "--config digits --rounds 1 --tracking null --quiet --output_dir"
    assert fit([*words.split(), str(folder)]) == 0
    return folder


COMMANDS = {
    "evaluate": lambda run: evaluate([str(run), "--json"]),
    "report": lambda run: report([str(run), "--output", str(run.parent / "r.html")]),
    "ledger": lambda run: ledger([str(run)]),
    "resume": lambda run: fit(["--resume", str(run), "--quiet"]),
}


class Hostile:
    def __reduce__(self):
        return os.system, ("touch executed",)


def damaged(content: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(6)
    place = rng.randrange(len(content)) if content else 0
    if kind == 0:
        return content[:place]
    if kind == 1:
        flipped = bytearray(content or b"\0")
        for _ in range(rng.choice([1, 20])):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == 2:
        return rng.choice(
            [b"", b"\0" * 100, b"[]", b"{}", b"null", b"[" * 5000, b'{"clients": []}', b"\xff\xfe", b"a: 1"]
        )
    if kind == 3:
        return content[:place] + rng.randbytes(50) + content[place:]
    if kind == 4:
        return content + content
    return pickle.dumps(Hostile())


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name",
    [
        "options.yaml",
        "result.json",
        "guarantees.json",
        "metrics.jsonl",
        "model.safetensors",
        "checkpoint.pt",
        "checkpoint.key",
        "data_key",
        "ledger.jsonl",
        "ledger.head",
        "private.json",
    ],
)
def test_damaged_files_of_a_run_are_one_line(name, finished, tmp_path, monkeypatch, capsys):
    """Every command either works or ends with status 2 and one line; nothing in a file is executed."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    for number in range(max(1, DAMAGES // 11)):
        rng = random.Random(f"{name} {number}")
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(finished, run)
        content = (run / name).read_bytes() if (run / name).exists() else b""
        (run / name).write_bytes(damaged(content, rng))
        for command, of in COMMANDS.items():
            if name == "model.safetensors" and command in ("ledger", "report"):
                continue  # they do not read it
            with at_most(60):
                status = of(run)
            printed = capsys.readouterr()
            last = printed.err.strip().rpartition("\n")[2]
            assert status == 0 or (status == 2 and last.startswith("error: ")), (name, number, command, printed.err)
            assert "Traceback" not in printed.err and not (tmp_path / "executed").exists()


def test_a_file_that_is_none_is_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "none", Path("a\0b"), Path("x" * 5000)):
        for read in (reading.read_text, reading.read_json, reading.read_safetensors):
            with pytest.raises(UserError, match="must be a"):
                read(path)


def test_a_file_that_grows_when_it_is_read_has_a_limit(tmp_path, monkeypatch):
    """A few bytes are not decompressed to gigabytes, nor believed to be, and an endless device has a limit."""
    bomb = tmp_path / "x.gz"
    with gzip.open(bomb, "wb") as file:
        for _ in range(100):
            file.write(bytes(1 << 20))
    monkeypatch.setattr(reading, "_LARGEST", 1 << 20)
    with pytest.raises(UserError, match="must have at most 1,048,576 bytes"):
        reading.read_bytes(bomb, most=1 << 20)
    with pytest.raises(UserError, match="must have at most 1,000 bytes"), at_most(5):
        reading.read_bytes(Path("/dev/zero"), most=1000)
    huge = {"a": {"dtype": "F32", "shape": [1 << 50], "data_offsets": [0, 1 << 52]}}
    header = json.dumps(huge).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(UserError, match="must be a file of safetensors"), at_most(5):
        reading.read_safetensors(tmp_path / "x.safetensors")
