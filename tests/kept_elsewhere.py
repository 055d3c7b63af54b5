"""A user's second file, in whose variables a model keeps numbers."""

TOTAL = 0.0


class Meter:
    def __init__(self):
        self.total = 0.0

    def update(self, value):
        self.total += value


METER = Meter()


def count():
    global TOTAL
    TOTAL += 1
