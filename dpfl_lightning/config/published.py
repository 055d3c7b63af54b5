"""Published settings of clients: the noise-aware paper's privacy budgets Dist1-Dist9 and batch sizes.

`published.csv` holds the lists for 60 clients. Their first 40 and 20 entries are the lists for 40 and 20 clients,
except for five lists of 20, which were drawn separately.

Reference: Malekmohammadi, Yu and Cao (2024), Table 7 (the distributions), and the lists in the authors' code release,
which are not sorted. With 20 clients they reproduce its Table 3.
"""

import csv
from pathlib import Path

# (probability, mean, standard deviation) of each normal component. Table 7 does not state that its second
# parameter is the standard deviation, but the published values show it.
NORMAL_MIXTURES: dict[str, tuple[tuple[float, float, float], ...]] = {
    "dist1": ((1.0, 2.0, 1.0),),
    "dist2": ((0.2, 0.2, 0.01), (0.6, 1.0, 0.1), (0.2, 5.0, 1.0)),
    "dist4": ((0.2, 0.2, 0.01), (0.6, 0.5, 0.1), (0.2, 2.0, 1.0)),
    "dist6": ((0.3, 0.2, 0.01), (0.5, 0.5, 0.1), (0.2, 1.0, 0.1)),
    "dist8": ((0.6, 0.2, 0.01), (0.4, 0.5, 0.1)),
}

# (low, high)
UNIFORMS = {"dist3": (0.2, 5.0), "dist5": (0.2, 2.0), "dist7": (0.2, 1.0), "dist9": (0.2, 0.5)}

_ROWS = list(csv.DictReader(Path(__file__).with_suffix(".csv").read_text(encoding="utf-8").splitlines()))


def _column(name: str, count: int) -> tuple[float, ...]:
    """Return the list for `count` clients."""
    separate = f"{name}_of_{count}"
    return tuple(float(row[separate if separate in row else name]) for row in _ROWS[:count])


EPSILONS: dict[str, dict[int, tuple[float, ...]]] = {
    name: {count: _column(name, count) for count in (20, 40, 60)} for name in sorted({*NORMAL_MIXTURES, *UNIFORMS})
}
BATCH_SIZES: dict[int, tuple[int, ...]] = {
    count: tuple(map(int, _column("batch_size", count))) for count in (20, 40, 60)
}
#: names of distributions that draw a value for each client
DRAWN = ("uniform", "choice", "normal", "published", *EPSILONS)
