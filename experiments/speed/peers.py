"""Other frameworks on the same round, each in a separate process, and if they conflict in another environment."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dpfl_lightning.errors import require
from experiments.speed.baselines import Contestant, build_net, random_records
from experiments.speed.cases import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, Case

_SCRIPTS = Path(__file__).parent / "peer_scripts"


@dataclass(frozen=True)
class Peer:
    """A framework to compare with.

    Args:
        script: gets the path of `job.json`, beside which lie `net.pt` and `client_<i>.pt`; does one round for every
        line on its
            standard input, and prints DONE on a separate line when the server has the mean.
        needs: distributions that must be installed.
        install: arguments of pip that install them.
    """

    script: Path
    needs: tuple[str, ...]
    install: str


PEERS = {
    "flower": Peer(_SCRIPTS / "flower.py", ("flwr", "ray", "opacus", "torch"), "'flwr[simulation]' opacus"),
    "pfl": Peer(_SCRIPTS / "pfl_research.py", ("pfl", "torch"), "pfl torch"),
}

_LOOK = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
def look(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
print(json.dumps({name: look(name) for name in sys.argv[1:]}))
"""


class PeerMissing(Exception):
    """Why a peer could not be measured, in one sentence."""


def check_python(python: str) -> None:
    advice = "For example the bin/python of an environment with the peers installed."
    require(shutil.which(python) is not None, "--peers_python", "be a Python", python, advice)


def versions(name: str, python: str) -> dict[str, str]:
    """Versions of what the peer needs, in the environment of `python`.

    Raises:
        PeerMissing: something is not installed there.
    """
    command = [python, "-c", _LOOK, *PEERS[name].needs]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, env=_environment(), check=True).stdout)
    if absent := [library for library, version in found.items() if version is None]:
        how = f"pip install {PEERS[name].install}, in a separate environment for --peers_python"
        raise PeerMissing(f"{name} lacks {', '.join(absent)}: {how}")
    return found


@contextmanager
def peer_contestant(name: str, case: Case, rounds: int, cores: int, python: str) -> Iterator[Contestant]:
    """The peer as a contestant, idle between its `rounds` rounds; its first round includes its start.

    Args:
        cores: clients side by side, if the peer has a choice.

    Raises:
        PeerMissing: from its `round`, if it ended early.
    """
    with (
        tempfile.TemporaryDirectory(prefix="dpfl_bench_") as folder,
        open(Path(folder) / "messages.txt", "w+") as messages,
        subprocess.Popen(
            [python, PEERS[name].script, _write_job(case, rounds, cores, Path(folder))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            env=_environment(),
        ) as process,
    ):

        def one_round() -> None:
            if process.poll() is None and process.stdin and process.stdout:
                process.stdin.write("go\n")
                process.stdin.flush()
                if any(line == "DONE\n" for line in process.stdout):  # Ray prints there, too
                    return
            messages.seek(0)
            last = (messages.read().strip().splitlines() or ["no message"])[-1]
            raise PeerMissing(f"{name} ended with status {process.wait()}: {last}")

        yield Contestant(name, torch.get_num_threads(), one_round)


def _write_job(case: Case, rounds: int, cores: int, folder: Path) -> Path:
    torch.save(build_net(case), folder / "net.pt")
    for client, pair in enumerate(random_records(case)):
        torch.save(pair, folder / f"client_{client}.pt")
    job = {
        "rounds": rounds,
        "cores": cores,
        "clients": case.clients,
        "batch_size": case.batch_size,
        "learning_rate": LEARNING_RATE,
        "clip_norm": CLIP_NORM,
        "noise_multiplier": NOISE_MULTIPLIER,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
