"""`dpfl plan`: compute noise from epsilon or epsilon from noise, before training."""

import argparse
import inspect
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from dpfl_lightning.config.command_line import CommandParser
from dpfl_lightning.config.options import Options
from dpfl_lightning.config.registry import described
from dpfl_lightning.config.yaml_text import inline
from dpfl_lightning.errors import UserError, command, nearest, require
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.client_plan import ClientPlan, client_plans, plan
from dpfl_lightning.runtime.spoken import in_both_forms
from dpfl_lightning.runtime.text import at_most, shown
from dpfl_lightning.runtime.text import columns as _columns

if TYPE_CHECKING:
    from dpfl_lightning.federated.messages.exchange import Site


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `plan` with command-line arguments, and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    keys = {word[2:].partition("=")[0].partition(".")[0] for word in words if word.startswith("--")}
    if keys & {"config", *vars(Options())} - {*inspect.signature(plan).parameters}:
        return _plan_run(words)
    options = _parse(words)
    as_json = options.pop("json")
    planned = plan(**options)
    print(json.dumps(planned.as_dict()) if as_json else shown(_client_text(planned, options)))
    return 0


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")


def _run_flags(parser: argparse.ArgumentParser) -> None:
    _flags(parser)
    text = "write the plan for the operators of sites, who accept it by `dpfl node accept`, to FILE; with --sites"
    parser.add_argument("--export", metavar="FILE", help=text)
    text = "files site.json of the sites that hold the records, one for each client"
    parser.add_argument("--sites", metavar="FILE", nargs="+", default=[], help=text)


def _parse(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `plan` by name, and `json`."""
    parser = CommandParser(
        "plan",
        "Compute noise from epsilon, or epsilon from noise, before training: for one client, or for every client of a "
        "run (--config, or any of its keys).",
        "[--KEY VALUE ...] [--json]",
        ("--num_records 900 --batch_size 9 --rounds 9 --delta 1e-4 --epsilon 2", "--config digits"),
    )
    _flags(parser)
    parser.add_argument(
        "--config", metavar="FILE", help="plan every client of this run; --config FILE --help lists its keys"
    )
    group, texts = parser.add_argument_group("one client"), described(inspect.getdoc(plan) or "")
    parameters = inspect.signature(plan).parameters
    for key, parameter in parameters.items():
        text = " ".join(texts[key].split()).partition(": ")[2]
        required = parameter.default is parameter.empty
        text += " (required)" if required else f" (default {inline(parameter.default)})"
        group.add_argument(f"--{key}", metavar="VALUE", default=argparse.SUPPRESS, help=text.replace("%", "%%"))
    options, unknown = parser.parse_known_args(words)
    given = {key: value for key, value in vars(options).items() if key != "config"}
    if unknown:
        wrong = unknown[0].partition("=")[0].removeprefix("--")
        near = nearest(wrong, [*parameters, *vars(options)])
        raise UserError(f"`{wrong}` must be a known key. {near or 'See --help.'}")
    missing = [key for key, one in parameters.items() if one.default is one.empty and key not in given]
    require(not missing, ", ".join(missing), "be given", None, "See --help.")
    hints = get_type_hints(plan)
    return {key: _typed(key, hints[key], text) if key in hints else text for key, text in given.items()} | {
        key: one.default for key, one in parameters.items() if key not in given and one.default is not one.empty
    }


def _typed(key: str, hint: Any, text: str) -> Any:
    """Return the text of an argument with its type; numbers must be finite."""
    kinds = (hint, *get_args(hint))
    if text == "null" and type(None) in kinds:
        return None
    try:
        value = text if str in kinds else int(text) if int in kinds else float(text)
    except ValueError:
        value = math.nan
    kind = "a whole number" if int in kinds else "a finite number"
    require(isinstance(value, str) or math.isfinite(value), key, f"be {kind}", text)
    return value


# ---- a whole run


def _plan_run(words: Sequence[str]) -> int:
    from dpfl_lightning.config.load import load

    options, flags = load(
        words,
        _run_flags,
        name="plan",
        description="Show noise, steps and epsilon of every client of a run before training.",
        examples=("--config digits", "--config digits --privacy.epsilon 2 --json"),
    )
    from dpfl_lightning.build import build_loop
    from dpfl_lightning.privacy.sampling import SAMPLERS

    sites: list[Site] = []
    if flags.sites:
        from dpfl_lightning.deployment.server import planning_loop
        from dpfl_lightning.federated.node.state import read_site

        sites = [read_site(Path(file)) for file in flags.sites]
        loop = planning_loop(options, sites)
    else:
        loop = build_loop(options)
    exported = None
    if flags.export is not None:
        from dpfl_lightning.deployment.server import export
        from dpfl_lightning.federated.messages.wire import digest

        exported = digest(export(loop, sites, flags.export))
    schedules, sampling = loop.plan_schedule().clients, SAMPLERS[loop.info.sampling].words
    sizes = [(n, schedule.batch_size(n)) for schedule, n in zip(schedules, loop.population.num_records, strict=True)]
    besides = loop.config.caveats, loop.clients.unprotected
    planned = client_plans(schedules, loop.config.accountant, sizes, sampling, *besides)
    notes = loop.describe()
    names = [loop.config.facts.name_of(client) for client in range(len(planned))]
    if flags.json:
        rows = [
            {
                "client": client,
                "name": names[client],
                **client_plan.as_dict(),
                "epsilon_budget": finite_or_none(client_plan.schedule.target_epsilon),
                "num_records": client_plan.num_records,
                "batch_size": client_plan.batch_size,
            }
            for client, client_plan in enumerate(planned)
        ]
        hashed = {} if exported is None else {"hash": exported}
        print(json.dumps({"clients": rows, "task": loop.info.task, "notes": notes, **hashed}))
    else:
        if exported is not None:
            notes = [*notes, f"The hash of {flags.export}, which sites compare, is {in_both_forms(exported)}."]
        print(shown("\n".join([_run_text(planned, names), f"Task: {loop.info.task}", *notes])))
    return 0


# ---- printed texts


def _client_text(client_plan: ClientPlan, options: Mapping[str, Any]) -> str:
    rounds = f"{options['rounds']} rounds"
    if options["participations"] is not None:
        rounds = f"{options['participations']} of {rounds}"
    each = f"local epochs {options['local_epochs']}" if options["steps"] is None else f"{options['steps']} steps each"
    unit = client_plan.schedule.main.noise_unit
    rows = {
        "records": client_plan.num_records,
        "batch size": f"{client_plan.batch_size} (sample rate {client_plan.sample_rate:.6g})",
        "steps": f"{client_plan.steps} ({rounds}, {each})",
        "noise multiplier": f"{client_plan.noise_multiplier:.6g} ({unit} / clip norm, on the sum)",
        "epsilon": at_most(client_plan.guarantee.epsilon),
        "delta": at_most(client_plan.guarantee.delta),
    }
    width = max(map(len, rows))
    lines = [f"{key.ljust(width)}  {value}" for key, value in rows.items()]
    return "\n".join([*lines, "", schedule_text(client_plan), "", promise(client_plan)])


def promise(client_plan: ClientPlan) -> str:
    """Return the guarantee of a plan as sentences."""
    return f"{client_plan.guarantee.words()}\nNot covered: {'; '.join(client_plan.guarantee.not_covered)}."


def schedule_text(client_plan: ClientPlan) -> str:
    """Return a table of the releases in a client's schedule, with the cost of each line."""
    head = ["purpose", "releases", "sample rate", "noise multiplier", "steps each", "epsilon alone"]
    rows = [
        [line.purpose, line.count, *line.event.cells(), at_most(alone)]
        for line, alone in zip(client_plan.schedule.planned, client_plan.epsilon_alone, strict=True)
    ]
    if len(rows) == 1:
        return _columns([head, *rows])
    together = f"together they cost {at_most(client_plan.guarantee.epsilon)}"
    return f"{_columns([head, *rows])}\nEpsilon alone is the cost of a line without the other lines; {together}."


def _run_text(planned: Sequence[ClientPlan], names: Sequence[str]) -> str:
    """Return a table of all clients and the guarantee with the largest epsilon."""
    one_delta = len({client_plan.guarantee.delta for client_plan in planned}) == 1  # it is stated below the table
    head = ["client", "records", "batch", "rate", "steps", "noise", "budget", "epsilon", *["delta"] * (not one_delta)]
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
    weakest = max(planned, key=lambda client_plan: client_plan.guarantee.epsilon)
    about = "Rate is the sample rate, noise the noise multiplier."
    parts = [_columns([[*head, "releases"], *rows]), about, f"Largest epsilon: {promise(weakest)}"]
    if len(weakest.schedule.planned) > 1:
        parts.append(f"Schedule of client {names[planned.index(weakest)]}, which has it:\n{schedule_text(weakest)}")
    return "\n".join(parts)


if __name__ == "__main__":
    raise SystemExit(main(None))
