"""`dpfl noise` and `dpfl plan`: both directions, JSON, a whole run, and one sentence for every mistake."""

import json
import math
from pathlib import Path

import pytest

from dpfl_lightning.commands.noise import main, plan
from dpfl_lightning.commands.plan import main as plan_command
from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import GaussianEvent

CLIENT = ["--num_records", "2400", "--batch_size", "128", "--rounds", "10", "--delta", "1e-4"]


@pytest.fixture
def shown(capsys):
    """`shown(*words)`: the text; with `--json` among the words both the text and the JSON, which is printed alone."""

    def output_of(*words: str):
        assert main(list(words)) == 0
        text = capsys.readouterr().out
        if "--json" not in words:
            return text
        return output_of(*(word for word in words if word != "--json")), json.loads(text)

    return output_of


def test_noise_and_epsilon_are_each_computed_from_the_other(shown):
    _, forth = shown(*CLIENT, "--epsilon", "2", "--json")
    assert forth["steps"] == 10 * math.ceil(2400 / 128) == 190
    assert forth["sample_rate"] == 128 / 2400 and forth["accountant"] == "pld" and 1.995 < forth["epsilon"] <= 2
    text, back = shown(*CLIENT, f"--noise_multiplier={forth['noise_multiplier']}", "--json")
    assert back == forth
    for words in ("noise multiplier", "190 (10 rounds", "per record", "add or remove one record", "Poisson-sampled"):
        assert words in text
    assert "PLD (dp_accounting" in text


def test_golden_value_both_ways():
    """Opacus: rate 0.04, noise 1.5, 2250 steps, delta 1e-5."""
    size = {"num_records": 25, "batch_size": 1, "rounds": 90, "delta": 1e-5, "accountant": "rdp"}
    assert plan(**size, noise_multiplier=1.5).guarantee.epsilon == pytest.approx(7.32911117143, abs=1e-6)
    assert plan(**size, epsilon=7.32912).noise_multiplier == pytest.approx(1.5, rel=2e-4)


def test_full_batches_of_several_epochs():
    full = plan(num_records=100, batch_size=100, rounds=4, local_epochs=3, delta=1e-5, epsilon=1.0)
    assert (full.steps, full.sample_rate, full.guarantee.sampling) == (12, 1.0, "full batches")
    assert full.noise_multiplier == pytest.approx(3.730632 * math.sqrt(12), rel=2e-4)


def test_missing_privacy_and_a_fallback_are_named(shown):
    _, result = shown(*CLIENT, "--noise_multiplier", "0", "--json")
    assert result["epsilon"] is None and result["guarantee"].startswith("No differential privacy")
    loud = [*CLIENT, "--noise_multiplier", "0.05", "--json"]
    assert "because epsilon is above 100" in shown(*loud)[1]["guarantee"]


# ---- rounds of several kinds: the clustered paper's setting, and the numbers of its tables


def clustered(epsilon, **more):
    """6600 records, batches of 32, 200 rounds, one local epoch, delta 1e-4, RDP as in the tables."""
    usual = {"num_records": 6600, "batch_size": 32, "rounds": 200, "delta": 1e-4, "accountant": "rdp"}
    return plan(epsilon=epsilon, **{**usual, **more})


def rounded(value, decimals):
    """To the nearest; noise is rounded up at its seventh digit, which can reach the next printed one."""
    return {f"{value:.{decimals}f}", f"{value * (1 - 2e-6):.{decimals}f}"}


@pytest.mark.parametrize(
    ("epsilon", "without", "same_noise", "alone", "noise_of_five"),
    [
        (2, "2.0005", "2.7065", "1.34", "2.1374"),
        (3, "1.4846", "1.9335", "1.95", "1.5255"),
        (4, "1.2295", "1.5436", "2.53", "1.2469"),
        (5, "1.0784", "1.3104", "3.05", "1.0873"),
        (10, "0.7801", "0.8576", "5.01", "0.7809"),
    ],
)
def test_what_a_full_first_round_costs(epsilon, without, same_noise, alone, noise_of_five):
    plain = clustered(epsilon)
    assert without in rounded(plain.noise_multiplier, 4) and plain.steps == 41_400
    full = clustered(epsilon, first_round="full")
    assert same_noise in rounded(full.noise_multiplier, 4) and full.steps == 1 + 41_193
    assert full.schedule.noise_multiplier("first_round") == full.noise_multiplier
    assert alone in rounded(full.epsilon_alone[0], 2)
    apart = clustered(epsilon, first_round="full", first_round_noise_multiplier=5.0)
    assert noise_of_five in rounded(apart.noise_multiplier, 4)
    assert apart.schedule.noise_multiplier("first_round") == 5.0
    for planned in (plain, full, apart):
        assert 0.999 * epsilon < planned.guarantee.epsilon <= epsilon


def test_selections_are_composed_with_training():
    for epsilon, noise, alone in ((5, "1.359", "1.20"), (2, "2.795", "0.43")):
        joint = clustered(epsilon, first_round="full", selections=20, selection_epsilon=0.03 * epsilon)
        assert noise in rounded(joint.noise_multiplier, 3)
        assert [line.purpose for line in joint.schedule.planned] == ["first_round", "select", "train"]
        assert alone in rounded(joint.epsilon_alone[1], 2) and "20 selections" in joint.guarantee.covers


EVERYTHING = {
    **{"first_round": "full", "first_round_noise_multiplier": 6.0, "selections": 7, "selection_epsilon": 0.05},
    **{"participations": 12, "steps": 3, "local_epochs": 2},
}


@pytest.mark.e2e
@pytest.mark.parametrize("judge", [("rdp", "add_remove"), ("rdp", "replace_one"), ("pld", "replace_one")])
@pytest.mark.parametrize("left_out", [(), ("first_round_noise_multiplier",), ("selections", "selection_epsilon")])
def test_all_options_together_in_both_directions(judge, left_out):
    more = {key: value for key, value in EVERYTHING.items() if key not in left_out}
    more |= dict(zip(("accountant", "adjacency"), judge, strict=True))
    more |= {"num_records": 2400, "batch_size": 64, "rounds": 30, "delta": 1e-4}
    forth = plan(**more, epsilon=3.0)
    counts = {line.purpose: (line.count, getattr(line.event, "steps", None)) for line in forth.schedule.planned}
    assert counts["first_round"] == (1, 2) and counts["train"] == (11, 3) and forth.steps == 2 + 33
    back = plan(**more, noise_multiplier=forth.noise_multiplier)
    assert back.guarantee == forth.guarantee and 2.99 < back.guarantee.epsilon <= 3.0
    assert back.schedule.events() == forth.schedule.events() and back.as_dict() == forth.as_dict()


def test_the_text_has_every_line_and_its_price(shown):
    words = "--epsilon 2 --first_round full --first_round_noise_multiplier 5 --selections 3 --selection_epsilon 0.1"
    text = shown(*CLIENT, *words.split(), "--participations", "6", "--steps", "4")
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["first_round"][1:5] == ["1", "1", "5", "1"] and rows["select"][1:5] == ["3", "1", "10", "(Gumbel)"]
    assert get_accountant("pld").epsilon([GaussianEvent(1.0, 5.0)], 1e-4) == float(rows["first_round"][5])
    assert "together they cost 2." in text and "Not covered: test and held-out records" in text


def test_laplace_noise_has_pure_budgets(shown):
    """Ten releases share a budget of 2: scale 5; replaced records move a sum twice as far."""
    full = "--num_records 100 --batch_size 100 --rounds 10 --delta 0 --mechanism laplace --json"
    text, result = shown(*full.split(), "--epsilon", "2")
    assert "Laplace scale / clip norm" in text and "(2, 0)-differential privacy" in text
    assert result["noise_multiplier"] == pytest.approx(5.0, rel=1e-6) and result["steps"] == 10
    _, replaced = shown(*full.split(), "--noise_multiplier", "5", "--adjacency", "replace_one")
    assert replaced["epsilon"] == pytest.approx(4.0, abs=2e-6)


@pytest.mark.parametrize("key", ["epsilon", "noise_multiplier", "delta", "first_round_noise_multiplier"])
def test_infinity_and_nan_are_refused_in_python_too(key):
    usual = {"num_records": 100, "batch_size": 10, "rounds": 3, "delta": 1e-5, "first_round": "full"}
    usual |= {} if key == "noise_multiplier" else {"epsilon": 1.0}
    for value in (math.inf, math.nan, -math.inf):
        with pytest.raises(UserError, match=f"`{key}` must be"):
            plan(**{**usual, key: value})


def test_a_large_delta_warns():
    with pytest.warns(UserWarning, match="`delta` should be below 1 / num_records = 0.01, got 0.05"):
        plan(num_records=100, batch_size=10, rounds=1, delta=0.05, epsilon=1.0)


FULL = "--epsilon 1 --first_round full --first_round_noise_multiplier"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "`epsilon` must be a number, got None. Give epsilon to find the noise"),
        ("--epsilon 1 --noise_multiplier 1", "`epsilon` must be left out if noise_multiplier is given, got 1.0"),
        ("--epsilon 0", "`epsilon` must be above 0 and finite, got 0.0"),
        ("--epsilon x", "`--epsilon` must be a number, got 'x'"),
        ("--epsilon 1e-4 --accountant rdp", "`epsilon` must be above 0.001251, the least that rdp can certify at"),
        ("--noise_multiplier -1", "`noise_multiplier` must be at least 0 and finite, got -1.0"),
        ("--epsilon 1 --delta 0", "`delta` must be in (0, 1), got 0.0. It is usually below 1 / num_records"),
        ("--epsilon 1 --batch_size 2401", "`batch_size` must be in 1..2400 (num_records), got 2401. A batch of 2400"),
        ("--epsilon 1 --rounds 1.5", "`--rounds` must be a whole number, got '1.5'"),
        ("--epsilon 1 --steps 5 --local_epochs 2", "`local_epochs` must be left out if steps is given, unless"),
        ("--epsilon 1 --participations 11", "`participations` must be in 1..10 (rounds), got 11"),
        ("--epsilon 1 --first_round half", "`first_round` must be full or left out, got 'half'"),
        ("--epsilon 1 --first_round_noise_multiplier 5", "must be left out unless first_round is full, got 5.0. Add"),
        (f"{FULL} 5 --participations 1", "must be left out for a client with one participation and a budget, got 5.0"),
        (f"{FULL} 1", "the cost of first_round with the given noise at delta 0.0001, got 1. Raise it"),
        (f"{FULL} 0", "`epsilon` must be above the cost of first_round with the given noise, which is unbounded,"),
        ("--epsilon 1 --selections 2", "`selection_epsilon` must be a number if selections is above 0, got None"),
        ("--epsilon 1 --selections 2 --selection_epsilon 0", "`selection_epsilon` must be above 0 and at most 1e6"),
        ("--epsilon 1 --selections 2 --selection_epsilon 9", "above 17.861, the cost of select with the given noise"),
        ("--epsilon 1 --mechanism laplace", "`batch_size` must be 2400 (num_records) with Laplace noise, got 128"),
        ("--epsilon 1 --mechanism lapace", "`mechanism` must be gaussian or laplace, got 'lapace'. Did you mean"),
        ("--epsilon 1 --adjacency swap", "`adjacency` must be one of add_remove, replace_one, got 'swap'"),
        ("--epsilon 1 --round 3", "`--round` must be a known flag. Did you mean `--rounds`?"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(capsys, words, message):
    assert main([*CLIENT, *words.split()]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ") and message in output.err and output.err.count("\n") == 1
    assert output.out == ""


def test_a_plan_counts_persons_if_they_are_known(capsys):
    words = ["--config", "digits", "--privacy.accountant", "rdp", "--data.records_per_person", "4"]
    assert plan_command([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["clients"]
    assert all(row["num_persons"] == math.ceil(row["num_records"] / 4) for row in rows)
    assert plan_command(words) == 0
    assert "client  records  persons  batch" in capsys.readouterr().out


def test_a_plan_names_the_caveats_of_the_run(capsys):
    conf = Path(__file__).parents[1] / "conf" / "digits.yaml"
    assert plan_command(["--config", str(conf), "--strategies", "{robust_hdp: {estimator: oracle}}"]) == 0
    assert "Caveat: a simulation: strategy robust_hdp (oracle)" in capsys.readouterr().out
