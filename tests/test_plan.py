"""`python -m dpfl_lightning.plan`: both directions, JSON, a whole run, and one sentence for every mistake."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import types

import pytest

from dpfl_lightning import plan as command
from dpfl_lightning.plan import main, plan
from dpfl_lightning.privacy.accountant import get_accountant
from dpfl_lightning.privacy.events import GaussianEvent
from dpfl_lightning.privacy.schedule import ClientSchedule, Planned

CLIENT = ["--num_records", "2400", "--batch_size", "128", "--rounds", "10", "--delta", "1e-4"]


def last_json(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_both_directions(capsys):
    assert main([*CLIENT, "--epsilon", "2", "--json"]) == 0
    there = last_json(capsys)
    assert there["steps"] == 10 * math.ceil(2400 / 128) == 190
    assert there["sample_rate"] == 128 / 2400
    assert there["accountant"] == "rdp"
    assert 1.995 < there["epsilon"] <= 2
    assert main([*CLIENT, f"--noise_multiplier={there['noise_multiplier']}", "--json"]) == 0
    assert last_json(capsys) == there


def test_golden_value_both_ways():
    """Opacus: rate 0.04, noise 1.5, 2250 steps, delta 1e-5."""
    back = plan(num_records=25, batch_size=1, rounds=90, delta=1e-5, noise_multiplier=1.5)
    assert back.guarantee.epsilon == pytest.approx(7.32911117143, abs=1e-6)
    assert plan(num_records=25, batch_size=1, rounds=90, delta=1e-5, epsilon=7.32912).noise_multiplier == pytest.approx(
        1.5, rel=2e-4
    )


def test_local_epochs_and_full_batches():
    full = plan(num_records=100, batch_size=100, rounds=4, local_epochs=3, delta=1e-5, epsilon=1.0, accountant="gdp")
    assert (full.steps, full.sample_rate) == (12, 1.0)
    assert full.noise_multiplier == pytest.approx(3.730632 * math.sqrt(12), rel=2e-4)
    assert full.guarantee.sampling == "full batches"


def test_the_text_states_the_guarantee(capsys):
    assert main([*CLIENT, "--epsilon", "2"]) == 0
    text = capsys.readouterr().out
    for words in (
        "noise multiplier",
        "190 (10 rounds",
        "per record",
        "add or remove one record",
        "Poisson-sampled",
        "RDP (Opacus",
    ):
        assert words in text


def test_no_noise_is_no_privacy(capsys):
    assert main([*CLIENT, "--noise_multiplier", "0", "--json"]) == 0
    found = last_json(capsys)
    assert found["epsilon"] is None and found["guarantee"].startswith("No differential privacy")


def test_fallback_is_said(capsys):
    words = [*CLIENT[:-1], "1e-12", "--noise_multiplier", "1", "--accountant", "prv", "--json"]
    assert main(words) == 0
    assert "because PRV's rounding errors matter" in last_json(capsys)["guarantee"]


def test_large_delta_warns():
    with pytest.warns(UserWarning, match="`delta` should be below 1 / num_records = 0.01, got 0.05"):
        plan(num_records=100, batch_size=10, rounds=1, delta=0.05, epsilon=1.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "`epsilon` must be a number, got None. Give epsilon to find the noise"),
        ("--epsilon 1 --noise_multiplier 1", "`epsilon` must be left out beside noise_multiplier, got 1.0"),
        ("--epsilon 0", "`epsilon` must be above 0 and finite, got 0.0"),
        ("--epsilon -1", "`epsilon` must be above 0 and finite, got -1.0"),
        ("--epsilon x", "`epsilon` must be a finite number, got 'x'"),
        (
            "--epsilon 0.0001",
            "`epsilon` must be above 0.001251, the least that rdp can certify at delta 0.0001",
        ),
        ("--noise_multiplier -1", "`noise_multiplier` must be at least 0 and finite, got -1.0"),
        ("--epsilon 1 --delta 0", "`delta` must be in (0, 1), got 0.0. Usual is below 1 / num_records"),
        ("--epsilon 1 --delta 1", "`delta` must be in (0, 1), got 1.0"),
        (
            "--epsilon 1 --batch_size 2401",
            "`batch_size` must be in 1..2400 (num_records), got 2401. A batch of 2400",
        ),
        ("--epsilon 1 --batch_size 0", "`batch_size` must be in 1..2400"),
        ("--epsilon 1 --num_records 0", "`num_records` must be at least 1, got 0"),
        ("--epsilon 1 --rounds 0", "`rounds` must be at least 1, got 0"),
        ("--epsilon 1 --rounds 1.5", "`rounds` must be a whole number, got '1.5'"),
        ("--epsilon 1 --local_epochs 0", "`local_epochs` must be at least 1, got 0"),
        (
            "--epsilon 1 --accountant gpd",
            "`accountant` must be one of rdp, prv, gdp, paper_ma, got 'gpd'. Did you mean `gdp`?",
        ),
        ("--epsilon 1 --accountant gdp", "`accountant` must be rdp or prv for a sample rate of"),
        ("--epsilon 1 --round 3", "`round` must be a known key. Did you mean `rounds`?"),
        ("--epsilon", "--epsilon: expected one argument"),
    ],
)
def test_bad_input_is_one_sentence(capsys, words, message):
    assert main([*CLIENT, *words.split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ") and message in said.err and said.err.count("\n") == 1


def test_missing_keys_are_named(capsys):
    assert main(["--epsilon", "1"]) == 2
    assert "num_records, batch_size, rounds, delta" in capsys.readouterr().err


def test_help_is_quick_and_loads_no_torch():
    code = (
        "import sys; from dpfl_lightning.plan import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'lightning', 'opacus', 'mlflow'} & set(sys.modules)"
    )
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 10  # measured: 0.8 s
    for key in ("--epsilon", "--noise_multiplier", "--num_records", "--config", "--json"):
        assert key in done.stdout


def test_a_whole_run(capsys, monkeypatch):
    """The table of a run: every client's schedule as the loop plans it, strategies' releases included."""
    rdp = get_accountant("rdp")
    schedules = tuple(
        ClientSchedule(
            budget,
            1e-5,
            (
                Planned("first_round", GaussianEvent(1.0, 5.0), 1),
                Planned("train", GaussianEvent(0.1, noise, 10), 9),
            ),
        )
        for budget, noise in ((2.0, 3.0), (math.inf, 1.0))
    )
    loop = types.SimpleNamespace(
        accountant=rdp,
        info=types.SimpleNamespace(sampling="poisson"),
        population=types.SimpleNamespace(caveats=("data sizes are public",)),
        settings=[types.SimpleNamespace(num_records=100, batch_size=10)] * 2,
    )
    monkeypatch.setattr("dpfl_lightning.federated.setup.planned_clients", lambda options: (loop, schedules))
    monkeypatch.setattr("dpfl_lightning.config.load", lambda words, *_, **__: (None, types.SimpleNamespace(json=True)))
    assert main(["--config=any.yaml", "--json"]) == 0
    text = capsys.readouterr().out
    rows = json.loads(text.splitlines()[-1])["clients"]
    assert [row["client"] for row in rows] == [0, 1]
    assert [row["epsilon_budget"] for row in rows] == [2.0, None]
    assert rows[0]["steps"] == 91 and rows[0]["sample_rate"] == 0.1 and rows[0]["noise_multiplier"] == 3.0
    assert rows[0]["epsilon"] == rdp.epsilon(schedules[0].events(), 1e-5)
    assert rows[0]["planned"][0] == {
        "purpose": "first_round",
        "count": 1,
        "event": {"sample_rate": 1.0, "noise_multiplier": 5.0, "steps": 1},
    }
    assert "1 first_round, 9 train" in text
    assert "Largest epsilon: (" in text and "Poisson sampling" in text and "Caveat: data sizes are public." in text


def test_columns_line_up():
    assert command._columns([["a", "bc"], [10, 2]]) == " a  bc\n10   2"
