"""The walk of one private gradient: the files of which a function runs in one round, in the order of their first call.

python tests/walk.py [fast|serial]
"""

import sys
import tempfile
from pathlib import Path

from conftest import small_loop
from rooms import PACKAGE

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.federated.server.round import Round


def walked(engine: str) -> list[str]:
    """Return the files of the package that the second round of a private run executes."""
    seen: dict[str, None] = {}
    really = Round.one_round

    def noted(frame, event, _):
        if event == "call" and frame.f_code.co_name not in {"<module>", "<lambda>"}:
            file = Path(frame.f_code.co_filename)
            if PACKAGE in file.parents:
                seen.setdefault(str(file.relative_to(PACKAGE)))

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
    return list(seen)


if __name__ == "__main__":
    files = walked(*(sys.argv[1:] or ["fast"]))
    print("\n".join(files))
    print(len(files), "files")
