"""`python -m experiments.papers NAME`: the papers' tables and figures, made here and shown beside the paper's.

`list` shows the names. Any key of `fit` can be set: what changes the numbers is kept apart from the declared ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpfl_lightning.config.load import load, split
from dpfl_lightning.config.options import FREE, nearest_key
from dpfl_lightning.errors import UserError, command, require
from dpfl_lightning.fit import fit, seed_list
from dpfl_lightning.runtime.launcher import launched
from experiments.papers.cells import RESULTS, Cell, Departures, finished, missing_files, wanted
from experiments.papers.experiment import Computation, Experiment
from experiments.papers.registry import experiments, find
from experiments.papers.report import as_dict, figure_path, listing, page, report
from experiments.papers.run import EXPERIMENT, Work, make, without_data

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: keys that decide how a run is executed and told, not its numbers; `--seeds` and the run's own folder stand for two
_FREE_KEYS = (*FREE, "data.folder", "data.download")
_OWN_FLAG = {"seed": "--seeds", "output_dir": "--runs"}


@command
def main(argv: Sequence[str] | None = None) -> int:
    overrides, words = split(sys.argv[1:] if argv is None else argv)
    options = _parse(words)
    require(launched().size == 1, "reproduce", "be one process", launched().size, "--jobs makes several cells at once.")
    first, *names = options.names
    if first == "list":
        print(listing(find(names) if names else list(experiments().values()), options.results))
        return 0
    chosen = [one.restricted(options.rows, options.columns) for one in find(options.names)]
    departures, free = _sorted_out(overrides)
    for experiment in chosen:
        _check_departures(experiment, departures)
    if options.page:
        page(options.page, options.results)
    work = Work(fit, options.results, options.runs, free, options.again)
    complete = options.show or _make_missing(chosen, options, departures, work)
    if not options.no_table:
        _tell(chosen, options, departures, free)
    return 0 if complete else 1


def _make_missing(
    chosen: Sequence[Experiment], options: argparse.Namespace, departures: Departures, work: Work
) -> bool:
    """Make every missing cell; returns whether all could be made. What could not is said, at once and at the end."""
    asked = {cell: None for one in chosen for cell in wanted(one, one.scale(options.scale), options.seeds, departures)}
    left = list(asked) if work.again else missing_files(list(asked), work.results)
    there, lacking = without_data(left, work)
    for sentence in lacking:
        print(sentence, file=sys.stderr)
    try:
        failed = _make_all(there, work, options.jobs)
    except KeyboardInterrupt:
        print("Finished cells are kept, and the same command goes on with the others.", file=sys.stderr)
        raise
    for sentence in failed:
        print(f"not made: {sentence}", file=sys.stderr)
    return not (lacking or failed)


def _make_all(cells: Sequence[Cell], work: Work, jobs: int | None) -> list[str]:
    """Computed cells here, trained ones here or in processes of their own."""
    from experiments.papers.jobs import fitting, make_at_once
    from experiments.papers.run import how

    computed = [cell for cell in cells if isinstance(how(cell), Computation)]
    trained = [cell for cell in cells if cell not in computed]
    problems = make(computed, work)
    at_once = min(jobs or fitting(trained, work), len(trained))
    return problems + (make_at_once(trained, work, at_once) if at_once > 1 else make(trained, work))


def _tell(
    chosen: Sequence[Experiment], options: argparse.Namespace, departures: Departures, free: Sequence[str]
) -> None:
    """The tables, figures and pages, for people, programs and MLflow."""
    for experiment in chosen:
        scale = experiment.scale(options.scale)
        figure = _draw(experiments()[experiment.name], scale, options.results, departures)  # never of some rows only
        text = report(experiment, scale, options.results, departures)
        print(f"\n{text}\n")
        if not options.show:
            _track(experiment, scale, text, figure, departures, free)
    if options.page:
        options.page.write_text(page(options.page, options.results), encoding="utf-8")
    if options.json:
        told = [as_dict(one, one.scale(options.scale), options.results, departures) for one in chosen]
        print(json.dumps(told[0] if len(told) == 1 else told))


def _draw(experiment: Experiment, scale: str, results: Path, departures: Departures) -> Figure | None:
    """The figure of what is made, also kept as a file; None where there is nothing to draw."""
    if experiment.draw is None:
        return None
    found = finished(results, experiment, scale, departures)
    if not found:
        return None
    panels = experiment.draw(found)
    if not any(panel.series for panel in panels):
        return None
    from dpfl_lightning.reporting.figures import panels_figure, save_svg

    figure = panels_figure(experiment.title, [panel for panel in panels if panel.series])
    path = figure_path(experiment, scale, results, departures)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_svg(figure, path)
    return figure


def _track(
    experiment: Experiment, scale: str, text: str, figure: Figure | None, departures: Departures, free: Sequence[str]
) -> None:
    """Table and figure as a run of their own beside those of the cells."""
    cell = Cell(experiment.name, "", "", scale, None, departures)
    words = ["--privacy", "null", "--tracking.experiment", EXPERIMENT, *free]
    tracking = load(words)[0].tracking
    if tracking is None:
        return
    from dpfl_lightning.reporting.mlflow import log_report

    tags = {"experiment": experiment.name, "scale": scale, **dict(departures)}
    name = cell.place.parent.as_posix()
    log_report(tracking.experiment, name, tags, text, figure, tracking.uri)


# ---- options


def _sorted_out(overrides: Sequence[tuple[str, str]]) -> tuple[Departures, tuple[str, ...]]:
    """What changes numbers, sorted, and what does not, as words.

    Raises:
        UserError: a key or value that no run could take.
    """
    load(["--privacy.epsilon=1", *(f"--{key}={text}" for key, text in overrides)])
    departures, free = {}, []
    for key, text in overrides:
        require(key not in _OWN_FLAG, f"--{key}", f"be given as {_OWN_FLAG.get(key)} here", text)
        if any(key == one or key.startswith(f"{one}.") for one in _FREE_KEYS):
            free.append(f"--{key}={text}")
        else:
            departures[key] = text
    return tuple(sorted(departures.items())), tuple(free)


def _check_departures(experiment: Experiment, departures: Departures) -> None:
    """A computed cell takes only what its formulas know."""
    takes = [made.takes for made in experiment.cells.values() if isinstance(made, Computation)]
    for key, text in departures:
        for known in takes:
            must = f"be one of {', '.join(known) or 'none'} for {experiment.name}, which is computed from formulas"
            require(key in known, f"--{key}", must, text)


def _names(text: str) -> list[str]:
    return text.split(",")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.papers",
        description="Tables and figures of papers: makes the cells that are missing, keeps each as one JSON file, and "
        "shows ours beside the paper's. Any key of fit can be set, too, as in --privacy.accountant paper_ma.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("names", metavar="NAME", nargs="*", help="tables or figures, or a paper (all of its own); or: list")
    add("--scale", metavar="small|paper", help="small: fewer rounds, where the table has it (the default); paper")
    add("--seeds", type=seed_list, metavar="N,N,...", help="of trained cells (as declared)")
    add("--rows", type=_names, metavar="NAME,...", help="only these methods")
    add("--columns", type=_names, metavar="NAME,...", help="only these settings")
    add("--again", action="store_true", help="make finished cells anew")
    add("--show", action="store_true", help="run nothing: only show what is made")
    add("--jobs", type=int, metavar="N", help="trained cells at once (as many as leave no core without work)")
    add("--json", action="store_true", help="print one JSON object on the last line")
    add("--page", type=Path, metavar="FILE", help="write the tables between this Markdown page's marks")
    add("--no_table", action="store_true", help="only make cells: show no table, track no figure")
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
    require(options.jobs is None or options.jobs >= 1, "--jobs", "be at least 1", options.jobs)
    shows = options.show or options.json or options.page
    require(not (options.no_table and shows), "--no_table", "be left out with --show, --json and --page", True)
    return options


if __name__ == "__main__":
    raise SystemExit(main(None))
