"""`dpfl node VERB STATE_DIR`: answer a server as the site of a real federation."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpfl_lightning.config.command_line import CommandParser
from dpfl_lightning.errors import UserError, command, nearest, require
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.runtime.spoken import SHORTEST, WORDS, digits_of
from dpfl_lightning.runtime.text import at_least, at_most, counted, shown

if TYPE_CHECKING:
    from dpfl_lightning.sites.node.state import Reservation, StateFolder

_ABOUT = (
    "Run the node of a site in a real federation. init: name the records. accept: agree to a plan. serve: answer the "
    "server. status: plans and the remaining budget. verify: check ledgers and plans. withdraw: leave a study. "
    "The node releases what its operator has accepted, and nothing else."
)
_INIT = ("node --config site.yaml", "node --config site.yaml --privacy.epsilon 2 --name berlin")
_TAKES = ("data", "privacy", "model", "clients", "seed")
_SCORES = "serve: score models on held-out records every so many rounds, for status (default 0: the final model alone)"


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `node` with command-line arguments, and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["init"]:
        return _init(words[1:])
    examples = ("init node --config site.yaml", "accept node plan.json", "serve node")
    about = f"{_ABOUT} See `dpfl node init --help` for the flags and keys of init."
    parser = CommandParser("node", about, "VERB STATE_DIR [PLAN] [FLAGS]", examples)
    _flags(parser)
    flags = parser.parse_args(words)
    require(not flags.person or flags.verb == "status", "--person", "be given with status", flags.verb)
    needs_plan = flags.verb in ("accept", "withdraw")
    what = "a file for accept, and the begin of a hash in `status` for withdraw"
    require(needs_plan == (flags.plan is not None), "PLAN", f"be {what}, and left out otherwise", flags.plan)
    from dpfl_lightning.sites.node.state import StateFolder

    run = {"accept": _accept, "serve": _serve, "status": _status, "verify": _verify}
    run.get(flags.verb, _withdraw)(StateFolder(Path(flags.state)), flags)
    return 0


def _flags(parser: argparse.ArgumentParser) -> None:
    verbs = ("init", "accept", "serve", "status", "verify", "withdraw")
    parser.add_argument("verb", metavar="VERB", choices=verbs, help=", ".join(verbs))
    parser.add_argument("state", metavar="STATE_DIR", help="folder of the node")
    parser.add_argument("plan", metavar="PLAN", nargs="?", help="accept: file of a plan; withdraw: begin of its hash")
    text = "accept: new limit on the sum of epsilon over all plans ever accepted, instead of privacy.epsilon of init"
    parser.add_argument("--epsilon_limit", metavar="E", type=float, help=text)
    text = "accept: new limit on the sum of delta, instead of privacy.delta of init"
    parser.add_argument("--delta_limit", metavar="D", type=float, help=text)
    text = "accept: allow a limit above the one that was set before"
    parser.add_argument("--raise_limits", action="store_true", help=text)
    text = "accept: hash of the plan as its sender says it, at least 32 digits or 16 words; refuse another plan"
    parser.add_argument("--hash", metavar="HASH", help=text)
    text = "accept: show what the plan means; accept and build nothing"
    parser.add_argument("--show", action="store_true", help=text)
    text = "accept --show: write what the plan means to FILE, a page for the data protection officer"
    parser.add_argument("--page", metavar="FILE", help=text)
    text = "accept: whom to ask about the study; the node remembers it"
    parser.add_argument("--contact", metavar="TEXT", default="", help=text)
    text = "status: ask for the id of a person, and say whether their rows are held out or used for training"
    parser.add_argument("--person", action="store_true", help=text)
    parser.add_argument("--socket", metavar="PATH", help="serve: Unix socket (default STATE_DIR/socket)")
    parser.add_argument("--score_every", metavar="ROUNDS", type=int, default=0, help=_SCORES)
    text = "serve: replies leave at multiples of this time after a request (default 1)"
    parser.add_argument("--slot", metavar="SECONDS", type=float, default=1.0, help=text)


def _init(words: Sequence[str]) -> int:
    from dpfl_lightning.config.load import load
    from dpfl_lightning.privacy.accounting.noise_source import KEYED

    about = (
        "Name the records of a site, from its configuration: data as for fit, privacy.epsilon and privacy.delta as the "
        "limits on the sum over all plans that it ever accepts (privacy.adjacency, and privacy.unit person with "
        "privacy.rows_per_person for limits per person), and model.class_path with model.init_args as the class of "
        f"this installation that plans may name, with these arguments. privacy.noise_key is a {KEYED.warning}."
    )
    options, flags = load(words, _init_flags, name="node init", description=about, examples=_INIT, takes=_TAKES)
    from dpfl_lightning.sites.node.accept import new_node
    from dpfl_lightning.sites.node.records import settings_of

    path = Path(flags.state)
    name = path.absolute().name if flags.name is None else flags.name
    state, site = new_node(path, settings_of(options, name, flags.client))
    print(f"Site {site.name}: {site.num_records} {site.unit}s, {site.num_classes} classes. {_budget(state)}")
    if (model := state.settings().model) is not None:
        print(f"Plans may name the model {model} with the arguments {state.settings().model_args}, and no others.")
    print(f"Send {path / 'site.json'}, which holds public facts only, to the server's operator.")
    if warning := state.settings().source.warning:
        print(f"Warning: {warning}.")
    return 0


def _init_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("state", metavar="STATE_DIR", help="new folder of the node")
    parser.add_argument("--name", help="name of the site, as in plans (default: the name of the folder)")
    text = "client of the data that is this site, if they have several (default: the name of the site)"
    parser.add_argument("--client", help=text)


def _accept(state: StateFolder, flags: argparse.Namespace) -> None:
    from dpfl_lightning.commands.plan import schedule_text
    from dpfl_lightning.reporting.site_page import site_page, site_text
    from dpfl_lightning.sites.node.accept import accept, limits_of
    from dpfl_lightning.sites.node.review import reviewed
    from dpfl_lightning.sites.terms import client_of, cost_of, read_terms
    from dpfl_lightning.sites.wire import digest

    require(flags.show or flags.page is None, "--page", "be given with --show", flags.page)
    terms = read_terms(Path(flags.plan))
    if flags.hash is not None:
        same, advice = digest(terms).startswith(_digits(flags.hash)), "It is another plan: read it with --show."
        require(same, "--hash", f"be the hash of {flags.plan}", flags.hash, advice)
    limits = flags.epsilon_limit, flags.delta_limit, flags.raise_limits
    plan = reviewed(state, terms, limits_of(state.settings(), *limits), flags.contact)
    if flags.contact:
        state.keep_contact(plan.digest, flags.contact)
    schedule = schedule_text(cost_of(terms, client_of(terms, plan.site)))
    print(shown(f"{site_text(plan)}\nEach release, for the expert:\n{schedule}"))
    if flags.show:
        if flags.page is not None:
            page = write_text(Path(flags.page), site_page(plan), private=True)
            print(f"{page} says so to the data protection officer.")
        return
    before = state.settings()
    accepted, after = accept(state, terms, *limits), state.settings()
    print(f"\nAccepted as {accepted}. {_budget(state)}")
    for name in ("epsilon", "delta"):
        one, other = (getattr(settings, f"{name}_limit") for settings in (before, after))
        if one != other:
            print(f"The limit of {name} was {at_most(one)} and is now {at_most(other)}.")


def _digits(spoken: str) -> str:
    """Return the digits of a hash that was given as digits or words. Raises UserError if they are too few."""
    try:
        digits, advice = digits_of(spoken), "Fewer can be forged."
    except ValueError as error:
        digits, advice = "", nearest(str(error), WORDS) or "They are printed by --show."
    require(len(digits) >= SHORTEST, "--hash", "be at least 32 hexadecimal digits or 16 words", spoken, advice)
    return digits


def _left(state: StateFolder, limits: tuple[float, float]) -> str:
    left = (at_least(max(0.0, one)) for one in state.left(limits))
    epsilon, delta = (f"{one} of {at_most(limit)}" for one, limit in zip(left, limits, strict=True))
    return f"epsilon {epsilon} and delta {delta}"


def _budget(state: StateFolder) -> str:
    """Return in words what the accepted plans reserve, and what remains."""
    settings, plans = state.settings(), state.plans().values()
    withdrawn, (epsilon, delta) = sum(one.withdrawn for one in plans), state.reserved()
    left = f"{_left(state, (settings.epsilon_limit, settings.delta_limit))} is left per {settings.unit}"
    accepted = counted(len(plans) - withdrawn, "accepted plan") + (f" and {withdrawn} withdrawn" if withdrawn else "")
    return f"{accepted}: epsilon {at_most(epsilon)} and delta {at_most(delta)} are reserved; {left}."


def _serve(state: StateFolder, flags: argparse.Namespace) -> None:
    from dpfl_lightning.sites.node.accept import open_study
    from dpfl_lightning.sites.node.service import Listener, Node

    settings = state.settings()
    require(flags.score_every >= 0, "--score_every", "be a number of rounds, or 0", flags.score_every)
    node = Node(state, functools.partial(open_study, score_every=flags.score_every))
    path = state.path / "socket" if flags.socket is None else Path(flags.socket)
    with state.serving(), contextlib.closing(node):
        if warning := settings.source.warning:
            print(f"Warning: {warning}.", flush=True)
        problems = []
        for plan, reserved in state.plans().items():
            line = _line(state, plan, reserved)
            if _condition(state, plan, reserved) == "active":
                problems.append(problem := node.problem(plan))
                line += "; ready" if problem is None else f"; not ready: {problem}"
            print(line, flush=True)
        must, advice = "have an active plan that is ready", "Mend what is stated above, and start the node again."
        require(not problems or None in problems, "STATE_DIR", must, str(state.path), advice)
        with contextlib.closing(Listener(node, path, flags.slot)) as listener:
            print(f"Node {settings.name} listens at {path}; replies leave every {flags.slot:g} s.", flush=True)
            listener.serve()


def _status(state: StateFolder, flags: argparse.Namespace) -> None:
    from dpfl_lightning.sites.node.scores import read_scores
    from dpfl_lightning.sites.receipt import public_key

    settings = state.settings()
    if flags.person:
        from dpfl_lightning.sites.node.records import site_population
        from dpfl_lightning.sites.node.review import place_of

        print("Id of the person: ", end="", file=sys.stderr, flush=True)
        person = sys.stdin.readline().strip()  # so that no history of commands keeps it
        require(bool(person), "--person", "be followed by a line with an id", "none")
        print(place_of(*site_population(settings), person))
        return
    data, warning = settings.config["data"], settings.source.warning
    origin = data["class_path"] or data["name"]
    print(f"Site {settings.name}, records from {origin}." + (f" {warning}." if warning else ""))
    print(f"Its public key is {public_key(state.key())}.")
    for plan, reserved in state.plans().items():
        print(_line(state, plan, reserved))
        if (kept := read_scores(state.plan_folder(plan))) is not None:
            print(f"    {kept.words()}")
        for words in _counts_sent(state.plan_folder(plan) / "ledger.jsonl"):
            print(f"    sent: {words}")
        _print_ahead(state, plan)
    print(_budget(state))
    for line in _in_account(settings.name):
        print(line)


def _counts_sent(ledger: Path) -> tuple[str, ...]:
    """Return in words which counts of held-out records the releases in a ledger are; `_line` says if it is damaged."""
    from dpfl_lightning.privacy.accounting.guarantee import released_words
    from dpfl_lightning.privacy.ledger.ledger import read_ledger

    charges = []
    with contextlib.suppress(UserError):
        charges = read_ledger(ledger) if ledger.is_file() else []
    return released_words([charge.event for charge in charges if charge.event.scores])


def _in_account(name: str) -> list[str]:
    """Return what all runs on the records of this site cost together, with simulations on this machine."""
    from dpfl_lightning.privacy.ledger.account_file import users_file
    from dpfl_lightning.privacy.ledger.operator import OperatedAccount

    holders = OperatedAccount(users_file()).holders() if users_file().is_file() else []
    return [
        f"Account {users_file()}: {counted(one.together.runs, 'run')} on these records, {one.together.cost()}"
        for one in holders
        if one.is_called(name)
    ]


def _print_ahead(state: StateFolder, plan: str) -> None:
    """Say if the account of this machine counts more of a plan than its ledger has; `_line` says if that is damaged."""
    from dpfl_lightning.privacy.ledger.account_file import users_file
    from dpfl_lightning.privacy.ledger.file import verify
    from dpfl_lightning.privacy.ledger.operator import OperatedAccount

    ledger, ends = state.plan_folder(plan) / "ledger.jsonl", []
    with contextlib.suppress(UserError):
        ends = [verify(ledger, lambda charge: None).end] if ledger.is_file() and users_file().is_file() else []
    for words in filter(None, map(OperatedAccount(users_file()).ahead_of, ends)):
        print(f"    {words}")


def _condition(state: StateFolder, plan: str, reserved: Reservation) -> str:
    if reserved.withdrawn:
        return "withdrawn"
    if (state.plan_folder(plan) / "error.log").exists():
        return "halted, see its error.log"
    return "active" if state.released(plan) < _planned(state, plan, reserved) else "finished"


def _planned(state: StateFolder, plan: str, reserved: Reservation) -> int:
    return sum(line.count for line in state.terms(plan).plan.schedule.clients[reserved.client].planned)


def _line(state: StateFolder, plan: str, reserved: Reservation) -> str:
    try:
        paid: int | str = state.released(plan)
    except UserError:
        if not reserved.withdrawn:
            raise
        paid = "an unknown number"
    paid = f"{paid} of {_planned(state, plan, reserved)} releases paid"
    condition = _condition(state, plan, reserved)
    return f"  {plan[:12]}  {condition}: {paid}, reserves ({at_most(reserved.epsilon)}, {at_most(reserved.delta)})"


def _verify(state: StateFolder, flags: argparse.Namespace) -> None:
    from dpfl_lightning.sites.node.accept import verified

    state.key()
    for plan, reserved in state.plans().items():
        spent = verified(state, plan)
        bound = f"epsilon {at_most(spent)} of at most {at_most(reserved.epsilon)}"
        print(f"  {plan[:12]}  ledger unchanged, every release planned, {bound}")
        _print_ahead(state, plan)
    print(f"{counted(len(state.plans()), 'plan')} verified. {_budget(state)}")


def _withdraw(state: StateFolder, flags: argparse.Namespace) -> None:
    found = [plan for plan in state.plans() if plan.startswith(flags.plan)]
    if len(found) != 1 or len(flags.plan) < 6:
        must = "be the first six or more digits of the hash of one accepted plan"
        raise UserError(f"`PLAN` must {must}, got {flags.plan!r}. See `dpfl node status`.")
    with state.locked():
        kept = state.withdraw(found[0])
    why = "because it has released something" if kept.epsilon else "because it released nothing"
    reserves = f"It still reserves {at_most(kept.epsilon)}, {why}."
    print(f"Plan {found[0][:12]} is withdrawn: the node refuses its server. {reserves}")
    print(_budget(state))
