"""Scores of a real federation: they stay at the sites, or are a planned release with noise."""

import dataclasses
import functools
import math
import re
import stat

import numpy as np
import pandas
import pytest
import torch
from conftest import FIXED_KEY
from sites import a_question, a_request, an_evaluation, asked, configured, federation, key_of, with_lines

from dpfl_lightning.algorithms.binned_scores import binned_scores, edges_of
from dpfl_lightning.commands.node import main
from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.data import Population
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.federated.messages.query import ChargedQuery, ScoreCounts
from dpfl_lightning.federated.server.run import Run
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.loop import build_loop
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.accounting.planned import Planned
from dpfl_lightning.privacy.ledger.ledger import read_ledger
from dpfl_lightning.privacy.mechanism import Gaussian
from dpfl_lightning.reporting.mlflow.sync import _curves
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Refused, Welcome
from dpfl_lightning.sites.node import study
from dpfl_lightning.sites.node.accept import accept, open_study, site_of
from dpfl_lightning.sites.node.records import settings_of, site_population
from dpfl_lightning.sites.node.scores import read_scores
from dpfl_lightning.sites.node.service import Node
from dpfl_lightning.sites.node.state import StateFolder
from dpfl_lightning.sites.server.channel import Sites
from dpfl_lightning.sites.server.deploy import loop_over, planning_loop, terms_of
from dpfl_lightning.sites.wire import digest
from dpfl_lightning.strategies import build

pytestmark = pytest.mark.e2e

RELEASED = {"size_weighted": {}, "released_scores": {"epsilon": 1.0, "bins": 10}}


@pytest.mark.parametrize("strategies", [None, RELEASED], ids=["kept", "released"])
def test_the_sites_keep_exact_scores_and_the_server_gets_noised_ones_or_none(strategies, tmp_path, capsys):
    nodes, terms, options = federation(tmp_path, strategies)
    loop = loop_over(options, Sites(terms, tuple(node.handle for node in nodes)))
    result = loop.run()
    at_server = [row[name] for row in result.clients for name in ("accuracy", "loss")]
    assert at_server == [None] * 4, "no score of a held-out record"
    simulated = dataclasses.replace(options, privacy=dataclasses.replace(options.privacy, noise_key=FIXED_KEY))
    alone = build_loop(dataclasses.replace(simulated, output_dir=str(tmp_path / "alone"))).run()
    for client, node in enumerate(nodes):
        folder = node.state.plan_folder(digest(terms))
        kept, expected = read_scores(folder), alone.clients[client]
        assert stat.S_IMODE((folder / "scores.json").stat().st_mode) == 0o600
        assert (kept.round, kept.score.accuracy) == (2, expected["accuracy"]) and kept.score.loss > 0
        assert sum(map(sum, kept.score.tables["confusion"])) == kept.records
        for name in ("scores.html", "report.html"):
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
        page, report = words_of(folder / "scores.html"), words_of(folder / "report.html")
        assert f"{expected['accuracy']:.2%}" not in report and "predicted 9" not in report
        for part in (
            f"accuracy {expected['accuracy']:.2%} ",
            f"of round 2, on {kept.records} held-out records.{' Noisy counts of the same' if strategies else ''}",
            "predicted 9",
            "Private: calibration.",
        ):
            assert part in page, part
        assert ("nothing of them leaves this site" if strategies is None else "The promise covers it.") in report
        assert "2 releases" in report
        capsys.readouterr()
        assert main(["status", str(node.state.path)]) == 0
        shown = capsys.readouterr().out
        sent = {name for one in _curves(Run.read(loop.output_dir), per_client=False).values() for name in one}
        assert ({"train_released_accuracy/00", "train_noise_of_accuracy/01"} <= sent) == bool(strategies)
        assert "kept here: auroc 0." in shown and f"accuracy {expected['accuracy']:.2%} (class shares" in shown
        assert ("sent: 1 noised set of counts of held-out records" in shown) == bool(strategies)
        paid = [charge.purpose for charge in read_ledger(folder / "ledger.jsonl")]
        assert paid == ["train", "train", *(["scores"] if strategies else [])]
        released = result.metrics.get("released_accuracy", [None] * 2)[client]
        if strategies:
            assert released != expected["accuracy"], "noised"
            assert abs(released - expected["accuracy"]) < 5 * result.metrics["noise_of_accuracy"][client]
            assert released == alone.metrics["released_accuracy"][client], "the bits of the simulation"
            assert result.clients[client]["epsilon_spent"] <= (4, 8)[client]
        else:
            assert released is None
    said = words_of(loop.output_dir / "guarantee.html")
    for part in (
        "1 noised set of counts of held-out records, from which accuracy, AUROC and calibration follow",
        "; from noisy counts, scores of each site on its held-out records",
        "Noisy counts of them were sent, which epsilon covers.",
        "test records, and exact scores on held-out records",
    ):
        assert (part in said) == bool(strategies), part
    assert "full-batch step" not in said
    assert ("test and held-out records, on which models are evaluated" in said) == (not strategies)


def words_of(page):
    return " ".join(re.sub("<[^>]+>", " ", page.read_text()).split())


def test_scores_that_fail_change_no_reply(tmp_path, monkeypatch):
    nodes, terms, _ = federation(tmp_path, count=1)
    monkeypatch.setattr(study, "evaluate_own", lambda *_: 1 / 0)
    with pytest.warns(UserNotice, match="scores of held-out records are not computed: ZeroDivisionError"):
        assert asked(nodes[0], an_evaluation(digest(terms), 0, torch.zeros(650))) == Welcome(False, ())
    assert read_scores(nodes[0].state.plan_folder(digest(terms))) is None


def test_an_operator_reads_that_held_out_records_are_counted_and_sent(tmp_path, capsys):
    nodes, terms, _ = federation(tmp_path, RELEASED)
    (tmp_path / "plan.json").write_text(wire.to_text(terms))
    main(["accept", str(nodes[0].state.path), str(tmp_path / "plan.json"), "--show"])
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"held-out records are counted [^.]* sent, which costs (1|0\.99\d*) alone\. Accuracy", shown)
    assert "Not covered: exact scores on held-out records: no: only noisy counts, which the promise covers" in shown


def test_what_a_server_may_ask_of_held_out_records(tmp_path):
    nodes, terms, _ = federation(tmp_path, RELEASED)
    model, plan, node = torch.zeros(650), digest(terms), nodes[0]
    before = asked(node, an_evaluation(plan, 0, model))
    assert before == asked(node, an_evaluation(plan, 2, model + 1)) == Welcome(False, ()), (
        "one reply, whatever the scores are"
    )
    for round, other in ((-1, model), (9, model)):
        assert asked(node, an_evaluation(plan, round, other)) == Refused("not_planned")
    assert asked(node, an_evaluation(plan, 1, model * math.nan)) == Refused("unfit_model")
    watched = Node(nodes[1].state, functools.partial(open_study, score_every=2))
    for round, scored in ((1, None), (2, 1)):
        asked(watched, a_request(terms, model, client=1, round=round))
        kept = read_scores(watched.state.plan_folder(plan))
        assert scored == (None if kept is None else kept.round)
    line = terms.plan.schedule.planned(0, "scores")
    honest = {"models": model[None], "row_of": {0: 0}, "edges": edges_of(10)}
    noise = Gaussian(1.0, line.event.noise_multiplier, 1.0, 1.0)
    for changed in ({"edges": (0.5, 0.1)}, {"edges": (math.nan,)}, {"edges": (0.1, 1.0)}, {"row_of": {0: 3}}):
        asking = ScoreCounts(mechanism_of={0: noise}, **{**honest, **changed})
        assert asked(node, a_question(plan, 1, asking)) == Refused("not_planned"), changed
    of_training = a_request(terms, model, purpose="scores", event=line.event)
    assert asked(node, of_training) == Refused("not_planned"), "it would train on what was accepted for counts"
    louder = dataclasses.replace(noise, noise_multiplier=0.1)
    assert asked(node, a_question(plan, 1, ScoreCounts(mechanism_of={0: louder}, **honest))) == Refused("not_planned")
    counts = asked(node, a_question(plan, 1, ScoreCounts(mechanism_of={0: noise}, **honest))).value
    assert len(counts) == 20 and len(read_ledger(node.state.plan_folder(plan) / "ledger.jsonl")) == 1


def node_of_two_labels(folder, frame):
    """A node whose records have two labels each, with its accepted plan of one line "scores"."""
    folder.mkdir()
    frame.to_csv(folder / "frame.csv", index=False)
    given = {"label": ["y", "z"], "columns": {"a": {"scale": [0, 1]}}, "held_out": 0.2, "num_classes": 2}
    data = {"class_path": "dpfl_lightning.Population.from_dataframe"}
    own = {"data": {**data, "init_args": {"df": str(folder / "frame.csv"), **given}}}
    settings = settings_of(from_mapping({**own, "privacy": {"epsilon": 9.0, "delta": 0.01}}), "0")
    population, client = site_population(settings)
    facts = site_of(settings, population, client, key_of(0))
    state = StateFolder.create(folder / "node", settings, facts, key_of(0))
    more = {"data": {**data, "init_args": given}, "task": "multilabel"}
    options = configured(folder, **more, clients={"count": 1, "batch_size": 10}, privacy={"epsilon": 8})
    terms = terms_of(planning_loop(options, [facts]), [facts])
    train = terms.plan.schedule.clients[0].planned[0]
    scores = GaussianEvent(1.0, 20.0, 1)
    terms = with_lines(terms, dataclasses.replace(train, count=1), Planned("scores", scores.of_held_out(), 1))
    with pytest.raises(UserError, match="`PLAN` must count held-out records of a task with one class for each record"):
        accept(state, terms)
    terms = with_lines(terms, dataclasses.replace(train, count=1), Planned("scores", scores, 1))
    accept(state, terms)
    return Node(state, open_study), terms, population


def test_no_reply_tells_whether_records_are_held_out(tmp_path):
    number = np.arange(40)
    frame = pandas.DataFrame({"a": number / 40, "y": number % 2, "z": number // 2 % 2})
    held_out = node_of_two_labels(tmp_path / "all", frame)[2].held_out_of[0].tolist()
    for name, kept in (("none", held_out), ("one", held_out[1:])):
        node, terms, population = node_of_two_labels(tmp_path / name, frame.drop(index=kept))
        assert population.num_held_out == (len(held_out) - len(kept),)
        models = torch.zeros(1, *node._study(digest(terms)).clients.module.flat.shape)
        asking = {"models": models, "row_of": {0: 0}, "edges": edges_of(4)}
        question = ScoreCounts(mechanism_of={0: Gaussian(1.0, 20.0, 1.0, 1.0)}, **asking)
        assert asked(node, a_question(digest(terms), 1, question)) == Refused("not_planned")
        clients = node._study(digest(terms)).clients
        with pytest.raises(RuntimeError):  # also without this refusal: a public record is computed where there is none
            clients.engine.answer(clients.client(0), ChargedQuery.of(question), 1, 0)


def test_the_price_of_scores_is_in_the_plan(make_loop):
    loop = make_loop(parts=build(RELEASED))
    for client in loop.plan_schedule().clients:
        line = client.planned[-1]
        alone, whole = ([(events, client.delta)] for events in (line.events(), client.events()))
        accountant = loop.config.accountant
        assert (line.purpose, line.count) == ("scores", 1) and 0.99 < accountant.search(alone)[0] <= 1
        assert accountant.search(whole)[0] <= client.target_epsilon
    seldom = dataclasses.replace(client.planned[0], count=0), line
    assert dataclasses.replace(client, planned=seldom).main_line.purpose == "train", "it defines rate and noise"
    labels = torch.arange(50) % 2
    whole = {str(client): (torch.ones(50, 6), labels) for client in range(4)}
    population = Population.from_datasets(whole, held_out=0.0, num_classes=2)
    loop = make_loop(population, torch.nn.Linear(6, 2), parts=build(RELEASED))
    result = loop.run()
    (words,) = [one for one in result.remarks if "released score" in one]
    assert words.endswith("A released score is - where its records are too few for the noise: clients 0, 1, 2, 3.")
    assert [row["releases"] for row in result.clients] == [4] * 4, "noised zeros, as if there were held-out records"
    assert result.metrics["released_auroc"] == [None] * 4
    with pytest.raises(UserError, match="`task` must have one class for each record with released_scores"):
        numbers = {str(client): (torch.zeros(50, 6), torch.zeros(50)) for client in range(4)}
        make_loop(Population.from_datasets(numbers), torch.nn.Linear(6, 1), parts=build(RELEASED)).plan_schedule()


class Early(Strategy):
    """Ends the run after three rounds."""

    def stop(self, view):
        return "enough" if view.state.round == 3 else None


def test_a_run_that_may_end_earlier_is_asked_in_between(make_loop):
    with pytest.raises(UserError, match=r"`strategies\.released_scores\.every` must be a number of rounds"):
        make_loop(parts=[*build(RELEASED), Early()]).plan_schedule()
    for every, words in {2: "Scores were released after round 2; metrics.jsonl has them.", 4: "No scores were"}.items():
        loop = make_loop(rounds=5, parts=[*build({"size_weighted": {}, "released_scores": {"every": every}}), Early()])
        assert [one for one in loop.run().remarks if words in one]


def slow_counts(shares, labels, edges):
    counts = torch.zeros(2, len(edges) + 1, dtype=torch.float64)
    for share, label in zip(shares, labels, strict=True):
        counts[label, sum(edge <= share for edge in edges)] += 1
    return counts


def test_scores_of_counts_are_those_of_the_records_up_to_the_bins():
    draw = torch.Generator().manual_seed(0)
    labels = (torch.rand(4000, generator=draw) < 0.3).long()
    shares = (torch.randn(4000, generator=draw) + labels - 0.5).sigmoid()
    edges = edges_of(40)
    counts = slow_counts(shares.tolist(), labels.tolist(), edges)
    scores = binned_scores(counts, 0.0, edges, of_two=True)
    pairs = shares[labels == 1][:, None] - shares[labels == 0]
    assert scores["auroc"].value == pytest.approx(float((pairs > 0).double().mean()), abs=0.002)
    assert scores["accuracy"].value == pytest.approx(float(((shares > 0.5) == labels.bool()).double().mean()))
    assert all(reading.noise == 0 for reading in scores.values())
    noised = torch.randn(300, 2, 40, generator=draw, dtype=torch.float64) * 10 + counts
    for name, reading in scores.items():
        values = torch.tensor([binned_scores(one, 10.0, edges, of_two=True)[name].value for one in noised])
        stated = binned_scores(noised[0], 10.0, edges, of_two=True)[name].noise
        assert float(values.mean()) == pytest.approx(reading.value, abs=0.2 * stated + 0.01), name
        assert float(values.std()) == pytest.approx(stated, rel=0.4), name
    few = binned_scores(counts / 100, 10.0, edges, of_two=True)
    assert {reading.value for reading in few.values()} == {None}, "the noise is larger than the records"
