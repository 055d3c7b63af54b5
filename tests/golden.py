"""Whether two checkouts release the same bits: `python tests/golden.py OLD NEW`, with their folders.

Every file in conf/, every engine, two ranks, a run that is interrupted and resumed, computed tables and `--help` run
in both, by commands alone, as simulations with one noise key. Compared are digests of the trained parameters, ledgers
(client, round, purpose, event), epsilons, accuracies, tables and help texts. Exit status 1 names what differs.
The data is random; the cache of calibrations is empty at the start. It takes a few minutes.
"""

import argparse
import difflib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from test_conf import shrunken, write_fashion

KEY = "0123456789abcdef0123456789abcdef"
SIMULATED = ["--privacy.noise_key", KEY, "--tracking", "null", "--engine.device", "cpu"]
ENGINES = ("serial", "trainer", "fast", "stacked")
TABLES = ("noise_aware.table3", "clustered.full_batch_cost", "clustered.selection_cost", "clustered.revised_figure8")
COMMANDS = ("fit", "evaluate", "plan", "sweep", "audit")
#: commands that move: where each is, the first that a checkout has
PLACES = {"reproduce": ("experiments/papers", "dpfl_lightning/reproduce.py")}

Answers = dict[str, Any]


class Checkout:
    """A checkout whose commands are run.

    Args:
        tree: its folder.
        scratch: an empty folder for what it writes.
        fashion: a folder with the four files of Fashion-MNIST.
    """

    def __init__(self, tree: Path, scratch: Path, fashion: Path) -> None:
        self.tree, self.scratch, self.fashion = tree.resolve(), scratch, fashion

    def start(self, *words: str, module: str = "dpfl_lightning.fit") -> subprocess.Popen[str]:
        """A command of this checkout, its output in one pipe."""
        threads = {"OMP_NUM_THREADS": "1", "DPFL_DATA": str(self.scratch / "cache"), "COLUMNS": "100"}
        return subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=self.scratch,
            env={**os.environ, **threads, "PYTHONPATH": str(self.tree)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str, module: str = "dpfl_lightning.fit") -> str:
        """What a command prints.

        Raises:
            RuntimeError: it fails.
        """
        process = self.start(*words, module=module)
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{self.tree}: {module} {' '.join(words)}\n{output[-3000:]}")
        return output

    def released(self, folder: Path) -> Answers:
        """What a finished run released."""
        result = json.loads((folder / "result.json").read_text())
        lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()[1:]]
        kept = sorted(path for path in folder.glob("*.pt") if not path.name.startswith("checkpoint"))
        charges = [[line[key] for key in ("client", "round", "purpose", "event")] for line in lines]
        return {
            "tensors": {path.name: digest_of(torch.load(path, weights_only=True)) for path in kept},
            "charges": hashlib.sha256(json.dumps(charges, sort_keys=True).encode()).hexdigest(),
            "epsilons": [client.get("epsilon") for client in result["clients"]],
            "accuracy": result["test_accuracy"],
        }

    def trained(self, name: str, argv: list[str], ranks: int = 1) -> Answers:
        """One run's releases."""
        folder = self.scratch / name
        words = [*argv, *SIMULATED, "--output_dir", str(folder)]
        if ranks > 1:
            launcher = ["--standalone", "--nproc_per_node", str(ranks), "-m", "dpfl_lightning.fit"]
            self.run(*launcher, *words, module="torch.distributed.run")
        else:
            self.run(*words)
        return self.released(folder)

    def interrupted(self, name: str, argv: list[str]) -> Answers:
        """The releases of a run that a signal stops after some round, and that is resumed."""
        folder = self.scratch / name
        process = self.start(*argv, *SIMULATED, "--output_dir", str(folder))
        while not (folder / "checkpoint.pt").exists():
            if process.poll() is not None:
                raise RuntimeError(f"{self.tree}: {name} ended before its first checkpoint\n{process.communicate()[0]}")
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.communicate()
        if not (folder / "result.json").exists():
            self.run("--resume", str(folder))
        return self.released(folder)

    def digits(self, *words: str) -> list[str]:
        """A small run on real digits."""
        return ["--config", str(self.tree / "conf/digits.yaml"), "--rounds", "3", *words]

    def answers(self) -> Answers:
        """All that is compared, by name."""
        found: Answers = {}
        for path in sorted((self.tree / "conf").glob("*.yaml")):
            found[f"conf {path.stem}"] = self.trained(path.stem, [*shrunken(path, self.fashion), "--rounds", "2"])
        for engine in ENGINES:
            found[f"engine {engine}"] = self.trained(f"engine_{engine}", self.digits("--engine.name", engine))
        found["two ranks"] = self.trained("ranks", self.digits(), ranks=2)
        found["interrupted"] = self.interrupted("interrupted", self.digits("--rounds", "40"))
        if found["interrupted"] != self.trained("whole", self.digits("--rounds", "40")):
            raise RuntimeError(f"{self.tree}: a run that was interrupted and resumed differs from a whole one")
        for table in TABLES:
            printed = self.run(table, module=self.place("reproduce"))  # the scratch folder holds no finished cells
            found[f"table {table}"] = [line for line in printed.splitlines() if line.startswith("|")]
        for command in COMMANDS:
            found[f"help {command}"] = self.run("--help", module=f"dpfl_lightning.{command}")
        return found

    def place(self, command: str) -> str:
        """The module that a command is in, in this checkout."""
        path = next(place for place in PLACES[command] if (self.tree / place).exists())
        return path.removesuffix(".py").replace("/", ".")


def digest_of(value: Any) -> str:
    """SHA-256 of all tensors in nested mappings and lists, with their names, dtypes and shapes."""
    digest = hashlib.sha256()

    def add(name: str, one: Any) -> None:
        if isinstance(one, torch.Tensor):
            digest.update(f"{name} {one.dtype} {tuple(one.shape)};".encode())
            digest.update(one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(one, dict):
            for key in sorted(one, key=str):
                add(f"{name}.{key}", one[key])
        elif isinstance(one, list | tuple):
            for number, part in enumerate(one):
                add(f"{name}.{number}", part)

    add("", value)
    return digest.hexdigest()


def differences(old: Answers, new: Answers) -> list[str]:
    """A paragraph for each name whose answers differ."""
    told = []
    for name in sorted(old.keys() | new.keys()):
        before, after = (json.dumps(one.get(name), indent=1).replace("\\n", "\n") for one in (old, new))
        if before != after:
            lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "old", "new", lineterm="", n=1)
            told.append("\n".join([name, *list(lines)[:40]]))
    return told


def main(argv: list[str] | None = None) -> int:
    """Compare two checkouts; 0 if nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        fashion = Path(folder, "fashion")
        fashion.mkdir()
        write_fashion(fashion)
        checkouts = []
        for side in ("old", "new"):
            Path(folder, side).mkdir()
            checkouts.append(Checkout(getattr(asked, side), Path(folder, side), fashion))
        with ThreadPoolExecutor(2) as pool:
            old, new = pool.map(Checkout.answers, checkouts)
    told = differences(old, new)
    print("\n\n".join(told) if told else f"{len(old)} answers are equal")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
