"""`dpfl init [FOLDER]`: write config.yaml and my_data.py, a small example to edit."""

from collections.abc import Sequence
from pathlib import Path

from dpfl_lightning.config.command_line import CommandParser
from dpfl_lightning.errors import command, require
from dpfl_lightning.runtime.files import write_text
from dpfl_lightning.runtime.launcher import invocation

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
    for name in ("berlin", "lyon", "oslo", "porto", "turin"):
        x = torch.randn(records, 8, generator=generator)
        clients[name] = x, (x @ weights > 0).long()
    return clients
'''
_FILES = {"config.yaml": _CONFIG, "my_data.py": _MY_DATA}


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `init` with command-line arguments, and return its exit status."""
    about = "Write config.yaml and my_data.py, an example to edit that trains in seconds. Existing files are kept."
    parser = CommandParser("init", about, "[FOLDER]", ("", "my_project"))
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default=".", help="new or existing folder (default .)")
    folder = Path(parser.parse_args(argv).folder)
    require(folder.is_dir() or not folder.exists(), "FOLDER", "be a folder", str(folder))
    existing = ", ".join(name for name in _FILES if (folder / name).exists())
    advice = f"It contains {existing} already; choose another folder."
    require(not existing, "FOLDER", f"have no {' or '.join(_FILES)}", str(folder), advice)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in _FILES.items():
        write_text(folder / name, text)
    there = [] if folder == Path() else [f"cd {folder}"]
    steps = [
        *there,
        f"{invocation('plan')} --config config.yaml   # noise and epsilon of each client",
        f"{invocation('fit')} --config config.yaml    # train, in seconds",
    ]
    written = " and ".join(str(folder / name) for name in _FILES)
    print("\n  ".join([f"Wrote {written}. Next:", *steps]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
