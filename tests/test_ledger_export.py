"""`dpfl ledger --export`: dp_accounting composes the file without this package (program in `docs/ledger.md`)."""

import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import small_loop
from few_digits import digits
from scipy.special import ndtri
from torch import nn

from dpfl_lightning.commands.ledger import main
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.accounting.events import (
    GaussianEvent,
    LaplaceEvent,
    NonPrivateEvent,
    SelectionEvent,
    dominating_gaussian,
)
from dpfl_lightning.privacy.ledger.export import as_dp_event
from dpfl_lightning.privacy.ledger.file import Charge, Header
from dpfl_lightning.privacy.ledger.ledger import Ledger

pytest.importorskip("dp_accounting")
DELTA = 1e-4


def program() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "docs" / "ledger.md").read_text(), re.S)
    assert "dpfl_lightning" not in found and found.count("\n") <= 25
    return found


def epsilons_in(output: str) -> dict[str, dict[str, float]]:
    """The epsilons that the documented program prints, by client and accountant."""
    epsilons: dict[str, dict[str, float]] = {}
    for line in output.splitlines():
        client, accountant, epsilon, _, reported = line.split()
        epsilons.setdefault(client, {})[accountant] = float(epsilon)
        epsilons[client]["reported"] = math.inf if reported == "None" else float(reported)
    return epsilons


@pytest.mark.e2e
def test_a_real_run_is_recomputed_without_this_package(tmp_path):
    """Orders at which dp_accounting's series does not converge make its RDP larger; these clients' noise is large."""
    run, file = tmp_path / "run", tmp_path / "dp_events.json"
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    privacy = PrivacyOptions(epsilon=[1.0, 1.5], delta=1e-3)
    clients = ClientOptions(count=2, batch_size=4)
    population = digits([[9, 30, 50], [20, 8, 40]])
    small_loop(population, ClientModule(net), rounds=3, clients=clients, privacy=privacy, output_dir=run).run()
    assert main([str(run), "--export", str(file)]) == 0
    code = f"import sys; sys.modules['dpfl_lightning'] = None\n{program()}"
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result, content, epsilons = (
        json.loads((run / "result.json").read_text()),
        json.loads(file.read_text()),
        epsilons_in(done.stdout),
    )
    assert list(epsilons) == ["0", "1"] == [row["client"] for row in content["clients"]]
    for row in result["clients"]:
        found = epsilons[str(row["client"])]
        assert found["reported"] == row["epsilon_spent"]
        assert 0 < found["PLDAccountant"] <= found["reported"] + 1e-3
        if content["accountant"] == "rdp":
            assert found["RdpAccountant"] == pytest.approx(found["reported"], abs=1e-3)
    assert content["ledgers"][0]["chain"] == result["ledger"]["chain"]


SAMPLED, FULL = GaussianEvent(0.1, 1.5, 20), GaussianEvent(1.0, 8.0, 5)
LAPLACE, CHOICE = LaplaceEvent(30.0, 4), SelectionEvent(0.2, 3)
KINDS = {
    "sampled": [SAMPLED],
    "full": [FULL, FULL],
    "laplace": [LAPLACE],
    "choices": [CHOICE],
    "all": [SAMPLED, FULL, LAPLACE, CHOICE],
    "nothing": [],
    "without noise": [SAMPLED, NonPrivateEvent("losses")],
    "noise 0": [GaussianEvent(0.1, 0.0)],
}


@pytest.mark.e2e
@pytest.mark.parametrize("adjacency", ["add_remove", pytest.param("replace_one", marks=pytest.mark.e2e)])
def test_every_kind_of_release_has_a_valid_bound(adjacency, tmp_path, monkeypatch, capsys):
    file, clients = tmp_path / "dp_events.json", len(KINDS)
    ledger = Ledger(tmp_path / "l.jsonl", Header("rdp", adjacency, "poisson", (DELTA,) * clients, (9.0,) * clients))
    for client, events in enumerate(KINDS.values()):
        ledger.charge([Charge(client, 1, "any", event, number) for number, event in enumerate(events)])
    ledger.close()
    assert main([str(ledger.path), "--export", str(file)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["program", str(file)])
    exec(program(), {})
    for kind, found in zip(KINDS, epsilons_in(capsys.readouterr().out).values(), strict=True):
        ours = get_accountant("rdp", adjacency).epsilon(KINDS[kind], DELTA)
        assert found.pop("reported") == ours and found, kind
        if kind in ("nothing", "without noise", "noise 0"):
            assert set(found.values()) == {ours}, kind
            continue
        if "PLDAccountant" in found and not {*KINDS[kind]} & {CHOICE, LAPLACE}:
            assert found["PLDAccountant"] <= ours + 1e-3, kind
        sampled_and_replaced = adjacency == "replace_one" and SAMPLED in KINDS[kind]
        assert ("RdpAccountant" in found) == (not sampled_and_replaced), kind
        if not sampled_and_replaced:  # pure epsilons add up to less, which their RDP does not know
            assert found["RdpAccountant"] == pytest.approx(ours, abs=1e-3) or found["RdpAccountant"] > ours, kind
        assert min(found.values()) <= 1.3 * ours, kind


@pytest.mark.parametrize("loss_range", [1e-3, 0.2, 1.0, 5.0, 20.0])
def test_the_gaussian_mechanism_for_a_choice_dominates_every_binary_one_of_its_range(loss_range):
    """Its mu is at least the difference of the quantiles at the corner of each mechanism with two losses."""
    mu = 2 / dominating_gaussian(loss_range)["noise_multiplier"]
    t = np.linspace(0, loss_range, 2001)[1:-1]
    p = (np.exp(loss_range) - np.exp(t)) / np.expm1(loss_range)
    corners = ndtri(p) - ndtri(p * np.exp(-t))
    assert np.abs(corners).max() <= mu * (1 + 1e-6) + 1e-9
    assert np.abs(corners).max() >= mu * (1 - 1e-3)


def test_the_file_has_the_fields_of_a_named_tuple():
    from dp_accounting import dp_event

    _, event = as_dp_event([SAMPLED], DELTA, "add_remove")
    inner = dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(1.5))
    native = dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(inner, 20)]).to_named_tuple()

    def as_dict(value):
        if hasattr(value, "_asdict"):
            return {key: as_dict(item) for key, item in value._asdict().items()}
        return [as_dict(item) for item in value] if isinstance(value, list) else value

    assert as_dict(native) == event


def test_it_never_replaces_a_file(tmp_path, capsys):
    ledger = Ledger(tmp_path / "ledger.jsonl", Header("rdp", "add_remove", "poisson", (DELTA,), (1.0,)))
    for name, free in {"ledger.jsonl": False, "ledger.head": False, "no/folder.json": False, "new.json": True}.items():
        assert main([str(tmp_path), "--export", str(tmp_path / name)]) == (0 if free else 2)
        assert free or "`--export` must be a new file in an existing folder" in capsys.readouterr().err
    ledger.close()


def test_several_runs_are_exported_together(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        ledger = Ledger(tmp_path / name / "ledger.jsonl", Header("rdp", "add_remove", "poisson", (DELTA,), (1.0,)))
        ledger.charge([Charge(0, 1, "train", FULL)])
        ledger.close()
    file = tmp_path / "both.json"
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--export", str(file)]) == 0
    content = json.loads(file.read_text())
    ((part,),) = (row["event"]["events"] for row in content["clients"])
    assert part["count"] == 10 and len(content["ledgers"]) == 2
    assert list(itertools.chain(content)) == ["about", "adjacency", "accountant", "ledgers", "clients"]
