"""The command: errors in one line, seeds, resume, evaluation."""

import copy
import gc
import json
import re
import shlex
import weakref

import pytest
import torch

import dpfl_lightning
from dpfl_lightning import loop
from dpfl_lightning.commands.evaluate import main as evaluate
from dpfl_lightning.commands.fit import main as fit
from dpfl_lightning.privacy.ledger.verify import read
from dpfl_lightning.reporting.progress import Progress
from dpfl_lightning.runtime.text import at_most

pytestmark = pytest.mark.e2e

DIGITS = ["--config", "conf/digits.yaml", "--rounds", "2", "--tracking", "null"]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


MISTAKES = [
    ("--rouns 3", "rouns", "Did you mean `--rounds`"),
    ("--privacy.epsilon 0", "privacy.epsilon", "> 0", "0"),
    ("--clients.batch_size 1000", "clients.batch_size", "1000"),
    ("--data.name digit", "digit", "Did you mean `digits`"),
    ("--data.groups '{name: rotation, sizes: [2, 2]}'", "data.groups.sizes", "5, clients.count"),
    ("--data.test_per_client 360", "data.test_per_client", "at most 359", "360"),
    ("--strategies.size_weighted.x 1", "strategies.size_weighted.x", "it has none"),
    ("--seeds 0,0", "--seeds", "0,0"),
    ("--privacy.accountant gdp", "gdp", "pld, rdp"),
    ("--engine.device cuda", "engine.device", "cuda"),
    ("--model '{class_path: no.such.Net}'", "model.class_path", "no.such.Net"),
    ("--model '{class_path: torch.nn.Linear, init_args: {foo: 3}}'", "model.init_args", "foo"),
    ("--model '{class_path: torch.nn.Linear, init_args: {in_features: 3, out_features: 10}}'", "(1, 8, 8)", "shapes"),
]


@pytest.fixture
def refused(capsys):
    """`refused(command, *words)`: the one line of an error."""

    def run(command, *words: str) -> str:
        capsys.readouterr()
        assert command(list(words)) == 2
        *progress, line = capsys.readouterr().err.splitlines()
        assert line.startswith("error: "), line
        assert all(words.startswith("solving noise multipliers") for words in progress), "only on a slow machine"
        return line

    return run


@pytest.mark.parametrize(("words", "parts"), [(words, parts) for words, *parts in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_no_folder(words, parts, refused, tmp_path):
    if "cuda" in parts and torch.cuda.is_available():
        pytest.skip("there is a GPU, so it is no mistake")
    error = refused(fit, *DIGITS, *shlex.split(words), "--output_dir", str(tmp_path / "run"))
    assert not [part for part in parts if part not in error], error
    assert not (tmp_path / "run").exists()


def test_a_wrong_folder_is_refused_and_left_alone(refused, tmp_path):
    assert "conf/nowhere.yaml" in refused(fit, "--config", "conf/nowhere.yaml")
    for word in ("--resume", "conf", "options.yaml"):
        assert word in refused(fit, "--resume", "conf")
    assert "output_dir" in refused(fit, *DIGITS, "--seeds", "0,1")
    (tmp_path / "precious.txt").write_text("mine")
    assert "other files" in refused(fit, *DIGITS, "--output_dir", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_seeds_report_mean_and_spread_and_are_not_repeated(tmp_path, capsys):
    argv = [*DIGITS, "--seeds", "0,1", "--output_dir", str(tmp_path / "runs")]
    assert fit(argv) == 0
    summary = json.loads((tmp_path / "runs" / "result.json").read_text())
    first, second = summary["scores"]["accuracy"]["of_seeds"]
    assert summary["scores"]["accuracy"]["mean"] == pytest.approx((first + second) / 2)
    assert summary["scores"]["accuracy"]["std"] == pytest.approx(abs(first - second) / 2**0.5)
    together = read([tmp_path / "runs" / f"seed_{seed}" / "ledger.jsonl" for seed in (0, 1)]).weakest
    assert summary["guarantee"]["epsilon"] == together.epsilon and summary["guarantee"]["delta"] == together.delta
    for words in ("All 2 runs are composed", "per record (add or remove one record)", "Poisson", "PLD"):
        assert words in summary["guarantee"]["words"], words
    text = capsys.readouterr().out
    table = [line.split() for line in text.splitlines() if line.strip().startswith(("0 ", "1 ", "all "))]
    assert [row[0] for row in table] == ["0", "1", "all"] and len(text.splitlines()) < 24
    assert f"{at_most(together.epsilon)} at delta 0.001" in text
    assert "Not covered: 5 points, listed in guarantee.html of each run." in text
    assert fit(argv) == 0
    assert "round" not in capsys.readouterr().out.replace("rounds", "")


def test_a_finished_run_keeps_no_data_in_memory(tmp_path, monkeypatch):
    """Or several seeds, or cells, would keep those of all runs before."""
    records, build_population = [], loop.build_population

    def watched(options):
        population = build_population(options)
        records.append(weakref.ref(population.x))
        return population

    monkeypatch.setattr(loop, "build_population", watched)
    gc.disable()  # when it runs by itself is chance
    try:
        assert fit([*DIGITS, "--seeds", "0,1", "--output_dir", str(tmp_path / "runs")]) == 0
        assert [reference() for reference in records] == [None, None]
    finally:
        gc.enable()


def test_the_folder_of_several_seeds_names_those_of_single_ones(tmp_path, refused):
    for seed in (0, 1):
        (tmp_path / f"seed_{seed}").mkdir()
        (tmp_path / f"seed_{seed}" / "options.yaml").touch()
    for command, words in ((fit, ["--resume", str(tmp_path)]), (evaluate, [str(tmp_path)])):
        assert f"several seeds: {tmp_path}/seed_0, {tmp_path}/seed_1." in refused(command, *words)


def test_a_run_built_in_python_goes_on_in_python(tmp_path, refused, make_loop, capsys):
    loop = make_loop(parts=[Progress()], output_dir=tmp_path / "run", rounds=2)
    loop.run()
    text = capsys.readouterr().out
    assert "dpfl_lightning evaluate" not in text
    (line,) = re.findall(r"(net = dpfl_lightning\.load_model.*)  \(in Python\)", text)
    exec(line, {"dpfl_lightning": dpfl_lightning, "net": copy.deepcopy(loop.module.net)})
    for command, words in ((fit, ["--resume", str(tmp_path / "run")]), (evaluate, [str(tmp_path / "run")])):
        error = refused(command, *words)
        assert "run was built in Python" in error and "run(resume=True)" in error
    assert make_loop(output_dir=tmp_path / "run", rounds=2).run(resume=True).finished, "as the message says"


def test_a_run_with_groups_is_scored_on_what_each_client_sees(tmp_path, capsys):
    run = str(tmp_path / "run")
    groups = ["--data.groups", "{name: label_shift, sizes: [1, 4]}", "--data.test_per_client", "100"]
    fixed = ["--rounds", "10", "--privacy.noise_key", "0" * 32]
    assert fit([*DIGITS, *groups, *fixed, "--output_dir", run]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    accuracies = [client["accuracy"] for client in result["clients"]]
    assert result["test_accuracy"] == pytest.approx(sum(accuracies) / 5) == result["accuracy_mean"]
    assert accuracies[0] < 0.4 < 0.6 < min(accuracies[1:])  # one model cannot serve two namings of the classes
    capsys.readouterr()
    assert evaluate([run]) == 0
    assert capsys.readouterr().out.startswith("Mean over clients on held-out records: accuracy ")
    assert evaluate([run, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [client["accuracy"] for client in again["clients"]] == pytest.approx(accuracies)
    assert fit(["--resume", run, "--data.groups.sizes", "[2, 3]"]) == 2
    assert "`data.groups.sizes" in capsys.readouterr().err


def test_resume_auto_begins_or_resumes_and_says_which(tmp_path, refused, capsys):
    auto, run = [*DIGITS, "--resume", "auto"], ["--output_dir", str(tmp_path / "run")]
    assert "`output_dir` must be given" in refused(fit, *auto)
    for said in ("Beginning a run", "Resuming the run"):
        assert fit([*auto, *run]) == 0 and said in capsys.readouterr().out
    assert "`rounds` must stay" in refused(fit, *auto, *run, "--rounds", "9")


def test_resume_and_evaluate_refuse_other_options_and_folders(tmp_path, refused):
    run = str(tmp_path / "run")
    assert fit([*DIGITS, "--output_dir", run]) == 0
    assert "`rounds` must stay" in refused(fit, "--resume", run, "--rounds", "9")
    assert fit(["--resume", run, "--engine.workers", "1"]) == 0
    assert "`RUN` must be the folder of a run" in refused(evaluate, str(tmp_path / "nowhere"))
    assert "`--rounds` must be left out of this command, got '5'." in refused(evaluate, run, "--rounds", "5")
    (tmp_path / "run" / "result.json").unlink()
    assert "--resume" in refused(evaluate, run)
