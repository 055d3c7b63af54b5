"""`python -m experiments.papers NAME` makes tables of papers and shows them beside the paper's numbers."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dpfl_lightning.commands.fit import fit, seed_list
from dpfl_lightning.config.load import load, split
from dpfl_lightning.config.options import FREE, nearest_key
from dpfl_lightning.errors import UserError, command, require
from dpfl_lightning.runtime.launcher import launched
from experiments.papers.cells import (
    RESULTS,
    Cell,
    Overrides,
    in_folder,
    is_needed,
    missing_cells,
    required_cells,
)
from experiments.papers.experiment import Computation, Experiment
from experiments.papers.registry import experiments, find
from experiments.papers.report import as_dict, overview, page, report
from experiments.papers.run import RunnerOptions, make, ready, spec

#: keys that decide how a run is executed and reported, not its numbers
_FREE_KEYS = (*FREE, "data.folder", "data.download")
#: keys that this command sets by flags
_FLAG_OF = {"seed": "--seeds", "output_dir": "--runs"}


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 1 if a cell could not be made, else 0."""
    set_by_user, words = split(sys.argv[1:] if argv is None else argv)
    options = _parse(words)
    with in_folder(options.results):
        return _run(set_by_user, options)


def _run(set_by_user: Sequence[tuple[str, str]], options: argparse.Namespace) -> int:
    require(launched().size == 1, "reproduce", "be one process", launched().size, "Start it without torchrun.")
    first, *names = options.names
    if first == "list":
        print(overview(find(names) if names else list(experiments().values()), options.results))
        return 0
    if first == "claims":
        from experiments.papers import claims

        path = claims.page_of(options.results)
        path.write_text(claims.page(options.results), encoding="utf-8")
        print(f"{path} is written")
        return 0
    if first == "systems":
        return _systems(names)
    chosen = [one.restricted(options.rows, options.columns, options.seeds) for one in find(options.names)]
    overrides, free = _sorted_out(set_by_user)
    for experiment in chosen:
        _check_overrides(experiment, overrides)
    if not options.json:
        return _made_and_shown(chosen, options, overrides, free)
    with contextlib.redirect_stdout(sys.stderr):  # so that the JSON is alone on standard output
        status = _made_and_shown(chosen, options, overrides, free)
    tables = [as_dict(one, one.scale(options.scale), options.results, overrides) for one in chosen]
    print(json.dumps(tables[0] if len(tables) == 1 else tables))
    return status


def _systems(papers: Sequence[str]) -> int:
    """Plan and train one round of every system of these papers (empty: of all)."""
    from experiments.papers.systems import systems, trained

    listed = [one for one in systems() if not papers or one.paper in papers]
    known = ", ".join(dict.fromkeys(one.paper for one in systems()))
    require(bool(listed), "NAME", f"be a paper after systems: {known}", " ".join(papers))
    failed = 0
    for one, words in trained(listed):
        failed += words.startswith("FAILED")
        print(f"{one.paper:12} {one.name:44} {words}", flush=True)
    print(f"{len(listed) - failed} of {len(listed)} systems were planned and trained")
    return 1 if failed else 0


def _made_and_shown(
    chosen: Sequence[Experiment], options: argparse.Namespace, overrides: Overrides, free: Sequence[str]
) -> int:
    runner = RunnerOptions(fit, options.results, options.runs, tuple(free), options.again)
    complete = options.show or _make_missing(chosen, options, overrides, runner)
    for experiment in chosen:
        print(f"\n{report(experiment, experiment.scale(options.scale), options.results, overrides)}\n")
    if options.page:
        for paper in dict.fromkeys(one.name.partition(".")[0] for one in chosen):
            (options.results / f"{paper}.md").write_text(page(paper, options.results), encoding="utf-8")
    return 0 if complete else 1


def _make_missing(
    chosen: Sequence[Experiment], options: argparse.Namespace, overrides: Overrides, runner: RunnerOptions
) -> bool:
    """Make every missing cell; prints the reason of each failure and returns whether there was none."""
    required: dict[Cell, None] = {}
    for experiment in chosen:
        scale = experiment.scale(options.scale)
        required |= dict.fromkeys(required_cells(experiment, scale, overrides))
    missing = list(required) if runner.again else missing_cells(list(required), runner.results)
    total, failures = len(missing), list[str]()
    try:
        while (now := ready(missing, runner))[0]:  # some cells can be made only after others
            failures += make(now[0], runner)
            missing = [cell for cell in missing if cell not in now[0] and is_needed(spec(cell), cell)]
    except KeyboardInterrupt:
        print("Finished cells are kept, and the same command goes on with the others.", file=sys.stderr)
        raise
    for reason, count in now[1].items():
        print(f"{count} of {total} cells cannot be made, because {reason}", file=sys.stderr)
    for sentence in failures:
        print(f"not made: {sentence}", file=sys.stderr)
    return not (missing or failures)


# ---- options


def _sorted_out(set_by_user: Sequence[tuple[str, str]]) -> tuple[Overrides, tuple[str, ...]]:
    """The overrides that change numbers, sorted, and the arguments that do not.

    Raises:
        UserError: a key or value that no run could take.
    """
    load(["--privacy.epsilon=1", *(f"--{key}={text}" for key, text in set_by_user)])
    overrides, free = {}, []
    for key, text in set_by_user:
        require(key not in _FLAG_OF, f"--{key}", f"be given as {_FLAG_OF.get(key)} here", text)
        if any(key == one or key.startswith(f"{one}.") for one in _FREE_KEYS):
            free.append(f"--{key}={text}")
        else:
            overrides[key] = text
    return tuple(sorted(overrides.items())), tuple(free)


def _check_overrides(experiment: Experiment, overrides: Overrides) -> None:
    """A computed cell takes no keys of a run."""
    computed = any(isinstance(cell, Computation) for cell in experiment.cells.values())
    for key, text in overrides:
        must = f"be left out for {experiment.name}, which is computed from formulas"
        require(not computed, f"--{key}", must, text)


def _names(text: str) -> list[str]:
    return text.split(",")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.papers",
        description="Tables of papers: makes the cells that are missing, keeps each as a line of JSON, and "
        "shows them beside the paper's numbers. Any key of fit can be set, too, as in --clients.learning_rate 0.02.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "names",
        metavar="NAME",
        nargs="*",
        help="tables, or a paper (all its tables); or: list; or: claims, which writes docs/papers.md, "
        "or DIR/papers.md with --results DIR; or: "
        "systems [PAPER], which plans and trains a round of every system",
    )
    add("--scale", metavar="small|paper", help="small: fewer rounds, where the table has it (the default); paper")
    add("--seeds", type=seed_list, metavar="N,N,...", help="of trained cells (as declared)")
    add("--rows", type=_names, metavar="NAME,...", help="only these methods")
    add("--columns", type=_names, metavar="NAME,...", help="only these settings")
    add("--again", action="store_true", help="make finished cells again")
    add("--show", action="store_true", help="run nothing: only show finished cells")
    add("--json", action="store_true", help="print one JSON object, or a list of several tables; text goes to stderr")
    add("--page", action="store_true", help="write all finished tables of the paper beside their cells, as PAPER.md")
    add("--results", type=Path, default=RESULTS, metavar="DIR", help=f"finished cells ({RESULTS})")
    add("--runs", type=Path, default=Path("runs/reproduce"), metavar="DIR", help="folders of runs (runs/reproduce)")
    try:
        options, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        cause = error.__context__
        raise cause if isinstance(cause, UserError) else UserError(f"{error}. See --help.") from None
    if unknown:
        word = unknown[0].partition("=")[0]
        near = nearest_key(word.removeprefix("--"), vars(options)).replace("`", "`--", 1)
        raise UserError(f"`{word}` must be a known key or flag. {near or 'See --help.'}")
    require(bool(options.names), "NAME", "be given", None, "`list` shows all names.")
    return options


if __name__ == "__main__":
    raise SystemExit(main(None))
