"""`dpfl init [FOLDER]`: write a configuration to edit: an example, or one for the columns of tables (`--from FILE`)."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfl_lightning.config.command_line import CommandParser
from dpfl_lightning.config.yaml_text import inline
from dpfl_lightning.errors import command, require
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.runtime.launcher import invocation

if TYPE_CHECKING:
    from dpfl_lightning.data.look import Column

_CONFIG = """\
# A configuration of dpfl_lightning. `dpfl fit --help all` explains every key;
# keys that are left out have their default.

data:
  class_path: my_data.hospitals  # your records: what this function in my_data.py returns
  init_args: {records: 400}  # its arguments
  population_args: {num_classes: 2}  # what may be public; every record is held out with probability 0.2
  # A known data set instead: name: digits (see --data.help), with clients.count

model: {name: logistic}  # --model.help lists the models
# Your own model: {class_path: my_model.Net, init_args: {width: 64}}

clients:
  batch_size: 32  # expected size; records are drawn by Poisson sampling
  learning_rate: 0.5

privacy:  # for each record of each client, over the whole run
  epsilon: [1, 2, 4, 8, 8]  # one value for all clients, or one for each
  delta: 1e-4  # usually below 1 / records
  clip_norm: 1.0

rounds: 10
strategies: {size_weighted: {}}  # --strategies.help lists the strategies
tracking: null  # {experiment: my_experiment} records the run in MLflow
"""

_MY_DATA = '''\
"""Your own data: a function that gives the records of every client."""

import torch


def hospitals(records: int = 200) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return name of the client -> (x, y): features [records, 8] and classes [records] in 0..1.

    These are random numbers. Replace them by your own files. Options such as
    `records` are set by `init_args` in config.yaml.
    """
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(8, generator=generator)
    clients = {}
    for name in ("ghent", "malaga", "porto", "turin", "zagreb"):
        x = torch.randn(records, 8, generator=generator)
        clients[name] = x, (x @ weights > 0).long()
    return clients
'''

_DATA = """\
# What all sites and the server agree on. It has names and kinds of columns, and no value of any row, so that it
# may leave the site. Fill in each null with what is public: from a protocol, a guideline or the literature.
data:
  class_path: dpfl_lightning.Population.from_dataframe
  init_args:
    label: {label}  # the outcome; site.yaml shows what columns hold
    classes: null  # in the order of their numbers and in quotes, as in ["no", "yes"]; for numbers leave this line out
    person: {person}  # {about_person}
    drop: {drop}  # look like identifiers or free text
    # Of numbers the public mean and standard deviation, scale: [60, 15] (of dates in days); without a line they are
    # inputs as they are. Of texts the public values, categories: [a, b]. Of dates a public first day, "2020-01-01".
    # Add fill: 1, a public value in place of missing ones, and unit: mg/l, so that a site with another one is refused.
    columns:{columns}
    held_out: {held_out}  # 0: all records train; 0.2: a fifth scores models at each site
"""

#: what has to be filled in of columns
_NULLS = {"number": {"scale": None}, "category": {"categories": None}, "date": {"since": None, "scale": None}}
_PERSON = "names a row's person, to judge by its name: confirm it, or write null if each row is another person"
_NO_PERSON = "the column that names the person of a row, if a person may have several rows"

_SITE = """\
# It stays at this site: what the rows hold is private. Compare it with data.yaml, and do not copy it there.
data:
  init_args:
    {tables}
    # replace: {{COLUMN: {{value: other}}}} where this file writes something else for a class or a category
privacy: {{epsilon: 4, delta: 1.0e-4}}  # of a node: limits on the sums over all plans that it ever accepts
{facts}
"""

_RUN = """\
# A run, which the operator of the server decides.
model: {name: logistic}  # --model.help lists the models
evaluation: {metrics: [auroc]}
clients: {batch_size: 64, learning_rate: 0.25}
privacy: {epsilon: 4, delta: 1.0e-4}  # delta is usually below 1 / records
# With unit: person, rows_per_person: 4 epsilon protects the persons of data.yaml, not single rows.
rounds: 20
tracking: null
# data: {init_args: {test: FILE.csv}}  # a public table of the server, for scores
"""
_FILES = {"config.yaml": _CONFIG, "my_data.py": _MY_DATA}


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `init` with command-line arguments, and return its exit status."""
    about = (
        "Write config.yaml and my_data.py, an example to edit that trains in seconds; or, for tables of your own, "
        "data.yaml, site.yaml and run.yaml. Existing files are kept."
    )
    parser = CommandParser("init", about, "[FOLDER] [FLAGS]", ("", "my_project", "--from hospital.csv"))
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default=".", help="new or existing folder (default .)")
    text = "CSV or Parquet files, one for each client, or their folder: how they are written is found out"
    parser.add_argument("--from", metavar="FILE | FOLDER", nargs="+", default=[], dest="tables", help=text)
    flags = parser.parse_args(argv)
    folder = Path(flags.folder)
    require(folder.is_dir() or not folder.exists(), "FOLDER", "be a folder", str(folder))
    files, differences, guessed = _for_tables(_tables(flags.tables), folder) if flags.tables else (_FILES, [], [])
    existing = ", ".join(name for name in files if (folder / name).exists())
    advice = f"It contains {existing} already; choose another folder."
    require(not existing, "FOLDER", f"have no {' or '.join(files)}", str(folder), advice)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_text(folder / name, text, private=name == "site.yaml")
    there = [] if folder == Path() else [f"cd {folder}"]
    given = " ".join(f"--config {name}" for name in files if name.endswith(".yaml"))
    first = "edit data.yaml, which all sites and the server have; site.yaml stays here, as it shows private rows"
    steps = [
        *there,
        *([first] if flags.tables else []),
        f"{invocation('plan')} {given}   # noise and epsilon of each client",
        f"{invocation('fit')} {given}    # train, in seconds",
    ]
    if flags.tables:
        steps.append(f"{invocation('node')} init NODE --config data.yaml --config site.yaml   # or be a site")
    written = " and ".join(str(folder / name) for name in files)
    print("\n  ".join([f"Wrote {written}. Next:", *steps]))
    for name in guessed:
        print(f"{name} is not UTF-8 and was read as cp1252: if its names look wrong, write another encoding and names.")
    if differences:
        print("\n  ".join(["These files differ (for your eyes: some are values of private rows):", *differences]))
    return 0


def _tables(given: Sequence[str]) -> list[Path]:
    """Return the files, with those in a folder in its place."""
    from dpfl_lightning.data.frames import files_in

    paths: list[Path] = []
    for one in map(Path, given):
        inside = files_in(one) if one.is_dir() else [one]
        require(bool(inside), "--from", "be files, or a folder with CSV or Parquet files", str(one))
        paths += inside
    return paths


def _for_tables(paths: Sequence[Path], folder: Path) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the configurations for tables (what is shared, what stays at the site, a run), how tables differ, and
    the names of those whose encoding is a guess.
    """
    from dpfl_lightning.data.look import differences, likely_label, likely_person, look

    looked = {path: look(path) for path in paths}
    columns = looked[paths[0]][1]
    label, person = likely_label(columns), likely_person(columns)
    inputs = [one for one in columns if one.name not in (label, person)]
    unfilled = [f"\n      {_pair(one.name, _NULLS[one.kind])}" for one in inputs if one.kind in _NULLS]
    shared = _DATA.format(
        label=inline(label, unicode=True),
        person=inline(person, unicode=True),
        about_person=_NO_PERSON if person is None else _PERSON,
        drop=inline([one.name for one in inputs if one.kind == "other"], unicode=True),
        columns="".join(unfilled) or " {}",
        held_out=0 if len(paths) == 1 else 0.2,
    )
    files = {path: os.path.relpath(path, folder) for path in paths}
    tables = ["df:", *(f"  {_pair(one.stem, {'file': files[one], 'read': looked[one][0]})}" for one in paths)]
    if len(paths) == 1:
        tables = [_pair("df", files[paths[0]]), _pair("read", looked[paths[0]][0])]
    facts = [line for path in paths for line in _facts(path, looked[path][1])]
    site = _SITE.format(tables="\n    ".join(tables), facts="\n".join(facts))
    written = {"data.yaml": shared, "site.yaml": site, "run.yaml": _RUN}
    guessed = [path.name for path in paths if looked[path][0].get("encoding") == "cp1252"]
    return written, differences({path.name: looked[path] for path in paths}, label), guessed


def _pair(name: str, value: Any) -> str:
    """Return an entry of a mapping as YAML on one line."""
    pair: Mapping[str, Any] = {name: value}
    return inline(pair, unicode=True)[1:-1]


def _facts(path: Path, columns: Sequence["Column"]) -> list[str]:
    return [f"# Private facts of {path.name}:", *(f"#   {one.name}: {one.facts}" for one in columns)]
