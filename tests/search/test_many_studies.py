"""Private studies over workers that are killed at random: each point of each grid once, and all that began is composed.

`DPFL_STUDIES` is their number; the full count is 50.
"""

import gc
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

import optuna
import pytest
import warm

from dpfl_lightning.commands.sweep import main as sweep
from dpfl_lightning.privacy.accounting.accountant import get_accountant
from dpfl_lightning.privacy.ledger.verify import read

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STUDIES, WORKERS = int(os.environ.get("DPFL_STUDIES", 8)), 8
KILLS = STUDIES // 2
RATES = [0.1, 0.3, 1.0]
FILE = f"""
rounds: 2
data: {{name: digits, public_records: 300}}
model: {{name: logistic}}
clients: {{count: 3, batch_size: 128}}
privacy: {{epsilon: [1, 2, 4], delta: 1.0e-3, accountant: rdp}}
tracking: null
sweep:
  objective: private
  sampler: {{name: grid}}
  space: {{clients.learning_rate: {{choices: {RATES}}}}}
  trials: {len(RATES)}
  heartbeat_seconds: 5
"""


def words_of(folder: Path, url: str, worker: int, study: int) -> list[str]:
    words = ["--config", str(folder / "search.yaml"), "--sweep.name", f"study{study}", "--sweep.storage", url]
    return [*words, "--output_dir", str(folder / f"worker{worker}" / f"study{study}")]


def one_worker(folder: Path, url: str, worker: int) -> None:
    """Join every fourth study, so that each has two workers."""
    for study in range(worker % 4, STUDIES, 4):
        assert sweep(words_of(folder, url, worker, study)) == 0
        gc.collect()  # a command is a process, whose end closes its connections; PostgreSQL has a hundred


@pytest.mark.filterwarnings("ignore:.*experimental")
def test_each_point_is_made_once_and_everything_that_began_is_composed(url, tmp_path, capsys):
    (tmp_path / "search.yaml").write_text(FILE)
    moments, kills, begun = random.Random(time.time_ns()), 0, time.monotonic()
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": paths}

    def start(worker: int) -> warm.Process:
        return warm.Process(str(Path(__file__)), str(tmp_path), url, str(worker), env=environment)

    def trained(worker: int) -> int:
        return len(list(tmp_path.glob(f"worker{worker}/study*/trials/*/*/ledger.jsonl")))

    workers = [start(worker) for worker in range(WORKERS)]
    before = [0] * WORKERS
    while any(worker.poll() is None for worker in workers):
        time.sleep(moments.uniform(0.1, 1.0))
        number = moments.randrange(WORKERS)
        if kills < KILLS and workers[number].poll() is None and trained(number) > before[number]:
            workers[number].kill()
            workers[number].wait()
            workers[number], before[number], kills = start(number), trained(number), kills + 1
    said = [worker.communicate()[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * WORKERS, said

    lost = 0
    for study in range(STUDIES):
        trials = optuna.load_study(study_name=f"study{study}", storage=url).get_trials(deepcopy=False)
        complete = Counter(trial.params["clients.learning_rate"] for trial in trials if trial.state.name == "COMPLETE")
        assert complete == Counter(RATES), f"study {study}: {complete}"
        charged = [trial for trial in trials if trial.user_attrs.get("costs")]
        lost += len(charged) - len(RATES)
        (first, *_) = tmp_path.glob(f"worker*/study{study}/result.json")
        cost = json.loads(first.read_text())["cost"]
        ledgers = [path for path in tmp_path.glob(f"worker*/study{study}/trials/**/ledger.jsonl")]
        runs = [ledger for ledger in ledgers if (ledger.parent / "result.json").is_file()]
        assert cost["runs"] == len(charged) >= len(runs) >= len(RATES)
        accountant, whole = get_accountant("rdp"), read(runs[:1])
        for client, (events, epsilon) in enumerate(zip(whole.events, cost["epsilon"], strict=True)):
            assert len(events) == 2, "two rounds"
            together = accountant.epsilon(list(events) * len(charged), 1e-3)
            assert together <= epsilon <= together + 2e-6, (study, client)
    with capsys.disabled():
        seconds = time.monotonic() - begun
        print(f"\n{STUDIES} studies, {kills} kills, {lost} trials repeated, {seconds:.0f} s, {url.partition(':')[0]}")


if __name__ == "__main__":
    one_worker(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
