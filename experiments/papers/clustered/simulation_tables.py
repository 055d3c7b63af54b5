"""The simulation of the first round as tables: which method finds known groups, from which separation on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experiments.papers.experiment import Column, Computation, Experiment, Found, Panel, Row, Values

_CNN, _SMALL, _RESNET18 = 28_938, 2_000, 11_181_642
_POINTS = [(_CNN, separation) for separation in (0, 6, 10, 12, 15, 20, 25, 50)]
_POINTS += [(_SMALL, separation) for separation in (0, 6, 10, 25)]
_COLUMNS = {f"p{count}_s{separation}": Column(f"{separation} at {count:,}") for count, separation in _POINTS}
_BAR = (
    "A separation of 3, which the papers call complete, holds for known means. With 21 clients the bar is 1.2 to 1.5 "
    "times the fourth root of the number of parameters: 16 to 20 for 28,938."
)


def _numbers(column: str) -> tuple[int, int]:
    count, separation = column.removeprefix("p").split("_s")
    return int(count), int(separation)


def _methods(column: str, departures: Mapping[str, str]) -> Values:
    from experiments.papers.clustered.simulation import methods_at

    num_params, separation = _numbers(column)
    return methods_at(float(separation), num_params)


def _draw_simulation(found: Found) -> list[Panel]:
    titles = {"raw_ari": "mixture as it is", "paper_ari": "the papers', 2-D", "ward_ari": "Ward", "split_ari": "ours"}
    series = {
        title: [
            (_numbers(column)[1], found[row, column][0]["values"][row])
            for column in _COLUMNS
            if (row, column) in found and _numbers(column)[0] == _CNN
        ]
        for row, title in titles.items()
    }
    made = {title: points for title, points in series.items() if points}
    return [Panel("28,938 parameters", "separation", "adjusted Rand index", made)]


SIMULATION = Experiment(
    name="clustered.simulation",
    title="Made-up updates of 21 clients in groups of 3, 6, 6 and 6: what finds them",
    shows="adjusted Rand index (1: the groups; 0: chance), least separation seen, number of groups found; mean of six "
    "draws. Columns: true separation, and number of parameters",
    rows={
        "raw_ari": Row("mixture of updates as they are: Rand index", "raw_ari", "all"),
        "raw_separation": Row("its separation", "raw_separation", "all"),
        "paper_ari": Row("the papers', two dimensions: Rand index", "paper_ari", "all"),
        "paper_separation": Row("its separation", "paper_separation", "all"),
        "paper_groups": Row("its number of groups out of 2 to 10", "paper_groups", "all"),
        "ward_ari": Row("Ward's four groups: Rand index", "ward_ari", "all"),
        "ward_separation": Row("their separation without noise", "ward_separation", "all"),
        "split_ari": Row("our default, number not told: Rand index", "split_ari", "all"),
        "split_groups": Row("its number of groups", "split_groups", "all"),
    },
    columns=_COLUMNS,
    cells={"all": Computation(_methods)},
    scales={"paper": "groups at equal distances, noise alone beside them"},
    draw=_draw_simulation,
    notes=(
        _BAR,
        "In all dimensions a mixture sees a separation of 45 where there is none: the noise of means of six clients. "
        "In two dimensions it still sees 1.1 to 1.3, an overlap of a quarter, and would draw models from random groups "
        "for a third of the rounds.",
    ),
)


# ---- how often the number of groups is found

_RATIOS = (0.8, 1.0, 1.2, 1.5)
_SETTINGS = {"none": ("no groups", 0.0, False)}
_SETTINGS |= {f"equal{ratio:g}": (f"equal {ratio:g}", ratio, False) for ratio in _RATIOS}
_SETTINGS |= {f"nested{ratio:g}": (f"nested {ratio:g}", ratio, True) for ratio in _RATIOS}
#: cell -> rule, number of parameters, sizes of groups
_RECOVERED = {
    f"{rule}_{count}": (rule, count, (3, 6, 6, 6)) for count in (_SMALL, _CNN, _RESNET18) for rule in ("split", "mss")
} | {f"{rule}_{_CNN}_42": (rule, _CNN, (6, 12, 12, 12)) for rule in ("split", "mss")}


def _recovery(cell: str) -> Callable[[str, Mapping[str, str]], Values]:
    rule, num_params, sizes = _RECOVERED[cell]

    def compute(column: str, departures: Mapping[str, str]) -> Values:
        from experiments.papers.clustered.simulation import recovery

        _, ratio, nested = _SETTINGS[column]
        return recovery(ratio, num_params, rule, nested, sizes)

    return compute


def _title(cell: str) -> str:
    rule, num_params, sizes = _RECOVERED[cell]
    return f"{rule}, {num_params:,} parameters, {sum(sizes)} clients"


RECOVERY = Experiment(
    name="clustered.recovery",
    title="How often the number of groups is found, by separation, clients and parameters",
    shows="share of 40 draws with the right number, %, and mean adjusted Rand index. Columns: separation / fourth root "
    "of the number of parameters, of four groups at equal distances, or two pairs three times as far apart (nested)",
    rows={
        f"{cell}_{value}": Row(f"{_title(cell)}: {words}", value, cell)
        for cell in _RECOVERED
        for value, words in (("found", "%"), ("ari", "Rand index"))
    },
    columns={name: Column(title) for name, (title, _, _) in _SETTINGS.items()},
    cells={cell: Computation(_recovery(cell)) for cell in _RECOVERED},
    scales={"paper": "noise alone beside the groups"},
    notes=(
        "split (our default) cuts in two as long as noise does not explain the cut; mss takes the number with the "
        "largest least separation, the papers' rule made safe, and never sees groups within groups. With no groups the "
        "right number is one. split makes a group too many in one run of a hundred, however many cuts it looks at.",
        _BAR,
    ),
)

SIMULATED = (SIMULATION, RECOVERY)
