"""The curves of a run: one line for each round in `metrics.jsonl`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from dpfl_lightning.config.reading import check_format, expecting, read_text

FILE, FORMAT = "metrics.jsonl", 1

Values = Mapping[str, float | None]  # name of a curve, or a client -> value


@dataclass(frozen=True)
class Round:
    """One round: name of a curve -> value, and name -> client -> value; None where nothing was measured.

    Curves begin with `test_` (test set), `train_` (releases, epsilon, speed) or `val_` (held-out records of clients).
    `clients` is empty for more than 100 clients.
    """

    round: int
    values: Values
    clients: Mapping[str, Values]

    def line(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}) + "\n"


NO_ROUND = Round(0, {}, {})


def read(path: Path) -> list[Round]:
    """Read `metrics.jsonl`; a missing file has no rounds, and an unfinished last line is left out.

    Raises UserError if the file is damaged, or has another format.
    """
    from pydantic import TypeAdapter  # imported here, so that `--help` stays fast

    if not path.is_file():
        return []
    advice = "Restore it, or delete it to go on without the curves of past rounds."
    lines, kind = read_text(path, advice=advice).split("\n"), TypeAdapter(Round)
    with expecting(path, "hold one JSON object for each round", advice):
        for line in lines[:-1]:
            check_format(path, json.loads(line)["format"], FORMAT)
        return [kind.validate_json(line, strict=True) for line in lines[:-1]]
