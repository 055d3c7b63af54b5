"""Stores a table of many runs in MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpfl_lightning.reporting.mlflow.store import Store


def log_report(
    experiment: str, name: str, tags: Mapping[str, str], text: str, figure: Any = None, uri: str | None = None
) -> None:
    """Log a table, and a matplotlib figure if there is one, as a separate finished run.

    Raises:
        UserError: the store cannot be reached or written.
    """
    store = Store(experiment, uri)
    with store.reported():
        run_id = store.begin(name, tags)
        store.log_text(run_id, text, "table.md")
        if figure is not None:
            store.log_figure(run_id, figure, "figure.png")
        store.end(run_id)
