"""A run is shown the same while it goes on and from its files afterwards."""

import dataclasses
import fcntl
import io
import json
import shutil

import pytest
import torch
from conftest import blobs, break_off, private
from rich.console import Console
from torch import nn

from dpfl_lightning import ClientModule
from dpfl_lightning.commands.report import main as report
from dpfl_lightning.config.options import ClientOptions
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.curves import score_curves
from dpfl_lightning.federated.server.run import Run, State
from dpfl_lightning.federated.server.summary import headline_over_clients
from dpfl_lightning.models.tasks import Measure
from dpfl_lightning.reporting import terminal
from dpfl_lightning.reporting.description import markdown
from dpfl_lightning.reporting.guarantee_page import guarantee_page


class Kept(Callback):
    """Keeps the run as the callbacks of a run see it."""

    def on_fit_start(self, view):
        self.begun, self.rounds = Run.begun(view), []

    def on_round_end(self, view, report):
        self.rounds.append(Run.after(view, report))

    def on_fit_end(self, view, result):
        self.ended = Run.ended(view, result)


def shown(run: Run) -> dict[str, object]:
    """Everything that a terminal and the page show of a run."""
    paper = Console(file=io.StringIO(), width=100)
    terminal.print_ended(run, paper)
    columns = {column.heading: column.cells() for column in terminal.plan_columns(run)}
    return {
        "plan": terminal.plan_lines(run),
        "columns": columns,
        "end": paper.file.getvalue(),
        "next": terminal.next_lines(run) if run.result else "",
        "page": guarantee_page(run) if run.result else "",
    }


@pytest.mark.parametrize("case", ["budgets", "no privacy", "given noise", "persons"])
def test_a_run_is_shown_from_its_files_as_it_was_shown_live(case, make_loop):
    kept, options = Kept(), {"privacy": private([4.0, 6.0, 8.0, 10.0])}
    if case == "no privacy":
        options["privacy"] = None
    if case == "given noise":
        options["privacy"] = private(epsilon=None, noise_multiplier=1.0)
    if case == "persons":
        codes = [[row // 2 for row in range(len(rows))] for rows in blobs().train_of]
        x, y = blobs().x, blobs().y
        clients = [(x[rows], y[rows]) for rows in blobs().train_of]
        options |= {"population": type(blobs()).from_datasets(clients, held_out=0.0, num_classes=3, persons=codes)}
        options["privacy"] = private(unit="person", rows_per_person=2)
    loop = make_loop(rounds=3, parts=[kept], **options)
    loop.run()
    read = Run.read(loop.output_dir)
    assert shown(read) == shown(kept.ended)
    assert read.info.as_dict() == kept.begun.info.as_dict()
    for live, one in zip(kept.rounds[:-1], read.rounds, strict=False):  # the last round gets the result
        assert terminal.round_words(live, live.last, "") == terminal.round_words(read, one, "")


def test_an_unfinished_run_says_from_its_files_why_it_ended(make_loop):
    loop = break_off(make_loop(rounds=4), 3)
    run = Run.read(loop.output_dir)
    assert run.done == 2 and run.result is None and terminal.verdict_words(run).startswith("Stopped after round 2 of 4")
    assert terminal.plan_lines(run)[0].startswith("4 clients, 4 rounds")


def test_a_run_that_was_moved_is_where_it_is(make_loop, tmp_path):
    loop = make_loop(rounds=2, clients=ClientOptions(count=4, batch_size=16))
    loop.run()
    moved = shutil.move(loop.output_dir, tmp_path / "elsewhere")
    run = Run.read(tmp_path / "elsewhere")
    assert run.folder == tmp_path / "elsewhere" == moved and len(run.rounds) == 2
    assert any(str(moved) in line for line in terminal.next_lines(run))


def test_what_is_damaged_is_one_line(make_loop):
    loop = make_loop(rounds=2)
    loop.run()
    path = loop.output_dir / "run.json"
    content = json.loads(path.read_text())
    for damaged in ({**content, "info": {}}, {**content, "info": {**content["info"], "clients": {"name": []}}}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(UserError, match=r"`.*run\.json` must describe a run"):
            Run.read(loop.output_dir)
    path.unlink()
    with pytest.raises(UserError, match=r"run\.json"):
        Run.read(loop.output_dir)
    with pytest.raises(UserError, match="`RUN` must be the folder of a run"):
        Run.read(loop.output_dir / "nothing")


def test_a_description_survives_json(make_loop):
    loop = make_loop(rounds=2)
    loop.run()
    info = loop.info
    again = type(info).read(json.loads(json.dumps(info.as_dict())), info.output_dir, info.options)
    assert dataclasses.replace(again, accountant=info.accountant) == info
    assert again.accountant.name == info.accountant.name


def test_report_prints_how_runs_ended(make_loop, tmp_path, capsys):
    loop = make_loop(rounds=2)
    result = loop.run()
    assert report([str(loop.output_dir), "--text", "--output", str(tmp_path / "none.html")]) == 0
    text = capsys.readouterr().out
    assert str(loop.output_dir) in text and result.guarantee.words() in text and "epsilon spent" in text
    assert not (tmp_path / "none.html").exists()
    search = tmp_path / "search"
    search.mkdir()
    (search / "result.json").write_text(json.dumps({"format": 1, "trials": []}))
    assert report([str(search), "--text"]) == 2
    assert "`RUN` must be the folder of a run, or of its seeds, with --text" in capsys.readouterr().err


def test_how_a_run_stands_is_said_once(make_loop):
    loop = break_off(make_loop(rounds=4), 3)
    folder, place = loop.output_dir, "after round 2 of 4"
    about = json.loads((folder / "run.json").read_text())

    def with_end(ended):
        (folder / "run.json").write_text(json.dumps({**about, "ended": ended}))
        run = Run.read(folder)
        assert terminal.verdict_words(run) == run.ending and markdown(run).startswith(f"**{run.ending}.**")
        return run.state, run.ending

    stopped = {"state": "interrupted", "reason": "stopped by SIGTERM", "seconds": 1.0}
    assert with_end(stopped) == (State.INTERRUPTED, f"Stopped {place}: stopped by SIGTERM")
    assert with_end({**stopped, "state": "failed", "reason": "full"}) == (State.FAILED, f"Stopped {place}: full")
    with (folder / "ledger.jsonl").open() as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        assert with_end(None) == (State.RUNNING, "Running")
    assert with_end(None) == (State.GONE, f"Stopped {place}: its process is gone")


def test_the_headline_is_the_first_metric_whatever_it_is_called():
    names = ["test_loss", "test_accuracy", "test_my_loss", "test_accuracy_at_5"]
    order = ["my_loss", "accuracy_at_5", "accuracy", "loss"]
    assert list(score_curves(names, order)) == order
    measures = {"mae": Measure(higher_is_better=False), "loss": Measure(higher_is_better=False)}
    clients = [{"accuracy": None, "loss": 1.0, "metrics": {"mae": value}} for value in (1.0, 3.0)]
    found = headline_over_clients(clients, measures)
    assert (found["headline"], found["headline_worst"], found["headline_gap"]) == ("mae", 3.0, 2.0)
    coverage = {"coverage": Measure(None, target=0.9)}
    found = headline_over_clients([{"metrics": {"coverage": value}} for value in (0.5, 0.9, 1.0)], coverage)
    assert (found["headline_worst"], found["headline_gap"]) == (0.5, pytest.approx(0.4))


def test_a_regression_has_a_worst_client(make_loop):
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    parts = zip(("oslo", "rome", "bern", "graz"), x.split(20), strict=True)
    people = type(blobs()).from_datasets({name: (part, part[:, 0]) for name, part in parts}, held_out=0.25)
    clients = ClientOptions(count=4, batch_size=10)
    loop = make_loop(people, ClientModule(nn.Linear(4, 1), task="regression"), clients=clients, rounds=1)
    result = loop.run()
    run, worst = Run.read(loop.output_dir), max(row["metrics"]["mae"] for row in result.clients)
    assert run.headline == result.headline == "mae" and run.worst_client == (run.worst_client.client, "mae", worst)
    assert f"worst {worst:.4g} ({run.worst_client.client})" in markdown(run)
