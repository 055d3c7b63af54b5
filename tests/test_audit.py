"""The command: its output and status, what it refuses, which clients it audits, and what its page shows."""

import dataclasses
import json
from pathlib import Path

import audit_mutants
import mutants
import pytest

from dpfl_lightning.auditing.report import text
from dpfl_lightning.auditing.run import audit
from dpfl_lightning.auditing.target import subjects
from dpfl_lightning.commands.audit import main
from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.privacy.accounting.events import SelectionEvent
from dpfl_lightning.privacy.accounting.planned import Planned

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[1]
DIGITS = ["--config", str(ROOT / "conf" / "digits.yaml")]
SURE = ["--confidence", "0.9999", "--releases", "30", "--rounds", "2"]  # a sound build: refuted once in 10,000 runs


@pytest.fixture
def one_engine(monkeypatch):
    """Sums of the others are compared in `tests/auditing`."""
    monkeypatch.setattr("dpfl_lightning.auditing.run.ENGINES", ["fast"])


def test_json_is_printed_alone_and_nothing_is_refuted(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DPFL_ACCOUNT", str(tmp_path / "account.jsonl"))
    assert main([*DIGITS, *SURE, "--for_clients", "0", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (client,) = result["clients"]
    assert client["client"] == 0 and result["refuted"] == [] and result["confidence"] == 0.9999
    assert client["claim"]["steps"] == 18 and 0 < client["claim"]["epsilon"] <= 2
    findings = client["findings"]
    assert [finding["check"] for finding in findings].count("sensitivity") == 3
    bounds = {one["check"]: one["figures"]["epsilon_low"] for one in findings if "epsilon_low" in one["figures"]}
    assert list(bounds) == ["grid", "canary", "round", "one run", "one run's curve"]
    out = text(result)
    assert out.startswith("Client 0 claims epsilon 2 at delta 0.001 (add or remove one record, pld): 18 steps")
    width = max(len(line) for line in out.splitlines() if line.lstrip().startswith(("check ", "canary ", "round ")))
    assert "sensitivity" in out and width <= 80
    assert "proves nothing" in out and "REFUTED" not in out
    assert not (tmp_path / "account.jsonl").exists(), "random records are charged to nobody"


def test_a_broken_build_has_status_1_and_is_told(capsys, monkeypatch, one_engine):
    mutants.half_the_noise(monkeypatch)
    assert main([*DIGITS, *SURE, "--for_clients", "3"]) == 1
    out = capsys.readouterr().out
    assert "REFUTED: " in out and "client 3: noise" in out and "This build does not keep its claimed epsilon." in out
    assert "proves nothing" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--privacy null", "`privacy` must be a mechanism to audit, got None."),
        ("--for_clients 5", "`--for_clients` must be all, or clients of 0, 1, 2, 3, 4, got '5'."),
        ("--confidence 1", "`--confidence` must be in (0, 1), got 1.0."),
        ("--releases 1", "`--releases` must be at least 2, got 1."),
        ("--for_client all", "`--for_client` must be a known key or flag. Did you mean `--for_clients`?"),
        ("--rounds 0", "`rounds` must be a whole number in [1, 1e6], got 0."),
    ],
)
def test_a_mistake_is_one_sentence(words, message, capsys):
    assert main([*DIGITS, *words.split()]) == 2
    out, err = capsys.readouterr()
    *progress, line = err.splitlines()
    assert line.startswith("error: ") and message in line and not out
    assert all(words.startswith("solving noise multipliers") for words in progress), "only on a slow machine"


@pytest.mark.parametrize("noise", ["0", "[0,0,0,0,0]"])
def test_a_run_without_a_claim_is_not_audited(noise, capsys):
    assert main([*DIGITS, "--privacy.epsilon", "null", "--privacy.noise_multiplier", noise, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    out = text(result)
    assert "Not audited: client 4: it claims no epsilon, because it releases nothing, or releases without noise." in out
    assert result["clients"] == []


# ---- which clients and releases are audited


def test_two_clients_are_audited_unless_clients_are_named(make_loop):
    budgets = PrivacyOptions(epsilon=[6.0, 3.0, 9.0, 5.0], delta=1e-3)
    targets, left_out = subjects(make_loop(privacy=budgets), None)
    assert [target.client for target in targets] == [1, 2] and left_out == []
    assert [target.client for target in subjects(make_loop(privacy=budgets), [3, 0])[0]] == [3, 0]
    noises = PrivacyOptions(noise_multiplier=[1.0, 0.0, 3.0, 2.0], delta=1e-3)
    targets, left_out = subjects(make_loop(privacy=noises), None)
    assert [target.client for target in targets] == [2, 0] and "client 1: it claims no epsilon" in left_out[0]


class Asks(Strategy):
    """A strategy that also plans what is not training, and a first round of another kind."""

    def plan_run(self, schedule, view):
        def more(client, planned):
            event = dataclasses.replace(planned.planned[0].event, sample_rate=1.0, steps=1)
            extra = (Planned("select", SelectionEvent(0.1), 2), Planned("first_round", event, 1))
            return dataclasses.replace(planned, planned=(*planned.planned, *extra))

        return schedule.replan(more)


def test_what_is_not_training_is_named_and_what_is_is_claimed(make_loop):
    loop = make_loop(parts=[Asks()])
    ((subject,), left_out) = subjects(loop, [2])
    assert left_out == ["client 2: 2 releases of select"]
    assert [(one.purpose, one.count, one.planned.sample_rate) for one in subject.releases][1] == ("first_round", 1, 1.0)
    assert subject.main.purpose == "train"
    every = loop.config.accountant.epsilon(loop.schedule.clients[2].events(), 1e-3)
    assert 0 < subject.epsilon < every <= loop.config.settings[2].epsilon
    assert [event.steps for event in subject.events()] == [subject.main.all_steps, 1]


def test_a_replaced_record_counts_twice(make_loop):
    mus = [
        subjects(make_loop(privacy=PrivacyOptions(noise_multiplier=2.0, delta=1e-3, adjacency=adjacency)), [0])[0][0].mu
        for adjacency in ("add_remove", "replace_one")
    ]
    assert mus == [0.5, 1.0]


def test_a_simulation_is_not_said_to_have_fresh_noise(make_loop):
    results = audit(make_loop(), [0], only={"fresh noise", "answers"})
    assert [one["check"] for one in results["clients"][0]["findings"]] == ["answers"]
    assert any(
        "fresh noise: a simulation: its noise follows from privacy.noise_key" in words
        for words in results["not_audited"]
    )


# ---- docs


def test_the_page_shows_the_saved_figures():
    results = json.loads((ROOT / "experiments" / "results" / "audit.json").read_text())
    assert audit_mutants.PAGE.read_text() == audit_mutants.page(results), f"write it anew: {audit_mutants.COMMAND}"


def test_the_saved_audit_refutes_every_mutant_and_not_the_build():
    results = json.loads((ROOT / "experiments" / "results" / "audit.json").read_text())
    assert results["options"] == audit_mutants.CASES
    for case, builds in results["cases"].items():
        broken = audit_mutants.FOUND[case]
        assert set(builds) == {audit_mutants.SOUND, *broken}
        assert builds[audit_mutants.SOUND]["refuted"] == []
        for name, (_, expected) in broken.items():
            for client in builds[name]["clients"]:
                assert {f"client {client['client']}: {check}" for check in expected} <= set(builds[name]["refuted"])
