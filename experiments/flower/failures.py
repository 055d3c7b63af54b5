"""What happens to a run when a part of the federation is lost in the middle of a round, and after `--resume`."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpfl_lightning.loop import build_loop
from dpfl_lightning.privacy.ledger.ledger import Charge, read_ledger
from dpfl_lightning.sites.exchange import Terms
from dpfl_lightning.sites.node.state import StateFolder
from dpfl_lightning.sites.wire import digest
from experiments.flower.federation import SITES, TEST_KEY, Federation, options_of, wait_until
from experiments.flower.speed import same_model

#: a federation, the name of the run, the folder of the simulation and its ledger -> what happened
Case = Callable[[Federation, str, Path, list[Charge]], dict[str, Any]]

ROUNDS = 3
CONFIG = f"--config digits --rounds {ROUNDS} --clients.count 3 --privacy.epsilon [2,4,8] --tracking null"


def tried(case: Case, name: str, folder: Path) -> dict[str, Any]:
    """Return what happened in a case."""
    simulated = folder / "simulated"
    if not (simulated / "result.json").is_file():
        build_loop(options_of(f"{CONFIG} --privacy.noise_key {TEST_KEY} --output_dir {simulated}")).run()
    # Replies wait five seconds, so that a loss comes after the charge and before the reply.
    with Federation(folder / name, "digits", 5.0).running() as sites:
        return case(sites, name, simulated, read_ledger(simulated / "ledger.jsonl"))


def _loss(lose: Callable[[Federation], None], restore: Callable[[Federation], None]) -> Case:
    def case(sites: Federation, name: str, simulated: Path, expected: list[Charge]) -> dict[str, Any]:
        terms = sites.plan(CONFIG, name)
        arguments = f"{CONFIG} --plan {name}.json --node_wait 600"
        run = sites.fit(f"fit {name}", f"{arguments} --output_dir {name}")
        wait_until(lambda: len(sites.charges("berlin", terms)) == 2, "round 2 of berlin")
        lost = time.monotonic()
        lose(sites)
        wait_until(lambda: run.poll() is not None, "the end of the run")
        ended = time.monotonic() - lost
        charged = [len(sites.charges(site, terms)) for site in SITES]
        restore(sites)
        resume = f"--resume {name} --plan {name}.json --node_wait 600"
        status = wait_until(lambda: _finished(sites, name, resume), "the resumed run")
        return {
            "seconds_until_the_run_ended": round(ended, 1),
            "status": run.returncode,
            "error": _error(sites.log(f"fit {name}")),
            "charged_then": charged,
            "charged_in_the_end": [len(sites.charges(site, terms)) for site in SITES],
            "starts": status,
            "equal": same_model(simulated, sites.folder / name),
            "ledgers_equal": _equal(sites, terms, expected),
        }

    return case


def _finished(sites: Federation, name: str, resume: str) -> int:
    """Resume until the run is complete; return how many Flower runs this took."""
    for start in range(1, 6):
        sites.fit(f"resume {name}", resume).wait()
        result = sites.folder / name / "result.json"
        if result.is_file() and json.loads(result.read_text())["finished"]:
            return start
    raise RuntimeError(sites.log(f"resume {name}"))


def _refusal(sites: Federation, name: str, simulated: Path, expected: list[Charge]) -> dict[str, Any]:
    terms = sites.plan(CONFIG, name)
    run = sites.fit(f"fit {name}", f"{CONFIG} --plan {name}.json --output_dir {name}")
    wait_until(lambda: sites.charges("berlin", terms), "round 1 of berlin")
    state = StateFolder(sites.folder / "berlin")
    with state.locked():
        state.withdraw(digest(terms))
    status = run.wait()
    charged = [len(sites.charges(site, terms)) for site in SITES]
    warning = re.search(r"the node of client .*", sites.log(f"fit {name}"))
    return {"status": status, "charged_in_the_end": charged, "warning": warning and warning[0]}


def _equal(sites: Federation, terms: Terms, expected: list[Charge]) -> bool:
    return all(
        sites.charges(site, terms) == [one for one in expected if one.client == client]
        for client, site in enumerate(SITES)
    )


def _error(log: str) -> str | None:
    found = re.search(r"error: .*", log)
    return found[0] if found else None


_LOSSES: dict[str, Case] = {
    "supernode": _loss(lambda sites: sites.kill("supernode berlin"), lambda sites: sites.start_supernode("berlin")),
    "node": _loss(lambda sites: sites.kill("node berlin"), lambda sites: sites.start_node("berlin")),
    "superlink": _loss(lambda sites: sites.kill("link"), lambda sites: sites.start_superlink()),
    "refusal": _refusal,
}
CASES = {name: functools.partial(tried, case, name) for name, case in _LOSSES.items()}
