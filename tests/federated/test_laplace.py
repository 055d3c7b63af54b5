"""Runs with Laplace noise: pure budgets, spent to the last, and what cannot go together."""

import json

import pytest

from dpfl_lightning.commands.ledger import main as ledger
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.events import LaplaceEvent
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.mechanism import Laplace

FULL = ClientOptions(count=4, batch_size=None, learning_rate=0.3)


def laplace(**more) -> PrivacyOptions:
    return PrivacyOptions(**{"epsilon": [4.0, 6.0, 8.0, 10.0], "delta": 0.0, "mechanism": "laplace", **more})


@pytest.mark.parametrize(("adjacency", "sensitivity"), [("add_remove", 1), ("replace_one", 2)])
def test_a_run_spends_pure_budgets(adjacency, sensitivity, make_loop, capsys):
    loop = make_loop(privacy=laplace(adjacency=adjacency), clients=FULL)
    result = loop.run()
    rows = zip([4.0, 6.0, 8.0, 10.0], result.clients, loop.clients.budgets.guarantees(), strict=True)
    for budget, row, promise in rows:
        assert budget * (1 - 1e-5) <= row["epsilon_spent"] <= budget and row["delta"] == 0
        assert promise.accountant == "addition of pure epsilons" and f"({budget:g}, 0)-diff" in promise.words()
        assert row["noise_multiplier"] == pytest.approx(3 * sensitivity / budget, rel=1e-5)
        mechanism = Laplace(1.0, row["noise_multiplier"], 1.0, float(row["num_records"]))
        assert row["noise_std"] == pytest.approx(mechanism.noise_std(1, 0.3)), "the divisor is the number of records"
    events = {charge.event for charge in read_ledger(loop.clients.folder.ledger_file) if charge.client == 0}
    assert events == {LaplaceEvent(result.clients[0]["noise_multiplier"], 1)}
    assert ledger([str(loop.output_dir), "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [c["epsilon"] for c in again["clients"]] == [c["epsilon_spent"] for c in result.clients]
    assert again["guarantee"]["accountant"] == "addition of pure epsilons"


def test_what_does_not_go_together_is_one_sentence(make_loop):
    must_be_full = r"`clients\.batch_size` must be null \(all \d+ of client 0's records\) with Laplace noise, got 16"
    gaussian = PrivacyOptions(epsilon=1.0, delta=0.0)
    for clients, privacy, words in (
        (ClientOptions(count=4, batch_size=16), laplace(), must_be_full),
        (FULL, gaussian, r"`privacy\.delta` must be in \(0, 1\) with Gaussian noise"),
    ):
        with pytest.raises(UserError, match=words):
            make_loop(privacy=privacy, clients=clients).run()
