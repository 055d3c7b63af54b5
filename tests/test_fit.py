"""The command as a person meets it: errors in one line, seeds, resume."""

import gc
import json
import weakref

import pytest
import torch

from dpfl_lightning import build as setup
from dpfl_lightning.evaluate import main as evaluate
from dpfl_lightning.fit import main as fit

pytestmark = pytest.mark.e2e

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so it is no mistake")
DIGITS = ["--config", "conf/digits.yaml", "--rounds", "2", "--tracking", "null"]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config", "conf/nowhere.yaml"], ["conf/nowhere.yaml"]),
        ([*DIGITS, "--rouns", "3"], ["rouns", "Did you mean `--rounds`"]),
        ([*DIGITS, "--privacy.epsilon", "0"], ["privacy.epsilon", "above 0", "0"]),
        ([*DIGITS, "--privacy.delta", "1.5"], ["privacy.delta", "[0, 1)", "1.5"]),
        ([*DIGITS, "--clients.count", "5000"], ["5000"]),
        ([*DIGITS, "--clients.batch_size", "1000"], ["clients.batch_size", "1000"]),
        ([*DIGITS, "--data.name", "digit"], ["digit", "Did you mean `digits`"]),
        ([*DIGITS, "--data.groups.name", "rotate"], ["data.groups.name", "rotate", "Did you mean `rotation`"]),
        ([*DIGITS, "--data.groups", "{name: rotation, sizes: [2, 2]}"], ["data.groups.sizes", "5, clients.count"]),
        ([*DIGITS, "--data.groups", "{name: rotation, size: [2, 3]}"], ["data.groups.size", "Did you mean `sizes`"]),
        ([*DIGITS, "--data.test_per_client", "360"], ["data.test_per_client", "at most 359", "360"]),
        ([*DIGITS, "--model.name", "logistik"], ["logistik", "Did you mean `logistic`"]),
        ([*DIGITS, "--strategies.size_weighted.x", "1"], ["strategies.size_weighted.x", "it has none"]),
        ([*DIGITS, "--seeds", "0,0"], ["--seeds", "0,0"]),
        ([*DIGITS, "--seeds", "0,1"], ["output_dir", "--seeds"]),
        (["--resume", "conf"], ["--resume", "conf", "options.yaml"]),
        ([*DIGITS, "--privacy.accountant", "gdp"], ["gdp", "full batch"]),
        pytest.param([*DIGITS, "--engine.device", "cuda"], ["engine.device", "cuda"], marks=NO_GPU),
        ([*DIGITS, "--model", "{class_path: no.such.Net}"], ["model.class_path", "no.such.Net"]),
        ([*DIGITS, "--model", "{class_path: torch.nn.Linear, init_args: {foo: 3}}"], ["model.init_args", "foo"]),
        (
            [*DIGITS, "--model", "{class_path: torch.nn.Linear, init_args: {in_features: 3, out_features: 10}}"],
            ["model", "(1, 8, 8)", "10 outputs", "shapes"],
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_2(argv, words, capsys, tmp_path):
    output = [] if "--resume" in argv or words[0] == "output_dir" else ["--output_dir", str(tmp_path / "run")]
    assert fit([*argv, *output]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
    for word in words:
        assert word in captured.err
    assert not (tmp_path / "run").exists()


def test_a_taken_folder_is_refused_and_kept(tmp_path, capsys):
    (tmp_path / "precious.txt").write_text("mine")
    assert fit([*DIGITS, "--output_dir", str(tmp_path)]) == 2
    assert "another run or other files" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_seeds_report_mean_and_spread_and_are_not_repeated(tmp_path, capsys):
    argv = [*DIGITS, "--seeds", "0,1", "--output_dir", str(tmp_path / "runs")]
    assert fit(argv) == 0
    summary = json.loads((tmp_path / "runs" / "result.json").read_text())
    first, second = summary["test_accuracy_of"]
    assert summary["test_accuracy"] == pytest.approx((first + second) / 2)
    assert summary["test_accuracy_std"] == pytest.approx(abs(first - second) / 2**0.5)
    for words in ("at most the sum", "per record (add or remove one record)", "Poisson", "RDP", "Not covered"):
        assert words in summary["guarantee"], words
    capsys.readouterr()
    assert fit(argv) == 0
    assert "round" not in capsys.readouterr().out.replace("rounds", "")


def test_a_run_that_is_over_holds_no_data(tmp_path, monkeypatch):
    """Or several seeds, or cells, would hold those of all runs before."""
    made, build = [], setup.build_population

    def watched(options):
        people = build(options)
        made.append(weakref.ref(people.x))
        return people

    monkeypatch.setattr(setup, "build_population", watched)
    gc.disable()  # when it comes by itself is chance
    try:
        assert fit([*DIGITS, "--seeds", "0,1", "--output_dir", str(tmp_path / "runs")]) == 0
        assert [one() for one in made] == [None, None]
    finally:
        gc.enable()


def test_the_folder_of_several_seeds_names_those_of_single_ones(tmp_path, capsys):
    for seed in (0, 1):
        (tmp_path / f"seed_{seed}").mkdir()
        (tmp_path / f"seed_{seed}" / "options.yaml").touch()
    for command, words in ((fit, ["--resume", str(tmp_path)]), (evaluate, [str(tmp_path)])):
        assert command(words) == 2
        assert f"several seeds: {tmp_path}/seed_0, {tmp_path}/seed_1." in capsys.readouterr().err


def test_resume_goes_on_only_with_the_run_it_was(tmp_path, capsys):
    run = str(tmp_path / "run")
    assert fit([*DIGITS, "--output_dir", run]) == 0
    assert fit(["--resume", run, "--rounds", "9"]) == 2
    assert "`rounds` must stay" in capsys.readouterr().err
    assert fit(["--resume", run, "--engine.workers", "1"]) == 0


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
    assert capsys.readouterr().out.startswith("test accuracy ")
    assert evaluate([run, "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [client["accuracy"] for client in again["clients"]] == pytest.approx(accuracies)
    assert fit(["--resume", run, "--data.groups.sizes", "[2, 3]"]) == 2
    assert "`data.groups.sizes" in capsys.readouterr().err


def test_evaluate_names_what_is_wrong(tmp_path, capsys):
    assert evaluate([str(tmp_path / "nowhere")]) == 2
    assert "`RUN` must be the folder of a run" in capsys.readouterr().err
    assert fit([*DIGITS, "--output_dir", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert evaluate([str(tmp_path / "run"), "--rounds", "5"]) == 2
    assert "`--rounds` must be left out of this command, got '5'." in capsys.readouterr().err
    (tmp_path / "run" / "result.json").unlink()
    assert evaluate([str(tmp_path / "run")]) == 2
    assert "--resume" in capsys.readouterr().err
