"""`python -m dpfl_lightning.plan`: both directions, JSON, a whole run, and one sentence for every mistake."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from dpfl_lightning import plan as command
from dpfl_lightning.errors import UserError
from dpfl_lightning.plan import main, plan
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.accounting.planned import ClientSchedule, Planned

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


# ---- rounds of several kinds: the clustered paper's setting, and what its tables say


def clustered(epsilon, **more):
    """6600 records, batches of 32, 200 rounds, one local epoch, delta 1e-4."""
    return plan(num_records=6600, batch_size=32, rounds=200, delta=1e-4, epsilon=epsilon, **more)


def printed(value, decimals):
    """To the nearest; noise is rounded up at its seventh digit, which can reach the next printed one."""
    return {f"{value:.{decimals}f}", f"{value * (1 - 2e-6):.{decimals}f}"}


@pytest.mark.parametrize(
    ("epsilon", "without", "same", "alone", "own"),
    [
        (2, "2.0005", "2.7065", "1.34", "2.1374"),
        (3, "1.4846", "1.9335", "1.95", "1.5255"),
        (4, "1.2295", "1.5436", "2.53", "1.2469"),
        (5, "1.0784", "1.3104", "3.05", "1.0873"),
        (10, "0.7801", "0.8576", "5.01", "0.7809"),
    ],
)
def test_what_a_full_first_round_costs(epsilon, without, same, alone, own):
    plain = clustered(epsilon)
    assert without in printed(plain.noise_multiplier, 4) and plain.steps == 41_400
    full = clustered(epsilon, first_round="full")
    assert same in printed(full.noise_multiplier, 4) and full.steps == 1 + 41_193
    assert full.schedule.noise_multiplier("first_round") == full.noise_multiplier
    assert alone in printed(full.epsilon_alone[0], 2)
    apart = clustered(epsilon, first_round="full", first_round_noise_multiplier=5.0)
    assert own in printed(apart.noise_multiplier, 4)
    assert apart.schedule.noise_multiplier("first_round") == 5.0
    for planned in (plain, full, apart):
        assert 0.999 * epsilon < planned.guarantee.epsilon <= epsilon


@pytest.mark.parametrize(("epsilon", "noise"), [(2, 2.51), (5, 1.11), (10, 0.785)])
def test_a_first_round_of_noise_three(epsilon, noise):
    """These are printed rounded up."""
    found = clustered(epsilon, first_round="full", first_round_noise_multiplier=3.0).noise_multiplier
    decimals = 3 if noise < 1 else 2
    assert math.ceil(found * 10**decimals) == round(noise * 10**decimals)


@pytest.mark.parametrize(("epsilon", "noise", "alone"), [(5, "1.359", "1.20"), (2, "2.795", "0.43")])
def test_selections_are_composed_with_training(epsilon, noise, alone):
    joint = clustered(epsilon, first_round="full", selections=20, selection_epsilon=0.03 * epsilon)
    assert noise in printed(joint.noise_multiplier, 3)
    assert [line.purpose for line in joint.schedule.planned] == ["first_round", "select", "train"]
    assert alone in printed(joint.epsilon_alone[1], 2)
    assert "20 selections" in joint.guarantee.covers


EVERYTHING = {
    "first_round": "full",
    "first_round_noise_multiplier": 6.0,
    "selections": 7,
    "selection_epsilon": 0.05,
    "participations": 12,
    "steps": 3,
    "local_epochs": 2,
}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("accountant", "adjacency"), [("rdp", "add_remove"), ("rdp", "replace_one"), ("prv", "add_remove")]
)
@pytest.mark.parametrize("left_out", [(), ("first_round_noise_multiplier",), ("selections", "selection_epsilon")])
def test_all_of_it_in_both_directions(accountant, adjacency, left_out):
    more = {key: value for key, value in EVERYTHING.items() if key not in left_out} | {"adjacency": adjacency}
    size = {"num_records": 2400, "batch_size": 64, "rounds": 30, "delta": 1e-4, "accountant": accountant}
    there = plan(**size, **more, epsilon=3.0)
    counts = {line.purpose: (line.count, getattr(line.event, "steps", None)) for line in there.schedule.planned}
    assert counts["first_round"] == (1, 2) and counts["train"] == (11, 3) and there.steps == 2 + 33
    back = plan(**size, **more, noise_multiplier=there.noise_multiplier)
    assert back.guarantee == there.guarantee and 2.99 < back.guarantee.epsilon <= 3.0
    assert back.schedule.events() == there.schedule.events()
    assert back.as_dict() == there.as_dict()


def test_one_participation_may_be_the_full_round_alone():
    once = plan(num_records=100, batch_size=10, rounds=9, delta=1e-5, epsilon=1.0, participations=1, first_round="full")
    assert [(line.purpose, line.count) for line in once.schedule.planned] == [("first_round", 1)]
    assert (once.steps, once.sample_rate, once.guarantee.sampling) == (1, 1.0, "full batches")
    same = plan(num_records=100, batch_size=100, rounds=1, delta=1e-5, epsilon=1.0)
    assert once.noise_multiplier == same.noise_multiplier
    spent = plan(
        num_records=100,
        batch_size=10,
        rounds=9,
        delta=1e-5,
        noise_multiplier=1.0,
        participations=1,
        first_round="full",
        first_round_noise_multiplier=4.0,
    )
    assert spent.noise_multiplier == 4.0


def test_fewer_participations_need_less_noise():
    noises = [clustered(2.0, participations=number).noise_multiplier for number in (1, 20, 200)]
    assert noises == sorted(noises) and noises[-1] == clustered(2.0).noise_multiplier
    assert clustered(2.0, steps=207).schedule == clustered(2.0).schedule


def test_gdp_has_full_rounds_of_unequal_noise():
    size = {"num_records": 50, "batch_size": 50, "rounds": 5, "delta": 1e-5, "accountant": "gdp"}
    found = plan(**size, epsilon=1.0, first_round="full", first_round_noise_multiplier=20.0)
    assert 1 / 20**2 + 4 / found.noise_multiplier**2 == pytest.approx(1 / 3.730632**2, rel=1e-4)


def test_the_text_has_every_line_and_its_price(capsys):
    words = "--epsilon 2 --first_round full --first_round_noise_multiplier 5 --selections 3 --selection_epsilon 0.1"
    assert main([*CLIENT, *words.split(), "--participations", "6", "--steps", "4"]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["steps"][1:] == ["21", "(6", "of", "10", "rounds,", "4", "steps", "each)"]
    assert rows["purpose"][-2:] == ["epsilon", "alone"]
    assert rows["first_round"][1:5] == ["1", "1", "5", "1"]
    assert rows["select"][1:5] == ["3", "1", "10", "(Gumbel)"]
    assert rows["train"][1:3] == ["5", "0.0533333"] and rows["train"][4] == "4"
    assert f"{get_accountant('rdp').epsilon([GaussianEvent(1.0, 5.0)], 1e-4):.4f}" <= rows["first_round"][5]
    assert "together they cost 2.0000" in text and "Not covered: test and held-out records" in text


def test_laplace_noise_has_pure_budgets(capsys):
    """Ten releases share a budget of 2: scale 5; replaced records move a sum twice as far."""
    full = ["--num_records", "100", "--batch_size", "100", "--rounds", "10", "--delta", "0", "--mechanism", "laplace"]
    assert main([*full, "--epsilon", "2", "--json"]) == 0
    text = capsys.readouterr().out
    assert "Laplace scale / clip norm" in text and "(2, 0)-differential privacy" in text
    found = json.loads(text.splitlines()[-1])
    assert found["noise_multiplier"] == pytest.approx(5.0, rel=1e-6) and found["steps"] == 10
    assert main([*full, "--noise_multiplier", "5", "--adjacency", "replace_one", "--json"]) == 0
    assert last_json(capsys)["epsilon"] == pytest.approx(4.0, abs=2e-6)


def test_accountant_and_adjacency_go_together(monkeypatch):
    asked = []
    rdp = get_accountant("rdp")
    monkeypatch.setattr(
        "dpfl_lightning.privacy.accounting.client_plan.get_accountant", lambda *names: asked.append(names) or rdp
    )
    clustered(2.0, adjacency="replace_one", accountant="prv")
    assert asked == [("prv", "replace_one")]


def test_a_second_plan_is_not_solved_again(monkeypatch):
    first = clustered(2.5)
    monkeypatch.setattr(
        "dpfl_lightning.privacy.accounting.schedule._smallest_noise", lambda plans, *_: {0: []}[len(plans)]
    )
    assert clustered(2.5) == first


@pytest.mark.parametrize("key", ["epsilon", "noise_multiplier", "delta", "first_round_noise_multiplier"])
@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
def test_no_number_is_refused_in_python_too(key, value):
    usual = {"num_records": 100, "batch_size": 10, "rounds": 3, "delta": 1e-5, "first_round": "full"}
    given = {**usual, **({} if key == "noise_multiplier" else {"epsilon": 1.0}), key: value}
    with pytest.raises(UserError, match=f"`{key}` must be"):
        plan(**given)


def test_large_delta_warns():
    with pytest.warns(UserWarning, match="`delta` should be below 1 / num_records = 0.01, got 0.05"):
        plan(num_records=100, batch_size=10, rounds=1, delta=0.05, epsilon=1.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "`epsilon` must be a number, got None. Give epsilon to find the noise"),
        ("--epsilon 1 --noise_multiplier 1", "`epsilon` must be left out if noise_multiplier is given, got 1.0"),
        ("--epsilon 0", "`epsilon` must be above 0 and finite, got 0.0"),
        ("--epsilon -1", "`epsilon` must be above 0 and finite, got -1.0"),
        ("--epsilon x", "`epsilon` must be a finite number, got 'x'"),
        (
            "--epsilon 0.0001",
            "`epsilon` must be above 0.001251, the least that rdp can certify at delta 0.0001",
        ),
        ("--noise_multiplier -1", "`noise_multiplier` must be at least 0 and finite, got -1.0"),
        ("--epsilon 1 --delta 0", "`delta` must be in (0, 1), got 0.0. It is usually below 1 / num_records"),
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
        ("--epsilon 1 --steps 0", "`steps` must be at least 1, got 0"),
        ("--epsilon 1 --steps 2.5", "`steps` must be a whole number, got '2.5'"),
        ("--epsilon 1 --steps 5 --local_epochs 2", "`local_epochs` must be left out if steps is given, unless"),
        ("--epsilon 1 --participations 0", "`participations` must be in 1..10 (rounds), got 0"),
        ("--epsilon 1 --participations 11", "`participations` must be in 1..10 (rounds), got 11"),
        ("--epsilon 1 --first_round half", "`first_round` must be full or left out, got 'half'"),
        (
            "--epsilon 1 --first_round_noise_multiplier 5",
            "`first_round_noise_multiplier` must be left out unless first_round is full, got 5.0. Add --first_round",
        ),
        (
            "--epsilon 1 --first_round full --first_round_noise_multiplier -1",
            "`first_round_noise_multiplier` must be at least 0 and finite, got -1.0",
        ),
        (
            "--epsilon 1 --first_round full --first_round_noise_multiplier inf",
            "`first_round_noise_multiplier` must be a finite number, got 'inf'",
        ),
        (
            "--epsilon 1 --first_round full --first_round_noise_multiplier 5 --participations 1",
            "`first_round_noise_multiplier` must be left out for a client with one participation and a budget, got 5.0",
        ),
        (
            "--epsilon 1 --first_round full --first_round_noise_multiplier 1",
            "`epsilon` must be above 4.17587, the cost of first_round with the given noise",
        ),
        (
            "--epsilon 1 --first_round full --first_round_noise_multiplier 0",
            "`epsilon` must be above the cost of first_round with the given noise, which is unbounded,",
        ),
        ("--epsilon 1 --selections -1", "`selections` must be at least 0, got -1"),
        ("--epsilon 1 --selections 2", "`selection_epsilon` must be a number if selections is above 0, got None"),
        ("--epsilon 1 --selection_epsilon 0.1", "`selections` must be at least 1 if selection_epsilon is given, got 0"),
        (
            "--epsilon 1 --selections 2 --selection_epsilon 0",
            "`selection_epsilon` must be above 0 and at most 1e6, got 0.0",
        ),
        (
            "--epsilon 1 --selections 2 --selection_epsilon 1e300",
            "`selection_epsilon` must be above 0 and at most 1e6, got 1e+300",
        ),
        (
            "--epsilon 1 --selections 2 --selection_epsilon 9",
            "`epsilon` must be above 45.9373, the cost of select with the given noise",
        ),
        (
            "--epsilon 1 --batch_size 2400 --accountant gdp --selections 1 --selection_epsilon 0.1",
            "`accountant` must be rdp or prv for selections",
        ),
        (
            "--epsilon 1 --mechanism laplace",
            "`batch_size` must be 2400 (num_records) with Laplace noise, got 128",
        ),
        ("--epsilon 1 --mechanism lapace", "`mechanism` must be gaussian or laplace, got 'lapace'. Did you mean"),
        ("--epsilon 1 --delta 0", "`delta` must be in (0, 1), got 0.0"),
        ("--epsilon 1 --adjacency swap", "`adjacency` must be one of add_remove, replace_one, got 'swap'"),
        ("--epsilon inf", "`epsilon` must be a finite number, got 'inf'"),
        ("--noise_multiplier inf", "`noise_multiplier` must be a finite number, got 'inf'"),
        ("--epsilon 1e-300", "`epsilon` must be above 0.001251, the least that rdp can certify"),
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
        caveats=("data sizes are public",),
        clients=types.SimpleNamespace(unprotected=()),
        population=types.SimpleNamespace(num_records=(100, 100)),
        describe=lambda: ["both take part in every round"],
        plan_schedule=lambda: types.SimpleNamespace(clients=schedules),
    )
    monkeypatch.setattr("dpfl_lightning.build.build_loop", lambda options: loop)
    monkeypatch.setattr(
        "dpfl_lightning.config.load.load", lambda words, *_, **__: (None, types.SimpleNamespace(json=True))
    )
    assert main(["--config=any.yaml", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text.splitlines()[-1])
    assert found["notes"] == ["both take part in every round"] == text.splitlines()[-2:-1]
    rows = found["clients"]
    assert [row["client"] for row in rows] == [0, 1]
    assert [row["epsilon_budget"] for row in rows] == [2.0, None]
    assert rows[0]["steps"] == 91 and rows[0]["sample_rate"] == 0.1 and rows[0]["noise_multiplier"] == 3.0
    assert rows[0]["epsilon"] == rdp.epsilon(schedules[0].events(), 1e-5)
    assert rows[0]["planned"][0] == {
        "purpose": "first_round",
        "count": 1,
        "event": {"sample_rate": 1.0, "noise_multiplier": 5.0, "steps": 1},
        "epsilon_alone": rdp.epsilon([GaussianEvent(1.0, 5.0)], 1e-5),
    }
    assert "1 first_round, 9 train" in text
    assert "Schedule of client 1, which has it:" in text and "Epsilon alone is" in text
    assert "Largest epsilon: (" in text and "Poisson sampling" in text and "Caveat: data sizes are public." in text


def test_columns_line_up():
    assert command._columns([["a", "bc"], [10, 2]]) == " a  bc\n10   2"


def test_a_plan_says_what_the_runs_guarantee_would(capsys):
    oracle = "{noise_aware: {estimator: oracle}}"
    conf = Path(__file__).parents[1] / "conf" / "digits.yaml"
    assert main(["--config", str(conf), "--strategies", oracle]) == 0
    assert "Caveat: a simulation: strategy noise_aware (oracle)" in capsys.readouterr().out
