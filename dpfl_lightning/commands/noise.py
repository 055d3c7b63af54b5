"""`dpfl noise`: compute noise from epsilon, or epsilon from noise, of one client."""

import argparse
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

from dpfl_lightning.commands.plan import schedule_text
from dpfl_lightning.config.command_line import CommandParser
from dpfl_lightning.config.registry import described
from dpfl_lightning.config.yaml_text import inline
from dpfl_lightning.errors import command
from dpfl_lightning.privacy.accounting.client_plan import ClientPlan, plan
from dpfl_lightning.runtime.text import at_most, shown


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `noise` with command-line arguments, and return its exit status."""
    parser = CommandParser(
        "noise",
        "Compute noise from epsilon, or epsilon from noise, of one client before training.",
        "--KEY VALUE ... [--json]",
        ("--num_records 90 --batch_size 9 --rounds 9 --delta 1e-4 --epsilon 2",),
    )
    _flags(parser)
    options = vars(parser.parse_args(argv))
    as_json = options.pop("json")
    planned = plan(**options)
    print(json.dumps(planned.as_dict()) if as_json else shown(_text(planned, options)))
    return 0


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    group, texts, hints = parser.add_argument_group("keys"), described(inspect.getdoc(plan) or ""), get_type_hints(plan)
    for key, one in inspect.signature(plan).parameters.items():
        kind = next(kind for kind in (int, float, str) if kind in (hints[key], *get_args(hints[key])))
        required = one.default is one.empty
        text = " ".join(texts[key].split()).partition(": ")[2]
        text += " (required)" if required else f" (default {inline(one.default)})"
        default = None if required else one.default
        words = {"metavar": "VALUE", "help": text.replace("%", "%%")}
        group.add_argument(f"--{key}", type=kind, required=required, default=default, **words)


def _text(client_plan: ClientPlan, options: Mapping[str, Any]) -> str:
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
    return "\n".join([*lines, "", schedule_text(client_plan), "", str(client_plan.guarantee)])
