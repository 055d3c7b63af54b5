"""What may be published says nothing private: no value of `replace`, no path, no host, no extreme of a column."""

import fnmatch
import platform
import re
import socket
from pathlib import Path

import numpy as np
import pandas
import pytest
import yaml

from dpfl_lightning.__main__ import main

ROOT = Path(__file__).parents[1]
CLIENTS = ("bergen", "cork", "turin")


def publishable() -> list[str]:
    """Patterns of the files of a run that docs/privacy.md allows to publish."""
    rows = [
        line.split("|")[1:-1] for line in (ROOT / "docs" / "privacy.md").read_text().splitlines() if "`RUN/" in line
    ]
    cells = [[cell.strip() for cell in row] for row in rows]
    return [name for row in cells if row[6] == "yes" for name in re.findall(r"`RUN/([^`]+)`", row[0])]


def records(folder: Path) -> dict[str, str]:
    """Write a private table for each client; return what must not be published, each with what it is."""
    rng, private = np.random.default_rng(0), {}
    for number, name in enumerate(CLIENTS):
        rows = 80
        lactate = rng.normal(2, 0.5, rows).round(3)
        lactate[0] = 7.625 + number / 8
        table = pandas.DataFrame(
            {
                "fallnummer": [f"K{number}{row:05}" for row in range(rows)],
                "sex": rng.choice(["weiblich", "maennlich"], rows),
                "lactate": lactate,
                "ill": rng.choice(["krankhaft", "gesund"], rows),
            }
        )
        table.to_csv(folder / f"geheim_{name}.csv", index=False)
        private |= {f"geheim_{name}": "a file", f"K{number}00007": "an id", str(lactate[0]): "an extreme"}
    words = ("weiblich", "maennlich", "krankhaft", "gesund", "unbefundet")
    private |= dict.fromkeys(words, "a value of `replace` or `read`")
    return private | {str(folder): "a path", HOST: "the host", str(Path.home()): "a home"}


HOST = "zz-host-of-a-site"  # a short name is in random bytes, too
CONFIG = """
data:
  class_path: dpfl_lightning.Population.from_dataframe
  init_args:
    df: {{{files}}}
    label: ill
    classes: ["no", "yes"]
    person: fallnummer
    columns: {{lactate: {{scale: [2, 1]}}, sex: {{categories: [f, m]}}}}
    read: {{na_values: [unbefundet]}}
    replace: {{sex: {{weiblich: f, maennlich: m}}, ill: {{krankhaft: "yes", gesund: "no"}}}}
model: {{name: logistic}}
clients: {{batch_size: 16, learning_rate: 0.3}}
privacy: {{epsilon: 4, delta: 1.0e-3}}
rounds: 2
strategies: {{{strategies}}}
"""


@pytest.mark.e2e
@pytest.mark.parametrize("strategies", ["size_weighted: {}", "distillation: {image_steps: 2, min_participants: 3}"])
def test_what_may_be_published_says_nothing_private(strategies, tmp_path, monkeypatch):
    folder = tmp_path / "kardiologie"
    folder.mkdir()
    private = records(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    monkeypatch.setattr(platform, "node", lambda: HOST)
    files = ", ".join(f"{name}: {folder / f'geheim_{name}.csv'}" for name in CLIENTS)
    (tmp_path / "run.yaml").write_text(CONFIG.format(files=files, strategies=strategies))
    tracking = f"{{uri: sqlite:///{tmp_path / 'mlflow.db'}}}"
    assert main(["fit", "--config", "run.yaml", "--tracking", tracking, "--output_dir", "run", "--quiet"]) == 0
    assert yaml.safe_load((tmp_path / "run" / "options.yaml").read_text())["data"]["init_args"]["replace"]
    patterns, seen, told = publishable(), set(), []
    for path in (one for one in (tmp_path / "run").rglob("*") if one.is_file()):
        name = str(path.relative_to(tmp_path / "run"))
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            seen.add(name)
            content = path.read_bytes()
            told += [f"{name}: {what} ({word})" for word, what in private.items() if word.encode() in content]
    assert {"run.json", "guarantee.html", "ledger.jsonl", "model.safetensors"} <= seen
    assert told == []


OWN = """
import torch


def tables(**given):
    draw = torch.Generator().manual_seed(0)
    return {name: (torch.randn(60, 3, generator=draw), torch.arange(60) % 2) for name in ("bergen", "cork")}
"""


def test_arguments_of_an_own_function_and_the_command_line_say_nothing_private(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_tables.py").write_text(OWN)
    (tmp_path / "zzplace").mkdir()
    given = {"dsn": "host=zzhost", "pin": 1234, "auth": "zzbearer", "tables": ["zza.xlsx"], "by": {"/zz/key.csv": "zz"}}
    config = {"data": {"class_path": "own_tables.tables", "init_args": given, "population_args": {"num_classes": 2}}}
    config |= {"model": {"name": "logistic"}, "rounds": 1, "tracking": None, "privacy": {"epsilon": 4, "delta": 1e-3}}
    (tmp_path / "zzplace" / "one.yaml").write_text(yaml.safe_dump(config))
    words = ["fit", f"--config={tmp_path}/zzplace/one.yaml", "--data.init_args.source", "zzword", "--quiet"]
    words += ["--data.init_args.replace.sex.zzw=f", f"--output_dir={tmp_path}/zzplace/run"]
    monkeypatch.setattr("sys.argv", ["dpfl", *words])
    assert main(words) == 0
    run = tmp_path / "zzplace" / "run"
    files = {str(one.relative_to(run)): one.read_text(errors="replace") for one in run.rglob("*") if one.is_file()}
    told = {
        name: re.findall(".{,30}(?:zz|pin.{1,3} 1234).{,20}", text)
        for name, text in files.items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in publishable()) and not name.endswith(".html")
    }
    assert {"run.json", "ledger.jsonl"} <= told.keys()
    assert {
        name: found for name, found in told.items() if any("1234" not in one or "pin" in one for one in found)
    } == {}
    assert str(tmp_path) not in files["guarantee.html"]


@pytest.mark.e2e
def test_a_run_that_a_ledger_describes_without_its_tables_goes_on_only_with_them(tmp_path, monkeypatch, capsys):
    records(tmp_path)
    monkeypatch.chdir(tmp_path)
    files = ", ".join(f"{name}: geheim_{name}.csv" for name in CLIENTS)
    config = CONFIG.format(files=files, strategies="size_weighted: {}")
    (tmp_path / "run.yaml").write_text(config)
    flags = "--tracking null --output_dir runs --seeds 0,1 --quiet"
    words = ["fit", "--config", "run.yaml", *flags.split()]
    assert main(words) == 0
    assert main(words) == 0  # both are found
    assert main(["fit", "--resume", "runs/seed_0", "--quiet"]) == 0, "a finished run returns its result"
    swapped = config.replace('krankhaft: "yes", gesund: "no"', 'krankhaft: "no", gesund: "yes"')
    (tmp_path / "run.yaml").write_text(swapped)
    capsys.readouterr()
    assert main(words) == 2
    assert "data" in capsys.readouterr().err
