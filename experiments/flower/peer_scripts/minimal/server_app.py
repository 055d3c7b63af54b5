"""Rounds of Flower's FedAvg; writes the seconds of all of them to a file."""

import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    began = time.perf_counter()
    strategy.start(grid, ArrayRecord([np.zeros(config["size"], np.float32)]), num_rounds=config["rounds"])
    Path(config["file"]).write_text(str(time.perf_counter() - began))
