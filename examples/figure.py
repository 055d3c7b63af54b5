"""The figure of an example: accuracy and spent epsilons, round by round."""

import sys
from pathlib import Path

from matplotlib.figure import Figure

from dpfl_lightning import Callback


class History(Callback):
    """Collects test accuracy and every client's epsilon, and prints a line for each round and client."""

    def __init__(self):
        self.accuracy, self.epsilons, self.names = [], [], []

    def on_round_end(self, view, report):
        self.folder = view.run.output_dir
        self.names = [view.facts.name_of(client) for client in range(view.facts.num_clients)]
        self.accuracy.append(report.test_accuracy)
        self.epsilons.append(report.epsilon_spent)
        print(f"round {report.round} of {report.rounds}: accuracy {report.test_accuracy:.3f}")

    def on_fit_end(self, view, result):
        for client in result.clients:
            print(f"{client['name']}: epsilon {client['epsilon_spent']:.2f} of {client['epsilon_budget']}")
        print(f"final accuracy {result.test_accuracy:.3f}")


def save_figure(title: str, **histories: History) -> None:
    """Draw the accuracy of one or several runs, and beside it the epsilons of the last one, and print where it is.

    The first argument of the command line is the path, by default `figure.png` in the folder of the run.
    """
    figure = Figure(figsize=(9, 3.2), layout="constrained", dpi=80)
    left, right = figure.subplots(1, 2)
    for label, history in histories.items():
        rounds = range(1, len(history.accuracy) + 1)
        left.plot(rounds, history.accuracy, marker="o", markersize=3, label=label)
    for name, epsilons in zip(history.names, zip(*history.epsilons, strict=True), strict=True):
        right.plot(rounds, epsilons, marker="o", markersize=3, label=name)
    left.set(title=title, xlabel="round", ylabel="accuracy on the test set")
    right.set(title="What each client has spent", xlabel="round", ylabel="epsilon", ylim=(0, None))
    right.legend(fontsize=8, ncols=1 + len(history.names) // 6)
    if len(histories) > 1:
        left.legend()
    path = Path(*sys.argv[1:2] or [history.folder / "figure.png"])
    figure.savefig(path)
    print("figure:", path)
