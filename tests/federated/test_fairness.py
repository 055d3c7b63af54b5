"""Fairness gaps against central models of true groups: the paper's definitions, where they are shown and refused."""

import json

import pytest
import torch
from conftest import FIXED_KEY, GROUPS, blobs, of_two_kinds, private, small_net
from rich.console import Console
from torch.nn.functional import cross_entropy

from dpfl_lightning import strategies
from dpfl_lightning.commands.fit import main as fit
from dpfl_lightning.commands.report import main as report
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.fairness import build_fairness
from dpfl_lightning.federated.client.module import ClientModule
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.run import Run
from dpfl_lightning.models import PersonalInput
from dpfl_lightning.papers.central_models import CentralModels
from dpfl_lightning.reporting.description import markdown
from dpfl_lightning.reporting.terminal import print_ended

GIVEN = r"CentralModels\(epochs=6, .*\)"  # by `loop_of`
PERSONAL = ClientModule(PersonalInput(small_net(), (6,)))
NAMES = {"fairness_acc_gap", "fairness_loss_gap"}


def loop_of(make_loop, population=None, epochs=6, **options):
    options = {"fairness": CentralModels(epochs=epochs), "rounds": 2, **options}
    return make_loop(of_two_kinds() if population is None else population, **options)


def scored(model, x, y):
    """Accuracy and mean loss of a model of `small_net`, by plain torch."""
    module = ClientModule(small_net())
    module.load(model)
    output = module.net(x).detach()
    return float((output.argmax(dim=1) == y).float().mean()), float(cross_entropy(output, y))


def by_hand(population, models, model_of, central):
    """F_acc and F_loss as section 5.1 prints them: the largest difference of any two clients."""
    lost, excess = [], []
    for client, group in enumerate(GROUPS):
        held, own = population.held_out_of[client], population.train_of[client]
        theirs, best = models[model_of[client]], central[group]
        lost.append(scored(best, population.x[held], population.y[held])[0])
        lost[-1] -= scored(theirs, population.x[held], population.y[held])[0]
        excess.append(scored(theirs, population.x[own], population.y[own])[1])
        excess[-1] -= scored(best, population.x[own], population.y[own])[1]
    return tuple(max(abs(one - other) for one in values for other in values) for values in (lost, excess))


@pytest.mark.e2e
def test_the_gaps_are_those_of_the_paper(make_loop):
    population = of_two_kinds()
    loop = loop_of(make_loop, population)
    central = CentralModels(epochs=6).models(ClientModule(small_net()), population)
    result = loop.run()
    expected = by_hand(population, loop.state.models, loop.state.model_of, central)
    assert tuple(result.fairness.values()) == pytest.approx(expected, rel=1e-4) and set(result.fairness) == NAMES
    assert result.fairness["fairness_loss_gap"] > 0.1, "one model for two kinds of clients"
    for group, model in enumerate(central):
        rows = torch.cat([population.train_of[client] for client in range(4) if GROUPS[client] == group])
        assert scored(model, population.x[rows], population.y[rows])[0] > 0.9, "it is trained"


@pytest.mark.e2e
def test_models_of_true_groups_are_fairer_than_one_model(make_loop):
    one = loop_of(make_loop, rounds=6).run().fairness
    oracle = loop_of(make_loop, rounds=6, parts=strategies.build({"oracle_clusters": {}})).run().fairness
    assert oracle["fairness_loss_gap"] < one["fairness_loss_gap"]
    assert oracle["fairness_acc_gap"] <= one["fairness_acc_gap"]


@pytest.mark.e2e
def test_it_changes_no_release_and_is_said_in_every_guarantee(make_loop):
    with_it, without = loop_of(make_loop), loop_of(make_loop, fairness=None)
    said, silent = with_it.run(), without.run()
    assert torch.equal(with_it.state.models, without.state.models)
    words = "computed from all records without noise"
    assert words in said.guarantee.words() and words not in silent.guarantee.words() and silent.fairness == {}
    assert not NAMES & silent.measures.keys()
    assert not any(said.measures[name].higher_is_better for name in NAMES)


class Interrupted(Callback):
    def on_round_end(self, view, report):
        raise KeyboardInterrupt


@pytest.mark.e2e
def test_a_resumed_run_has_the_same_gaps(make_loop, tmp_path):
    whole = loop_of(make_loop).run().fairness
    loop = loop_of(make_loop, parts=[Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    resumed = loop_of(make_loop, output_dir=loop.output_dir)
    assert resumed.run(resume=True).fairness == pytest.approx(whole)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"privacy": private(noise_key=None)}, r"left out where noise protects records, got {}.*pooled records.* {}"),
        ({"population": blobs()}, r"null unless clients have true groups, got {}.*data\.groups"),
        ({"module": PERSONAL}, r"null if clients have personal parameters, got {}.*model\.personal_input"),
    ],
)
def test_runs_of_real_records_are_refused_before_anything_is_charged(options, words, make_loop, tmp_path):
    way_out = r"A simulation may have it: set privacy\.noise_key: KEY or privacy: null\."
    with pytest.raises(UserError, match=r"`evaluation\.fairness` must be " + words.format(GIVEN, way_out)):
        loop_of(make_loop, **{"output_dir": tmp_path / "refused", **options})
    assert not (tmp_path / "refused").exists()


def test_records_at_sites_are_refused(make_loop):
    words = r"`evaluation\.fairness` must be null with records at sites, got CentralModels\(epochs=6"
    with pytest.raises(UserError, match=words):
        loop_of(make_loop, remote=object())


def test_options_are_checked():
    for options, words in (
        ({"name": "central"}, r"evaluation\.fairness\.name.*one of central_models"),
        ({"name": "central_models", "epochs": 0}, r"evaluation\.fairness\.epochs"),
        ({"name": "central_models", "epoch": 1}, "Did you mean `epochs`"),
    ):
        with pytest.raises(UserError, match=words):
            build_fairness(options)


@pytest.mark.e2e
def test_files_terminal_report_and_mlflow_show_the_gaps(tmp_path, capsys, in_the_repository):
    folder = tmp_path / "run"
    options = {
        "config": "conf/ifca.yaml",
        "rounds": 2,
        "privacy.noise_key": FIXED_KEY,
        "evaluation.fairness": "{name: central_models, epochs: 2}",
        "tracking": "null",
        "output_dir": folder,
    }
    assert fit([word for key, value in options.items() for word in (f"--{key}", str(value))]) == 0
    assert "fairness_acc_gap 0." in capsys.readouterr().out
    run = Run.read(folder)
    assert json.loads((folder / "result.json").read_text())["fairness"] == run.result.fairness != {}
    assert {f"val_{name}" for name in NAMES} <= run.rounds[0].values.keys(), "MLflow has the curves of every round"
    assert run.rounds[-1].values["val_fairness_acc_gap"] == run.result.fairness["fairness_acc_gap"]
    assert "fairness_loss_gap 0." in markdown(run)
    console = Console(record=True, width=200)
    print_ended(run, console)
    assert "fairness_loss_gap 0." in console.export_text()
    page = tmp_path / "report.html"
    assert report([str(folder), "--output", str(page)]) == 0
    assert "fairness acc gap" in page.read_text()
