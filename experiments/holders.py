"""How often the account recognises a holder's records, and how often it errs. `python -m experiments.holders`.

Tables are drawn from synthetic populations, written as CSV files and read by `Population.from_dataframe`.
"""

import argparse
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from pandas import DataFrame

from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserNotice
from dpfl_lightning.privacy.ledger.account_file import RunRecord
from dpfl_lightning.privacy.ledger.evidence import CONTAINMENT, MIN_SHARED, MOST_CHANCE
from dpfl_lightning.privacy.ledger.operator import OperatedAccount
from experiments.pages import RESULTS, markdown, written

PAIRS, SEED = 200, 0
TERMS = "add_remove", "poisson", "pld"  # of the runs in the account
SIZES, SHARES, ALL = (20, 2000), (0.1, 1.0), 0.25  # rows; share that the other has, too; how often all of them
DELTA, KEY = 1e-5, bytes(32)
_ABOUT = (
    f"Pairs of tables of {SIZES[0]} to {SIZES[1]:,} rows, seed {SEED}. Clients are of one holder if they share "
    f"{CONTAINMENT:.0%} of the rows of the smaller one, at least {MIN_SHARED}, and the probability that they do by "
    f"chance is below {MOST_CHANCE:g}. A second table has {SHARES[0]:.0%} to {SHARES[1]:.0%} of the first one's rows, "
    f"in {ALL:.0%} of the pairs all of them. It has another name, another order of rows and columns, and other columns "
    "and scales in its configuration. A third each have swapped labels, or one column less in the file. Half of the "
    "files have semicolons and decimal commas, and a third are pooled with up to four times as many rows of others."
)


def hospital(rng: np.random.Generator, rows: int) -> DataFrame:
    """Admissions: patients with several, whose ids are running numbers; missing values."""
    patients = np.repeat(np.arange(rows), 1 + rng.poisson(0.6, rows))[:rows]
    age, sex = rng.normal(62, 15, rows).clip(18, 99).round(), rng.choice(["F", "M"], rows)
    days = pandas.to_datetime("2022-01-01") + pandas.to_timedelta(rng.integers(0, 900, rows), unit="D")
    table = DataFrame(
        {
            "patient": [f"P{number}" for number in patients],
            "admitted": days.strftime("%Y-%m-%d"),
            "age": age[patients],
            "sex": sex[patients],
            "admission": rng.choice(["elective", "emergency", "transfer"], rows, p=[0.5, 0.4, 0.1]),
            "crp": rng.lognormal(2.5, 1, rows).round(1),
            "sbp": rng.normal(130, 20, rows).round(),
            "creatinine": rng.lognormal(0, 0.4, rows).round(2),
            "ill": rng.integers(0, 2, rows),
        }
    )
    for column, share in {"crp": 0.12, "creatinine": 0.08}.items():
        table.loc[rng.random(rows) < share, column] = np.nan
    return table


def laboratory(rng: np.random.Generator, rows: int) -> DataFrame:
    """Four measurements of two or three digits."""
    values = {name: rng.lognormal(1 + place, 0.6, rows).round(1) for place, name in enumerate(["hb", "wbc", "crp"])}
    return DataFrame({**values, "sbp": rng.normal(130, 20, rows).round(), "ill": rng.integers(0, 2, rows)})


def visits(rng: np.random.Generator, rows: int) -> DataFrame:
    """Whole numbers and categories, some of which follow from others."""
    age, female = rng.integers(18, 95, rows), rng.integers(0, 2, rows)
    height = rng.normal(178 - 12 * female, 7).round()
    weight = (height - 100 + rng.normal(0, 12, rows)).round()
    columns = {"age": age, "female": female, "height": height, "weight": weight, "visits": rng.poisson(2, rows)}
    bmi = (weight / (height / 100) ** 2).round(1)
    return DataFrame({**columns, "bmi": bmi, "smoker": rng.integers(0, 2, rows), "ill": rng.integers(0, 2, rows)})


def survey(rng: np.random.Generator, rows: int) -> DataFrame:
    """Answers of two to five values: many people give the same ones."""
    answers = {f"q{number}": rng.integers(0, kinds, rows) for number, kinds in enumerate((2, 2, 3, 4, 5))}
    return DataFrame({**answers, "ill": rng.integers(0, 2, rows)})


def rounded(rng: np.random.Generator, rows: int) -> DataFrame:
    """Rounded measurements: rows repeat in large tables only."""
    age, bmi = 5 * rng.integers(4, 19, rows), rng.normal(26, 4, rows).round()
    sbp = (rng.normal(110 + age / 3, 15) / 10).round() * 10
    return DataFrame({"age": age, "bmi": bmi, "sbp": sbp, "ill": rng.integers(0, 2, rows)})


def diagnoses(rng: np.random.Generator, rows: int) -> DataFrame:
    """A code of 300, its text and its chapter, and an age: columns that follow from each other."""
    code, age = rng.zipf(1.3, rows) % 300, rng.integers(18, 95, rows)
    texts = [f"diagnosis {number}" for number in code]
    return DataFrame({"code": code, "text": texts, "chapter": code // 20, "age": age, "ill": rng.integers(0, 2, rows)})


Source = Callable[[np.random.Generator, int], DataFrame]
TELLING: tuple[Source, ...] = (hospital, laboratory, visits)  # in which hardly any row repeats
EVERY: tuple[Source, ...] = (*TELLING, survey, rounded, diagnoses)


@dataclass(frozen=True)
class Pair:
    """Two tables of other names, and whether the account has found records in common."""

    source: str
    kind: str
    rows: tuple[int, int]
    shared: int
    changes: tuple[str, ...]
    found: bool
    chance: float | None


def drawn(rng: np.random.Generator, low: float, high: float) -> float:
    return float(rng.uniform(low, high))


def size(rng: np.random.Generator) -> int:
    return round(float(np.exp(rng.uniform(*np.log(SIZES)))))


class Comparison:
    """Tables of two clients, in a folder of their own, and an account to which both are charged."""

    def __init__(self, folder: Path, rng: np.random.Generator) -> None:
        self.folder, self.rng = folder, rng
        self.account = OperatedAccount(folder / "account.jsonl")

    def enter(self, name: str, table: DataFrame, run: str) -> None:
        """Charge a run on a table, as a configuration with random columns and scales reads it."""
        path, semicolons = self.folder / f"{name}.csv", bool(self.rng.random() < 0.5)
        table.to_csv(path, index=False, **({"sep": ";", "decimal": ","} if semicolons else {}))
        numbers = [one for one in table if one not in ("ill", "patient") and table[one].dtype.kind in "if"]
        features = self.rng.permutation(numbers)[: 1 + int(self.rng.integers(len(numbers)))].tolist()
        population = Population.from_dataframe(
            {name: {"file": path, "read": {"sep": ";", "decimal": ","} if semicolons else {}}},
            label="ill",
            num_classes=2,
            features=features,
            columns={
                one: {"scale": (drawn(self.rng, 0, 50), drawn(self.rng, 20, 80)), "fill": 0.0} for one in features
            },
            person="patient" if "patient" in table and self.rng.random() < 0.5 else "none",
        )
        evidence = population.evidence(KEY)  # the account's own is another one each time, and so are the least digests
        self.account.enter(RunRecord(run * 32, "none", *TERMS, {0: name}, (DELTA,), ((),), evidence, (None,), (None,)))

    def result(self) -> tuple[bool, float | None]:
        lines = [json.loads(line) for line in self.account.path.read_text().splitlines()]
        chances = [line["chance"] for line in lines if "same" in line]
        return bool(chances), min(chances, default=None)


def compared(pair: Callable[[np.random.Generator], Mapping[str, Any]], seed: Sequence[int]) -> Pair:
    """Draw two tables, and ask an account whether they are of one holder."""
    rng = np.random.default_rng(seed)
    drawn_pair = dict(pair(rng))
    first, second = drawn_pair.pop("tables")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserNotice)
        warnings.simplefilter("ignore", pandas.errors.PerformanceWarning)
        comparison = Comparison(Path(folder), rng)
        comparison.enter("bergen", first, "a")
        comparison.enter("haukeland", second, "b")
        found, chance = comparison.result()
    return Pair(rows=(len(first), len(second)), found=found, chance=chance, **drawn_pair)


def disjoint(rng: np.random.Generator, sources: Sequence[Source] = EVERY) -> dict[str, Any]:
    """Two tables of other records of one population. Each numbers its patients from one on."""
    source, rows = sources[int(rng.integers(len(sources)))], (size(rng), size(rng))
    tables = source(rng, rows[0]), source(rng, rows[1])
    return {"source": source.__name__, "kind": "disjoint", "tables": tables, "shared": 0, "changes": ()}


def overlapping(rng: np.random.Generator, sources: Sequence[Source] = TELLING, many: bool = False) -> dict[str, Any]:
    """A table, and one with some of its rows; `many` changes two columns in every row."""
    source = sources[int(rng.integers(len(sources)))]
    first = source(rng, size(rng))
    share = 1.0 if rng.random() < ALL else drawn(rng, *SHARES)
    shared = max(MIN_SHARED, round(share * len(first)))
    second, changes = first.sample(shared, random_state=int(rng.integers(2**31))), []
    if rng.random() < 1 / 3:
        more = source(rng, max(1, round(drawn(rng, 0.5, 4) * shared)))
        second, changes = pandas.concat([second, more]), ["pooled"]
    change = "two columns" if many else ("none", "labels swapped", "a column less")[int(rng.integers(3))]
    others = [one for one in second if one not in ("ill", "patient")]
    if change == "labels swapped":
        second = second.assign(ill=1 - second["ill"])
    elif change == "a column less":
        second = second.drop(columns=others[int(rng.integers(len(others)))])
    elif change == "two columns":
        number = next(one for one in others if second[one].dtype.kind in "if" and second[one].notna().all())
        second = second.assign(ill=1 - second["ill"], **{number: second[number] + 0.5})
    changes += [change] * (change != "none")
    second = second.sample(frac=1, random_state=int(rng.integers(2**31)))[list(rng.permutation(second.columns))]
    kind = "changed in every row" if many else "overlapping" if sources == TELLING else "overlapping, few values"
    return {"source": source.__name__, "kind": kind, "tables": (first, second), "shared": shared, "changes": changes}


KINDS: Mapping[str, Callable[[np.random.Generator], Mapping[str, Any]]] = {
    "disjoint": disjoint,
    "overlapping": overlapping,
    "overlapping, few values": lambda rng: overlapping(rng, (survey, rounded, diagnoses)),
    "changed in every row": lambda rng: overlapping(rng, many=True),
}


def table_of(pairs: Sequence[Pair]) -> str:
    head = ["second table", *(source.__name__ for source in EVERY), "one holder"]
    rows = []
    for kind in KINDS:
        own = [pair for pair in pairs if pair.kind == kind]
        by_source = [[pair for pair in own if pair.source == source.__name__] for source in EVERY]
        counts = [f"{sum(pair.found for pair in some)} of {len(some)}" if some else "-" for some in [*by_source, own]]
        rows.append([kind, *counts])
    return markdown(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.holders", description=__doc__)
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, help="of each kind; files are written for the default alone"
    )
    flags = parser.parse_args(argv)
    pairs = []
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state  # where accounts leave what they remember
        for place, (kind, pair) in enumerate(KINDS.items()):
            pairs += [compared(pair, (SEED, place, number)) for number in range(flags.pairs)]
            print(f"{kind}: {sum(one.found for one in pairs if one.kind == kind)} of {flags.pairs}", flush=True)
    table = table_of(pairs)
    print(table)
    if flags.pairs == PAIRS:
        lines = ",\n".join(json.dumps(asdict(pair)) for pair in pairs)
        (RESULTS / "holders.json").write_text(f"[\n{lines}\n]\n")
        (RESULTS / "holders.md").write_text(
            written("Holders recognised", "python -m experiments.holders", _ABOUT, table)
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
