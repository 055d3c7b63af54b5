"""`dpfl fit --config fmnist`: train and report a run; `--resume DIR` resumes it, `--resume auto` does either."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from dpfl_lightning.config.load import load
from dpfl_lightning.config.mapping import options_file
from dpfl_lightning.config.options import Options, named
from dpfl_lightning.errors import command, require
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.runtime.launcher import invocation, launched
from dpfl_lightning.runtime.text import counted, shown

_AUTO = "auto"  # value of --resume

if TYPE_CHECKING:
    from dpfl_lightning.federated.server.callback import Callback
    from dpfl_lightning.federated.server.results import RunResult
    from dpfl_lightning.federated.server.strategy import Strategy
    from dpfl_lightning.privacy.accounting.guarantee import RunGuarantee
    from dpfl_lightning.reporting.mlflow import SeedsTracking
    from dpfl_lightning.reporting.progress import Detail
    from dpfl_lightning.sites.server.connections import Connection

    Connect = Callable[[int, float], Sequence[Connection]]


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `fit` with command-line arguments, and return its exit status."""
    return run(argv)


def run(argv: Sequence[str] | None = None, connect: Connect | None = None) -> int:
    """Run `fit` with command-line arguments; `connect(count, wait)` returns channels to the nodes, instead of --nodes.

    Raises UserError.
    """
    options, flags = load(
        argv,
        _flags,
        name="fit",
        description="Train a model by federated learning. Each client has its own privacy budget.",
        examples=("--config digits", "--config config.yaml --rounds 50 --privacy.epsilon 2", "--resume runs/digits"),
        config_of=lambda flags: options_file(flags.resume, "--resume") if flags.resume not in (None, _AUTO) else None,
        decided=lambda flags: _of_sites(flags, connect) if flags.nodes or flags.plan or connect else {},
    )
    if flags.resume == _AUTO:
        flags.resume = _has_begun(options, flags.quiet)
    elif flags.resume:
        options = dataclasses.replace(options, output_dir=flags.resume)
    if flags.nodes or flags.plan or connect:
        _fit_sites(options, flags, connect)
    elif flags.seeds:
        advice = "Give the same --output_dir instead."
        require(not flags.resume, "--seeds", "be given without --resume", flags.seeds, advice)
        fit_seeds(options, flags.seeds, "quiet" if flags.quiet else "short")
    else:
        fit(options, resume=bool(flags.resume), detail="quiet" if flags.quiet else "full")
    return 0


def _has_begun(options: Options, quiet: bool) -> bool:
    """Whether `--resume auto` resumes a run; says which. Raises UserError without a folder."""
    advice = "For example --output_dir runs/mine."
    require(options.output_dir is not None, "output_dir", "be given with --resume auto", None, advice)
    folder = Path(str(options.output_dir))
    begun = (folder / "options.yaml").is_file()
    if launched().rank == 0 and not quiet:  # the other ranks serve it, and may come after it has begun
        print(f"Resuming the run in {folder}." if begun else f"Beginning a run in {folder}: it contains none.")
    return begun


def fit(
    options: Options, resume: bool = False, more: Sequence[Strategy | Callback] = (), detail: Detail = "full"
) -> RunResult:
    """Train one run, with progress on the terminal and, unless `tracking` is None, in MLflow.

    With several ranks, every rank calls this function; only rank 0 prints and writes. `resume` continues the run in
    `options.output_dir`. `more` are additional strategies and callbacks. `detail` selects what is printed, see
    `Progress`.
    """
    from dpfl_lightning.loop import build_loop

    options = _placed(options)
    callbacks = [*more, *_callbacks(options, detail)] if launched().rank == 0 else []
    return build_loop(options, callbacks).run(resume)


def _of_sites(flags: argparse.Namespace, connect: Connect | None) -> dict[str, Any]:
    """Check the flags of a run over the nodes of sites, and return the keys that its plan decides."""
    if connect is None:
        require(bool(flags.nodes and flags.plan), "--nodes, --plan", "be given together", flags.plan or flags.nodes)
    else:
        require(bool(flags.plan), "--plan", "be given: the file that the sites have accepted", flags.plan)
        require(not flags.nodes, "--nodes", "be left out: Flower finds the nodes", flags.nodes)
    require(not flags.seeds, "--seeds", "be left out with --plan", flags.seeds, "A plan is for one run.")
    from dpfl_lightning.sites.terms import read_terms

    return {"clients.count": len(read_terms(Path(flags.plan)).sites)}


def _fit_sites(options: Options, flags: argparse.Namespace, connect: Connect | None) -> None:
    """Train over the nodes of sites."""
    from dpfl_lightning.sites.server.addresses import connection_to
    from dpfl_lightning.sites.server.channel import Sites
    from dpfl_lightning.sites.server.deploy import loop_over
    from dpfl_lightning.sites.terms import read_terms

    terms = read_terms(Path(flags.plan))
    if connect is None:
        connections = [connection_to(address, flags.node_wait) for address in flags.nodes]
    else:
        connections = [*connect(len(terms.sites), flags.node_wait)]
    sites = Sites(terms, connections)
    options = _placed(options)
    loop_over(options, sites, _callbacks(options, "quiet" if flags.quiet else "full")).run(bool(flags.resume))


def _callbacks(options: Options, detail: Detail) -> list[Callback]:
    from dpfl_lightning.reporting.progress import Progress

    section = options.tracking
    if section is None:
        return [Progress(detail=detail)]
    from dpfl_lightning.loop import build_loggers
    from dpfl_lightning.reporting.loggers import Loggers
    from dpfl_lightning.reporting.mlflow import Tracking

    loggers = Loggers(build_loggers(options), section.per_client)
    tracking = Tracking(**{name: value for name, value in dataclasses.asdict(section).items() if name != "loggers"})
    return [tracking, loggers, Progress(next_steps=[tracking.how_to_open], detail=detail)]


def _placed(options: Options) -> Options:
    """Choose the folder of the run before its loop does, because loggers write to it."""
    from dpfl_lightning.loop import new_folder

    return options if options.output_dir else dataclasses.replace(options, output_dir=new_folder())


def fit_seeds(options: Options, seeds: Sequence[int], detail: Detail = "short") -> dict[str, Any]:
    """Train the same run for every seed, in `output_dir/seed_<n>`. Skips finished runs and resumes started ones.

    Returns the `summarise` of the runs, and writes it to `output_dir/result.json`; ranks above 0 return nothing.
    """
    advice = "For example --output_dir runs/mine."
    require(options.output_dir is not None, "output_dir", "be given with --seeds", None, advice)
    from dpfl_lightning.federated.server.scores import remarks, seed_rows, stated
    from dpfl_lightning.federated.transport.ranks import Ranks
    from dpfl_lightning.loop import so_far
    from dpfl_lightning.reporting.terminal import print_rows

    ranks = Ranks(options.engine.device)
    parent = Path(str(options.output_dir))
    results: list[Mapping[str, Any]] = []
    tracking, parent_run = _seeds_tracking(options, parent) if ranks.rank == 0 else (None, None)
    parent_run = ranks.broadcast(parent_run)
    try:
        for seed in seeds:
            seed_options = _nested(options, seed, parent, parent_run)
            begun, result = ranks.broadcast(so_far(seed_options) if ranks.rank == 0 else (False, None))
            if ranks.rank == 0 and detail != "quiet":
                state = "finished before in" if result else "in"
                print(
                    f"Seed {seed} ({len(results) + 1} of {len(seeds)}), {state} {seed_options.output_dir}", flush=True
                )
            if result is None:
                result = fit(seed_options, resume=begun, detail="silent" if detail == "quiet" else detail)
            results.append({**vars(result), "model": None})
            gc.collect()  # the objects of a run form cycles; without this, its data would stay during the next run
    except BaseException:
        if tracking is not None and parent_run is not None:
            tracking.stopped(parent_run)
        raise
    if ranks.rank > 0:
        return {}
    guarantee = composed_over_seeds(results)
    rows, limits = seed_rows(seeds, results, stated(guarantee)), remarks(results)
    if tracking is not None and parent_run is not None:
        from dpfl_lightning.reporting.description import seeds_markdown

        folders = [Path(result["output_dir"]) for result in results]
        tracking.end(parent_run, folders, seeds_markdown(seeds, results, guarantee), guarantee)
    summary = summarise(seeds, results, guarantee)
    write_text(parent / "result.json", json.dumps(summary, indent=2) + "\n")
    print_rows(rows)
    print(shown("\n".join([*limits, f"Guarantee: {guarantee.words()}"])))
    if detail == "quiet":
        print(f"Output folder: {parent}")
        return summary
    points = counted(len(guarantee.not_covered), "point")
    print(f"Not covered: {points}, listed in guarantee.html of each run.")
    print(f"{parent}/result.json: mean, standard deviation, and the folder of every run")
    print(f"{invocation('report')} {parent}: curves and tables of all seeds on one page")
    if tracking is not None:
        print(tracking.how_to_open)
    return summary


def _seeds_tracking(options: Options, parent: Path) -> tuple[SeedsTracking | None, str | None]:
    """Begin or resume the MLflow run in which the runs of the seeds are nested."""
    if options.tracking is None:
        return None, None
    from dpfl_lightning.config.per_client import by_client, resolve
    from dpfl_lightning.reporting.mlflow import SeedsTracking

    section, privacy = options.tracking, options.privacy
    tracking = SeedsTracking(section.experiment, section.uri, section.tags)
    epsilon = math.inf if privacy is None or privacy.epsilon is None else privacy.epsilon
    names = tuple(map(str, epsilon)) if by_client(epsilon) else ()
    listed = names or (epsilon if isinstance(epsilon, tuple) else (epsilon,))
    count = len(names) or options.clients.count or len(listed)  # null with a user's data
    budgets = resolve("privacy.epsilon", epsilon, count, options.seed, names=names)
    record = dataclasses.asdict(options)
    return tracking, tracking.begin(section.run_name or "", parent, record, () if privacy is None else budgets)


def _nested(options: Options, seed: int, parent: Path, parent_run: str | None) -> Options:
    """Return the options of one seed, whose MLflow run is nested in `parent_run`."""
    from dpfl_lightning.privacy.accounting.noise_source import source_of

    options = dataclasses.replace(options, seed=seed, output_dir=str(parent / f"seed_{seed}"))
    name = " ".join(filter(None, [source_of(options.privacy).label, f"seed {seed}"]))
    return named(options, name, {"mlflow.parentRunId": parent_run})


def summarise(seeds: Sequence[int], results: Sequence[Mapping[str, Any]], guarantee: RunGuarantee) -> dict[str, Any]:
    """Return mean and standard deviation of the test scores over seeds, and the guarantee of all runs together."""
    from dpfl_lightning.federated.messages.evaluation import known_values
    from dpfl_lightning.federated.server.results import FORMAT
    from dpfl_lightning.federated.server.scores import scores_of

    rows = [scores_of(result, "test_") for result in results]
    return {
        "format": FORMAT,
        "seeds": list(seeds),
        "scores": {
            name: {
                "mean": fmean(values),
                "std": stdev(values) if len(values) > 1 else 0.0,
                "of_seeds": [row.get(name) for row in rows],
            }
            for name, values in known_values(rows).items()
            if values
        },
        "runs": [result["output_dir"] for result in results],
        "guarantee": guarantee.as_dict(),
    }


def composed_over_seeds(results: Sequence[Mapping[str, Any]]) -> RunGuarantee:
    """Return the guarantee of all runs together, composed from their ledgers as `dpfl ledger` does."""
    from dpfl_lightning.privacy.accounting.guarantee import RunGuarantee
    from dpfl_lightning.privacy.ledger.verify import ledger_of, read

    paths, rows = [ledger_of(one["output_dir"]) for one in results], [one["clients"] for one in results]
    unbounded = max(sum(client["epsilon_spent"] is None for client in clients) for clients in rows)
    accounts = [one["guarantee"].together for one in results if one["guarantee"].together is not None]
    last = max(accounts, key=lambda account: account.runs, default=None)  # of the last run
    of_all = None if last is None else dataclasses.replace(last, runs=max(last.runs - len(paths) + 1, 0))
    all_of = read(paths).weakest.with_account(of_all)
    return RunGuarantee(**vars(all_of), clients=len(rows[0]), unbounded=unbounded, runs=len(paths))


def _flags(parser: argparse.ArgumentParser) -> None:
    text = "resume the run in DIR after its last complete round; auto: begin or resume the run in --output_dir"
    parser.add_argument("--resume", metavar="DIR | auto", help=text)
    text = "repeat the run for these seeds, such as 0,1,2, and report mean and standard deviation"
    parser.add_argument("--seeds", metavar="N,N,...", type=seed_list, help=text)
    parser.add_argument("--quiet", action="store_true", help="print only warnings, errors and the result")
    text = "Unix sockets of the nodes of the sites that hold the records, one for each client; with --plan"
    parser.add_argument("--nodes", metavar="SOCKET", nargs="+", default=[], help=text)
    parser.add_argument("--plan", metavar="FILE", help="the plan that these sites have accepted")
    text = "seconds after which a node is left out of the round (default 3600)"
    parser.add_argument("--node_wait", metavar="SECONDS", type=float, default=3600.0, help=text)


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
