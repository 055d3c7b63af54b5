"""The command as a person meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.papers.__main__ import main
from experiments.papers.cells import contents, file_of
from experiments.papers.run import NOISE_KEY

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("in_the_repository")]
QUIET = ["--tracking", "null", "--engine.device", "cpu"]
EXAMPLE = ["example.digits", "--columns", "epsilon4", "--rows", "uniform"]


@pytest.fixture
def places(tmp_path):
    return ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]


#: arguments, and words of the error
MISTAKES = """
 | NAME, list
example.digts | NAME, example.digts, Did you mean `example.digits`?
list nothing | NAME, nothing
example.digits --columns epsilon5 | --columns, epsilon4, epsilon16, epsilon5
example.digits --scale big | --scale, small, paper, big
example.digits --seeds 0,0 | --seeds, 0,0
example.digits --output_dir x | --output_dir, --runs
example.digits --colums x | --colums, Did you mean `--columns`?
example.digits --clients.lerning_rate 1 | Did you mean `clients.learning_rate`?
example.digits --clients.learning_rate -1 | clients.learning_rate, > 0, -1
noise_aware.table3 --rounds 5 | --rounds, formulas
"""


def test_a_mistake_is_one_line_and_makes_nothing(capsys, places, tmp_path):
    for line in MISTAKES.strip("\n").splitlines():
        argv, words = line.split("|")
        assert main([*argv.split(), *places]) == 2, line
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and not printed.out, printed
        for word in words.strip().split(", "):
            assert word in printed.err, line
        assert not list(tmp_path.iterdir()), line


def test_a_table_is_made_shown_and_skipped_the_next_time(capsys, places, tmp_path):
    page = tmp_path / "results" / "example.md"
    argv = ["example.digits", "--columns", "epsilon4", *places]
    assert main([*argv, *QUIET, "--json", "--page"]) == 0
    out, printed = capsys.readouterr()
    shown = json.loads(out)
    assert shown["missing"] == 0 and len(shown["numbers"]) == 2 and all(one["ours"] for one in shown["numbers"])
    assert "cell 1 of 2, example.digits: epsilon4, uniform, seed 0: about" in printed and "round 2/2" in printed
    assert "| uniform weights " in printed and "| uniform weights " in page.read_text()
    lines = file_of(tmp_path / "results", "example.digits").read_bytes()
    assert lines.count(b"\n") == 2
    assert main([*argv, *QUIET]) == 0
    printed = capsys.readouterr().out
    assert "round" not in printed.partition("**example.digits**")[0] and "| uniform weights " in printed
    assert file_of(tmp_path / "results", "example.digits").read_bytes() == lines


def test_seeds_and_keys_make_cells_of_their_own(capsys, places, tmp_path):
    assert main([*EXAMPLE, "--seeds", "1,2", "--clients.learning_rate", "0.1", *places, *QUIET]) == 0
    assert "with clients.learning_rate 0.1" in capsys.readouterr().out
    folder = Path("example.digits/small+clients.learning_rate=0.1")
    made = contents(tmp_path / "results", "example.digits")
    assert list(made) == [folder / "epsilon4_uniform_seed1", folder / "epsilon4_uniform_seed2"]
    held = made[folder / "epsilon4_uniform_seed1"]
    assert held["command"].endswith(f"--seed=1 --clients.learning_rate=0.1 --privacy.noise_key={NOISE_KEY}")
    assert "tracking" not in held["command"] and "device" not in held["command"]


def test_what_cannot_be_made_is_status_1(capsys, places, monkeypatch, tmp_path):
    monkeypatch.setenv("DPFL_DATA", str(tmp_path / "no_data"))
    argv = ["noise_aware.table3_measured", "--columns", "dist1", "--data.download", "false", *places]
    assert main([*argv, "--tracking", "null"]) == 1
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and "1 of 1 cells cannot be made" in printed.err and "mnist" in printed.err
    assert "0 of 1 cells are made." in printed.out


def test_runs_are_tracked_in_one_experiment(places, new_store, tmp_path):
    from mlflow.tracking import MlflowClient

    store = new_store(tmp_path)
    assert main([*EXAMPLE, *places, "--tracking.uri", store]) == 0
    client = MlflowClient(store)
    (experiment,) = [one for one in client.search_experiments() if one.name != "Default"]
    assert experiment.name == "reproduce"
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "example.digits/small/epsilon4_uniform_seed0 (simulated)"
    found = [run.data.tags[name] for name in ("experiment", "row", "column", "scale", "seed")]
    assert found == ["example.digits", "uniform", "epsilon4", "small", "0"]


def test_the_list_is_quick():
    """It imports neither torch nor matplotlib, though it knows every table."""
    loaded = "import sys; print([name for name in ('torch', 'matplotlib', 'mlflow', 'opacus') if name in sys.modules])"
    code = f"from experiments.papers.__main__ import main; main(['list']); {loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and "noise_aware.table13" in done.stdout
