"""`python -m dpfl_lightning.plan`: compute noise from epsilon, or epsilon from noise, before training."""

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

import jsonargparse

from dpfl_lightning.errors import UserError, command, nearest
from dpfl_lightning.privacy.accounting.accountant import epsilon_text as _epsilon
from dpfl_lightning.privacy.accounting.accountant import finite_or_none
from dpfl_lightning.privacy.accounting.client_plan import ClientPlan, client_plans, plan
from dpfl_lightning.privacy.accounting.events import Event, GaussianEvent, LaplaceEvent, SelectionEvent
from dpfl_lightning.runtime.text import columns as _columns

_PROG = "python -m dpfl_lightning.plan"
_JSON_HELP = "also print one JSON object, on the last line"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `plan` with command-line arguments, and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if any(word.partition("=")[0] == "--ledger" for word in words):
        from dpfl_lightning.privacy.ledger.verify import main as report_ledger

        return report_ledger(words)
    if any(word.partition("=")[0] == "--config" for word in words):
        return _plan_run(words)
    options = _parse(words)
    as_json = options.pop("json")
    planned = plan(**options)
    print(_client_text(planned, options))
    if as_json:
        print(json.dumps(planned.as_dict()))
    return 0


def _parse(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `plan` by name, and `json`."""
    about = "Compute noise from epsilon, or epsilon from noise, before training: for one client, or a run (--config)."
    parser = jsonargparse.ArgumentParser(prog=_PROG, description=about, exit_on_error=False, allow_abbrev=False)
    parser.add_function_arguments(plan)
    parser.add_argument("--json", action="store_true", help=_JSON_HELP)
    parser.add_argument(
        "--config", metavar="FILE", help="plan every client of this run; --config FILE --help lists its keys"
    )
    parser.add_argument(
        "--ledger", metavar="FILE", help="verify and recompose ledgers; --ledger FILE --help lists the flags"
    )
    try:
        options = parser.parse_args(words).as_dict()
    except argparse.ArgumentError as error:
        raise _mistake(" ".join(str(error).split()), [action.dest for action in parser._actions]) from None
    options.pop("config"), options.pop("ledger")
    return options


def _mistake(message: str, known: Sequence[str]) -> UserError:
    """Return jsonargparse's message as a UserError in the usual form."""
    if wrong := re.fullmatch(r'Parser key "(\w+)": .* value: (.*)', message):
        key, value = wrong.groups()
        hint = get_type_hints(plan)[key]
        kind = "a whole number" if int in (hint, *get_args(hint)) else "a finite number"
        return UserError(f"`{key}` must be {kind}, got {value!r}.")
    if wrong := re.fullmatch(r"unrecognized arguments: (?:--)?([^\s=]+).*", message):
        return UserError(f"`{wrong[1]}` must be a known key. {nearest(wrong[1], known) or 'See --help.'}")
    return UserError(f"{message}. See --help.")


# ---- a whole run


def _plan_run(words: Sequence[str]) -> int:
    from dpfl_lightning.config.load import load

    options, flags = load(
        words,
        lambda parser: parser.add_argument("--json", action="store_true", help=_JSON_HELP),
        prog=_PROG,
        description="Show noise, steps and epsilon of every client of a run before training.",
    )
    from dpfl_lightning.build import build_loop
    from dpfl_lightning.privacy.sampling import SAMPLINGS

    loop = build_loop(options)
    schedules, sampling = loop.plan_schedule().clients, SAMPLINGS[loop.info.sampling]
    sizes = [(n, schedule.batch_size(n)) for schedule, n in zip(schedules, loop.population.num_records, strict=True)]
    planned = client_plans(schedules, loop.accountant, sizes, sampling, loop.caveats, loop.clients.unprotected)
    notes = loop.describe()
    names = [loop.facts.name_of(client) for client in range(len(planned))]
    print("\n".join([_run_text(planned, names), f"Task: {loop.info.task}", *notes]))
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
        print(json.dumps({"clients": rows, "task": loop.info.task, "notes": notes}))
    return 0


# ---- printed texts


def _client_text(client_plan: ClientPlan, options: Mapping[str, Any]) -> str:
    rounds = f"{options['rounds']} rounds"
    if options["participations"] is not None:
        rounds = f"{options['participations']} of {rounds}"
    each = f"local epochs {options['local_epochs']}" if options["steps"] is None else f"{options['steps']} steps each"
    unit = "Laplace scale" if isinstance(client_plan.schedule.main, LaplaceEvent) else "noise std"
    rows = {
        "records": client_plan.num_records,
        "batch size": f"{client_plan.batch_size} (sample rate {client_plan.sample_rate:.6g})",
        "steps": f"{client_plan.steps} ({rounds}, {each})",
        "noise multiplier": f"{client_plan.noise_multiplier:.6g} ({unit} / clip norm, on the sum)",
        "epsilon": _epsilon(client_plan.guarantee.epsilon),
        "delta": f"{client_plan.guarantee.delta:g}",
    }
    width = max(map(len, rows))
    lines = [f"{key.ljust(width)}  {value}" for key, value in rows.items()]
    return "\n".join([*lines, "", _schedule_text(client_plan), "", _promise(client_plan)])


def _promise(client_plan: ClientPlan) -> str:
    return f"{client_plan.guarantee.words()}\nNot covered: {'; '.join(client_plan.guarantee.not_covered)}."


def _schedule_text(client_plan: ClientPlan) -> str:
    """Return a table of the releases in a client's schedule, with the cost of each line."""
    head = ["purpose", "releases", "sample rate", "noise multiplier", "steps each", "epsilon alone"]
    rows = [
        [line.purpose, line.count, *_event_cells(line.event), _epsilon(alone)]
        for line, alone in zip(client_plan.schedule.planned, client_plan.epsilon_alone, strict=True)
    ]
    if len(rows) == 1:
        return _columns([head, *rows])
    together = f"together they cost {_epsilon(client_plan.guarantee.epsilon)}"
    return f"{_columns([head, *rows])}\nEpsilon alone is the cost of a line without the other lines; {together}."


def _event_cells(event: Event) -> list[str]:
    """Return sample rate, noise and steps of an event."""
    if isinstance(event, GaussianEvent):
        return [f"{event.sample_rate:.6g}", f"{event.noise_multiplier or 0.0:.6g}", str(event.steps)]
    if isinstance(event, LaplaceEvent):
        return ["1", f"{event.noise_multiplier:.6g} (Laplace)", str(event.steps)]
    if isinstance(event, SelectionEvent):
        return ["1", f"{1 / event.epsilon if event.epsilon else math.inf:.6g} (Gumbel)", str(event.count)]
    return ["1", "none", "-"]  # `NonPrivateEvent`: uses all records, and its noise does not count


def _run_text(planned: Sequence[ClientPlan], names: Sequence[str]) -> str:
    """Return a table of all clients and the guarantee with the largest epsilon."""
    head = ["client", "records", "batch", "sample rate", "steps", "noise multiplier", "budget", "epsilon", "delta"]
    rows = [
        [
            name,
            client_plan.num_records,
            client_plan.batch_size,
            f"{client_plan.sample_rate:.5f}",
            client_plan.steps,
            f"{client_plan.noise_multiplier:.6g}" if any(client_plan.schedule.releases) else "-",
            "none" if math.isinf(client_plan.schedule.target_epsilon) else f"{client_plan.schedule.target_epsilon:g}",
            _epsilon(client_plan.guarantee.epsilon),
            f"{client_plan.guarantee.delta:g}",
            ", ".join(f"{line.count} {line.purpose}" for line in client_plan.schedule.planned),
        ]
        for name, client_plan in zip(names, planned, strict=True)
    ]
    weakest = max(planned, key=lambda client_plan: client_plan.guarantee.epsilon)
    parts = [_columns([[*head, "releases"], *rows]), f"Largest epsilon: {_promise(weakest)}"]
    if len(weakest.schedule.planned) > 1:
        parts.append(f"Schedule of client {names[planned.index(weakest)]}, which has it:\n{_schedule_text(weakest)}")
    return "\n".join(parts)


if __name__ == "__main__":
    raise SystemExit(main(None))
