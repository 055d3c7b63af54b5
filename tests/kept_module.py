"""A file of a user, whose variables count where it is handled as a value."""

TOTAL = [0]


def step():
    TOTAL[0] += 1
