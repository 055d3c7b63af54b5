"""Figures of the selection paper that are not of one value per cell."""

from experiments.papers.experiment import Cells, Experiment, Panel


def clients(experiment: Experiment, cells: Cells) -> list[Panel]:
    """Figure 3: estimated unlikeness of each client, and its participations, of one seed."""
    panels = []
    for column, setting in experiment.columns.items():
        runs = cells.get(("two_stage", column), ())
        lists: dict[str, list[float]] = next((run["clients"] for run in runs if "clients" in run), {})
        for name, title in (("unlikeness", "estimated unlikeness (loss)"), ("quota", "participations")):
            series = {title: list(enumerate(lists[name]))} if name in lists else {}
            panels.append(Panel(f"{setting.title}: {title}", "client", title, series, kind="points"))
    return panels
