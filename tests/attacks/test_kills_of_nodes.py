"""Nodes of sites and their server are killed: each release is paid for before it leaves, and nothing is lost or counted
twice.
"""

import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from killed_nodes import EPSILON, ROUNDS, Federation, Site, charged, ledger_lines
from oracle import lower_bound, upper_bound

from dpfl_lightning.privacy.accounting.events import Release
from dpfl_lightning.privacy.ledger.file import charges_of
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.ledger.operator import OperatedAccount
from dpfl_lightning.sites.node.state import StateFolder
from dpfl_lightning.sites.receipt import read_receipts

pytestmark = pytest.mark.e2e

KILLS = int(os.environ.get("DPFL_KILLS_OF_COMMANDS", 3))  # of nodes and their server; the full count is 60
KILLS_OF_A_STUDY = 8


@pytest.mark.parametrize("kills", [pytest.param(KILLS), pytest.param(max(KILLS, 60), marks=pytest.mark.slow)])
def test_killed_nodes_and_servers_pay_once_for_all_that_left_the_site(kills, tmp_path, monkeypatch):
    seed, made = time.time_ns(), Counter[str]()
    moments = random.Random(seed)
    while made["node"] + made["server"] < kills:
        left = kills - made["node"] - made["server"]
        federation = Federation(tmp_path / str(left), moments)
        runs = [federation.study(f"study{number}", kills) for number, kills in enumerate(divided(left))]
        runs.append(federation.study("last", 0))  # in which the nodes open all plans again
        federation.close()
        made.update(federation.kills)
        for client, site in enumerate(federation.sites.values()):
            for name, value in site.environment.items():
                monkeypatch.setenv(name, value)
            assert not site.faults
            federation.done(["node", "verify", str(site.state)], site)
            check_account(site)
            check_servers(site, client, runs)
            check_epsilon(site, len(runs))
    print(f"{dict(made)}, moments of seed {seed}")


def divided(kills: int) -> list[int]:
    """The kills of each of at most three studies."""
    return [
        min(KILLS_OF_A_STUDY, kills - before) for before in range(0, min(kills, 3 * KILLS_OF_A_STUDY), KILLS_OF_A_STUDY)
    ]


def check_account(site: Site) -> None:
    """Account, ledgers and signed heads say the same, and a ledger that is added again adds nothing."""
    account, ledgers = OperatedAccount(site.account), site.ledgers()
    before = charged(site.account)
    assert before == ledgers, "the same lines in the same order, and no other run"
    for run, lines in ledgers.items():
        chains = [line["chain"] for line in lines]
        assert len(set(chains)) == len(chains)
        assert all(chains[count - 2] == chain for chain, count in site.heads[run].items() if count > 1)
    for file in site.state.glob("plans/*/ledger.jsonl"):
        assert account.add(file) == 0
    assert charged(site.account) == before
    charges = {run: [charge for line in lines for charge in charges_of(line)] for run, lines in ledgers.items()}
    paid = {run: Counter(charge.event for charge in of_run) for run, of_run in charges.items()}
    assert {run: sum(counts.values(), Counter()) for run, (_, counts) in account._runs.items()} == paid


def check_servers(site: Site, client: int, runs: list[Path]) -> None:
    """What the servers know of a client is what its account says, and their runs are complete."""
    assert all(json.loads((run / "result.json").read_text())["rounds"] == ROUNDS for run in runs)
    of_site = [charge for lines in charged(site.account).values() for line in lines for charge in charges_of(line)]
    told = [
        charge
        for run in runs
        for line in ledger_lines(run / "ledger.jsonl")
        for charge in charges_of(line)
        if charge.client == client
    ]
    assert Counter(told) == Counter(of_site)
    chains = {line["chain"] for lines in charged(site.account).values() for line in lines}
    assert all(read_receipts(run)[client].ledger.chain in chains for run in runs)
    releases = Counter(round for _, round in site.releases for _ in site.releases[_, round])
    paid = Counter(charge.round for charge in of_site)
    assert releases <= paid, "each release is paid for"


def check_epsilon(site: Site, studies: int) -> None:
    """The epsilon of the account is between those of what was received and of what was charged; plans reserve more."""
    state, (holder,) = StateFolder(site.state), OperatedAccount(site.account).holders()
    received, paid = list[Release](), list[Release]()
    for plan in state.plans():
        charges = read_ledger(state.plan_folder(plan) / "ledger.jsonl")
        (event,) = {charge.event for charge in charges}
        received.append(event.repeated(sum(len(some) for (of, _), some in site.releases.items() if of == plan)))
        paid.append(event.repeated(len(charges)))
    delta = holder.together.delta
    assert lower_bound(received, delta) <= holder.together.epsilon <= upper_bound(paid, delta) * 1.001
    assert len(state.plans()) == holder.together.runs == studies and not any(
        one.withdrawn for one in state.plans().values()
    )
    assert all(one.begun and one.epsilon <= EPSILON for one in state.plans().values())
    assert holder.together.epsilon <= state.reserved()[0] <= EPSILON * studies
