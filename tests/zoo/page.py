"""The page about the models of the zoo, written from the results."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

PAGE = Path(__file__).parents[2] / "experiments/results/models_tried.md"
WORST, LONGEST, TOLERANCE = 10, 240, 1e-4

TEXT = """# Models that were tried

Of {total} models, with random weights, {tried} were tried: 60 small ones that were listed before any was tried, 36 that
a seed drew from the lists of names of timm, torchvision and transformers (`tests/zoo/draw.py`), and four
LightningModules as tutorials have them. Failures stay in the list. One command tries each in a process of its own and
writes this page:

```bash
pip install --no-deps --target /tmp/suites -r tests/zoo/requirements.txt
TEST_SUITES=/tmp/suites python -m tests.zoo
```

Classes with a forward pass of their own go under `vmap`, or one record at a time
([supported layers](../../docs/supported.md)).

| | models |
|---|---|
{counts}

| how gradients are computed | models that work | median ratio to Opacus |
|---|---|---|
{engines}

| library | models that work | median ratio to Opacus (models that Opacus runs) |
|---|---|---|
{libraries}

{speed}

- A model is **trainable** if a plain loop of autograd, one record at a time, gives finite gradients, and the same
  beside another record. The others **mix** the records of a batch: record-level privacy is not possible for them.
- A model **works** if two rounds of two clients end within their budgets (epsilon 8, dropout as the library sets it),
  the engine's gradients of single records and their clipped sums equal those of the loop to 1e-4 (relative; to 1e-9 in
  float64 where float32 rounds across kinks), a record's
  gradient is the same in another place and in other company, and steps along them lower the loss. Another model that
  trains is **silently wrong**.
- **Ratio** is the CPU time of a clipped sum of 16 records by Opacus' `GradSampleModule`, divided by ours on the same
  batch, in turns and with dropout off: above 1 this package is faster. Ours takes the passes of a run with this batch
  size, which are filled up. A star: Opacus' gradients differ from the loop's by more than 1e-4. A dash: Opacus cannot
  run the model, or we refuse it.

{untried}{tables}
"""


def kind_of(row: dict[str, Any]) -> str:
    """Return what a result means."""
    if row["judge"] == "trainable":
        return {"refused": "refused wrongly", "failed": "fails", "wrong": "silently wrong"}.get(row["outcome"], "works")
    return "refused rightly" if row["outcome"] == "refused" else "accepted, but mixes records"


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return the numbers of models of each kind."""
    kinds = [kind_of(row) for row in rows]
    shown = ["works", "refused wrongly", "fails", "silently wrong", "refused rightly", "accepted, but mixes records"]
    trainable = sum(row["judge"] == "trainable" for row in rows)
    return {"trainable": trainable, "not trainable": len(rows) - trainable} | {
        kind: kinds.count(kind) for kind in shown
    }


def engines(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table row for each way in which the engine computes gradients: the first words of its description."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if kind_of(row) == "works":
            found.setdefault(re.split(r" for |:", row["engine"])[0], []).append(row)
    lines = []
    for words, some in sorted(found.items()):
        ratios = [row["ratio"] for row in some if "ratio" in row]
        lines.append(f"| {words} | {len(some)} | {f'{median(ratios):.2f}' if ratios else '-'} |")
    return "\n".join(lines)


def libraries(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table row for each library."""
    lines = []
    for library in dict.fromkeys(row["source"].split()[0] for row in rows):
        some = [row for row in rows if row["source"].split()[0] == library]
        ratios = [row["ratio"] for row in some if "ratio" in row]
        shown = f"{median(ratios):.2f} ({len(ratios)})" if ratios else "-"
        lines.append(f"| {library} | {sum(kind_of(row) == 'works' for row in some)} of {len(some)} | {shown} |")
    return "\n".join(lines)


def _open(rows: Sequence[dict[str, Any]], untried: Sequence[str]) -> str:
    """Return what is left to try, in words: a row of this version tells whether the loss falls."""
    older = sum(kind_of(row) == "works" and "falls" not in row for row in rows)
    said = [f"Not tried yet: {', '.join(untried)}."] if untried else []
    if older:
        said.append(f"{older} models that work were tried with an earlier version, which followed no loss.")
    return "".join(f"{one}\n\n" for one in said)


def page(rows: Sequence[dict[str, Any]], untried: Sequence[str] = ()) -> str:
    """Return the text of the page; models that are `untried` have no row yet."""
    ratios = sorted((row["ratio"], row["name"]) for row in rows if "ratio" in row)
    right = [row["ratio"] for row in rows if "ratio" in row and row["opacus_error"] <= TOLERANCE]
    speed = "No ratio was measured."
    if ratios:
        worst = ", ".join(f"{name} {ratio:g}" for ratio, name in ratios[:WORST])
        middle = median(ratio for ratio, _ in ratios)
        speed = f"The median ratio to Opacus of {len(ratios)} models is {middle:.2f}"
        speed += (
            f", and {median(right):.2f} of the {len(right)} whose gradients Opacus computes rightly" if right else ""
        )
        speed += f". The lowest: {worst}."
    lines = [
        "| model | source | what happens | engine, or sentence | ratio | largest error |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        said = (row.get("engine") or row.get("sentence", "")).replace("|", "\\|").replace("<", "&lt;")
        said = said if len(said) <= LONGEST else said[:LONGEST] + " ..."
        star = "\\*" if row.get("opacus_error", 0.0) > TOLERANCE else ""
        ratio = f"{row['ratio']:.2f}{star}" if "ratio" in row else "-"
        error = f"{row['error64']:.0e} (float64)" if "error64" in row else f"{row.get('error', 0.0):.0e}"
        error = error if "error" in row else "-"
        lines.append(f"| {row['name']} | {row['source']} | {kind_of(row)} | {said} | {ratio} | {error} |")
    counts = "\n".join(f"| {kind} | {count} |" for kind, count in summary(rows).items())
    return TEXT.format(
        total=len(rows) + len(untried),
        tried=len(rows),
        counts=counts,
        engines=engines(rows),
        libraries=libraries(rows),
        speed=speed,
        untried=_open(rows, untried),
        tables="\n".join(lines),
    )
