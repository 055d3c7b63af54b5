"""`dpfl evaluate RUN [--data.name mnist]`: score a finished run on test and held-out records."""

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from dpfl_lightning.config.load import load
from dpfl_lightning.config.mapping import options_file
from dpfl_lightning.config.options import Options
from dpfl_lightning.config.reading import read_safetensors
from dpfl_lightning.errors import UserError, command, require, warn_user
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.runtime.launcher import invocation

_MOST_MODELS = 1 << 16  # of a run, which may have more models than clients


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `evaluate` with command-line arguments, and return its exit status."""
    options, flags = load(
        argv,
        _flags,
        name="evaluate",
        description="Evaluate a finished run. --data.* keys select other data of the same shape; keys that are not "
        "given have the values of the run, not the defaults.",
        examples=("runs/digits", "runs/digits --data.label_noise.name records --json"),
        config_of=lambda flags: options_file(flags.run, "RUN"),
        takes=["data"],
    )
    report = evaluate_run(options, Path(flags.run))
    if flags.json:
        print(json.dumps(report, default=vars))
        return 0
    from dpfl_lightning.federated.server.scores import Column, in_words, remarks, score_columns
    from dpfl_lightning.reporting.terminal import print_table

    print("\n".join([in_words(report) or "There is nothing to evaluate.", *remarks([report])]))
    if scores := score_columns([[row] for row in report["clients"]]):
        print("Held-out records of each client:")
        print_table([Column("client", [row["name"] for row in report["clients"]]), *scores])
    return 0


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a finished run")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")


def evaluate_run(options: Options, run: Path) -> dict:
    """Return accuracies in [0, 1] (None for a regression), losses and metrics of the run's final models.

    `personal` is whether the clients' personal parameters, which are in `checkpoint.pt` only, were used; None if the
    model has none. Without them a warning says so, and the scores are those of their initial values. `test_set` is
    whether there is a test set; if not, test scores are means over clients on held-out records.

    Raises UserError if the run is not finished, or its models do not fit the data in `options`.

    **Privacy** The run's guarantee does not cover test and held-out records.
    """
    import torch

    from dpfl_lightning.build import build_module, build_population, build_test_set
    from dpfl_lightning.federated.client.checks import check_fits
    from dpfl_lightning.federated.client.engines.serial import SerialEngine
    from dpfl_lightning.federated.client.evaluation import evaluate
    from dpfl_lightning.federated.client.folder import ClientFolder
    from dpfl_lightning.federated.client.identity import module_digest
    from dpfl_lightning.federated.messages.evaluation import ClientModels
    from dpfl_lightning.federated.server.folder import RunFolder
    from dpfl_lightning.federated.server.run import read_result
    from dpfl_lightning.models.model import has_frozen, load_trained
    from dpfl_lightning.privacy.accounting.accountant import finite_or_none
    from dpfl_lightning.privacy.noise import Streams
    from dpfl_lightning.runtime.files import SUFFIX

    result, advice = read_result(run), f"Finish it with {invocation('fit')} --resume {run}."
    require(result is not None, "RUN", "be the folder of a finished run", str(run), advice)
    assert result is not None  # for mypy
    model_of, at_sites = tuple(client["model"] for client in result.clients), result.at_sites
    several = any(run.glob(f"model_*{SUFFIX}"))
    files = [run / f"model_{k}{SUFFIX}" for k in range(_MOST_MODELS)] if several else [run / f"model{SUFFIX}"]
    fits = {*model_of} and all(isinstance(row, int) and 0 <= row < len(files) for row in model_of)
    require(bool(fits), str(run / "result.json"), "have the model of each client", model_of, "Restore it.")
    files = files[: max(model_of) + 1]
    try:
        population = build_test_set(options) if at_sites else build_population(options)
    except UserError as error:
        advice = "Paths are relative to the working directory in which the run was started."
        if options.data.class_path is None or "no such file" not in str(error).lower():
            raise
        raise UserError(f"{error} {advice}") from None
    require(population is not None, "data.init_args.test", "be given to score models of a run over sites", None)
    assert population is not None  # for mypy
    if at_sites:  # their held-out records are not here
        none = [population.held_out_of[0][:0] for _ in model_of]
        called = tuple(str(row.get("name", client)) for client, row in enumerate(result.clients))
        population = dataclasses.replace(population, train_of=none, held_out_of=none, names=called)
    module = build_module(options, population)
    check_fits(module, population)
    header = ClientFolder(run).header()
    if has_frozen(module.net) and header is not None and header.identity.get("module") != module_digest(module):
        warn_user("the frozen parameters or the code of the model are not those of the run")
    models = []
    for file in files:
        require(file.is_file(), "RUN", "contain its models", str(run), f"{file.name} is gone: restore it.")
        try:
            load_trained(module.net, read_safetensors(file)[0])
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1].strip()
            data = options.data.class_path or options.data.name
            raise UserError(f"`data` must fit the run's model, got {data!r}: {reason}.") from None
        models.append(module.flat)
    engine = SerialEngine()
    engine.setup(module, HeldClients(population), Streams(), "poisson")  # no noise is drawn
    personal = None
    if module.personal:
        readable = not at_sites and os.access(RunFolder(run).checkpoint, os.R_OK)
        checkpoint = RunFolder(run).load_checkpoint(module.device, ClientFolder(run).seal) if readable else None
        if personal := checkpoint is not None:
            state = engine.clients.state_dict() | {"kept": checkpoint["clients"]["kept"]}
            engine.clients.load_state_dict(state)
        else:
            kept = "the nodes of the sites" if at_sites else "checkpoint.pt of the run, which only the clients may read"
            names, where = ", ".join(module.personal), kept
            warn_user(
                f"these are not the scores of the run: the personal parameters ({names}) have their initial values, "
                f"because those of the clients are in {where}"
            )
    scores = evaluate(module, population, ClientModels(torch.stack(models), model_of), engine)
    rows = [
        {"client": client, "name": population.name_of(client), **vars(one), "loss": finite_or_none(one.loss)}
        for client, one in enumerate(scores.clients)
    ]
    test = scores.test
    on_test = {"test_accuracy": test.accuracy, "test_loss": test.loss, "test_metrics": test.metrics}
    more = {"baseline": dict(scores.baseline), "undefined": dict(test.undefined), "personal": personal}
    more["measures"] = dict(scores.measures)
    return {"test_set": population.test is not None, **on_test, **more, "clients": rows}
