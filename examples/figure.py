"""The figure of an example: a score and spent epsilons, round by round."""

import sys
from pathlib import Path

from matplotlib.figure import Figure

from dpfl_lightning import RunResult


def save_figure(title: str, score: str = "accuracy", **results: RunResult) -> None:
    """Draw a score of one or several runs, and beside it the epsilons of the last one, and print where it is.

    The first argument of the command line is the path, by default `figure.png` in the folder of the run.
    """
    figure = Figure(figsize=(9, 3.2), layout="constrained", dpi=80)
    left, right = figure.subplots(1, 2)
    for label, result in results.items():
        history = result.history()
        rounds = [one["round"] for one in history]
        left.plot(rounds, [one[f"test_{score}"] for one in history], marker="o", markersize=3, label=label)
        for client in result.clients:
            print(f"{client['name']}: epsilon {client['epsilon_spent']} of {client['epsilon_budget']}")
        scores = {"accuracy": result.test_accuracy, **result.test_metrics}
        print(f"final {score} {scores[score]:.3f}")
    for client in result.clients:
        epsilons = [one["clients"]["train_epsilon"][client["name"]] for one in history]
        right.plot(rounds, epsilons, marker="o", markersize=3, label=client["name"])
    left.set(title=title, xlabel="round", ylabel=f"{score} on the test set")
    right.set(title="What each client has spent", xlabel="round", ylabel="epsilon", ylim=(0, None))
    right.legend(fontsize=8, ncols=1 + len(result.clients) // 6)
    if len(results) > 1:
        left.legend()
    path = Path(*sys.argv[1:2] or [Path(result.output_dir) / "figure.png"])
    figure.savefig(path)
    print("figure:", path)
