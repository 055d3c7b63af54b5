"""Tables of federations over Flower from saved results."""

from __future__ import annotations

from typing import Any

from dpfl_lightning.runtime.text import at_most
from experiments.pages import markdown

_PLACES = {
    "simulation": "simulation",
    "sockets": "nodes at Unix sockets",
    "flower": "nodes behind Flower",
    "minimal": "Flower alone: FedAvg of an array that nobody trains",
}
_CASES = {
    "supernode": "SuperNode of one site killed",
    "node": "node of one site killed",
    "superlink": "SuperLink killed",
    "refusal": "one site withdraws after round 1",
}


def speed_table(found: dict[str, Any]) -> str:
    """Seconds a round by place, and what else was seen in the run over Flower."""
    rows = [
        [words, f"{found[name]['seconds']:.0f}", f"{found[name]['load']:.0f}"]
        for name, words in _PLACES.items()
        if name in found
    ]
    table = markdown(["three sites, Fashion-MNIST", "seconds a round", "load of the machine"], rows)
    if (one := found.get("flower")) is None:
        return table
    same = "equal" if one["equal"] and one["ledgers_equal"] else "not equal"
    spent = ", ".join(map(at_most, one["epsilons"]))
    tracking, memory = one["tracking"], {name: size / 2**20 for name, size in one["memory"].items()}
    return (
        f"{table}\n\nModel ({one['parameters']:,} parameters) and ledgers of the run over Flower are {same} to those "
        f"of the simulation. Its sites have spent epsilon {spent}. MLflow has {tracking['parameters']} parameters, "
        f"{tracking['metrics']} metrics and {tracking['artifacts']} artifacts of it. A node needed "
        f"{memory['node']:.0f} MiB of memory at most, its SuperNode {memory['supernode']:.0f} MiB."
    )


def failures_table(found: dict[str, Any]) -> str:
    """What was lost, how the run ended, what was charged, and whether the resumed run equals the simulation."""
    rows = []
    for name, words in _CASES.items():
        if (one := found.get(name)) is None:
            continue
        if name == "refusal":
            end, then, after = "the run goes on without it", "-", "-"
        else:
            end = f"the run ends after {one['seconds_until_the_run_ended']:.0f} s"
            then = _counts(one["charged_then"])
            after = "equal" if one["equal"] and one["ledgers_equal"] else "not equal"
        rows.append([words, end, then, _counts(one["charged_in_the_end"]), after])
    titles = ["lost in round 2 of 3", "what happens", "releases charged then", "in the end", "beside the simulation"]
    return markdown(titles, rows)


def _counts(charged: list[int]) -> str:
    return ", ".join(map(str, charged))
