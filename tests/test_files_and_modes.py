"""The table of docs/privacy.md names all files of a run and of a node with their modes, and no others."""

import os
import re
import stat
from fnmatch import fnmatch
from pathlib import Path

import pytest
from sites import asked, federation, hello, listening

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.papers.sets.distilled_set import CARD, DATA_CARD, TENSORS
from dpfl_lightning.reporting.mlflow import Tracking
from dpfl_lightning.sites.exchange import Refused
from dpfl_lightning.sites.node.service import Node
from dpfl_lightning.sites.server.channel import Sites
from dpfl_lightning.sites.server.deploy import loop_over
from dpfl_lightning.sites.wire import digest
from dpfl_lightning.strategies import build

PAGE = Path(__file__).parents[1] / "docs" / "privacy.md"


def table() -> dict[str, int]:
    """Pattern of each file in the table -> its mode."""
    section = PAGE.read_text().partition("## Who can see which file\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]
    return {name: int(row[1], 8) for row in rows for name in re.findall("`(.*?)`", row[0])}


def files_in(folder: Path, name: str) -> dict[str, int]:
    paths = [path for path in folder.rglob("*") if not path.is_dir()]
    return {f"{name}/{path.relative_to(folder)}": stat.S_IMODE(path.lstat().st_mode) for path in paths}


class Breaks(Callback):
    def on_round_end(self, view, report):
        raise KeyboardInterrupt


@pytest.mark.e2e
def test_every_file_has_the_mode_of_the_table_and_the_table_no_others(make_loop, new_store, tmp_path):
    before = os.umask(0o022)
    try:
        usual = {"privacy": PrivacyOptions(epsilon=4.0, delta=1e-3, accountant="rdp"), "rounds": 2}
        one, several = make_loop(**usual), make_loop(parts=build({"local": {}}), **usual)
        one.run(), several.run()
        broken = make_loop(parts=[Breaks()], **usual)
        with pytest.raises(KeyboardInterrupt):
            broken.run()
        broken.clients.folder.keep_errors(2, {0: ValueError("record 17")})
        (node,), terms, options = federation(tmp_path, count=1)
        node.state.keep_contact(digest(terms), "study office")
        loop = loop_over(options, Sites(terms, (node.handle,)))
        loop.run()
        node.close()
        assert asked(Node(node.state, None), hello(digest(terms))) == Refused("halted")
        with node.state.serving(), listening(node, node.state.path / "socket"):
            found = files_in(node.state.path, "NODE")
            assert stat.S_IMODE(node.state.path.stat().st_mode) == 0o700
        store = new_store(tmp_path / "store")
        tracked = make_loop(parts=[Tracking("modes", uri=store)], **usual)
        tracked.run()
        found |= {name.removeprefix("store/"): mode for name, mode in files_in(tmp_path / "store", "store").items()}
        for folder in (one.output_dir, several.output_dir, broken.output_dir, tracked.output_dir, loop.output_dir):
            found |= files_in(folder, "RUN")
    finally:
        os.umask(before)
    modes = table()
    of_file = {file: {pattern for pattern in modes if fnmatch(file, pattern)} for file in found}
    assert {file: len(patterns) for file, patterns in of_file.items()} == dict.fromkeys(found, 1), "one row for each"
    assert found == {file: modes[pattern] for file, (pattern,) in of_file.items()}
    of_sets = {f"RUN/{name}" for name in (TENSORS, CARD, DATA_CARD)}
    assert modes.keys() - set().union(*of_file.values()) == of_sets
