"""Tracking of runs, searches and tables in MLflow."""

from dpfl_lightning.reporting.mlflow.run import Tracking
from dpfl_lightning.reporting.mlflow.store import downloaded, how_to_open, log_report, store_uri
from dpfl_lightning.reporting.mlflow.study import StudyTracking

__all__ = ["StudyTracking", "Tracking", "downloaded", "how_to_open", "log_report", "store_uri"]
