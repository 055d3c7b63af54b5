"""What it costs to protect persons instead of records, at the same epsilon of a person. No paper has this table."""

import math

from experiments.papers.declarations import entry, table

K, DELTA = 4, 1.0e-4  # most rows of a person; delta of a person


def _epsilon(row: str, column: str, scale: str) -> float:
    """The budget of a unit: K records have K times that of a record."""
    epsilon = float(column.rpartition("_")[2])
    return epsilon / K if row == "bound" else epsilon


def _delta(row: str, column: str, scale: str) -> float:
    """DELTA for K records: K exp((K - 1) epsilon) delta, with epsilon and delta of a record."""
    return DELTA / (K * math.exp((K - 1) * _epsilon(row, column, scale))) if row == "bound" else DELTA


_PERSON = {"privacy.unit": "person", "privacy.rows_per_person": K, "clients.batch_size": 64}
_FASHION = {
    "data": {"name": "fashion_mnist", "records_per_client": 2400, "records_per_person": K},
    "model": {"name": "logistic"},
    "clients.count": 5,
}
_HOSPITALS = {
    "data": {"name": None, "class_path": "experiments.papers.persons.hospitals"},
    "model": {"name": "logistic"},
    "clients.count": None,
}
TABLES = [
    table(
        "persons.accuracy",
        title="Persons with up to four records, 5 clients",
        shows="accuracy on the test set, or of hospitals on held-out patients, %",
        rows=[
            entry("record", "record, the same epsilon for a record alone"),
            entry("bound", "record, the group bound of four records"),
            entry("person", "person", _PERSON),
        ],
        columns=[
            entry(f"{name}_{epsilon}", f"{title}, epsilon {epsilon}", data)
            for name, title, data in (
                ("fashion", "Fashion-MNIST in groups of four", _FASHION),
                ("hospitals", "hospitals", _HOSPITALS),
            )
            for epsilon in (2, 8)
        ],
        options={
            "rounds": 10,
            "clients.batch_size": 256,
            "clients.learning_rate": 0.5,
            "privacy.epsilon": _epsilon,
            "privacy.delta": _delta,
            "evaluation.every": 10,
            "strategies": {"size_weighted": {}},
        },
        scales={"small": "10 rounds of one epoch"},
        seeds={"small": [0, 1, 2]},
        minutes={"small": 0.2},
        ours="person",
        rivals=["bound"],
    )
]
