"""The claims of the papers, each with a verdict that is computed from finished cells: docs/papers.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from dpfl_lightning.config.yaml_text import read_yaml
from dpfl_lightning.errors import require
from experiments.pages import markdown
from experiments.papers.cells import finished, missing_cells, required_cells
from experiments.papers.experiment import Experiment
from experiments.papers.registry import experiments
from experiments.papers.run import seconds_of
from experiments.papers.systems import section
from experiments.papers.tuning import accuracies

FILE, PAGE = Path(__file__).parent / "claims.yaml", Path("docs/papers.md")
FEWEST = 3  # seeds of a verdict
CONFIRMED, NOT, UNDECIDED, REFUTED = "confirmed", "not confirmed", "undecided", "refuted"
PAPERS = {
    "noise_aware": ("Robust-HDP", "noise_aware.md"),
    "clustered": ("R-DPCFL", "clustered.md"),
    "selection": ("DPFL-BCS", "selection.md"),
    "distillation": ("DistDD", "distillation.md"),
}


class Finding(NamedTuple):
    """What cells say of a part of a claim."""

    verdict: str
    ours: str
    papers: str


@dataclass(frozen=True)
class Claim:
    """A claim of a paper; see the head of `claims.yaml`."""

    id: str
    paper: str
    claim: str
    compare: Sequence[Mapping[str, Any]] = ()
    grows: Sequence[Mapping[str, Any]] = ()
    facts: Sequence[Mapping[str, Any]] = ()
    judged: Mapping[str, str] = field(default_factory=dict)
    open: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""

    def findings(self, results: Path) -> list[Finding]:
        found = [one for part in self.compare for one in _compared(part, results)]
        found += [one for part in self.grows for one in _grown(part, results)]
        found += [one for part in self.facts for one in _computed(part, results)]
        if self.judged:
            found.append(Finding(self.judged["verdict"], f"{self.judged['because']} ({self.judged['where']})", ""))
        return found

    def verdict(self, results: Path) -> str:
        """Return the verdict of all parts: `mixed` if they differ, `open` without finished cells."""
        verdicts = dict.fromkeys(one.verdict for one in self.findings(results))
        if len(verdicts) > 1 and REFUTED in verdicts and not (self.compare or self.grows):
            return REFUTED  # a bound has to hold in every column
        return "open" if not verdicts else next(iter(verdicts)) if len(verdicts) == 1 else "mixed"

    @property
    def tables(self) -> list[str]:
        return list(dict.fromkeys(part["table"] for part in self.parts))

    @property
    def parts(self) -> list[Mapping[str, Any]]:
        """What reads tables."""
        return [*self.compare, *self.grows, *self.facts]


def claims() -> list[Claim]:
    """Return the claims of `claims.yaml`. Raises UserError for an unknown field, table, row or column."""
    listed = [Claim(**one) for one in read_yaml(str(FILE))["claims"]]
    for one in listed:
        require(bool(one.parts or one.judged or one.open), one.id, "say what decides it", "nothing")
        for part in one.parts:
            experiment = experiments()[part["table"]]
            for row in (part["row"], *part.get("rivals", ()), *([part["than"]] if "than" in part else [])):
                require(row in experiment.rows, f"{one.id}.{part['table']}", "have such a row", row)
            for column in _columns(part, experiment):
                require(column in experiment.columns, f"{one.id}.{part['table']}", "have such a column", column)
    return listed


def _columns(part: Mapping[str, Any], experiment: Experiment) -> list[str]:
    named = [*part.get("columns", ()), *(part[key] for key in ("column", "from", "to") if key in part)]
    return named or list(experiment.columns)


def _compared(part: Mapping[str, Any], results: Path) -> Iterator[Finding]:
    """Yield a finding for each column and rival with finished cells, in the direction in which the row is better."""
    experiment, row = experiments()[part["table"]], part["row"]
    for column in part.get("columns", experiment.columns):
        for rival in part["rivals"]:
            of_seed = _differences(part, rival, column, part.get("from", column), results)
            if not of_seed:
                continue
            differences, sign = [*of_seed.values()], _sign(experiment, row)
            effect = part.get("effect", _papers_effect(experiment, row, rival, column, sign))
            names = f"{experiment.rows[row].title} - {experiment.rows[rival].title}"
            where = f"{names}, {experiment.columns[column].title}"
            shown = f"{where}: {in_words(differences, experiment.decimals)}"
            published = "-" if effect is None else f"{effect:+.1f}"
            yield Finding(verdict_of(differences, effect, part.get("within", 0.0)), shown, published)


def _grown(part: Mapping[str, Any], results: Path) -> Iterator[Finding]:
    """Yield a finding for each rival: by how much the row's lead is larger in the column `to` than in `from`."""
    experiment, row = experiments()[part["table"]], part["row"]
    for rival in part["rivals"]:
        before, after = (_differences(part, rival, part[key], part[key], results) for key in ("from", "to"))
        differences = [after[seed] - before[seed] for seed in before if seed in after]
        if not differences:
            continue
        sign, titles = _sign(experiment, row), (experiment.columns[part[key]].title for key in ("from", "to"))
        leads = [_papers_effect(experiment, row, rival, part[key], sign) for key in ("from", "to")]
        effect = None if leads[0] is None or leads[1] is None else leads[1] - leads[0]
        names = f"Lead of {experiment.rows[row].title} over {experiment.rows[rival].title}"
        shown = f"{names}, from {' to '.join(titles)}: {in_words(differences, experiment.decimals)}"
        published = "-" if effect is None else f"{effect:+.1f}"
        yield Finding(verdict_of(differences, effect), shown, published)


def _differences(
    part: Mapping[str, Any], rival: str, column: str, column_of_rival: str, results: Path
) -> dict[int | None, float]:
    """Return seed -> by how much the row is better than the rival, for the seeds that both have."""
    experiment, row = experiments()[part["table"]], part["row"]
    cells = finished(results, experiment, experiment.scale(None))
    ours, theirs = (
        accuracies(experiment, name, cells.get((name, place), ()))
        for name, place in ((row, column), (rival, column_of_rival))
    )
    return {seed: _sign(experiment, row) * (ours[seed] - theirs[seed]) for seed in ours if seed in theirs}


def _sign(experiment: Experiment, row: str) -> int:
    """Return -1 where lower numbers are better, else 1."""
    better = experiment.comparison.better if experiment.comparison else ""
    return -1 if (better if isinstance(better, str) else better.get(row, "")) == "lower" else 1


def _papers_effect(experiment: Experiment, row: str, rival: str, column: str, sign: int) -> float | None:
    ours, theirs = experiment.paper_number(row, column), experiment.paper_number(rival, column)
    return None if ours is None or theirs is None else sign * (ours - theirs)


def verdict_of(differences: Sequence[float], effect: float | None, within: float = 0.0) -> str:
    """Return the verdict of paired differences: the 95 % interval decides.

    `effect` is the paper's difference, and `within` how much worse still counts as equal.

    >>> verdict_of([2.0, 2.1, 1.9], effect=2.0), verdict_of([0.0, 0.1, -0.1], effect=2.0), verdict_of([2.0], effect=2.0)
    ('confirmed', 'not confirmed', 'undecided')
    """
    if len(differences) < FEWEST:
        return UNDECIDED
    mean, half = fmean(differences), _half_width(differences)
    if mean - half > -within:
        return CONFIRMED
    least = 0.0 if effect is None else max(effect, 0.0) / 2
    return NOT if mean + half < least - within else UNDECIDED


def _half_width(differences: Sequence[float]) -> float:
    from scipy.stats import t

    count = len(differences)
    return float(t.ppf(0.975, count - 1)) * stdev(differences) / math.sqrt(count)


def in_words(differences: Sequence[float], decimals: int) -> str:
    """Return the mean with its standard error, and the least difference that would have been seen.

    >>> in_words([1.0, 2.0, 3.0], 1), in_words([1.0], 1)
    ('+2.0 ± 0.6 (3 seeds; 2.5 would have been seen)', '+1.0 (1 seed)')
    """
    count, mean = len(differences), fmean(differences)
    if count < 2:
        return f"{mean:+.{decimals}f} (1 seed)"
    error, seen = stdev(differences) / math.sqrt(count), _half_width(differences)
    return f"{mean:+.{decimals}f} ± {error:.{decimals}f} ({count} seeds; {seen:.{decimals}f} would have been seen)"


def _computed(part: Mapping[str, Any], results: Path) -> Iterator[Finding]:
    """Yield one finding of all columns: whether the bound holds in each."""
    experiment = experiments()[part["table"]]
    cells = finished(results, experiment, experiment.scale(None))
    columns = [one for one in _columns(part, experiment) if (part["row"], one) in cells]
    if not columns:
        return

    def of(row: str, column: str) -> float:
        return fmean(run["values"][experiment.rows[row].value] for run in cells[row, column])

    if "than" in part:
        pairs = [(of(part["row"], one), of(part["than"], one)) for one in columns]
        holds = all(ours <= part["factor"] * other for ours, other in pairs)
        ratios = [ours / other for ours, other in pairs if other]
        words, than = f"{min(ratios):.3g} to {max(ratios):.3g} times", experiment.rows[part["than"]].title
        shown, bound = f"{experiment.rows[part['row']].title}: {words} {than}", f"at most {part['factor']:g} times"
    else:
        values = [of(part["row"], one) for one in columns]
        most, least = part.get("at_most", math.inf), part.get("at_least", -math.inf)
        holds = least <= min(values) and max(values) <= most
        bound = f"at most {most:g}" if "at_most" in part else f"at least {least:g}"
        words = f"{values[0]:.3g}" if len(values) == 1 else f"{min(values):.3g} to {max(values):.3g}"
        shown = f"{experiment.rows[part['row']].title}: {words}"
    yield Finding(CONFIRMED if holds else REFUTED, shown, bound)


# ---- the page


def page(results: Path) -> str:
    """Return docs/papers.md."""
    text, listed = read_yaml(str(FILE)), claims()
    parts = ["# The papers' claims", "<!-- Written by `python -m experiments.papers claims`. -->", text["head"].strip()]
    counts = Counter(one.verdict(results) for one in listed)
    parts.append(f"Of {len(listed)} claims {', '.join(f'{n} are {verdict}' for verdict, n in counts.items())}.")
    for paper, (title, details) in PAPERS.items():
        rows = [row for one in listed if one.paper == paper for row in _rows(one, results)]
        parts += [
            f"## {title}",
            markdown(["", "claim", "verdict", "ours", "the paper's", "command"], rows),
            f"{text['use'][paper].strip()} [Details]({details}).",
            section(paper),
        ]
    return "\n\n".join(parts) + "\n"


def _rows(claim: Claim, results: Path) -> list[list[str]]:
    findings, verdict = claim.findings(results), claim.verdict(results)
    commands = "; ".join(f"`python -m experiments.papers {table}`" for table in claim.tables)
    left = _left(claim, results)
    ours = "<br>".join(f"{one.ours}: {one.verdict}" if verdict == "mixed" else one.ours for one in findings)
    words = " ".join(filter(None, [ours, claim.remark, left]))
    published = "<br>".join(one.papers for one in findings)
    return [[claim.id, claim.claim, f"**{verdict}**", words or "-", published or "-", commands or "-"]]


def _left(claim: Claim, results: Path) -> str:
    """Return what would decide a claim, and in how many hours."""
    if claim.open:
        return f"Would decide it: {claim.open['needs']}, about {claim.open['hours']:g} hours on two cores."
    if claim.verdict(results) not in ("open", UNDECIDED):
        return ""
    missing = [
        cell
        for table in claim.tables
        for cell in missing_cells(required_cells(experiments()[table], experiments()[table].scale(None)), results)
    ]
    hours = seconds_of(missing, results) / 3600 if missing else 0.0
    return f"Its tables lack {len(missing)} cells, about {hours:.1f} hours on two cores." if missing else ""
