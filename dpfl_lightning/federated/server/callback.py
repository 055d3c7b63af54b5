"""Callbacks watch a run: they receive what strategies see and what the run reports, and decide nothing."""

from collections.abc import Sequence
from typing import Any

from dpfl_lightning.federated.server.results import RoundReport, RunResult
from dpfl_lightning.federated.server.view import View

_IN_A_ROUND = (
    *("exhausted", "stop", "replan", "plan_round", "needs_updates"),
    *("weigh", "combine", "scale", "step", "after_step"),
)


class Callback:
    """Override any of these hooks to watch a run. A `Strategy` may be a `Callback`, too."""

    def on_fit_start(self, view: View) -> None:
        """Called before the first round of a new or resumed run."""

    def on_round_start(self, view: View) -> None:
        """Called before each round."""

    def on_round_end(self, view: View, report: RoundReport) -> None:
        """Called after each round, when it is on disk."""

    def on_fit_end(self, view: View, result: RunResult) -> None:
        """Called when the run has finished or was interrupted."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def answer_of(owner: object, hook: str, *args: object) -> Any:
    """Call a hook; an exception gets a note that names the hook and the round."""
    try:
        return getattr(owner, hook)(*args)
    except Exception as error:
        view = next(arg for arg in args if isinstance(arg, View))
        when = f"in round {view.round}" if hook in _IN_A_ROUND else f"after round {view.round - 1}"
        error.add_note(f"This came from the hook `{hook}` of {type(owner).__qualname__}, {when}.")
        raise


def notify(callbacks: Sequence[Callback], hook: str, *args: object) -> None:
    """Call one hook of every callback."""
    for callback in callbacks:
        answer_of(callback, hook, *args)
