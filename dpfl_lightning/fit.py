"""`python -m dpfl_lightning.fit --config conf/fmnist.yaml`: train and report a run; `--resume DIR` resumes it."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from dpfl_lightning.config.load import load, options_file
from dpfl_lightning.config.options import Options
from dpfl_lightning.errors import command, require
from dpfl_lightning.runtime.launcher import launched

if TYPE_CHECKING:
    from dpfl_lightning.federated.server.callback import Callback
    from dpfl_lightning.federated.server.results import RunResult
    from dpfl_lightning.federated.server.strategy import Strategy
    from dpfl_lightning.reporting.mlflow import SeedsTracking


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `fit` with command-line arguments, and return its exit status."""
    options, flags = load(
        argv,
        _flags,
        prog="python -m dpfl_lightning.fit",
        description="Differentially private federated training. Each client has its own privacy budget.",
        config_of=lambda flags: options_file(flags.resume, "--resume") if flags.resume else None,
    )
    if flags.resume:
        options = dataclasses.replace(options, output_dir=flags.resume)
    if flags.seeds:
        advice = "Give the same --output_dir instead."
        require(not flags.resume, "--seeds", "be given without --resume", flags.seeds, advice)
        fit_seeds(options, flags.seeds)
    else:
        fit(options, resume=bool(flags.resume))
    return 0


def fit(options: Options, resume: bool = False, more: Sequence[Strategy | Callback] = ()) -> RunResult:
    """Train one run, with progress on the terminal and, unless `tracking` is None, in MLflow.

    With several ranks, every rank calls this function; only rank 0 prints and writes. `resume` continues the run in
    `options.output_dir`. `more` are additional strategies and callbacks.
    """
    from dpfl_lightning.build import build_loop

    try:
        return build_loop(options, [*more, *_callbacks(options)] if launched().rank == 0 else []).run(resume)
    finally:
        gc.collect()  # the objects of a run form cycles; without this, its data would stay during the next run


def _callbacks(options: Options) -> list[Callback]:
    from dpfl_lightning.reporting.progress import Progress

    if options.tracking is None:
        return [Progress()]
    from dpfl_lightning.reporting.mlflow import Tracking

    tracking = Tracking(**dataclasses.asdict(options.tracking))
    return [tracking, Progress(next_steps=[tracking.how_to_open])]


def fit_seeds(options: Options, seeds: Sequence[int]) -> dict:
    """Train the same run for every seed, in `output_dir/seed_<n>`. Skips finished runs and resumes started ones.

    Returns the `summarise` of the runs, and writes it to `output_dir/result.json`.
    """
    advice = "For example --output_dir runs/mine."
    require(options.output_dir is not None, "output_dir", "be given with --seeds", None, advice)
    from dpfl_lightning.build import so_far
    from dpfl_lightning.federated.transport.ranks import Ranks

    ranks = Ranks(options.engine.device)
    parent, results = Path(str(options.output_dir)), []
    tracking, parent_run = _seeds_tracking(options, parent) if ranks.rank == 0 else (None, None)
    parent_run = ranks.broadcast(parent_run)
    try:
        for seed in seeds:
            seed_options = _nested(options, seed, parent, parent_run)
            begun, result = ranks.broadcast(so_far(seed_options) if ranks.rank == 0 else (False, None))
            results.append(fit(seed_options, resume=begun).as_dict() if result is None else result)
    except BaseException:
        if tracking is not None and parent_run is not None:
            tracking.stopped(parent_run)
        raise
    summary = summarise(seeds, results)
    if ranks.rank > 0:
        return summary
    if tracking is not None and parent_run is not None:
        tracking.end(parent_run, [Path(folder) for folder in summary["runs"]], _description(summary))
    (parent / "result.json").write_text(json.dumps(summary, indent=2) + "\n")
    accuracy, spread = summary["test_accuracy"], summary["test_accuracy_std"]
    if accuracy is not None:
        print(f"{len(seeds)} seeds: test accuracy {accuracy:.2%} +- {spread:.2%} (standard deviation)")
    print(summary["guarantee"])
    return summary


def _seeds_tracking(options: Options, parent: Path) -> tuple[SeedsTracking | None, str | None]:
    """Begin or resume the MLflow run in which the runs of the seeds are nested."""
    if options.tracking is None:
        return None, None
    from dpfl_lightning.config.per_client import resolve
    from dpfl_lightning.reporting.mlflow import SeedsTracking

    section, privacy = options.tracking, options.privacy
    tracking = SeedsTracking(section.experiment, section.uri, section.tags)
    epsilon = math.inf if privacy is None or privacy.epsilon is None else privacy.epsilon
    budgets = resolve("privacy.epsilon", epsilon, options.clients.count, options.seed)
    record = dataclasses.asdict(options)
    return tracking, tracking.begin(section.run_name or "", parent, record, None if privacy is None else budgets)


def _nested(options: Options, seed: int, parent: Path, parent_run: str | None) -> Options:
    """Return the options of one seed, whose MLflow run is nested in `parent_run`."""
    options = dataclasses.replace(options, seed=seed, output_dir=str(parent / f"seed_{seed}"))
    if options.tracking is None:
        return options
    tags = {**options.tracking.tags, "mlflow.parentRunId": parent_run}
    return dataclasses.replace(
        options, tracking=dataclasses.replace(options.tracking, run_name=f"seed {seed}", tags=tags)
    )


def _description(summary: dict) -> str:
    """Describe the runs of all seeds in Markdown."""
    accuracy = summary["test_accuracy"]
    scored = [] if accuracy is None else [f"**Test accuracy {accuracy:.2%} +- {summary['test_accuracy_std']:.2%}**"]
    seeds = f"Mean and standard deviation over seeds {', '.join(map(str, summary['seeds']))}."
    return "\n\n".join([*scored, seeds, f"**Guarantee.** {summary['guarantee']}"])


def summarise(seeds: Sequence[int], results: Sequence[dict]) -> dict:
    """Return mean and spread of the test accuracy over seeds, and a guarantee for all runs together."""
    from dpfl_lightning.privacy.accounting.accountant import delta_text, epsilon_text

    accuracies = [result["test_accuracy"] for result in results if result["test_accuracy"] is not None]
    spent = [[client["epsilon_spent"] for client in result["clients"]] for result in results]
    epsilons = [max(math.inf if one is None else one for one in clients) for clients in spent]
    delta = delta_text(math.fsum(max(client["delta"] for client in result["clients"]) for result in results))
    largest = results[epsilons.index(max(epsilons))]
    together = "Simulated, nobody is protected: " * any(result.get("simulated") for result in results) + (
        f"Every seed is a separate release. All {len(results)} runs together cost a record at most the sum of their "
        f"epsilons, {epsilon_text(math.fsum(epsilons))} at delta {delta} (basic composition of each run's "
        f"largest epsilon). The run with the largest epsilon: {largest['guarantee']}"
    )
    return {
        "seeds": list(seeds),
        "test_accuracy": fmean(accuracies) if accuracies else None,
        "test_accuracy_std": stdev(accuracies) if len(accuracies) > 1 else 0.0,
        "test_accuracy_of": accuracies,
        "runs": [result["output_dir"] for result in results],
        "guarantee": together,
    }


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", metavar="DIR", help="resume the run in DIR after its last complete round")
    parser.add_argument(
        "--seeds", metavar="N,N,...", type=seed_list, help="repeat the run for these seeds and report mean and spread"
    )


def seed_list(text: str) -> list[int]:
    """Parse the value of `--seeds`, or raise UserError unless it lists different whole numbers.

    >>> seed_list("0,1,2")
    [0, 1, 2]
    """
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    require(bool(seeds) and len(set(seeds)) == len(seeds), "--seeds", "be different whole numbers such as 0,1,2", text)
    return seeds


if __name__ == "__main__":
    raise SystemExit(main())
