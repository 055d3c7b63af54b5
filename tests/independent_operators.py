"""`python tests/independent_operators.py TRIES [write]`: listed operators on random arguments, beside another record.

Dimensions of a record are as many as the records of a pass. Prints a line of JSON: how many overloads ran, those of
which a record felt another one or its place, and those that never ran or ended their process. With `write` the last
three join `dpfl_lightning/privacy/clipping/independent.txt` as overloads that may not be called, those that are wrong
with "!". Each runs in a process of its own, because some end it for arguments that do not fit.
"""

import json
import os
import random
import signal
import sys
import warnings
from pathlib import Path

import torch
from torch.func import vmap

from dpfl_lightning.privacy.clipping import independent
from dpfl_lightning.privacy.clipping.independent import keeps_records_apart
from dpfl_lightning.privacy.clipping.watched import WatchedCalls

RECORDS, CHANGED, PATIENCE = 4, 1, 20
SHAPES = [(4,), (4, 4), (1, 4, 4), (4, 4, 4), (1, 2, 4, 4), (3, 4), ()]
SIZES = [[4, 4], [4, 4, 4], [4, 1], [1, 1], [2, 2], [4], [0], [1], [3, 4], [2, 2, 2], [1, 1, 1]]
OTHERS = {
    **{kind: [0, 1, 2, -1, 4, -2, -3] for kind in ("int", "SymInt")},
    **{kind: [0.5, 1.0, 2.0] for kind in ("float", "number")},
    **{kind: SIZES for kind in ("List[int]", "List[SymInt]")},
    "bool": [False, True],
    "List[bool]": [[True] * 3, [True] * 2, [False]],
    "str": ["sum", "mean", "none"],
}
LIST = Path(independent.__file__).with_suffix(".txt")
#: words in names of operators that draw
DRAW = ("drop", "rand", "bern", "normal", "uniform", "cauchy", "expon", "geom", "multinom", "rrelu", "fractional")
OF_NUMBERS = ("ind", "offset", "length", "target")  # in names of arguments


def drawn(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if kind == "long":
        return (1.5 * values.abs()).long().clamp(max=3)
    return values > 0 if kind == "bool" else values.abs() + 0.1 if kind == "positive" else values


def arguments(schema, draw: random.Random, generator: torch.Generator) -> list:
    """For each argument its value, and whether each record has its own; KeyError for a type that is not tried."""
    found, shape = [], draw.choice(SHAPES)
    for one in schema.arguments:
        kind = str(one.type).removeprefix("Optional[").removesuffix("]" if str(one.type).startswith("Optional") else "")
        if kind in ("Tensor", "List[Tensor]"):
            own, numbers = draw.random() < 0.6, any(word in one.name for word in OF_NUMBERS)
            other = shape if draw.random() < 0.6 else draw.choice(SHAPES)
            what = "long" if numbers else draw.choice(["float"] * 3 + ["long", "positive", "bool"])
            found.append((drawn(what, (RECORDS, *other) if own else other, generator), own, kind != "Tensor"))
        elif one.has_default_value() and (draw.random() < 0.6 or kind not in OTHERS):
            found.append((one.default_value, False, False))
        else:
            found.append((draw.choice(OTHERS[kind]), False, False))
    return found


def felt(operator, seed: int) -> bool | None:
    """Whether a record felt another one; None if the arguments do not fit."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    given = arguments(operator._schema, draw, generator)
    if not any(own for _, own, _ in given):
        return None
    by_name = [one.kwarg_only for one in operator._schema.arguments]

    def results(records: list[torch.Tensor]) -> list[torch.Tensor]:
        shared = [value.clone() if isinstance(value, torch.Tensor) else value for value, _, _ in given]

        def one(*own):
            of_record, watch = iter(own), WatchedCalls(under_vmap=True)
            values = [
                next(of_record) if of_each else other for other, (_, of_each, _) in zip(shared, given, strict=True)
            ]
            values = [[value] if listed else value for value, (_, _, listed) in zip(values, given, strict=True)]
            places = [value for value, named in zip(values, by_name, strict=True) if not named]
            names = {
                argument.name: value
                for argument, value, named in zip(operator._schema.arguments, values, by_name, strict=True)
                if named
            }
            torch.manual_seed(0)
            with watch:
                made = operator(*places, **names)
                watch.require_no_error()
            parts = made if isinstance(made, tuple | list) else [made]
            tensors = [part for part in parts if isinstance(part, torch.Tensor)]
            return (*tensors, *(value for value in shared if isinstance(value, torch.Tensor)))

        return [*vmap(one, randomness="different")(*records)]

    before = [value for value, own, _ in given if own]
    expected = results([value.clone() for value in before])
    if not any(word in str(operator) for word in DRAW) and (place_counts(results, before, expected)):
        return True
    for scale, number in ((1.0, 0), (-1e4, 7), (3.0, 12)):
        after = [value.clone() for value in before]
        for value in after:
            if value.is_floating_point():
                value[CHANGED] = value[CHANGED] * scale + (0.3 if scale == 1 else 0.0)
            else:
                value[CHANGED] = ~value[CHANGED] if value.dtype is torch.bool else number
        try:
            found = results(after)
        except Exception:
            continue
        rest = [place for place in range(RECORDS) if place != CHANGED]
        for one, two in zip(expected, found, strict=True):
            if one.shape != two.shape or not torch.equal(one[rest].nan_to_num(9.0), two[rest].nan_to_num(9.0)):
                return True
    return False


def place_counts(results, before: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether equal records get different rows, or records in other places other rows."""
    for source in ([0] * RECORDS, [1, 2, 3, 0]):
        try:
            found = results([value[source].clone() for value in before])
        except Exception:
            continue
        for one, two in zip(expected, found, strict=True):
            if one.shape != two.shape or not torch.equal(one[source].nan_to_num(9.0), two.nan_to_num(9.0)):
                return True
    return False


def outcome(operator, tries: int) -> str:
    ran = False
    for seed in range(tries):
        try:
            found = felt(operator, seed)
        except Exception:  # arguments that do not fit
            continue
        if found:
            return "felt"
        ran |= found is not None
    return "ran" if ran else "never"


def in_process(operator, tries: int) -> str:
    reader, writer = os.pipe()
    if (process := os.fork()) == 0:
        signal.alarm(PATIENCE)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.write(writer, outcome(operator, tries).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    os.waitpid(process, 0)
    return text or "ended"


def operators():
    for name in torch._C._dispatch_get_all_op_names():
        library, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if library == "aten" and "out" not in overload.split("_") and not overload.endswith("out"):
            packet = getattr(torch.ops.aten, base)
            if keeps_records_apart(packet, base) and "empty" not in base:  # whose numbers are nobody's
                yield name, getattr(packet, overload or "default", None)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    written = [line for line in LIST.read_text().split() if "::" not in line]
    if "write" in sys.argv:
        independent.NOT_CALLED = frozenset()
    outcome(torch.ops.aten.layer_norm.default, 30)  # what torch loads on first use, for all processes
    found = {name: in_process(one, int(sys.argv[1])) for name, one in sorted(operators()) if one is not None}
    of = {kind: [name for name, one in found.items() if one == kind] for kind in ("felt", "never", "ended")}
    if "write" in sys.argv:
        wrong = [f"{name}!" for name in (*of["felt"], *of["ended"])]
        LIST.write_text("\n".join([*written, *sorted([*of["never"], *wrong])]) + "\n")
    print(json.dumps({"ran": sum(one == "ran" for one in found.values()), **of}))
