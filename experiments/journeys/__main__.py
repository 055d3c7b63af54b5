"""Two journeys of a new user, by this package, by Opacus and by Flower: lines of code, seconds and accuracy.

    python -m experiments.journeys --peers PYTHON

PYTHON is an interpreter with flwr[simulation], opacus, lightning, pandas, scikit-learn and torchmetrics. Every script
runs once in each turn, and the medians are written to `experiments/results/journeys.md`.
"""

import argparse
import ast
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from datetime import date
from pathlib import Path
from statistics import median

from experiments.pages import RESULTS, written

ROOT = Path(__file__).parents[2]
PAGE = RESULTS / "journeys.md"
JOURNEYS = {
    "tabular": "hospitals in a CSV file",
    "lightning_module": "a LightningModule with Adam and a schedule",
}
#: seconds after which a script is stopped
LIMIT = 600
CONTESTANTS = ("dpfl_lightning", "Opacus", "Flower")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.journeys", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers", required=True, help="Python interpreter with Opacus and Flower")
    parser.add_argument("--turns", type=int, default=1, help="number of runs of each script")
    options = parser.parse_args()
    pythons = (sys.executable, options.peers, options.peers)
    rows = []
    for journey, title in JOURNEYS.items():
        turns = [
            [run(python, script(journey, name)) for name, python in zip(CONTESTANTS, pythons, strict=True)]
            for _ in range(options.turns)
        ]
        seconds = [median(one[0] for one in runs) for runs in zip(*turns, strict=True)]
        accuracies = [median(one[1] for one in runs) for runs in zip(*turns, strict=True)]
        for row, name in enumerate(CONTESTANTS):
            ratio = f"{seconds[row]:.0f} ({seconds[row] / seconds[0]:.1f})"
            numbers = f"{user_lines(script(journey, name))} | {ratio} | {100 * accuracies[row]:.1f} %"
            rows.append(f"| {title} | {name} | {numbers} |")
            print(rows[-1], flush=True)
    head = "| journey | by | lines | seconds (ratio) | accuracy |\n|---|---|---|---|---|"
    note = f"{date.today()}, medians of {options.turns} turns on {os.cpu_count()} CPU cores."
    table = "\n".join([head, *rows])
    PAGE.write_text(written("Journeys", "python -m experiments.journeys --peers PYTHON", table, note))


def script(journey: str, contestant: str) -> Path:
    """Return the script of a journey."""
    if contestant == "dpfl_lightning":
        return ROOT / "examples" / f"{journey}.py"
    return ROOT / "experiments" / "journeys" / "peer_scripts" / f"{journey}_{contestant.lower()}.py"


def user_lines(path: Path) -> int:
    """Return the number of lines that are not blank, a comment or part of a docstring."""
    text = path.read_text()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node.body[0] for node in ast.walk(ast.parse(text)) if isinstance(node, kinds) and ast.get_docstring(node)]
    words = {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = (one for one in tokenize.generate_tokens(io.StringIO(text).readline) if one.type not in silent)
    return len({line for one in tokens for line in range(one.start[0], one.end[0] + 1)} - words)


def run(python: str, path: Path) -> tuple[float, float]:
    """Return the seconds of a script, from its start to its end, and the accuracy that it prints.

    Nothing that an earlier run has cached is used.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": folder,
        }
        began = time.perf_counter()
        process = subprocess.Popen(
            [python, str(path)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, errors = process.communicate(timeout=LIMIT)
            seconds = time.perf_counter() - began
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what a script has left running would slow the next one
    found = re.findall(r"final accuracy (\d\.\d+)", out)
    if process.returncode or not found:
        raise RuntimeError(f"{path.name} failed:\n{out[-2000:]}\n{errors[-2000:]}")
    return seconds, float(found[-1])


if __name__ == "__main__":
    main()
