"""The tables of docs/howto/flower.md from saved results."""

from __future__ import annotations

from typing import Any

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
    rows = [f"| {words} | {found[name]:.1f} |" for name, words in _PLACES.items()]
    same = "equal" if found["equal"] and found["ledgers_equal"] else "not equal"
    spent = ", ".join(f"{one:.3g}" for one in found["epsilons"])
    tracking, memory = found["tracking"], {name: size / 2**20 for name, size in found["memory"].items()}
    what = f"{found['rounds']} rounds of Fashion-MNIST at three sites, {found['parameters']:,} parameters"
    return "\n".join(
        [
            f"| {what} | seconds a round |",
            "|---|---|",
            *rows,
            "",
            f"Model and ledgers of the run over Flower are {same} to those of the simulation. Its sites have spent "
            f"epsilon {spent}. MLflow has {tracking['parameters']} parameters, {tracking['metrics']} metrics and "
            f"{tracking['artifacts']} artifacts of it. A node needs {memory['node']:.0f} MiB of memory at most, its "
            f"SuperNode {memory['supernode']:.0f} MiB. The machine has {found['cores']} cores and was busy with other "
            f"work (load {found['load']:.0f} at the start), so compare rows, not machines.",
        ]
    )


def failures_table(found: dict[str, Any]) -> str:
    """What was lost, how the run ended, what was charged, and whether the resumed run equals the simulation."""
    rows = []
    for name, words in _CASES.items():
        if (one := found.get(name)) is None:
            continue
        if name == "refusal":
            end, then, after = "the run goes on without it", "", "not resumed"
        else:
            end = f"the run ends after {one['seconds_until_the_run_ended']:.0f} s"
            then = _counts(one["charged_then"])
            after = "equal" if one["equal"] and one["ledgers_equal"] else "not equal"
        rows.append(f"| {words} | {end} | {then} | {_counts(one['charged_in_the_end'])} | {after} |")
    head = "| lost in round 2 of 3 | what happens | releases charged then | in the end | beside the simulation |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def _counts(charged: list[int]) -> str:
    return ", ".join(map(str, charged))
