"""Runs `dpfl fit` with the arguments `fit` of the run configuration; the nodes of the sites are behind SuperNodes."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    from dpfl_lightning.flower import fit

    fit(grid, str(context.run_config["folder"]), str(context.run_config["fit"]))
