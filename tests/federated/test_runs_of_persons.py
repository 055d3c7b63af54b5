"""Runs that protect persons: draws, batches, charges and guarantees count persons."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from conftest import EVERY_ENGINE, FIXED_KEY

from dpfl_lightning import ClientModule, Population, strategies
from dpfl_lightning.commands.ledger import main as ledger
from dpfl_lightning.commands.plan import main as plan
from dpfl_lightning.config.options import ClientOptions, PrivacyOptions
from dpfl_lightning.config.registry import names_of
from dpfl_lightning.data.records import Records
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client import answers
from dpfl_lightning.federated.client.engines.serial import DrawnBatches
from dpfl_lightning.federated.server.callback import Callback
from dpfl_lightning.federated.server.run import Run
from dpfl_lightning.papers.baselines.ifca import Ifca
from dpfl_lightning.papers.distillation.distillation import Distillation
from dpfl_lightning.papers.distillation.feature_means import FeatureMeans
from dpfl_lightning.privacy.accounting.units import Person
from dpfl_lightning.privacy.clipping.inputs import Block
from dpfl_lightning.reporting.description import markdown
from dpfl_lightning.reporting.progress import Progress

pytestmark = pytest.mark.e2e

CLIENTS = ClientOptions(count=4, batch_size=8, learning_rate=0.3)
ROWS = [1, 2, 3, 6] * 10  # of the persons of a client


def per_person(**options) -> PrivacyOptions:
    return PrivacyOptions(**{"epsilon": 5.0, "unit": "person", "rows_per_person": 4, "noise_key": FIXED_KEY, **options})


def people(extra: int = 0) -> Population:
    """Four clients with 40 persons each; the last client has one more if there are `extra` rows."""
    clients, ids = [], []
    for client in range(4):
        rows = [*ROWS, *[extra] * (client == 3 and extra > 0)]
        parts = []
        for person, count in enumerate(rows):
            rng = np.random.default_rng((client, person))
            y = rng.integers(0, 3, count)
            parts.append((np.eye(64)[y] + 0.3 * rng.normal(size=(count, 64)), y))
        x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
        clients.append((x.astype(np.float32), y))
        ids.append([f"P{one}" for one in np.repeat(np.arange(len(rows)), rows)])
    return Population.from_datasets(clients, held_out=0.2, num_classes=3, persons=ids)


def module() -> ClientModule:
    torch.manual_seed(0)
    return ClientModule(torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)))


def run_of(make_loop, **options):
    options = {"population": people(), "module": module(), "privacy": per_person(), "clients": CLIENTS, **options}
    return make_loop(**options)


@pytest.mark.parametrize(
    ("privacy", "relation"),
    [
        ({"mechanism": "laplace", "delta": 0.0}, "add or remove one person of one client), full batches of persons"),
        ({"adjacency": "replace_one"}, "replace one person of one client), Poisson sampling of persons"),
    ],
)
def test_other_noise_and_relations_are_of_persons_too(make_loop, privacy, relation):
    full = dataclasses.replace(CLIENTS, batch_size=None if "mechanism" in privacy else 8)
    loop = run_of(make_loop, privacy=per_person(**privacy), clients=full)
    result = loop.run()
    assert f"-differential privacy per person ({relation}, at most 4 rows of each" in result.guarantee.words()
    assert 4.9 < result.guarantee.epsilon <= 5
    (relation,) = {one.event.as_dict()["kind"] for one in loop.schedule.clients[0].planned}
    assert relation == ("laplace" if "mechanism" in privacy else "gaussian")


@pytest.mark.parametrize("batch_size", [8, None])
@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_every_engine_trains_on_persons_as_the_reference(make_loop, engine, batch_size):
    clients = dataclasses.replace(CLIENTS, batch_size=batch_size)
    result = run_of(make_loop, engine=engine, clients=clients).run()
    reference = run_of(make_loop, engine="serial", clients=clients).run()
    ours, theirs = result.model.state_dict(), reference.model.state_dict()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_an_epsilon_of_persons_says_so_everywhere(make_loop, capsys):
    loop = run_of(make_loop, parts=[Progress()])
    assert loop.config.facts.num_records == loop.population.num_ids
    loop.run()
    shown = capsys.readouterr().out
    assert "persons  batch" in shown and "records  batch" not in shown and "max epsilon" in shown
    assert all("per person" in line for line in shown.splitlines() if "max epsilon" in line)
    folder = loop.config.output_dir
    words = "differential privacy per person (add or remove one person of one client), Poisson sampling of persons"
    for file in ("result.json", "guarantees.json", "guarantee.html"):
        assert f"{words}, at most 4 rows of each" in (folder / file).read_text(), file
    result, run = (json.loads((folder / file).read_text()) for file in ("result.json", "run.json"))
    assert {client["unit"] for client in result["clients"]} == {run["tags"]["unit"]} == {"person"}
    assert run["tags"]["sampling"] == "Poisson sampling of persons, at most 4 rows of each"
    assert '"num_persons": ' in run["datasets"]["training"]["profile"]
    about = markdown(Run.read(folder))
    assert re.search(r" per person \([^)]+\)\*\*, the largest of 4 clients", about), "with the badge of a simulation"
    assert Person().not_covered[0] in about
    assert json.loads((folder / "ledger.jsonl").open().readline())["adjacency"] == "add_remove_of_persons"
    assert ledger([str(folder)]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("most", "says"),
    [
        (None, "privacy.unit person protects persons"),
        (4, "for all records of a person with several, at the same delta"),
    ],
)
def test_an_epsilon_of_records_says_what_holds_for_persons(make_loop, capsys, most, says):
    loop = run_of(make_loop, privacy=per_person(unit="record", rows_per_person=most))
    loop.run()
    folder = loop.config.output_dir
    assert all(says in (folder / file).read_text() for file in ("result.json", "guarantees.json", "guarantee.html"))
    assert ledger([str(folder)]) == 0
    assert says in capsys.readouterr().out


def test_a_person_counts_once_in_released_scores(make_loop):
    chosen = strategies.build({"size_weighted": {}, "released_scores": {"epsilon": 900}})
    loop = run_of(make_loop, privacy=per_person(epsilon=1000.0), parts=chosen)
    result, population = loop.run(), loop.clients.population
    for client, released in enumerate(result.metrics["released_accuracy"]):
        x, y = population.held_out(client)
        loop.model.load(loop.state.models[0])
        right = loop.model.net(x.rows).argmax(dim=1).view(y.shape) == y
        assert len(y) == len(population.unit_ids[population.held_out_of[client]].unique())
        assert released == pytest.approx(float((right * x.weights).sum(dim=1).mean()), abs=0.02)
    assert len({*result.metrics["released_accuracy"]}) > 1
    nobody = dataclasses.replace(people(), held_out_of=[torch.empty(0, dtype=torch.long)] * 4)
    again = run_of(make_loop, population=nobody, privacy=per_person(), parts=strategies.build({"released_scores": {}}))
    assert again.run().metrics["released_accuracy"] == [None] * 4, "noised zeros"


def test_rows_of_a_person_follow_from_this_person_and_the_secret():
    one, more = (population.counting(Person(4)).chosen(b"secret") for population in (people(), people(extra=9)))
    known = {int(one.unit_ids[rows[0]]): one.x[rows[rows >= 0]] for blocks in one.blocks_of for rows in blocks}
    others = {int(more.unit_ids[rows[0]]): more.x[rows[rows >= 0]] for blocks in more.blocks_of for rows in blocks}
    assert known.keys() <= others.keys() and len(others) <= len(known) + 1
    assert all(torch.equal(rows, others[code]) for code, rows in known.items())
    rows, ids = np.arange(50), np.zeros(50, dtype=np.int64)
    chosen = [Person(4).blocks(rows, ids, key)[0].tolist() for key in (b"a", b"b", b"c")]
    assert len({*map(tuple, chosen)}) == 3 and all(len({*one}) == 4 for one in chosen)


def test_a_batch_holds_blocks_of_persons():
    population = people().counting(Person(4)).chosen(b"secret")
    (x, y), *_ = DrawnBatches(Records(population, 0), [np.arange(population.num_records[0])])
    sizes = sorted((x.weights > 0).sum(1).tolist())
    assert x.x.shape[:2] == y.shape == (population.num_records[0], 4)
    torch.testing.assert_close(x.weights.sum(1), torch.ones(len(y)))
    _, counts = population.unit_ids[population.train_of[0]].unique(return_counts=True)
    assert sizes == sorted(counts.clamp(max=4).tolist())


class Interrupt(Callback):
    def on_round_end(self, view, report):
        raise KeyboardInterrupt


def test_a_resumed_run_uses_the_same_rows(make_loop, tmp_path):
    whole = run_of(make_loop).run()
    part = run_of(make_loop, output_dir=tmp_path / "part", parts=[Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        part.run()
    again = run_of(make_loop, output_dir=tmp_path / "part")
    result = again.run(resume=True)
    assert all(map(torch.equal, again.clients.population.blocks_of, part.clients.population.blocks_of))
    torch.testing.assert_close(result.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_queries_for_losses_ask_persons(make_loop, monkeypatch):
    asked = []

    def watched(query, client, module, x, y, *more):
        asked.append(len(y))
        assert isinstance(x, Block)
        return answer(query, client, module, x, y, *more)

    answer = answers.answer
    monkeypatch.setattr(answers, "answer", watched)
    loop = run_of(make_loop, parts=[Ifca(num_clusters=2)], new_net=lambda seed: module().net)
    loop.run()
    assert {*asked} == {*loop.population.num_ids}


def test_the_plan_of_a_configuration_counts_persons(capsys):
    unit = ["--privacy.unit", "person", "--privacy.rows_per_person", "4", "--data.records_per_person", "4"]
    assert plan(["--config", "digits", "--clients.batch_size", "8", *unit]) == 0
    shown = capsys.readouterr().out
    assert "persons" in shown and "per person (add or remove one person of one client)" in shown


@pytest.mark.parametrize("name", sorted({*names_of("strategies")} - {"early_stopping", "oracle_clusters"}))
def test_every_strategy_counts_persons_or_is_refused_by_name(make_loop, name):
    in_stages = name.startswith("two_stage")
    (strategy,) = strategies.build({name: {"warmup_rounds": 2} if in_stages else {}})
    options = {"parts": [strategy], "new_net": lambda seed: module().net}
    options["clients"] = dataclasses.replace(CLIENTS, batch_size=None if in_stages else CLIENTS.batch_size)
    if strategy.jobs and not any(job.any_unit for job in strategy.jobs):
        with pytest.raises(UserError, match=f"`privacy.unit` must be record with {strategy.config_name}"):
            run_of(make_loop, **options)
        return
    loop = run_of(make_loop, **options)
    loop.run()
    assert all("person" in one.words() for one in loop.clients.guarantees())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"privacy": per_person(rows_per_person=None)}, "`privacy.rows_per_person` must be a number with unit person"),
        ({"privacy": per_person(sampling="shuffle")}, "`privacy.unit` must be record with privacy.sampling shuffle"),
        ({"parts": [Distillation()]}, "`privacy.unit` must be record with distillation"),
        ({"parts": [FeatureMeans()]}, "`privacy.unit` must be record with feature_means"),
        ({"population": None, "module": None}, "`privacy.unit` must be record for data without persons"),
    ],
)
def test_what_counts_records_is_refused(make_loop, options, says):
    with pytest.raises(UserError, match=says.replace("(", "[(]")):
        run_of(make_loop, **options)
