"""The walk of one private gradient: the files of which a function runs in one round, in the order of their first call.

python tests/walk.py [fast|serial]; with `epsilon` those of a whole run, from its configuration to its pages.
"""

import sys
import tempfile
from pathlib import Path

from conftest import small_loop
from rooms import PACKAGE

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.federated.server.round import Round
from dpfl_lightning.loop import build_loop


class Noted:
    """Notes the files of the package of which a function is called, as a profile function."""

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}

    def __call__(self, frame, event, _) -> None:
        if event == "call" and frame.f_code.co_name not in {"<module>", "<lambda>"}:
            file = Path(frame.f_code.co_filename)
            if PACKAGE in file.parents:
                self.seen.setdefault(str(file.relative_to(PACKAGE)))


def of_a_run() -> list[str]:
    """Return the files of the package that a private run executes, from its configuration to its pages."""
    noted = Noted()
    with tempfile.TemporaryDirectory() as folder:
        privacy = {"epsilon": [2.0, 4.0, 8.0], "delta": 1e-3}
        options = {"data": {"name": "digits"}, "clients": {"count": 3}, "privacy": privacy, "rounds": 2}
        sys.setprofile(noted)
        try:
            build_loop(from_mapping({**options, "output_dir": str(Path(folder) / "run")})).run()
        finally:
            sys.setprofile(None)
    return list(noted.seen)


def walked(engine: str) -> list[str]:
    """Return the files of the package that the second round of a private run executes."""
    noted, really = Noted(), Round.one_round

    def watched(self, plan):
        if self.view.round < 2:
            return really(self, plan)
        sys.setprofile(noted)  # an engine of one worker computes in this thread
        try:
            return really(self, plan)
        finally:
            sys.setprofile(None)

    Round.one_round = watched
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = ENGINES[engine](1) if engine == "fast" else ENGINES[engine]()
            privacy = PrivacyOptions(epsilon=8.0, delta=1e-3)
            small_loop(privacy=privacy, engine=made, rounds=2, output_dir=Path(folder) / "run").run()
    finally:
        Round.one_round = really
    return list(noted.seen)


if __name__ == "__main__":
    (what,) = sys.argv[1:] or ["fast"]
    files = of_a_run() if what == "epsilon" else walked(what)
    print("\n".join(files))
    print(len(files), "files")
