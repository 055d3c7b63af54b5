"""`python -m dpfl_lightning.plan`: epsilon to noise and back before anyone trains, of a client or a run."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jsonargparse

from dpfl_lightning.errors import UserError, UserNotice, command, nearest, require
from dpfl_lightning.privacy.accountant import get_accountant
from dpfl_lightning.privacy.events import Caveat, GaussianEvent
from dpfl_lightning.privacy.guarantee import Guarantee, guarantee
from dpfl_lightning.privacy.schedule import ClientSchedule, Planned, calibrate
from dpfl_lightning.tables import columns as _columns
from dpfl_lightning.tables import epsilon as _epsilon

_PROG = "python -m dpfl_lightning.plan"


@command
def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if any(word.partition("=")[0] == "--ledger" for word in words):
        from dpfl_lightning.ledger_report import main as report_ledger

        return report_ledger(words)
    if any(word.partition("=")[0] == "--config" for word in words):
        return _plan_run(words)
    options = _parse(words)
    as_json = options.pop("json")
    planned = plan(**options)
    print(_client_text(planned, options["rounds"], options["local_epochs"]))
    if as_json:
        print(json.dumps(planned.as_dict()))
    return 0


@dataclass(frozen=True)
class ClientPlan:
    """What one client will release, and what that guarantees.

    Args:
        schedule: every release, its noise solved.
        guarantee: of the whole schedule.
        accountant: name of the accountant.
        num_records: training records.
        batch_size: expected records of a step.
    """

    schedule: ClientSchedule
    guarantee: Guarantee
    accountant: str
    num_records: int
    batch_size: int

    @property
    def noise_multiplier(self) -> float:
        """Noise std / clip norm of the most frequent release."""
        return self.schedule.main.noise_multiplier or 0.0

    @property
    def sample_rate(self) -> float:
        """Poisson probability of a record in a step of the most frequent release."""
        return self.schedule.main.sample_rate

    @property
    def steps(self) -> int:
        """Noised steps of the whole run."""
        return sum(event.steps for event in self.schedule.events() if isinstance(event, GaussianEvent))

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; an infinite epsilon is None."""
        promise = self.guarantee.as_dict()
        return {
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": self.sample_rate,
            "steps": self.steps,
            "epsilon": promise["epsilon"],
            "accountant": self.accountant,
            "delta": self.guarantee.delta,
            "guarantee": promise["words"],
        }


def plan(
    num_records: int,
    batch_size: int,
    rounds: int,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    local_epochs: int = 1,
    accountant: str = "rdp",
) -> ClientPlan:
    """Epsilon to noise, or noise to epsilon, of a client that trains by DPSGD in every round.

    Steps are rounds * local_epochs * ceil(num_records / batch_size) and the sample rate is batch_size /
    num_records, as the Poisson sampler of a run really takes them. A batch of all records is a full batch,
    without amplification.

    Args:
        num_records: training records of the client, >= 1.
        batch_size: expected records of a step, in 1..num_records.
        rounds: rounds that the client trains in, >= 1.
        delta: slack of the guarantee, in (0, 1); usually below 1 / num_records.
        epsilon: budget to find the noise for, > 0; give this or noise_multiplier.
        noise_multiplier: noise std / clip norm on the sum, to find epsilon for, >= 0; give this or epsilon.
        local_epochs: passes over the own records in a round, >= 1.
        accountant: rdp, prv (tighter, slower) or gdp (exact, full batches only).
    Returns:
        The plan, its noise and its epsilon rounded up.

    **Privacy** Arithmetic on public facts.

    Raises:
        UserError: a value out of range, or an epsilon below what the accountant can certify.

    >>> planned = plan(num_records=2400, batch_size=64, rounds=30, delta=1e-4, epsilon=2.0)
    >>> planned.steps, round(planned.noise_multiplier, 3), planned.guarantee.epsilon <= 2.0
    (1140, 1.887, True)
    """
    if (epsilon is None) == (noise_multiplier is None):
        must = "must be a number" if epsilon is None else "must be left out beside noise_multiplier"
        raise UserError(
            f"`epsilon` {must}, got {epsilon}. Give epsilon to find the noise, or noise_multiplier to find epsilon."
        )
    for key, value in (("num_records", num_records), ("rounds", rounds), ("local_epochs", local_epochs)):
        require(value >= 1, key, "be at least 1", value)
    way_out = f"A batch of {num_records} is the full batch."
    require(
        1 <= batch_size <= num_records,
        "batch_size",
        f"be in 1..{num_records} (num_records)",
        batch_size,
        way_out,
    )
    if epsilon is not None:
        require(0 < epsilon < math.inf, "epsilon", "be above 0 and finite", epsilon, "Smaller is more private.")
    if noise_multiplier is not None:
        require(0 <= noise_multiplier < math.inf, "noise_multiplier", "be at least 0 and finite", noise_multiplier)
    require(
        0 < delta < 1,
        "delta",
        "be in (0, 1)",
        delta,
        f"Usual is below 1 / num_records = {1 / num_records:.2g}.",
    )
    if delta > 1 / num_records:
        warnings.warn(
            f"`delta` should be below 1 / num_records = {1 / num_records:.2g}, got {delta:g}: publishing one "
            "record at random would satisfy it.",
            UserNotice,
            stacklevel=2,
        )
    judge = get_accountant(accountant)
    steps = local_epochs * math.ceil(num_records / batch_size)
    event = GaussianEvent(batch_size / num_records, noise_multiplier, steps)
    schedule = ClientSchedule(math.inf if epsilon is None else epsilon, delta, (Planned("train", event, rounds),))
    if epsilon is not None:
        schedule = calibrate([schedule], judge)[0]
    return ClientPlan(schedule, guarantee(schedule.events(), delta, judge), accountant, num_records, batch_size)


def _parse(words: Sequence[str]) -> dict[str, Any]:
    """Arguments of `plan` by name, and `json`."""
    about = "Epsilon to noise and back before anyone trains: one client by these keys, or a run by --config."
    parser = jsonargparse.ArgumentParser(prog=_PROG, description=about, exit_on_error=False, allow_abbrev=False)
    parser.add_function_arguments(plan)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line, too")
    parser.add_argument(
        "--config", metavar="FILE", help="plan every client of this run; its keys: --config FILE --help"
    )
    parser.add_argument(
        "--ledger", metavar="FILE", help="verify this ledger and compose it again; its keys: --ledger FILE --help"
    )
    try:
        options = parser.parse_args(words).as_dict()
    except argparse.ArgumentError as error:
        raise _mistake(" ".join(str(error).split()), [action.dest for action in parser._actions]) from None
    options.pop("config"), options.pop("ledger")
    return options


def _mistake(message: str, known: Sequence[str]) -> UserError:
    """jsonargparse's message in the project's sentence form."""
    if wrong := re.fullmatch(r'Parser key "(\w+)": .* value: (.*)', message):
        key, value = wrong.groups()
        kind = "a whole number" if inspect.signature(plan).parameters[key].annotation == "int" else "a finite number"
        return UserError(f"`{key}` must be {kind}, got {value!r}.")
    if wrong := re.fullmatch(r"unrecognized arguments: (?:--)?([^\s=]+).*", message):
        return UserError(f"`{wrong[1]}` must be a known key. {nearest(wrong[1], known) or 'See --help.'}")
    return UserError(f"{message}. See --help.")


# ---- a whole run


def _plan_run(words: Sequence[str]) -> int:
    from dpfl_lightning.config import load

    options, flags = load(
        words,
        lambda parser: parser.add_argument(
            "--json", action="store_true", help="print one JSON object on the last line"
        ),
        prog=_PROG,
        description="Noise, steps and epsilon of every client of a run, before anyone trains.",
    )
    planned = _planned_clients(options)
    print(_run_text(planned))
    if flags.json:
        print(json.dumps({"clients": [_run_row(client, own) for client, own in enumerate(planned)]}))
    return 0


def _planned_clients(options: Any) -> list[ClientPlan]:
    """Every client's plan; the loop is built, so that strategies declare releases, but nobody trains."""
    from dpfl_lightning.federated.setup import planned_clients
    from dpfl_lightning.privacy.sampling import SAMPLINGS

    loop, schedules = planned_clients(options)
    judge, sampling = loop.accountant, SAMPLINGS[loop.info.sampling]
    caveats = [Caveat(words) for words in loop.population.caveats]
    return [
        ClientPlan(
            schedule,
            guarantee([*schedule.events(), *caveats], schedule.delta, judge, sampling),
            judge.name,
            own.num_records,
            own.batch_size,
        )
        for own, schedule in zip(loop.settings, schedules, strict=True)
    ]


def _run_row(client: int, own: ClientPlan) -> dict[str, Any]:
    budget = own.schedule.target_epsilon
    return {
        "client": client,
        **own.as_dict(),
        "epsilon_budget": budget if math.isfinite(budget) else None,
        "num_records": own.num_records,
        "batch_size": own.batch_size,
        "planned": [{"purpose": p.purpose, "count": p.count, "event": asdict(p.event)} for p in own.schedule.planned],
    }


# ---- what is printed


def _client_text(own: ClientPlan, rounds: int, local_epochs: int) -> str:
    rows = {
        "records": own.num_records,
        "batch size": f"{own.batch_size} (sample rate {own.sample_rate:.6g})",
        "steps": f"{own.steps} ({rounds} rounds, local epochs {local_epochs})",
        "noise multiplier": f"{own.noise_multiplier:.6g} (noise std / clip norm, on the sum)",
        "epsilon": _epsilon(own.guarantee.epsilon),
        "delta": f"{own.guarantee.delta:g}",
    }
    width = max(map(len, rows))
    return "\n".join([*(f"{key.ljust(width)}  {value}" for key, value in rows.items()), own.guarantee.words()])


def _run_text(planned: Sequence[ClientPlan]) -> str:
    head = [
        "client",
        "records",
        "batch",
        "sample rate",
        "steps",
        "noise multiplier",
        "budget",
        "epsilon",
        "delta",
        "releases",
    ]
    rows = [
        [
            client,
            own.num_records,
            own.batch_size,
            f"{own.sample_rate:.5f}",
            own.steps,
            f"{own.noise_multiplier:.6g}",
            "none" if math.isinf(own.schedule.target_epsilon) else f"{own.schedule.target_epsilon:g}",
            _epsilon(own.guarantee.epsilon),
            f"{own.guarantee.delta:g}",
            ", ".join(f"{line.count} {line.purpose}" for line in own.schedule.planned),
        ]
        for client, own in enumerate(planned)
    ]
    weakest = max(planned, key=lambda own: own.guarantee.epsilon)
    return f"{_columns([head, *rows])}\nLargest epsilon: {weakest.guarantee.words()}"


if __name__ == "__main__":
    raise SystemExit(main(None))
