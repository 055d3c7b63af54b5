"""`dpfl report`: one page about runs, seeds and searches, from their folders alone."""

import base64
import dataclasses
import json
import re

import pytest
from fakes import FRAME, a_report, a_result, a_view

from dpfl_lightning.commands.fit import fit_seeds
from dpfl_lightning.commands.report import main, report
from dpfl_lightning.config.options import Options, PrivacyOptions
from dpfl_lightning.config.yaml_text import dump
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.messages.evaluation import Score
from dpfl_lightning.federated.server import history
from dpfl_lightning.federated.server.run import Run
from dpfl_lightning.federated.server.scores import seed_rows, stated
from dpfl_lightning.privacy.accounting.guarantee import RunGuarantee
from dpfl_lightning.privacy.accounting.noise_source import FRESH, KEYED
from dpfl_lightning.reporting import curves, description
from dpfl_lightning.reporting.run_files import RunGroup, read

EVIL = "<script>alert(1)</script>"
SEEDS = {"epsilon": 4.0, "delta": 1e-3, **FRAME, "clients": 3, "unbounded": 0}


def a_folder(folder, rounds=4, finished=True, names=(), **changed):
    """A run's folder as the run writes it, without its ledger."""
    folder.mkdir(parents=True)
    options = dataclasses.asdict(Options(rounds=4, privacy=PrivacyOptions(epsilon=[1.0, 2.0, 3.0])))
    options |= changed.pop("options", {})
    view = a_view(folder, rounds=4, options=options, source=changed.pop("source", FRESH))
    view = dataclasses.replace(
        view, facts=dataclasses.replace(view.facts, names=names, test_set=changed.get("test_set", True))
    )
    reports = changed.pop("reports", {})
    (folder / "options.yaml").write_text(dump(options))
    callback = curves.Curves()
    callback.on_fit_start(view)
    for round in range(1, rounds + 1):
        callback.on_round_end(view, a_report(view, round, **reports))
    if finished:
        (folder / "result.json").write_text(json.dumps(a_result(view, **changed).as_dict()))
    return folder


def words(page: str) -> str:
    return " ".join(re.sub(r"<script>.*?</script>|<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL).split())


def table(page: str, heading: str) -> dict[str, dict[str, str]]:
    """Return the table under a heading: its first column -> title -> cell."""
    text = page.partition(f"<h2>{heading}")[2].partition("</table>")[0]
    titles = re.findall(r"<th scope[^>]*>(.*?)</th>", text)
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", text)]
    return {row[0]: dict(zip(titles, row, strict=True)) for row in rows}


def charts(page: str) -> dict[str, list[list[str]]]:
    """Title of each chart -> the rows of its values."""
    found = re.findall(r'<div class="chart"><h3>(.*?)</h3><img[^>]*>(.*?)</details>', page, re.DOTALL)
    rows = {title: re.findall(r"<tr>(<td>.*?)</tr>", text, re.DOTALL) for title, text in found}
    return {title: [re.findall(r"<td>(.*?)</td>", row) for row in of_chart] for title, of_chart in rows.items()}


def images(page: str) -> list[str]:
    """The charts as SVG."""
    return [base64.b64decode(one).decode() for one in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)]


def test_rounds_are_appended_and_those_that_a_resumed_run_repeats_are_removed(tmp_path):
    view, path = a_view(tmp_path), tmp_path / "metrics.jsonl"
    callback = curves.Curves()
    callback.on_fit_start(view)
    for round in (1, 2, 3):
        callback.on_round_end(view, a_report(view, round))
    with path.open("a") as file:
        file.write('{"round": 4, "val')  # a crash
    assert [one.round for one in history.read(path)] == [1, 2, 3]
    callback.on_fit_start(dataclasses.replace(view, round=3))
    callback.on_round_end(view, a_report(view, 3))
    assert [one.round for one in history.read(path)] == [1, 2, 3] and path.read_text().endswith("\n")
    assert history.read(path)[2].clients["val_accuracy"] == {"0": 0.15, "1": 0.151, "2": 0.152}
    path.write_text('{"format": 1, "round": 1, "values": {"test_accuracy": "<b>"}, "clients": {}}\n')
    with pytest.raises(UserError, match="one JSON object for each round"):
        history.read(path)


@pytest.mark.e2e
def test_runs_are_compared_with_their_seeds_guarantees_and_clients(tmp_path, capsys):
    for seed, accuracy in ((0, 0.5), (1, 0.7)):
        a_folder(tmp_path / "seeds" / f"seed_{seed}", test_accuracy=accuracy, options={"seed": seed})
    summary = {"format": 1, "seeds": [0, 1], "guarantee": RunGuarantee(**SEEDS, runs=2).as_dict()}
    (tmp_path / "seeds" / "result.json").write_text(json.dumps(summary))
    other = a_folder(tmp_path / "other", options={"rounds": 9}, test_accuracy=None, names=("berlin", "paris", "rome"))
    assert main([str(tmp_path / "seeds"), "--text"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Guarantee of all 2 runs: (")
    page = report([tmp_path / "seeds", other])
    text = words(page)
    assert "60.00% \N{PLUS-MINUS SIGN} 14.14%" in text and "2 of 2 seeds finished" in text
    assert "All 2 runs are composed." in text and "(3, 0.001)-differential privacy per record (" in text
    assert "Options that differ option seeds other rounds 4 9" in text, "seeds are not a difference"
    assert "paris" in text and "3 at delta 0.001" in text and "ledger not verified" in text
    over_round, over_epsilon = "Test accuracy over round", "Test accuracy over largest epsilon spent by a client"
    assert list(charts(page))[:2] == [over_round, over_epsilon]
    rows = charts(page)[over_epsilon]
    assert rows[:2] == [["seeds", "0.3", "0.05"], ["seeds", "0.6", "0.1"]] and rows[-1] == ["other", "1.2", "0.2"]
    assert all(">seeds<" in one and ">other<" in one for one in images(page)), "the legend"


@pytest.mark.e2e
def test_a_run_has_one_colour_in_all_charts(tmp_path):
    one, other = (a_folder(tmp_path / name) for name in ("one", "other"))
    rounds = [dataclasses.replace(two, values={"test_auroc": 0.5 + two.round / 100}) for two in Run.read(other).rounds]
    (other / history.FILE).write_text("".join(two.line() for two in rounds))
    page = report([one, other])
    heading = "Test auroc over round"
    assert {cells[0] for cells in charts(page)[heading]} == {"other"}, "alone in a chart, and named"
    images_of = dict(zip(charts(page), images(page), strict=True))
    assert "#d9622b" in images_of[heading] and "#2f6fde" not in images_of[heading] and ">other<" in images_of[heading]


@pytest.mark.e2e
def test_confusion_and_calibration_on_the_test_set_are_shown(tmp_path):
    tables = {"confusion": [[90, 2], [5, 3]], "calibration": [[80, 0.05, 0.04], [20, 0.4, 0.25]]}
    given = {"data": {"class_path": "x.y", "init_args": {"classes": ["alive", "died"]}}}
    page = report([a_folder(tmp_path / "run", test_tables=tables, options=given)])
    confusion = "Confusion on the test set label predicted alive predicted died alive 90 2 died 5 3"
    assert confusion in words(page) and 'alt="calibration"' in page
    numbered = words(report([a_folder(tmp_path / "other", test_tables=tables)]))
    assert "label predicted 0 predicted 1 0 90 2 1 5 3" in numbered
    assert "Confusion" not in words(report([a_folder(tmp_path / "without")]))


@pytest.mark.e2e
def test_runs_without_a_guarantee_and_unfinished_runs_are_marked(tmp_path):
    simulated = a_folder(tmp_path / "simulated", source=KEYED)
    bare = a_folder(tmp_path / "bare", options={"privacy": None})
    unfinished = a_folder(tmp_path / "unfinished", rounds=2, finished=False)
    text = words(report([simulated, bare, unfinished]))
    assert "simulated simulated: nobody is protected" in text and "bare no privacy" in text
    gone = "Stopped after round 2 of 4: its process is gone"
    assert f"unfinished unfinished {gone} at least" in text and f"{gone}. No guarantee is stated yet" in text


@pytest.mark.e2e
def test_names_are_text_and_nothing_is_loaded_from_elsewhere(tmp_path):
    run = a_folder(tmp_path / "run", names=(EVIL, "b", "c"), guarantee=RunGuarantee(**{**SEEDS, "accountant": EVIL}))
    page = report([run])
    assert EVIL not in page and "&lt;script&gt;alert(1)" in page
    assert charts(page)["Accuracy of each client over its epsilon"][0][0] == "&lt;script&gt;alert(1)&lt;/script&gt;"
    evil = report([a_folder(tmp_path / EVIL.replace("/", "")), run])
    assert images(evil) and not any("<script" in one for one in images(evil)) and "<script>alert" not in evil
    assert "://" not in page and "default-src 'none'" in page and not re.search(r"<(link|iframe|object)|@import", page)


def test_a_search_is_shown(tmp_path):
    trials = [
        {"number": number, "state": "complete", "params": {"lr": 0.1 * number}, "scores": {"accuracy": score}}
        for number, score in ((0, 0.5), (1, 0.75))
    ]
    (tmp_path / "search").mkdir()
    result = {"format": 1, "study": "tune", "best": [1], "trials": trials, "guarantee": ["PRIVATE: 2 trials"]}
    result["cost"] = {"epsilon": [1.00001, None], "delta": [1e-3] * 2, "names": ["berlin", "paris"]}
    (tmp_path / "search" / "result.json").write_text(json.dumps(result))
    page = report([tmp_path / "search"])
    text = words(page)
    assert "1 (best) complete 75.00% 0.1 0 complete 50.00% 0" in text and "PRIVATE: 2 trials" in text
    assert "client epsilon delta berlin 1.00001 0.001 paris no bound 0.001" in text
    assert charts(page)["tune: accuracy over lr"] == [["trial 0", "0", "0.5"], ["trial 1 (best)", "0.1", "0.75"]]


@pytest.mark.e2e
def test_what_cannot_be_read_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "`RUN` must be the folder of a run, of seeds or of a finished search" in capsys.readouterr().err
    run = a_folder(tmp_path / "run")
    for name, text in (("result.json", "{"), ("options.yaml", "a: ["), ("result.json", "{}"), ("metrics.jsonl", "x\n")):
        kept = (run / name).read_text()
        (run / name).write_text(text)
        assert main([str(run), "--output", str(tmp_path / "page.html")]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: `{run / name}` must") and error.count("\n") == 1
        (run / name).write_text(kept)
    assert main([str(run), "--output", str(tmp_path / "page.html")]) == 0 and (tmp_path / "page.html").is_file()
    assert main([str(run), "--output", str(tmp_path / "no" / "page.html")]) == 2


@pytest.mark.e2e
def test_a_real_run_is_verified_and_its_seeds_are_nested_in_mlflow(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    from dpfl_lightning.config.load import load

    arguments = ["--config", "digits", "--rounds", "2", "--output_dir", str(tmp_path / "seeds")]
    options, _ = load(arguments)
    summary = fit_seeds(options, [0, 1])
    group = read(tmp_path / "seeds")
    assert isinstance(group, RunGroup) and len(group.runs) == 2 and len(Run.read(group.runs[0].folder).rounds) == 2
    page = report([tmp_path / "seeds", tmp_path / "seeds" / "seed_0"])
    assert "not verified" not in page and words(page).count("The ledger is verified.") == 2
    client = MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    nested = {run.info.run_name for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id}
    assert nested == {"seed 0", "seed 1"} and parent.info.run_name == "size_weighted eps 2-16 logistic"
    accuracy = summary["scores"]["accuracy"]
    assert parent.data.metrics["test_accuracy"] == pytest.approx(accuracy["mean"])
    assert parent.data.metrics["test_accuracy_std_over_seeds"] == pytest.approx(accuracy["std"])
    assert parent.data.params["num_params"] == "650"
    assert fit_seeds(options, [0, 1])["seeds"] == [0, 1]
    assert len(client.search_runs([parent.info.experiment_id])) == 3, "the same parent, and no run again"


@pytest.mark.e2e
def test_each_value_stands_under_its_title_and_missing_seeds_are_said(tmp_path):
    plain = a_folder(tmp_path / "plain", test_accuracy=0.5)
    scored = a_folder(tmp_path / "scored", test_accuracy=None, test_metrics={"mae": 0.25})
    for seed in (0, 2):
        a_folder(tmp_path / "seeds" / f"seed_{seed}")
    (tmp_path / "seeds" / "result.json").write_text(json.dumps({"format": 1, "seeds": [0, 1, 2]}))
    stopped = a_folder(tmp_path / "stopped", rounds=2, finished=False)
    page = report([plain, scored, tmp_path / "seeds", stopped])
    cells = table(page, "Results")
    assert cells["plain"]["test mae"] == "" and cells["plain"]["test accuracy"] == "50.00%"
    assert list(cells["plain"])[-1] == "ledger", "all scores stand together"
    assert cells["scored"]["test mae"] == "0.25" and cells["scored"]["test accuracy"] == ""
    assert cells["seeds"]["state"] == "2 of 3 seeds finished, 1 folder missing"
    assert cells["stopped"]["largest epsilon"].startswith("at least ") and "dpfl ledger" in page


def test_regressions_are_shown_by_their_first_metric_and_without_a_test_set_as_means_over_clients(tmp_path):
    scores = {"test_accuracy": None, "test_loss": 0.3, "test_metrics": {"mae": 0.6}}
    clients = [
        {**client, "accuracy": None, "loss": loss, "metrics": {"mae": 2 * loss}}
        for client, loss in zip(a_result(a_view(tmp_path)).clients, (0.1, 0.2, 0.6), strict=True)
    ]
    changed = {**scores, "test_set": False, "clients": clients, "metrics_mean": {"mae": 0.6}}
    reports = {
        "client_accuracy": (None,) * 3,
        "client_scores": [Score(None, one["loss"], one["metrics"]) for one in clients],
    }
    held_out = a_folder(tmp_path / "held_out", reports={**scores, **reports}, **changed)
    page = report([held_out])
    results = table(page, "Results")["held_out"]
    assert results["mae on held-out records"] == "0.6" and results["worst client"] == "mae 1.2"
    assert not [title for title, cell in results.items() if not cell or "accuracy" in title], "empty columns"
    fair = {"run": "held_out", "score": "mae", "mean": "0.6", "std over clients": "0.432", "worst": "1.2", "gap": "1"}
    assert table(page, "Fairness")["held_out"] == fair
    assert next(iter(charts(page))) == "Mae on held-out records over round"


def test_seeds_have_one_headline_of_which_each_says_how_many_define_it(tmp_path):
    for seed, auroc in enumerate((0.7, None, 0.9)):
        clients = [
            {**client, "metrics": {"auroc": auroc and auroc - 0.1 * client["client"]}}
            for client in a_result(a_view(tmp_path)).clients
        ]
        changed = {"test_metrics": {"auroc": auroc}, "clients": clients, "options": {"seed": seed}}
        a_folder(tmp_path / "seeds" / f"seed_{seed}", **changed)
    page = report([tmp_path / "seeds"])
    results = table(page, "Results")["seeds"]
    assert results["test auroc"] == "0.8 \N{PLUS-MINUS SIGN} 0.1414 (2 of 3 seeds)"
    assert results["worst client"] == "auroc 0.6 \N{PLUS-MINUS SIGN} 0.1414 (2 of 3 seeds)", "no mean with accuracies"
    assert table(page, "Fairness")["seeds"]["worst"] == results["worst client"].removeprefix("auroc ")


@pytest.mark.e2e
def test_every_epsilon_of_a_simulation_carries_its_badge(tmp_path):
    said = RunGuarantee(**SEEDS, caveats=KEYED.caveats)
    folder = a_folder(tmp_path / "run", source=KEYED, guarantee=said)
    assert "4 at delta 0.001 per record (simulated: nobody is protected)" in words(report([folder]))
    seeds = tmp_path / "seeds"
    for seed in (1, 2):
        a_folder(seeds / f"seed_{seed}", source=KEYED, guarantee=said, options={"seed": seed})
    (seeds / "result.json").write_text(json.dumps({"format": 1, "seeds": [1, 2], "guarantee": said.as_dict()}))
    cells = table(report([seeds]), "Results")["seeds"]
    assert cells["largest epsilon"].endswith("(simulated: nobody is protected)")
    results = [vars(run.result) for run in read(seeds).runs]
    assert all("nobody is protected" in row["largest epsilon"] for row in seed_rows([1, 2], results, stated(said)))
    assert "(simulated: nobody is protected)" in description.seeds_markdown([1, 2], results, said)
    assert description.claim(said)["epsilon"] == "4 (simulated: nobody is protected)"
    assert "simulated eps 1-3" in Run.read(folder).about["name"]
