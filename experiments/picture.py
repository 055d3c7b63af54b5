"""`python -m experiments.picture`: train the main job with three strategies and draw the picture of README.md.

The curves are written to `experiments/results/picture.json`; `--draw` draws the picture from this file again.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfl_lightning.config.load import load
from dpfl_lightning.errors import command
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.results import RoundReport
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.fit import fit
from experiments.papers.cells import circumstances, code_version

ROOT = Path(__file__).parents[1]
LABELS = {
    "noise_aware": "budgets of each client, noise-aware weights",
    "size_weighted": "budgets of each client, weights by data size",
    "minimum_epsilon": "all clients at the smallest budget",
}


class Curves(Callback):
    """Records test accuracy and epsilon spent over the rounds of one run."""

    def __init__(self) -> None:
        self.accuracy: dict[str, float] = {}
        self.epsilon: list[list[float]] = []

    def on_round_end(self, view: View, report: RoundReport) -> None:
        self.epsilon.append([round(one, 4) for one in report.epsilon_spent])
        if report.test_accuracy is not None:
            self.accuracy[str(report.round)] = round(report.test_accuracy, 4)


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "experiments" / "results" / "picture.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "strategies.svg")
    parser.add_argument("--draw", action="store_true", help="draw the picture from the results without training")
    known, overrides = parser.parse_known_args(argv)
    if not known.draw:
        text = json.dumps(_trained(overrides), indent=1)
        known.results.write_text(re.sub(r"\[[^\[\]]*\]", lambda found: " ".join(found[0].split()), text) + "\n")
    _draw(json.loads(known.results.read_text()), known.picture)
    return 0


def _trained(overrides: Sequence[str]) -> dict[str, Any]:
    results: dict[str, Any] = {"command": " ".join(["python -m experiments.picture", *overrides]), "runs": {}}
    for strategy in LABELS:
        config = ["--config", str(ROOT / "conf" / "fmnist.yaml"), "--tracking", "null"]
        with tempfile.TemporaryDirectory() as folder:
            chosen = ["--strategies", f"{{{strategy}: {{}}}}", "--output_dir", f"{folder}/run"]
            options, _ = load([*config, *overrides, *chosen])
            fit(options, more=[curves := Curves()])
        results["runs"][strategy] = vars(curves)
    return {**results, **circumstances("cpu", code_version())}


def _draw(results: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    from experiments.papers.drawing import save_svg

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    for strategy, label in LABELS.items():
        accuracy = results["runs"][strategy]["accuracy"]
        left.plot([int(one) for one in accuracy], [100 * one for one in accuracy.values()], label=label)
    left.set(title="Accuracy on the test set", xlabel="round", ylabel="percent")
    left.legend(fontsize=9, frameon=False, loc="lower right")
    spent = results["runs"]["noise_aware"]["epsilon"]
    right.plot(range(1, len(spent) + 1), spent, color="tab:blue", linewidth=0.9, alpha=0.6)
    right.set(title="Epsilon spent by each client", xlabel="round", ylabel="epsilon")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    save_svg(figure, path)


if __name__ == "__main__":
    raise SystemExit(main())
