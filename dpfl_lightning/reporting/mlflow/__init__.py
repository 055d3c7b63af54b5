"""Tracking of runs, searches and tables in MLflow. Only this package imports mlflow."""

import os

# Read when mlflow is imported, which only happens below. A privacy tool sends no usage reports unasked.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from dpfl_lightning.reporting.mlflow.run import Tracking
from dpfl_lightning.reporting.mlflow.store import Store, downloaded, how_to_open, reported, store_uri
from dpfl_lightning.reporting.mlflow.study import SeedsTracking, StudyTracking
from dpfl_lightning.reporting.mlflow.sync import sync

__all__ = [
    "SeedsTracking",
    "Store",
    "StudyTracking",
    "Tracking",
    "downloaded",
    "how_to_open",
    "reported",
    "store_uri",
    "sync",
]
