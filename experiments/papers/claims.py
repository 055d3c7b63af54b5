"""The claims of the papers, each with a verdict that is computed from finished cells: docs/papers.md."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from dpfl_lightning.config.yaml_text import read_yaml
from dpfl_lightning.errors import require
from experiments.pages import RESULTS, markdown
from experiments.papers import tuning
from experiments.papers.cells import Cell, finished, is_finished, kept, missing_cells, required_cells
from experiments.papers.experiment import Experiment
from experiments.papers.registry import experiments
from experiments.papers.report import not_tuned
from experiments.papers.run import seconds_of
from experiments.papers.systems import section

FILE, PAGE = Path(__file__).parent / "claims.yaml", Path("docs/papers.md")
FEWEST = 3  # seeds of a verdict
CONFIRMED, DIRECTION, SMALLER, NOT = "confirmed", "direction only", "smaller", "not confirmed"
UNDECIDED, REFUTED, NO_VERDICT, MIXED = "undecided", "refuted", "no verdict", "mixed"
OPEN = "not decided at this scale"
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
    searches: Sequence[Mapping[str, Any]] = ()
    remark: str = ""

    def findings(self, results: Path) -> list[Finding]:
        found = [one for part in self.compare for one in _compared(part, results)]
        found += [one for part in self.grows for one in _grown(part, results)]
        found += [one for part in self.facts for one in _computed(part, results)]
        return found + [one for part in self.searches for one in _searched(part, results)]

    def verdict(self, results: Path) -> str:
        """Return the verdict of all parts: `mixed` if they differ, `OPEN` without finished cells."""
        verdicts = dict.fromkeys(one.verdict for one in self.findings(results))
        if len(verdicts) > 1 and REFUTED in verdicts and not (self.compare or self.grows):
            return REFUTED  # a bound has to hold in every column
        return OPEN if not verdicts else next(iter(verdicts)) if len(verdicts) == 1 else MIXED

    @property
    def tables(self) -> list[str]:
        return list(dict.fromkeys(table for part in self.parts for table in (part["table"], *part.get("beside", ()))))

    @property
    def parts(self) -> list[Mapping[str, Any]]:
        """What reads tables."""
        return [*self.compare, *self.grows, *self.facts, *self.searches]

    def cells(self) -> list[Cell]:
        """Return the cells whose numbers the claim reads, each once."""
        read = [cell for part in self.parts for cell in _cells_of(part)]
        return list(dict.fromkeys(read))


def claims() -> list[Claim]:
    """Return the claims of `claims.yaml`. Raises UserError for an unknown field, table, row or column."""
    listed = [Claim(**one) for one in read_yaml(str(FILE))["claims"]]
    for one in listed:
        require(bool(one.parts), one.id, "say what decides it", "nothing")
        for part in one.parts:
            experiment = experiments()[part["table"]]
            for row in _rows_of(part):
                require(row in experiment.rows, f"{one.id}.{part['table']}", "have such a row", row)
            for column in _columns(part, experiment):
                require(column in experiment.columns, f"{one.id}.{part['table']}", "have such a column", column)
    return listed


def find(ids: Sequence[str]) -> list[Claim]:
    """Return the claims of these ids; a UserError names one that is none."""
    known = {one.id: one for one in claims()}
    for name in ids:
        require(name in known, "NAME", f"be a claim after claims: {', '.join(known)}", name)
    return [known[name] for name in dict.fromkeys(ids)]


def _rows_of(part: Mapping[str, Any]) -> list[str]:
    named = [*(part[key] for key in ("row", "than", "equals") if key in part), *part.get("rivals", ())]
    return list(dict.fromkeys(named))


def _columns(part: Mapping[str, Any], experiment: Experiment) -> list[str]:
    """Return the columns whose cells a part reads."""
    named = [*part.get("columns", ()), *(part[key] for key in ("column", "from", "to") if key in part)]
    return list(dict.fromkeys(named)) or list(experiment.columns)


def _cells_of(part: Mapping[str, Any]) -> list[Cell]:
    experiment = experiments()[part["table"]]
    read = experiment.restricted(_rows_of(part) or None, _columns(part, experiment))
    beside = (experiments()[name] for name in part.get("beside", ()))
    return [cell for one in (read, *beside) for cell in required_cells(one, one.scale(None))]


# ---- paired differences


def _compared(part: Mapping[str, Any], results: Path) -> Iterator[Finding]:
    """Yield a finding for each column and rival with finished cells, in the direction in which the row is better."""
    experiment, row = experiments()[part["table"]], part["row"]
    for column in part.get("columns", experiment.columns):
        place = part.get("from", column)
        for rival in part["rivals"]:
            of_seed = _differences(part, rival, column, place, results)
            if not of_seed:
                continue
            differences, within = [*of_seed.values()], part.get("within", 0.0)
            effect = part.get("effect", papers_effect(experiment, row, rival, column, place))
            where = experiment.columns[column].title
            where += f" against {experiment.columns[place].title}" if place != column else ""
            names = experiment.rows[row].title
            names += f" - {experiment.rows[rival].title}" if rival != row else ""
            shown = f"{names}, {where}: {in_words(differences, experiment.decimals)}"
            verdict = verdict_of(differences, effect, within)
            yield _unless_untuned(Finding(verdict, shown, _signed(effect)), experiment, (column, place), results)


def _grown(part: Mapping[str, Any], results: Path) -> Iterator[Finding]:
    """Yield a finding for each rival: by how much the row's lead is larger in the column `to` than in `from`."""
    experiment, row, places = experiments()[part["table"]], part["row"], (part["from"], part["to"])
    for rival in part["rivals"]:
        before, after = (_differences(part, rival, place, place, results) for place in places)
        differences = [after[seed] - before[seed] for seed in before if seed in after]
        if not differences:
            continue
        leads = [papers_effect(experiment, row, rival, place, place) for place in places]
        effect = None if leads[0] is None or leads[1] is None else leads[1] - leads[0]
        names = f"Lead of {experiment.rows[row].title} over {experiment.rows[rival].title}"
        titles = " to ".join(experiment.columns[place].title for place in places)
        shown = f"{names}, from {titles}: {in_words(differences, experiment.decimals)}"
        finding = Finding(verdict_of(differences, effect), shown, _signed(effect))
        yield _unless_untuned(finding, experiment, places, results)


def _unless_untuned(finding: Finding, experiment: Experiment, columns: Sequence[str], results: Path) -> Finding:
    """Return the finding without its verdict if in one of its columns a row is above its own upper bound."""
    if any(not_tuned(experiment, experiment.scale(None), results, column) for column in columns):
        return finding._replace(verdict=NO_VERDICT, ours=f"{finding.ours}, not tuned")
    return finding


def _signed(effect: float | None) -> str:
    return "-" if effect is None else f"{effect:+.1f}"


def _differences(
    part: Mapping[str, Any], rival: str, column: str, column_of_rival: str, results: Path
) -> dict[int | None, float]:
    """Return seed -> by how much the row is better than the rival, for the seeds that both have."""
    experiment, row = experiments()[part["table"]], part["row"]
    cells = finished(results, experiment, experiment.scale(None))
    ours, theirs = (
        tuning.accuracies(experiment, name, cells.get((name, place), ()))
        for name, place in ((row, column), (rival, column_of_rival))
    )
    return {seed: _sign(experiment, row) * (ours[seed] - theirs[seed]) for seed in ours if seed in theirs}


def _sign(experiment: Experiment, row: str) -> int:
    """Return -1 where lower numbers are better, else 1."""
    better = experiment.comparison.better if experiment.comparison else ""
    return -1 if (better if isinstance(better, str) else better.get(row, "")) == "lower" else 1


def papers_effect(experiment: Experiment, row: str, rival: str, column: str, column_of_rival: str) -> float | None:
    """Return by how much the row is better than the rival in the paper; None where it has no number."""
    ours, theirs = experiment.paper_number(row, column), experiment.paper_number(rival, column_of_rival)
    return None if ours is None or theirs is None else _sign(experiment, row) * (ours - theirs)


def verdict_of(differences: Sequence[float], effect: float | None, within: float = 0.0) -> str:
    """Return the verdict of paired differences by their 95 % interval; the head of the page has the rules.

    `effect` is the paper's difference. `within` is how much worse still counts as equal; then `effect` is not used.

    >>> verdict_of([2.0, 2.1, 1.9], 2.0), verdict_of([2.0, 2.1, 1.9], 9.0), verdict_of([0.0, 0.1, -0.1], 2.0)
    ('confirmed', 'smaller', 'not confirmed')
    """
    if len(differences) < FEWEST:
        return UNDECIDED
    mean, half = fmean(differences), _half_width(differences)
    least, most = mean - half + within, mean + half + within
    half_of_papers = 0.0 if effect is None or within else max(effect, 0.0) / 2
    if least > 0:
        return SMALLER if most < half_of_papers else DIRECTION if least < half_of_papers else CONFIRMED
    return NOT if most < half_of_papers else UNDECIDED


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


# ---- numbers without seeds


def _computed(part: Mapping[str, Any], results: Path) -> Iterator[Finding]:
    """Yield one finding of all columns: whether the bound holds in each."""
    experiment = experiments()[part["table"]]
    cells = finished(results, experiment, experiment.scale(None))
    columns = [one for one in _columns(part, experiment) if (part["row"], one) in cells]
    if not columns:
        return

    def of(row: str) -> list[float]:
        return [fmean(run["values"][experiment.rows[row].value] for run in cells[row, one]) for one in columns]

    values, title = of(part["row"]), experiment.rows[part["row"]].title
    if "than" in part:
        others = of(part["than"])
        holds = all(ours <= part["factor"] * other for ours, other in zip(values, others, strict=True))
        ratios = [ours / other for ours, other in zip(values, others, strict=True) if other]
        words, bound = (
            f"{_range(ratios)} times {experiment.rows[part['than']].title}",
            f"at most {part['factor']:g} times",
        )
    elif part.get("falls"):
        holds = all(after < before for before, after in itertools.pairwise(values))
        first, last = (experiment.columns[one].title for one in (columns[0], columns[-1]))
        words, bound = f"{values[0]:.3g} at {first} to {values[-1]:.3g} at {last}", "falls"
    else:
        most, least = part.get("at_most", math.inf), part.get("at_least", -math.inf)
        holds = least <= min(values) and max(values) <= most
        bounds = (f"at least {least:g}" if least > -math.inf else "", f"at most {most:g}" if most < math.inf else "")
        words, bound = _range(values), " and ".join(filter(None, bounds))
    yield Finding(CONFIRMED if holds else REFUTED, f"{title}: {words}", bound)


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _searched(part: Mapping[str, Any], results: Path) -> Iterator[Finding]:
    """Yield a finding of a search over a set: its choice (`regret`), or its seconds with those of the set."""
    from experiments.papers.distillation.judgements import judged, with_interval

    experiment = experiments()[part["table"]]
    cells = finished(results, experiment, experiment.scale(None))
    found = {scorer: judged(experiment, cells, scorer) for scorer in ("distilled", "random", "federated")}
    of_set, of_random, of_federation = found.values()
    if of_set is None or of_random is None or of_federation is None:
        return
    if "regret" in part:
        seeds = min(len(cells[row, "distilled"]) for row in experiment.rows if (row, "distilled") in cells)
        worse = of_set.regret - of_federation.regret
        verdict = UNDECIDED if seeds < FEWEST else CONFIRMED if worse <= part["regret"] else NOT
        best = f"the set's choice is {of_set.regret:.1f} points below the best"
        points = f"{best}, that of the federation {of_federation.regret:.1f}, that of as many random records"
        ranks = [with_interval(one.spearman, one.candidates) for one in (of_set, of_random)]
        shown = (
            f"{experiment.name}: {points} {of_random.regret:.1f}. Spearman {ranks[0]} and {ranks[1]}. {_seeds(seeds)}"
        )
        yield Finding(verdict, shown, f"at most {part['regret']:g} points")
        return
    of_making = sum(kept(results, cell)["seconds"] for cell in _made(part, results))
    ours, theirs = of_making + of_set.candidates * of_set.seconds, of_set.candidates * of_federation.seconds
    trials = f"{of_set.candidates} trials of {of_set.seconds:.0f} s"
    shown = f"{experiment.name}: {ours:.0f} s, {of_making:.0f} s of them for the set and {trials}; in the federation "
    verdict = CONFIRMED if ours < theirs else REFUTED
    yield Finding(verdict, f"{shown}{theirs:.0f} s, {of_federation.seconds:.0f} s a trial", "less time")


def _made(part: Mapping[str, Any], results: Path) -> list[Cell]:
    """Return the finished cells of the tables beside that of the part."""
    beside = [experiments()[name] for name in part.get("beside", ())]
    return [cell for one in beside for cell in required_cells(one, one.scale(None)) if is_finished(cell, results)]


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


# ---- what it costs


def with_needed(cells: Iterable[Cell]) -> list[Cell]:
    """Return these cells and those whose results choose their options, each once."""
    found: dict[Cell, None] = {}
    waiting = list(cells)
    while waiting:
        cell = waiting.pop(0)
        if cell not in found:
            found[cell] = None
            waiting += tuning.asked_by(cell)
    return list(found)


def to_make(listed: Sequence[Claim], results: Path) -> list[Cell]:
    """Return the cells that these claims read, and those that they need, which are not finished."""
    return missing_cells(with_needed(cell for one in listed for cell in one.cells()), results)


def hours(cells: Sequence[Cell], results: Path) -> float:
    """Return the hours on two cores: measured of finished cells, estimated of others."""
    missing = missing_cells(list(cells), results)
    made = [cell for cell in cells if cell not in set(missing)]
    return (math.fsum(kept(results, cell)["seconds"] for cell in made) + seconds_of(missing, results)) / 3600


# ---- the page


def page(results: Path) -> str:
    """Return docs/papers.md."""
    text, listed = read_yaml(str(FILE)), claims()
    parts = ["# The papers' claims", "<!-- Written by `python -m experiments.papers claims`. -->", text["head"].strip()]
    counts = Counter(one.verdict(results) for one in listed)
    parts.append(f"{len(listed)} claims: {', '.join(f'{n} {verdict}' for verdict, n in counts.most_common())}.")
    parts.append(_left(listed, text["allotted"], results))
    for paper, (title, details) in PAPERS.items():
        of_paper = [one for one in listed if one.paper == paper]
        rows = [[one.id, one.claim, f"**{one.verdict(results)}**", _cost(one, results)] for one in of_paper]
        parts += [
            f"## {title}",
            markdown(["", "claim", "verdict", "hours, of them left"], rows),
            f"{text['use'][paper].strip()} [Details]({details}).",
            f"### What was found: {title}",
            *(_details(one, text["differs"], results) for one in of_paper),
            f"### Systems: {title}",
            section(paper),
        ]
    return "\n\n".join(parts) + "\n"


def page_of(results: Path) -> Path:
    """Return the file of the page: that of the docs for the project's own cells, else one beside the cells."""
    return PAGE if results.resolve() == RESULTS.resolve() else results / PAGE.name


def _cost(claim: Claim, results: Path) -> str:
    cells = with_needed(claim.cells())
    return f"{hours(cells, results):.2f}, {hours(missing_cells(cells, results), results):.2f}"


def details(claim: Claim, results: Path) -> str:
    """Return what decides a claim: differences, how its runs differ from the paper's, what is not made yet, commits."""
    return _details(claim, read_yaml(str(FILE))["differs"], results)


def _details(claim: Claim, differs: Mapping[str, str], results: Path) -> str:
    findings = claim.findings(results)
    differing = len({one.verdict for one in findings}) > 1
    lines = [
        f"{one.ours}{'' if one.papers == '-' else f'; {_whose(one)}: {one.papers}'}"
        f"{f': *{one.verdict}*' if differing else ''}"
        for one in findings
    ]
    tables_of = dict[str, list[str]]()
    for table in claim.tables:
        tables_of.setdefault(differs[table].strip(), []).append(table)
    lines += [f"Other than in the paper, {', '.join(names)}: {text}" for text, names in tables_of.items()]
    lines.append(f"{_made_of(claim, results)} `python -m experiments.papers claims {claim.id}`")
    heading = f"**{claim.id}** {claim.claim}: *{claim.verdict(results)}*."
    text = " ".join(filter(None, [heading, claim.remark]))
    return "\n".join([text, "", *(f"- {line}" for line in lines)])


def _made_of(claim: Claim, results: Path) -> str:
    """Return how many cells are not made yet, and the commits of the others, or their dates where they have none."""
    cells = claim.cells()
    missing = missing_cells(cells, results)
    made = [kept(results, cell) for cell in cells if cell not in set(missing)]
    left = (
        f"{len(missing)} of {len(cells)} cells are not made yet."
        if made
        else f"None of the {len(cells)} cells is made yet."
    )
    commits = {one.get("commit", "") for one in made}
    of = [one[:8] + "+" * one.endswith("+") for one in sorted(commits - {""})]
    dates = sorted({one.get("date", "unknown dates") for one in made if not one.get("commit")})
    words = [left if missing else ""]
    words += [f"Cells of {'commit' if len(of) == 1 else 'commits'} {', '.join(of)}."] if of else []
    words += [f"Cells of {', '.join(dates)}, without a commit."] if dates else []
    return " ".join(filter(None, words))


def _whose(finding: Finding) -> str:
    return "the paper" if finding.papers[0] in "+-" else "bound"


def _left(listed: Sequence[Claim], allotted: Mapping[str, float], results: Path) -> str:
    """Return the hours of all claims, and those allotted to the missing cells of each table and needed for them."""
    cells = with_needed(cell for claim in listed for cell in claim.cells())
    missing = missing_cells(cells, results)
    of_claims = {claim.id: set(with_needed(claim.cells())) for claim in listed}
    of_table: dict[str, list[Cell]] = {name: [] for name in allotted}
    for cell in missing:
        of_table.setdefault(cell.experiment, []).append(cell)
    words = (
        f"All of them together read {len(cells)} cells, which take {hours(cells, results):.0f} hours on two cores. "
        f"{len(missing)} of them, {hours(missing, results):.0f} hours, are not made yet. "
        f"{math.fsum(allotted.values()):g} hours are allotted to them, in this order; where they are fewer than are "
        "left, seeds are made one by one:"
    )
    lines = [
        [
            name,
            f"{allotted.get(name, 0.0):g}",
            str(len(some)),
            f"{hours(some, results):.2f}",
            _claims_of(some, of_claims),
        ]
        for name, some in of_table.items()
        if some
    ]
    return f"{words}\n\n{markdown(['table', 'hours allotted', 'cells left', 'hours left', 'for'], lines)}"


def _claims_of(cells: Sequence[Cell], of_claims: Mapping[str, set[Cell]]) -> str:
    return ", ".join(name for name, read in of_claims.items() if not read.isdisjoint(cells))
