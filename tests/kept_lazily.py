"""A file of a user that makes an attribute itself."""

_TOTAL = [0]


def _step():
    _TOTAL[0] += 1


def __getattr__(name):
    if name == "step":
        return _step
    raise AttributeError(name)
