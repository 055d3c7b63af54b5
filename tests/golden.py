"""Whether two checkouts release the same bits: `python tests/golden.py OLD NEW`, with their folders.

Every file in conf/, every engine, two ranks, a run that is interrupted and resumed, a client that misses the first
round, a sweep, two nodes, a tracked run and computed tables run in both, by commands alone, with one noise key.
Compared are digests of the trained parameters, ledgers (client, round, purpose, event), epsilons, accuracies, trials,
the plan of the nodes, names in MLflow and tables. The noise of nodes differs from plan to plan: their parameters are
not compared. Exit status 1 names what differs. The data is random. It takes minutes.
"""

import argparse
import difflib
import functools
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from test_conf import shrunken, write_fashion

KEY = "0123456789abcdef0123456789abcdef"
SIMULATED = ["--privacy.noise_key", KEY, "--engine.device", "cpu"]
UNTRACKED = ["--tracking", "null"]
ENGINES = ("serial", "trainer")  # the files in conf/ take the default
TABLES = ("noise_aware.table3", "clustered.full_batch_cost", "clustered.selection_cost")
#: two groups of clients; with this seed, only the first update of client 5 is lost
LATE = {
    "--seed": "34",
    "--clients.count": "6",
    "--data.groups": "{name: rotation, sizes: [3, 3]}",
    "--privacy.epsilon": "8",
    "--strategies": "{clustered: {num_clusters: 2}}",
    "--network.dropout": "[0, 0, 0, 0, 0, 0.5]",
    "--rounds": "5",
}
NODES = ["--clients.count", "2", "--privacy.epsilon", "[2, 4]", "--engine.device", "cpu"]
DRAWN = ("run", "module")  # parts of a plan that differ each time, or with the source of a model
#: commands that move: where each is, the first that a checkout has
PLACES = {"reproduce": ("experiments/papers", "dpfl_lightning/reproduce.py")}

#: ends of the files of models, and how they are read
READ = {".safetensors": load_file, ".pt": functools.partial(torch.load, weights_only=True)}

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

    def start(self, *words: str, command: str = "fit", module: str | None = None) -> subprocess.Popen[str]:
        """A command of this checkout, its output in one pipe."""
        called = ["dpfl_lightning", command] if module is None else [module]
        own = {"DPFL_DATA": str(self.scratch / "cache"), "DPFL_ACCOUNT": str(self.scratch / "account.jsonl")}
        threads = {"OMP_NUM_THREADS": "1", "COLUMNS": "100", **own}
        return subprocess.Popen(
            [sys.executable, "-m", *called, *words],
            cwd=self.scratch,
            env={**os.environ, **threads, "PYTHONPATH": str(self.tree)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str, command: str = "fit", module: str | None = None) -> str:
        """What a command, or another module, prints.

        Raises:
            RuntimeError: it fails.
        """
        process = self.start(*words, command=command, module=module)
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{self.tree}: {command} {' '.join(words)}\n{output[-3000:]}")
        return output

    def trained(self, name: str, argv: list[str], ranks: int = 1) -> Answers:
        """One run's releases."""
        folder = self.scratch / name
        words = [*argv, *SIMULATED, *UNTRACKED, "--output_dir", str(folder)]
        if ranks > 1:
            launcher = ["--standalone", "--nproc_per_node", str(ranks), "-m", "dpfl_lightning.fit"]
            self.run(*launcher, *words, module="torch.distributed.run")
        else:
            self.run(*words)
        return released(folder)

    def interrupted(self, name: str, argv: list[str]) -> Answers:
        """The releases of a run that a signal stops after some round, and that is resumed."""
        folder = self.scratch / name
        process = self.start(*argv, *SIMULATED, *UNTRACKED, "--output_dir", str(folder))
        while not (folder / "checkpoint.pt").exists():
            if process.poll() is not None:
                raise RuntimeError(f"{self.tree}: {name} ended before its first checkpoint\n{process.communicate()[0]}")
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.communicate()
        if not (folder / "result.json").exists():
            self.run("--resume", str(folder))
        return released(folder)

    def late(self) -> Answers:
        """The releases of a run in which a client misses the round that forms the groups, and its groups by round."""
        answers = self.trained("late", self.digits(*(word for pair in LATE.items() for word in pair)))
        lines = map(json.loads, (self.scratch / "late" / "metrics.jsonl").read_text().splitlines())
        groups = [line["clients"]["train_group"]["5"] for line in lines]
        if groups[0] is not None or groups[-1] is None:
            raise RuntimeError(f"{self.tree}: the client is not late, its groups are {groups}")
        return {**answers, "groups": groups}

    def searched(self) -> Answers:
        """The trials of a small sweep, and the releases of its final run."""
        folder = self.scratch / "sweep"
        small = ["--rounds", "1", "--sweep.trials", "2", "--sweep.training.epochs", "1", "--final"]
        words = ["--config", str(self.tree / "sweeps/nas_digits.yaml"), *small, *SIMULATED, *UNTRACKED]
        self.run(*words, "--output_dir", str(folder), command="sweep")
        result = json.loads((folder / "result.json").read_text())
        trials = [[trial[key] for key in ("state", "params", "scores")] for trial in result["trials"]]
        return {"trials": trials, "best": result["best"], "final": released(folder / "final")}

    def federated(self) -> Answers:
        """The plan, charges and epsilons of a federation of two nodes."""
        words, names = self.digits(*NODES, *UNTRACKED), ("berlin", "paris")
        for number, name in enumerate(names):
            self.run("init", name, *self.site(number), command="node")
        facts = [f"{name}/site.json" for name in names]
        self.run(*words, "--sites", *facts, "--export", "plan.json", command="plan")
        with ExitStack() as nodes:
            for name in names:
                self.run("accept", name, "plan.json", "--epsilon_limit", "5", command="node")
                nodes.enter_context(self.serving(name))
            sockets = [f"{name}/socket" for name in names]
            self.run(*words, "--plan", "plan.json", "--nodes", *sockets, "--output_dir", "sites")
        terms = json.loads((self.scratch / "plan.json").read_text())["message"]
        for site in terms["sites"]:
            del site["public_key"]  # drawn by the node
        ledgers = sorted(self.scratch.glob("*/plans/*/ledger.jsonl"))
        return {
            "plan": {key: value for key, value in terms.items() if key not in DRAWN},
            "charges": [charges_of(ledger) for ledger, _ in zip(ledgers, names, strict=True)],
            "epsilons": released(self.scratch / "sites")["epsilons"],
        }

    def site(self, number: int) -> list[str]:
        """The words with which `node init` gives half of the digits to a node."""
        limits = ["--privacy.epsilon", "5", "--privacy.delta", "0.01", "--privacy.noise_key", KEY]
        return ["--client", str(number), "--data.name", "digits", "--clients.count", "2", *limits]

    @contextmanager
    def serving(self, name: str) -> Iterator[None]:
        """A node that listens at its socket."""
        node = self.start("serve", name, "--slot", "0.1", command="node")
        try:
            while not (self.scratch / name / "socket").exists():
                if node.poll() is not None:
                    raise RuntimeError(f"{self.tree}: the node does not serve\n{node.communicate()[0]}")
                time.sleep(0.05)
            yield
        finally:
            node.terminate()
            node.communicate()

    def tracked(self) -> Answers:
        """The names under which MLflow gets a run."""
        store = self.scratch / "mlflow.db"
        self.run(*self.digits(), *SIMULATED, "--tracking.uri", f"sqlite:///{store}", "--output_dir", "tracked")
        names = {}
        with sqlite3.connect(store) as opened:
            for table in ("params", "metrics", "tags"):
                rows = opened.execute(f"SELECT DISTINCT key FROM {table} ORDER BY key").fetchall()
                names[table] = some([key for (key,) in rows], table)
        return names

    def digits(self, *words: str) -> list[str]:
        """A small run on real digits."""
        return ["--config", str(self.tree / "conf/digits.yaml"), "--rounds", "3", *words]

    def answers(self) -> Answers:
        """All that is compared, by name."""
        found: Answers = {}
        for path in sorted((self.tree / "conf").glob("*.yaml")):
            rounds = [] if "feature_means" in path.read_text() else ["--rounds", "2"]  # clients release once
            found[f"conf {path.stem}"] = self.trained(path.stem, [*shrunken(path, self.fashion), *rounds])
        for engine in ENGINES:
            found[f"engine {engine}"] = self.trained(f"engine_{engine}", self.digits("--engine.name", engine))
        found["two ranks"] = self.trained("ranks", self.digits(), ranks=2)
        found["interrupted"] = self.interrupted("interrupted", self.digits("--rounds", "20"))
        if found["interrupted"] != self.trained("whole", self.digits("--rounds", "20")):
            raise RuntimeError(f"{self.tree}: a run that was interrupted and resumed differs from a whole one")
        for part in (self.late, self.searched, self.federated, self.tracked):
            found[part.__name__] = part()
        for table in TABLES:
            printed = self.run(table, module=self.place("reproduce"))  # the scratch folder holds no finished cells
            lines = [line for line in printed.splitlines() if line.startswith("|")]
            found[f"table {table}"] = some(lines, f"lines of {table}")
        return found

    def place(self, command: str) -> str:
        """The module that a command is in, in this checkout."""
        path = next(place for place in PLACES[command] if (self.tree / place).exists())
        return path.removesuffix(".py").replace("/", ".")


def released(folder: Path) -> Answers:
    """What a finished run released.

    Raises:
        KeyError: the results or the ledger lack a key that is compared.
        ValueError: there are no parameters, charges or epsilons to compare.
    """
    result = json.loads((folder / "result.json").read_text())
    kept = sorted(path for path in folder.iterdir() if path.suffix in READ and not path.name.startswith("checkpoint"))
    return {
        "tensors": {path.stem: digest_of(READ[path.suffix](path)) for path in some(kept, "parameters")},
        "charges": charges_of(folder / "ledger.jsonl"),
        "epsilons": some([client["epsilon_spent"] for client in result["clients"]], "epsilons"),
        "accuracy": result["test_accuracy"],
    }


def charges_of(ledger: Path) -> str:
    """SHA-256 of the charges in a ledger, of which there is at least one."""
    lines = [json.loads(line) for line in ledger.read_text().splitlines()[1:]]
    charges = []
    for line in some(lines, "charges"):
        for client in [line["client"]] if "client" in line else clients_of(line["clients"]):
            charges.append([client, line["round"], line["number"], line["purpose"], line["event"]])
    return hashlib.sha256(json.dumps(sorted(charges, key=json.dumps), sort_keys=True).encode()).hexdigest()


def clients_of(spans: list[int | list[int]]) -> list[int]:
    """The clients of a line: numbers, and [first, last]."""
    found: list[int] = []
    for one in spans:
        first, last = one if isinstance(one, list) else (one, one)
        found += range(first, last + 1)
    return found


def some(values: list[Any], what: str) -> list[Any]:
    """The values, which must be there: nothing compared with nothing would be equal."""
    if not values or None in values:
        raise ValueError(f"there are no {what} to compare: {values}")
    return values


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
