"""`dpfl plan`: show noise, steps and epsilon of every client of a run, before training."""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpfl_lightning.config.load import load
from dpfl_lightning.errors import command
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.client_plan import ClientPlan, client_plans
from dpfl_lightning.runtime.spoken import in_both_forms
from dpfl_lightning.runtime.text import at_most, columns, shown

if TYPE_CHECKING:
    from dpfl_lightning.sites.exchange import Site


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `plan` with command-line arguments, and return its exit status."""
    options, flags = load(
        argv,
        _flags,
        name="plan",
        description="Show noise, steps and epsilon of every client of a run before training.",
        examples=("--config digits", "--config digits --privacy.epsilon 2 --json"),
        decided=lambda flags: {"clients.count": len(flags.sites)} if flags.sites else {},
    )
    from dpfl_lightning.loop import build_loop
    from dpfl_lightning.privacy.sampling import SAMPLERS

    sites: list[Site] = []
    if flags.sites:
        from dpfl_lightning.sites.server.deploy import planning_loop
        from dpfl_lightning.sites.terms import read_site

        sites = [read_site(Path(file)) for file in flags.sites]
        loop = planning_loop(options, sites)
    else:
        loop = build_loop(options)
    exported = None
    if flags.export is not None:
        from dpfl_lightning.sites.server.deploy import export
        from dpfl_lightning.sites.wire import digest

        exported = digest(export(loop, sites, flags.export))
    schedules, sampling = loop.plan_schedule().clients, SAMPLERS[loop.info.sampling].words
    sizes = [(n, schedule.batch_size(n)) for schedule, n in zip(schedules, loop.config.facts.num_records, strict=True)]
    besides = loop.config.caveats, loop.clients.unprotected
    planned = client_plans(schedules, loop.config.accountant, sizes, sampling, *besides, loop.clients.unit)
    notes = [*loop.describe(), *filter(None, [loop.clients.outlook(loop.run_plan())])]
    names = [loop.config.facts.name_of(client) for client in range(len(planned))]
    ids, group = loop.population.num_ids, loop.clients.unit.group
    if flags.json:
        rows = [
            {
                "client": client,
                "name": names[client],
                **client_plan.as_dict(),
                "epsilon_budget": finite_or_none(client_plan.schedule.target_epsilon),
                "num_records": client_plan.num_records,
                "unit": client_plan.guarantee.unit,
                **({} if ids is None else {f"num_{group}s": ids[client]}),
                "batch_size": client_plan.batch_size,
            }
            for client, client_plan in enumerate(planned)
        ]
        hashed = {} if exported is None else {"hash": exported}
        print(json.dumps({"clients": rows, "task": loop.info.task, "notes": notes, **hashed}))
    else:
        if exported is not None:
            notes = [*notes, f"The hash of {flags.export}, which sites compare, is {in_both_forms(exported)}."]
        more = {} if ids is None or loop.clients.unit.is_group else {f"{group}s": ids}
        print(shown("\n".join([_run_text(planned, names, more), f"Task: {loop.info.task}", *notes])))
    return 0


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    text = "write the plan for the operators of sites, who accept it by `dpfl node accept`, to FILE; with --sites"
    parser.add_argument("--export", metavar="FILE", help=text)
    text = "files site.json of the sites that hold the records, one for each client"
    parser.add_argument("--sites", metavar="FILE", nargs="+", default=[], help=text)


def schedule_text(client_plan: ClientPlan) -> str:
    """Return a table of the releases in a client's schedule, with the cost of each line."""
    head = ["purpose", "releases", "sample rate", "noise multiplier", "steps each", "epsilon alone"]
    rows = [
        [line.purpose, line.count, *line.event.cells(), at_most(alone)]
        for line, alone in zip(client_plan.schedule.planned, client_plan.epsilon_alone, strict=True)
    ]
    lines = [columns([head, *rows])]
    if len(rows) > 1:
        together = f"together they cost {at_most(client_plan.guarantee.epsilon)}"
        lines.append(f"Epsilon alone is the cost of a line without the other lines; {together}.")
    for line, alone in zip(client_plan.schedule.planned, client_plan.epsilon_alone, strict=True):
        if line.event.scores:
            what = "held-out records are counted by label and predicted probability, noised and sent"
            cost = f"which costs {at_most(alone)} alone"
            lines.append(f"{line.purpose}: {what}, {cost}. Accuracy, AUROC and calibration follow.")
    return "\n".join(lines)


def _run_text(planned: Sequence[ClientPlan], names: Sequence[str], more: Mapping[str, Sequence[int]]) -> str:
    """Return a table of all clients, with `more` counts, and the guarantee with the largest epsilon."""
    one_delta = len({client_plan.guarantee.delta for client_plan in planned}) == 1  # it is stated below the table
    head = [
        "client",
        f"{planned[0].guarantee.unit}s",
        "batch",
        "rate",
        "steps",
        "noise",
        "budget",
        "epsilon",
        *["delta"] * (not one_delta),
    ]
    rows = [
        [
            name,
            client_plan.num_records,
            client_plan.batch_size,
            f"{client_plan.sample_rate:.5f}",
            client_plan.steps,
            f"{client_plan.noise_multiplier:.6g}" if any(client_plan.schedule.releases) else "-",
            "none" if math.isinf(client_plan.schedule.target_epsilon) else at_most(client_plan.schedule.target_epsilon),
            at_most(client_plan.guarantee.epsilon),
            *[at_most(client_plan.guarantee.delta)] * (not one_delta),
            ", ".join(f"{line.count} {line.purpose}" for line in client_plan.schedule.planned),
        ]
        for name, client_plan in zip(names, planned, strict=True)
    ]
    for title, counts in more.items():
        head.insert(2, title)
        for row, count in zip(rows, counts, strict=True):
            row.insert(2, count)
    weakest = max(planned, key=lambda client_plan: client_plan.guarantee.epsilon)
    about = "Rate is the sample rate, noise the noise multiplier."
    parts = [columns([[*head, "releases"], *rows]), about, f"Largest epsilon: {weakest.guarantee}"]
    if len(weakest.schedule.planned) > 1:
        parts.append(f"Schedule of client {names[planned.index(weakest)]}, which has it:\n{schedule_text(weakest)}")
    return "\n".join(parts)
