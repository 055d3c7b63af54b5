"""The folder of a node: whose records it serves, the plans that it has accepted, and the limit on all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from dpfl_lightning.config.reading import check_format, expecting, read_bytes, read_key
from dpfl_lightning.errors import UserError, require
from dpfl_lightning.privacy.accounting.accountant import exact_sum
from dpfl_lightning.privacy.accounting.noise_source import NoiseSource, source_of, with_key
from dpfl_lightning.privacy.accounting.units import RECORD, ROWS_KEY, Unit, unit_of
from dpfl_lightning.privacy.compose import Keys, Line, compose
from dpfl_lightning.privacy.ledger.file import is_begun
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.runtime.files import locked_folder, write_json, write_text
from dpfl_lightning.runtime.strict_json import parsed
from dpfl_lightning.runtime.text import at_most
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Site, Terms
from dpfl_lightning.sites.receipt import public_key
from dpfl_lightning.sites.terms import read_site, read_terms

T = TypeVar("T")

_FORMAT = 1  # of node.json and of reserved.json
_MOST_CONTACT = 300  # characters


@dataclass(frozen=True)
class Settings:
    """What the operator of a site decides.

    Args:
        name: of the site; the name of its client in plans, or its number if clients have no names.
        client: whose records are served, if the data have several clients.
        config: the part of a configuration that says where the records are.
        epsilon_limit, delta_limit: on the sum over all accepted plans, under `adjacency`.
        unit: what the limits protect; a plan must have the same.
        model: `module.Class` of the site's installation that plans may name as `model.class_path`; None allows the
            models of this package only.
        model_args: the `model.init_args` with which a plan may name it, and no others.
        noise_key: 32 hexadecimal digits from which noise follows in tests: it protects nobody. None draws fresh noise.
    """

    name: str
    client: str
    config: Mapping[str, Any]
    epsilon_limit: float
    delta_limit: float
    adjacency: str = "add_remove"
    unit: Unit = RECORD
    model: str | None = None
    model_args: Mapping[str, Any] = field(default_factory=dict)
    noise_key: str | None = None

    @property
    def source(self) -> NoiseSource:
        return source_of(vars(self))

    def with_key(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return a section privacy of a configuration with this node's source of noise."""
        return with_key(section, self.noise_key)


@dataclass(frozen=True)
class Reservation:
    """The (epsilon, delta) that an accepted plan may spend, and this site's client in it.

    It counts towards the limit also after the site has `withdrawn`, unless nothing was released: when to stop may
    depend on releases, so what a part of the plan costs is not a bound that was fixed beforehand. `most_numbers` is
    how many bytes of tensors a request of the plan needs. Once the plan has `begun`, its ledger must be whole.
    `accepted` and `ended` are the dates of acceptance and withdrawal; empty before.
    """

    epsilon: float
    delta: float
    client: int
    most_numbers: int
    withdrawn: bool = False
    begun: bool = False
    accepted: str = ""
    ended: str = ""


class StateFolder:
    """`node.json`, `node.key` (with which the node signs), `site.json` (public facts), `plans/HASH/`, and the socket.

    **Privacy** All but `site.json` is for the operator of the site alone: the folder has mode 0700.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, settings: Settings, site: Site, key: bytes) -> StateFolder:
        """Create the folder of a new node, whose records are those of `site`, and which signs with `key`."""
        empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        require(empty, "STATE_DIR", "be new or empty", str(path), "A node that was set up keeps its folder.")
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.chmod(0o700)
        folder = cls(path)
        (path / "plans").mkdir()
        write_text(path / "node.key", key.hex(), private=True)
        write_text(path / "site.json", wire.to_text(site))
        folder.save(settings)
        return folder

    def key(self) -> bytes:
        """Return the private key with which the node signs, 32 bytes. Raises UserError if it is gone or damaged."""
        file = self.path / "node.key"
        advice = "Restore it from a copy: plans that were accepted with its public key need it."
        key = read_key(file, advice)
        require(public_key(key) == self.site().public_key, str(file), "belong to site.json", "another key", advice)
        return key

    def site(self) -> Site:
        file = self.path / "site.json"
        return read_site(file, str(file))

    def renew(self, site: Site) -> None:
        """Let `site.json` have the facts about the records as they are now, which a new plan needs."""
        if wire.digest(site) != wire.digest(self.site()):
            write_text(self.path / "site.json", wire.to_text(site))

    def save(self, settings: Settings) -> None:
        _write(self.path / "node.json", {**vars(settings), **settings.unit.options()})

    def settings(self) -> Settings:
        file = self.path / "node.json"
        must = "be the folder of a node"
        require(file.is_file(), "STATE_DIR", must, str(self.path), "Create it with `dpfl node init`.")
        return _read(_settings, file, "the settings of a node")

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Hold the one lock under which plans are accepted and withdrawn."""
        return locked_folder(self.path)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Be the one process that serves this folder. Raises UserError if there is another one."""
        with open(self.path / "serving.lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                require(False, "STATE_DIR", "be served by one process", str(self.path), "Another one serves it now.")
            yield

    def plans(self) -> dict[str, Reservation]:
        """Return the reservation of each accepted plan, by its hash."""
        files = sorted(self.path.glob("plans/*/reserved.json"))
        return {file.parent.name: _read(Reservation, file, "a reservation") for file in files}

    def plan_folder(self, plan: str) -> Path:
        return self.path / "plans" / plan

    def terms(self, plan: str) -> Terms:
        return read_terms(self.plan_folder(plan) / "plan.json")

    def released(self, plan: str) -> int:
        """Return how many releases a plan has paid for.

        Raises UserError unless ledger, head and kept releases agree: an earlier state than the last one is not served.
        """
        folder = self.plan_folder(plan)
        ledger, numbers = folder / "ledger.jsonl", [int(one.name.partition("-")[0]) for one in kept_releases(folder)]
        try:
            if not (self.plans()[plan].begun or numbers or is_begun(ledger)):
                return 0
            require(ledger.is_file(), ledger.name, "hold the charges of this plan", "no file")
            paid = len(read_ledger(ledger))
            made = max(numbers, default=-1) + 1
            repeats = self.settings().source.repeats  # without a charge
            require(repeats or paid >= made, ledger.name, f"pay for the {made} releases that were made", paid)
        except UserError as error:
            raise UserError(
                f"`{folder}` must hold the whole ledger of its plan, got: {str(error).partition('. ')[0].rstrip('.')}. "
                "Restore its files from a copy that was made after the node had stopped for the last time; or end the "
                f"study with `dpfl node withdraw {self.path} {plan[:12]}`: all that it reserved stays reserved."
            ) from None
        return paid

    def begin(self, plan: str) -> None:
        """Note that a plan has a ledger from now on, before its first charge; call it under `locked`."""
        reservation = self.plans()[plan]
        if not reservation.begun:
            self._write(plan, dataclasses.replace(reservation, begun=True))

    def contact(self, plan: str) -> str:
        """Return whom to ask about a plan; empty if nobody was named."""
        file = self._contact(plan)
        return file.read_text(encoding="utf-8") if file.is_file() else ""

    def keep_contact(self, plan: str, contact: str) -> None:
        """Remember whom to ask about a plan, before or after it is accepted."""
        fits = bool(contact.strip()) and contact.isprintable() and len(contact) <= _MOST_CONTACT
        require(fits, "--contact", f"be one line of at most {_MOST_CONTACT} characters", contact)
        self.plan_folder(plan).mkdir(exist_ok=True)
        write_text(self._contact(plan), contact, private=True)

    def _contact(self, plan: str) -> Path:
        return self.plan_folder(plan) / "contact.txt"

    def reserved(self, *more: Reservation, without: str = "") -> tuple[float, float]:
        """Return what all plans but `without`, and `more`, reserve together.

        Results may choose the releases of later plans, so epsilons and deltas are added.
        """
        adjacency, keys = self.settings().adjacency, Keys([self.settings().name])
        plans = [one for plan, one in self.plans().items() if plan != without]
        lines = [
            Line(str(number), one.client, keys, (), one.delta, adjacency, "poisson", "pld", one.epsilon, chosen=True)
            for number, one in enumerate((*plans, *more))
        ]
        total = compose(lines, of=[keys])[keys]
        return total.epsilon, total.delta

    def left(self, limits: tuple[float, float], *more: Reservation) -> tuple[float, float]:
        """Return what of the limits (epsilon, delta) all plans and `more` leave; below 0 if they are above a limit."""
        epsilon, delta = (exact_sum([limit, -one]) for limit, one in zip(limits, self.reserved(*more), strict=True))
        return epsilon, delta

    def reserve(self, terms: Terms, reservation: Reservation, epsilon_limit: float, delta_limit: float) -> str:
        """Store an accepted plan and return its hash; call it under `locked`. Raises UserError as `check` does."""
        self.check(terms, reservation, epsilon_limit, delta_limit)
        plan = wire.digest(terms)
        folder = self.plan_folder(plan)
        folder.mkdir(exist_ok=True)
        write_text(folder / "plan.json", wire.to_text(terms))
        self.save(dataclasses.replace(self.settings(), epsilon_limit=epsilon_limit, delta_limit=delta_limit))
        accepted = dataclasses.replace(reservation, accepted=date.today().isoformat())
        self._write(plan, accepted)  # last: without it the plan is not accepted
        return plan

    def check(self, terms: Terms, reservation: Reservation, epsilon_limit: float, delta_limit: float) -> None:
        """Raise UserError if a plan was accepted before, or the sum of all reservations would exceed a limit."""
        plan, others = wire.digest(terms), self.plans()
        require(plan not in others, "PLAN", "be a plan that was not accepted before", plan[:12], "See `status`.")
        totals = self.reserved(reservation)
        for name, limit, total in zip(("epsilon", "delta"), (epsilon_limit, delta_limit), totals, strict=True):
            must = f"be at least {at_most(total)}, the {name} of this plan and of {len(others)} accepted before"
            require(total <= limit, f"--{name}_limit", must, limit, "Refuse the plan, or raise the limit.")

    def withdraw(self, plan: str) -> Reservation:
        """End a plan, and return what of its reservation stays; call it under `locked`."""
        before = self.plans()[plan]
        try:
            unused = not self.released(plan)
        except UserError:  # what was released is unknown
            unused = False
        kept = (0.0, 0.0) if unused else (before.epsilon, before.delta)
        ended = date.today().isoformat()
        after = dataclasses.replace(before, epsilon=kept[0], delta=kept[1], withdrawn=True, ended=ended)
        self._write(plan, after)
        return after

    def _write(self, plan: str, reservation: Reservation) -> None:
        _write(self.plan_folder(plan) / "reserved.json", vars(reservation))


def _settings(**content: Any) -> Settings:
    unit = unit_of(content)
    del content[ROWS_KEY]
    return Settings(**{**content, "unit": unit})


def _write(file: Path, content: Mapping[str, Any]) -> None:
    write_json(file, {"format": _FORMAT, **content}, private=True)


def _read(kind: Callable[..., T], file: Path, what: str) -> T:
    with expecting(file, f"hold {what}", "Restore it from a copy."):
        content = parsed(read_bytes(file))
        check_format(file, content.pop("format", None), _FORMAT)
        return kind(**content)


def kept_releases(folder: Path) -> list[Path]:
    """Return the files of the releases that a plan keeps, `NUMBER-ROUND-DIGEST.bin`, in the order of their numbers."""
    return sorted((folder / "releases").glob("*.bin"))
