"""Try the models of the zoo, each in a process of its own, and write `experiments/results/models_tried.md`."""

import argparse
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from zoo.everything import ZOO  # noqa: E402
from zoo.packages import missing  # noqa: E402
from zoo.page import PAGE, page  # noqa: E402

RESULTS = Path(__file__).parent / "results.jsonl"
MARK = "result: "  # libraries print, too


def one(name: str, limit: int) -> None:
    """Try one model in this process, which ends after `limit` CPU seconds, and print its result."""
    import resource

    import torch
    from zoo.judge import judged
    from zoo.trial import described, tried

    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    torch.set_num_threads(1)
    missing()
    verdict = judged(ZOO[name])
    print(MARK + json.dumps(described(ZOO[name], verdict)), flush=True)  # also known if the rest takes too long
    print(MARK + json.dumps(tried(ZOO[name], verdict)))


def in_process(name: str, limit: int) -> dict[str, Any]:
    """Try one model in a process of its own, for at most `limit` CPU seconds."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.zoo", "--here", name, "--limit", str(limit)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise RuntimeError(f"{name} was not judged: {done.stderr}")
    row = json.loads(lines[-1])
    if done.returncode == 0:
        return row
    late = done.returncode == -signal.SIGXCPU
    sentence = f"it did not end within {limit} CPU seconds" if late else " ".join(done.stderr.split())[-300:]
    return row | {"outcome": "failed", "sentence": sentence}


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ZOO, metavar="NAME", help="models to try; the others keep theirs")
    parser.add_argument("--jobs", type=int, default=1, help="models tried at the same time")
    parser.add_argument("--limit", type=int, default=300, help="CPU seconds for each model")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--here", choices=ZOO, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.here:
        one(flags.here, flags.limit)
        return
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    known = {row["name"]: row for row in rows}
    if not flags.page:
        if absent := missing():
            parser.error(absent)
        with ThreadPoolExecutor(flags.jobs) as pool:
            tried = [pool.submit(in_process, name, flags.limit) for name in flags.only or ZOO]
            for done in as_completed(tried):  # what is finished is kept, whatever happens to the rest
                row = done.result()
                known[row["name"]] = row
                shown = row.get("engine") or row.get("sentence", "")
                print(
                    f"{row['name']:26} {row['judge']:12} {row['outcome']:8} {row.get('ratio', ''):>5} {shown}",
                    flush=True,
                )
                RESULTS.write_text("".join(json.dumps(known[name]) + "\n" for name in ZOO if name in known))
    PAGE.write_text(page([known[name] for name in ZOO if name in known], [name for name in ZOO if name not in known]))


if __name__ == "__main__":
    main()
