"""`dpfl node accept --show --page`: what an officer is told before signing, and that a plan does nothing before it."""

import dataclasses
import hashlib
import io
import json
import math
import os
import re
import shutil
import stat
import sys
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import numpy as np
import pandas
import pytest
import sites
import torch
from pages import EVIL, Reader, words_of
from sites import federation, hello, planned, state_of

from dpfl_lightning.commands.ledger import main as ledger_command
from dpfl_lightning.commands.node import main
from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.data.unit_ids import codes
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.identity import data_digests
from dpfl_lightning.privacy.ledger.evidence import Evidence
from dpfl_lightning.privacy.ledger.file import read_header
from dpfl_lightning.reporting.odds import Odds
from dpfl_lightning.reporting.site_page import TOTALS
from dpfl_lightning.runtime.spoken import words_of as spoken
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Released, Terms
from dpfl_lightning.sites.node.accept import accept, offer_of, open_study, site_of
from dpfl_lightning.sites.node.records import settings_of, site_population
from dpfl_lightning.sites.node.scores import read_scores
from dpfl_lightning.sites.node.service import Node
from dpfl_lightning.sites.node.state import StateFolder
from dpfl_lightning.sites.receipt import read_receipts
from dpfl_lightning.sites.server.channel import Sites
from dpfl_lightning.sites.server.deploy import loop_over, planning_loop, terms_of
from dpfl_lightning.sites.wire import digest

ROWS = 60
TABLE = pandas.DataFrame(
    {
        "age": [30.5 + row for row in range(ROWS)],
        "sex": ["f", "m"] * (ROWS // 2),
        "Fallnummer": [f"K{row:05}" for row in range(ROWS)],
        "died": ["no", "no", "yes"] * (ROWS // 3),
    }
)


def of_tables(folder: Path, held_out: float = 0, **more):
    """The nodes of three sites with tables, in this folder, and a plan for them."""
    states = []
    for number, name in enumerate(("cork", "dijon", "essen")):
        file = folder / f"{name}.csv"
        table = TABLE.assign(Fallnummer=[f"{name}{row}" for row in range(ROWS)], age=TABLE.age + number)
        table.to_csv(file, index=False)
        privacy = {"epsilon": 5, "delta": 0.01}
        settings = settings_of(from_mapping({"data": data_of(file, held_out), "privacy": privacy}), name)
        facts = site_of(settings, *site_population(settings), sites.key_of(number))
        states.append(StateFolder.create(folder / name, settings, facts, sites.key_of(number)))
    return states, of_sites(states, folder, held_out, **more)


def data_of(file: Path | None, held_out: float) -> dict:
    """The data of a configuration, with this table."""
    arguments = {"df": file and str(file), "label": "died", "classes": ["no", "yes"]}
    arguments |= {
        "columns": {"age": {"scale": [60, 20]}, "sex": {"categories": ["f", "m"]}},
        "person": "Fallnummer",
        "held_out": held_out,
    }
    return {"class_path": "dpfl_lightning.Population.from_dataframe", "init_args": arguments}


def of_sites(states, folder: Path, held_out: float = 0, **more):
    """A plan for these nodes, as their site.json are now."""
    facts = [state.site() for state in states]
    clients = {"count": 3, "learning_rate": 0.5, "batch_size": 20}
    asked = sites.configured(folder / "planned", clients=clients, data=data_of(None, held_out), **more)
    return terms_of(planning_loop(asked, facts), facts)


def shown(state: StateFolder, terms, folder: Path, *flags: str, code: int = 0) -> str:
    """The page of `accept --show --page`, as HTML."""
    (folder / "plan.json").write_text(wire.to_text(terms))
    page = folder / "page.html"
    page.unlink(missing_ok=True)
    words = ["accept", str(state.path), str(folder / "plan.json"), "--show", "--page", str(page), *flags]
    assert main(words) == code
    return page.read_text() if code == 0 else ""


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    return folder, *of_tables(folder)


#: what a data protection officer asks, and the sentence of the page that answers it
QUESTIONS = {
    "who sees what": "the server, which is not trusted every noisy update of this site, with a signed receipt, its "
    "name, its number of records for training, names, scales and classes of columns as the study states them, its "
    "budget, that it takes part, and when it answers records, noise, exact scores, anything before noise was added",
    "what leaves without the promise": "the number of records in training, and all options yes: 480 records, exactly: "
    "who knows all other records can count, and so knows whether this one is in the data; options hold no data",
    "no contradiction": "whether a record is in its data is protected, except against who can count (section 3)",
    "no acceptance before signing": "The operator must not accept before the signature: the program does not check "
    "this.",
    "rounding": "Factors and cases are rounded up, what is left (section 5) down.",
    "the seed": "node.json, node.key, site.json nothing; node.json is this site's configuration, with the seed",
    "worst case": "somebody who knows all other records, and tosses a coin on whether this one was in the data, "
    "is right in 50 of 100 cases. From the noisy updates that this site would send in this run they are right in at "
    "most 95.3 of 100",
    "the whole group": "It hits anybody of all 480 records with probability 1 in 2 at most.",
    "what epsilon 3 means": "Experts write this promise as epsilon 3 and delta 0.001 : the factor is "
    "exp(epsilon), 20.1, and delta is the probability of the exception.",
    "deletion": "scores.json, scores.html, private.json, error.log exact figures, also of those who have left; "
    "error.log may have values of records delete once the study has ended",
    "guesses": "data_key, releases/ who has the key and all other training records can test a guess of one on "
    "ledger.jsonl; last replies delete once the study has ended",
    "what to keep": "Keep the signed page: it shows what was decided.",
    "withdrawal of a person before acceptance": "before acceptance a plan with the new number is needed the plan stays "
    "as it is nothing accepted, nothing sent the node refuses the plan: the site withdraws from it, and needs a new "
    "plan the study goes on without them nothing, once the site has withdrawn",
    "withdrawal of a person later": "during the run the same; what was sent shows no more of them than section 1 "
    "allows the study goes on without them the whole budget of the plan after the run models keep what they "
    "learnt, within the promise; fingerprints and their key stay in the account of the user; delete data_key, "
    "releases/, private.json and error.log, if any the same fingerprints stay; delete scores.json, scores.html and "
    "error.log, if any the whole budget of the plan",
    "what a new plan shows": "For a new plan the node writes the new number into site.json; its limit and all that is "
    "counted stay. The number is exact and public: 479 records after 480 tell that one has left.",
    "withdrawal": "from then on the node refuses the server. What was sent cannot be called back",
    "audit": "compares the ledger, the list of what may have been sent, never less, with the accepted plan; finds "
    "later changes, unless ledger.head was rewritten, too; shows all plans and the limit",
    "the record of the server": "prints its chain, which the server has in receipts.json, signed by this node",
    "who gets the check": "nothing is transferred to anybody",
    "contact": "Contact for questions about this study: Dr. A. Muster, +49 30 123.",
    "other studies": "plans times as likely, at most except with probability right guesses, at most epsilon "
    "delta Before this plan (0 plans; this one not counted) 1 0 50 of 100 cases 0 0 This plan alone 20.1 1 in 1,000 "
    "95.3 of 100 cases 3 0.001 Together, if you sign (this plan counted) 20.1 1 in 1,000 95.3 of 100 cases 3 0.001 "
    "Your limit 149 1 in 100 99.4 of 100 cases 5 0.01 Left afterwards 7.38 1 in 112 2 0.009 Your limit is the most "
    "that all plans of this node may ever cost together: the node refuses a plan above it. The operator sets it, and "
    "can raise it by --raise_limits. It fits.",
    "held-out records": "120 rows. No training uses them. They score models that the server sends, in general "
    "the final one. The exact scores stay here. In this plan nothing of them leaves this site: no score, no count, not "
    "even their number.",
    "what is private": "Private: this page is for the operator and the data protection officer of this site, and for "
    "authorities that audit them.",
    "collusion": "If all sites and the server put together what they know (collusion), the promise of section 1 "
    "is the same",
    "what changed since the last plan": "This is the first plan at this node.",
    "code": "A plan brings no program code, and nothing that it names was started for this page.",
}


@pytest.mark.e2e
@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_are_answered_by_a_sentence(question, tmp_path):
    terms = planned(tmp_path, privacy={"epsilon": [3, 4, 8]})
    words = ["--epsilon_limit", "5", "--contact", "Dr. A. Muster, +49 30 123"]
    page = shown(state_of(tmp_path, 0, key=None), terms, tmp_path, *words)
    assert QUESTIONS[question] in words_of(page)


def test_the_page_says_what_is_signed(hospitals, capsys):
    folder, (cork, *_), terms = hospitals
    page = words_of(shown(cork, terms, folder))
    for part in (
        "cork: what one plan means",
        "has not accepted this plan",
        spoken(digest(terms)[:32]),
        digest(terms),
        "at most 7.39 times as likely",
        "with probability 1 in 1,000",
        "88.1 of 100 cases",
        "epsilon 2 and delta 0.001",
        "Training 60 rows of 60 persons",
        "Held out no row",
        "age, sex; beside them only the label and Fallnummer, which names persons",
        "died (no, yes)",
        "'logistic', a model of dpfl_lightning, which the server chose",
        "dijon 60 records epsilon 4, delta 0.001",
        "essen 60 records epsilon 8, delta 0.001",
        "The server writes: 'This run uses SizeWeighted.'",
        "noised gradient steps in 2 releases",
        "No contact for questions about this study was named",
        "Contact for questions about this study: ____",
        "It fits.",
        "A person with several rows is protected less.",
    ):
        assert part in page, part
    assert "cork7" not in page and ".csv" not in page
    file = folder / "page.html"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and f"{file} says so" in capsys.readouterr().out
    assert not cork.plans()


def test_a_page_needs_show(hospitals, capsys):
    folder, (cork, *_), _ = hospitals
    assert main(["accept", str(cork.path), str(folder / "plan.json"), "--page", "x.html"]) == 2
    assert "`--page` must be given with --show, got 'x.html'" in capsys.readouterr().err and not Path("x.html").exists()


def test_a_plan_that_does_not_fit_is_shown_with_its_reason(tmp_path):
    terms = planned(tmp_path)
    other = dataclasses.replace(terms.sites[0], public_key=terms.sites[1].public_key)
    forged = dataclasses.replace(terms, sites=(other, *terms.sites[1:]))
    page = words_of(shown(state_of(tmp_path, 0, key=None), forged, tmp_path))
    assert "It does not fit: `PLAN` must have the public facts of this site" in page
    page = words_of(shown(state_of(tmp_path / "key", 0), terms, tmp_path))
    assert "This node has a test key: noise can be computed by everyone who knows the key" in page


def with_options(terms, caveats=(), strategies=None, **changed):
    """The plan with other options, as its author could write them."""
    options = {**terms.plan.options, **changed}
    plan = dataclasses.replace(terms.plan, options=options, caveats=(*terms.plan.caveats, *caveats))
    plan = plan if strategies is None else dataclasses.replace(plan, strategies=strategies)
    return dataclasses.replace(terms, plan=plan)


def test_what_the_server_writes_is_escaped_and_a_literal(tmp_path):
    terms = with_options(planned(tmp_path), [EVIL], model={"class_path": EVIL, "init_args": {"a": EVIL}}, task=EVIL)
    page = shown(state_of(tmp_path, 0, key=None), terms, tmp_path, "--contact", EVIL)
    assert EVIL not in page and page.count("<script") == 0
    reader = Reader(page)
    assert not [tag for tag, _ in reader.tags if tag in ("script", "link", "img", "iframe", "object")]
    assert not [value for _, given in reader.tags for name, value in given.items() if name in ("src", "href", "onload")]
    assert "which the server names and this site has not fixed: the node refuses it" in words_of(page)


def test_facts_that_only_the_server_states_are_not_said_in_the_words_of_the_program(tmp_path):
    terms, state = planned(tmp_path), state_of(tmp_path, 0, key=None)
    lies = {"schema": {"columns": ["all of it is safe"], "label": ["all of it is safe"]}}
    liars = tuple(dataclasses.replace(one, **lies) for one in terms.sites)
    page = words_of(shown(state, dataclasses.replace(terms, sites=liars), tmp_path))
    assert "does not fit" in page
    assert "none by name: records are numbers of shape" in page and page.count("all of it is safe") <= 1
    with pytest.raises(wire.WireError):
        wire.from_text(Terms, wire.to_text(terms).replace('"kind": "Record"', '"kind": "Harmless"').encode())
    other = dataclasses.replace(terms, version="0.0 and safe")
    assert "dpfl_lightning 0.0" not in words_of(shown(state, other, tmp_path))


@pytest.mark.e2e
def test_what_changed_since_the_last_plan_is_said(tmp_path):
    first, state = planned(tmp_path), state_of(tmp_path, 0, key=None)
    accept(state, first)
    again = dataclasses.replace(first, run="0" * 32)
    page = words_of(shown(state, again, tmp_path))
    assert (
        f"Compared with the plan {digest(first)[:12]}, which this node accepted last, only the name of the run" in page
    )
    second = planned(tmp_path, rounds=3, privacy={"epsilon": [1, 4]}, clients={"count": 2})
    page = words_of(shown(state_of(tmp_path / "two", 0, key=None, sites=2), second, tmp_path))
    assert "This is the first plan at this node." in page
    third = planned(tmp_path, rounds=3, privacy={"epsilon": [1, 4, 8]}, model={"name": "convnet"})
    page = words_of(shown(state, third, tmp_path))
    for part in (
        "this one costs half as much.",
        "The same are: number of records in training, columns, label, contact, limit of the part of one record, "
        "strategies of the server, other sites. Who is held out follows from section 2, which no plan changes",
        "budget epsilon 2, delta 0.001 epsilon 1, delta 0.001",
        "rounds 2 3",
        "releases 2 releases for 'train' of 2 steps, each with about 0.5 of the records, noise of 1.94 times the limit",
        "option model.name 'logistic' 'convnet'",
        "Before this plan (1 plan; this one not counted) 7.39 1 in 1,000 88.1 of 100 cases 2 0.001",
        "This plan alone 2.72 1 in 1,000",
        "Together, if you sign (this plan counted) 20.1 1 in 500 95.3 of 100 cases 3 0.002",
    ):
        assert part in page, part
    assert "option rounds" not in page and "option privacy.epsilon" not in page, "other rows state them"


def without(folder: Path, person: str) -> None:
    """Delete the rows of one person at Cork."""
    file = folder / "cork.csv"
    lines = file.read_text().splitlines(True)
    file.write_text("".join(line for line in lines if f",{person}," not in line))
    assert len(file.read_text().splitlines()) == len(lines) - 1


def started(state: StateFolder, plan: str) -> str | None:
    """Start a node once; why it refuses the plan, or None."""
    node = Node(state, open_study)
    try:
        return node.problem(plan)
    finally:
        node.close()


def one_of(state: StateFolder, held_out: bool) -> str:
    """The id of a person of Cork who is held out, or trains."""
    population, client = site_population(state.settings())
    rows = (population.held_out_of if held_out else population.train_of)[client]
    return pandas.read_csv(state.path.parent / "cork.csv").Fallnummer[int(rows[0])]


def sends_one(state: StateFolder, terms) -> None:
    """Cork's node makes its first release, and stops."""
    node = Node(state, open_study)
    reply = sites.asked(node, sites.a_request(terms, torch.zeros(2 * (terms.sites[0].inputs.shape[1] + 1))))
    node.close()
    assert isinstance(reply, Released)


@pytest.mark.e2e
def test_a_training_person_withdraws_before_anything_is_sent(tmp_path):
    """The first two cases of the table: the plan is refused, nothing stays counted, the same node takes a new plan."""
    states, terms = of_tables(tmp_path, held_out=0.3)
    cork, size = states[0], terms.sites[0].num_records
    accept(cork, terms, 2.5)
    assert started(cork, digest(terms)) is None
    without(tmp_path, one_of(cork, held_out=False))
    assert "must have the public facts of this site" in started(cork, digest(terms))
    page = words_of(shown(cork, terms, tmp_path))
    assert "Held out not counted, because the plan does not fit" in page
    assert f"{size - 1} records after {size} tell that one has left" in page
    assert cork.withdraw(digest(terms)).epsilon == 0 and cork.reserved() == (0, 0)
    assert f"and withdrew from it on {date.today().isoformat()}." in words_of(shown(cork, terms, tmp_path))
    assert cork.site().num_records == size - 1, "what a new plan is made from"
    accept(cork, of_sites(states, tmp_path, held_out=0.3))
    assert cork.reserved()[0] == pytest.approx(2, abs=1e-5)


@pytest.mark.e2e
def test_a_training_person_withdraws_during_the_run(tmp_path):
    """The third case: the whole budget stays counted at the same node, whose limit holds for the new plan."""
    states, terms = of_tables(tmp_path, held_out=0.3)
    cork = states[0]
    accept(cork, terms, 2.5)
    sends_one(cork, terms)
    without(tmp_path, one_of(cork, held_out=False))
    assert "must have the public facts of this site" in started(cork, digest(terms))
    assert cork.withdraw(digest(terms)).epsilon == cork.reserved()[0] > 1.9
    new = of_sites(states, tmp_path, held_out=0.3)
    with pytest.raises(UserError, match="`--epsilon_limit` must be at least 4"):
        accept(cork, new)
    accept(cork, new, 5, may_rise=True)
    assert started(cork, digest(new)) is None and cork.reserved()[0] == pytest.approx(4, abs=1e-5)


@pytest.mark.e2e
def test_the_study_goes_on_without_a_held_out_person(tmp_path):
    (cork, *_), terms = of_tables(tmp_path, held_out=0.3)
    accept(cork, terms)
    for sent in (False, True):
        without(tmp_path, one_of(cork, held_out=True))
        assert started(cork, digest(terms)) is None, "before it has sent anything, and later"
        if not sent:
            sends_one(cork, terms)


@pytest.mark.e2e
def test_corrected_training_rows_are_refused_once_the_node_has_started_the_plan(tmp_path):
    (cork, *_), terms = of_tables(tmp_path)
    accept(cork, terms)
    file = tmp_path / "cork.csv"
    for age, refusal in (("31.5", None), ("32.5", "records")):
        file.write_text(re.sub(r"[\d.]+,f,cork0,", f"{age},f,cork0,", file.read_text()))
        problem = started(cork, digest(terms))
        assert problem is None if refusal is None else refusal in problem


@pytest.mark.e2e
def test_who_has_the_files_can_test_guesses_as_the_page_says(tmp_path, the_state_of_the_tests, monkeypatch):
    account = tmp_path / "data" / "account.jsonl"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("DPFL_ACCOUNT", str(account))
    (cork, *_), terms = of_tables(tmp_path)
    accept(cork, terms)
    assert started(cork, digest(terms)) is None
    folder, guess = cork.plan_folder(digest(terms)), offer_of(terms, cork).population
    key, other = bytes.fromhex((folder / "data_key").read_text()), b"another key"
    by_key, without_key = ([one.hex() for one in data_digests(HeldClients(guess), secret)] for secret in (key, other))
    kept = read_header(folder / "ledger.jsonl").identity["records"]
    assert by_key == kept and without_key[0] != kept[0], "nothing without data_key"

    lines = [json.loads(line) for line in account.read_text().splitlines()]
    key = hashlib.blake2b(b"person", key=bytes.fromhex(lines[0]["key"]), digest_size=32).digest()
    of_rows = [line["evidence"] for line in lines if "evidence" in line and "run" not in line]
    (evidence,) = [Evidence.of_json(one) for given in of_rows for one in given.values()]
    digests = [{view.packed[at : at + 8] for at in range(0, len(view.packed), 8)} for view in evidence.views]
    ids = {
        name: hashlib.blake2b(int(codes([name])).to_bytes(8, "big"), key=key, digest_size=8).digest()
        for name in ("cork7", "cork700")
    }
    assert ids["cork7"] in digests[-1] and ids["cork700"] not in digests[-1]
    without(tmp_path, "cork7")
    started(cork, digest(terms))
    assert lines == [json.loads(line) for line in account.read_text().splitlines()][: len(lines)], "it stays"


def test_the_account_keeps_so_many_fingerprints_as_the_page_says(hospitals):
    folder, (_, dijon, _), terms = hospitals
    page = words_of(shown(dijon, terms, folder))
    assert "of up to 256 rows, whole and without each column and of up to 256 ids, also of those who have left" in page
    cells = np.arange(4000, dtype=np.uint64).reshape(1000, 4)
    views = Evidence.of(cells, np.arange(1000, dtype=np.uint64), 0.5, b"key").views
    assert [len(view.packed) // 8 for view in views] == [256] * 6, "whole, without each of four columns, and ids"


def test_the_numbers_of_a_person_at_all_sites_are_sums(tmp_path):
    (cork, *_), terms = of_tables(tmp_path, privacy={"epsilon": [0.5, 1, 1]})
    factor = math.ceil(math.exp(2.5) * 10) / 10
    cases = math.ceil(1000 * (1 + 0.003 * math.exp(-2.5)) / (1 + math.exp(-2.5))) / 10
    assert (
        "For a person with one record at each of the 3 sites, in all plans of this node, the budgets add up to epsilon "
        f"2.5, delta 0.003: at most {factor} times as likely, except with probability 1 in 333, and right "
        f"guesses in at most {cases} of 100"
    ) in words_of(shown(cork, terms, tmp_path))


@pytest.mark.e2e
def test_the_budgets_of_all_sites_in_all_plans_are_added_up(tmp_path):
    (cork, dijon, essen), first = of_tables(tmp_path, privacy={"epsilon": [0.5, 1, 1]})
    who = "A person with one record at every site of every plan here (budgets added up)"
    assert who not in words_of(shown(cork, first, tmp_path)), "section 4 has the numbers"
    accept(cork, first)
    second = of_sites((cork, dijon, essen), tmp_path, privacy={"epsilon": [0.25, 0.25, 0.5]})
    factor, cases = math.ceil(math.exp(3.5) * 10) / 10, math.ceil(1000 / (1 + math.exp(-3.5))) / 10
    page = words_of(shown(cork, second, tmp_path))
    assert f"{who} {factor} 1 in 166 {cases} of 100 cases 3.5 0.006 Your limit is" in page
    assert "In all plans" not in page and "at each of the 3 sites the budgets add up to epsilon 1, delta 0.003" in page
    cork.withdraw(digest(first))  # nothing was sent: the budget of Cork is free again
    assert f"{who} 20.1 1 in 200 95.3 of 100 cases 3 0.005 Your limit is" in words_of(shown(cork, second, tmp_path))
    (cork.plan_folder(digest(first)) / "plan.json").unlink()
    page = words_of(shown(cork, second, tmp_path))
    assert f"{who} not known: a plan.json is missing or changed" in page


@pytest.mark.e2e
def test_a_contact_that_is_gone_is_a_change(tmp_path):
    first, state = planned(tmp_path), state_of(tmp_path, 0, key=None)
    page = words_of(shown(state, first, tmp_path, "--contact", "study office"))
    assert "the contact has CONFIG, the configuration of the run" in page
    accept(state, first)
    page = words_of(shown(state, dataclasses.replace(first, run="0" * 32), tmp_path))
    assert "only the name of the run and the contact differs." in page and "contact study office none" in page
    assert "the operator asks the server for CONFIG, the configuration of the run" in page
    assert "options of the model. Who is held out" in words_of(shown(state, planned(tmp_path, rounds=3), tmp_path))


@pytest.mark.e2e
def test_receivers_and_files_are_those_of_the_plan(tmp_path):
    personal = {"name": "logistic", "personal_input": True}
    page = words_of(shown(state_of(tmp_path, 0, key=None), with_options(planned(tmp_path), model=personal), tmp_path))
    assert "last replies, and the personal parameters of the model without noise delete" in page
    assert "the other sites models, and with the plan" in page and "two sites" not in page
    assert "the data protection officer this page by the program: records, exact scores the server" in page
    own = with_options(planned(tmp_path), model={"class_path": "own.Net"})
    page = words_of(shown(state_of(tmp_path / "own", 0, key=None), own, tmp_path))
    assert "last replies, and, if the class of the model has personal parameters, these without noise delete" in page
    two = planned(tmp_path, privacy={"epsilon": [1, 4]}, clients={"count": 2})
    page = words_of(shown(state_of(tmp_path / "two", 0, key=None, sites=2), two, tmp_path))
    assert "the other sites models (with two sites, they tell what this site sent), and with the plan" in page


def test_a_remainder_is_rounded_down_and_factors_can_be_checked():
    for epsilon, delta in ((0.5, 9e-5), (1.5, 2e-5), (3.0, 0.009)):
        left, most = Odds.left(epsilon, delta), Odds.of(epsilon, delta)
        assert float(left.factor) <= math.exp(epsilon) <= float(most.factor) <= 1.01 * float(left.factor)
        assert 1 / int(left.exception[5:].replace(",", "")) <= delta and not left.guesses
    one, other, both = (float(Odds.of(epsilon, 0).factor) for epsilon in (0.5, 1.0, 1.5))
    assert one * other == pytest.approx(both, abs=0.01)


def test_the_page_stays_short(hospitals):
    folder, (cork, *_), terms = hospitals
    assert len(words_of(shown(cork, terms, folder)).split()) < 2100


def test_the_terminal_says_what_the_page_says(hospitals, capsys):
    folder, (_, dijon, _), terms = hospitals
    page = words_of(shown(dijon, terms, folder, "--contact", "study office")).replace(" .", ".")
    printed = capsys.readouterr().out.partition("\nEach release, for the expert:")[0].splitlines()
    titles = ("What leaves this site", "Received by ", "Not received", "Not covered", *TOTALS)
    assert len(printed) > 20
    for line in printed:
        for part in re.split("[:;.]+ ", line.strip(" .")):
            title = next((one for one in titles if part.startswith(one)), "")
            assert part.removeprefix(title).strip() in page, line


CONTACT = "Contact for questions about this study: study office, +49 30 123."


@pytest.mark.e2e
def test_the_contact_is_kept_with_the_consent(tmp_path, capsys):
    terms, state = planned(tmp_path), state_of(tmp_path, 0, key=None)
    page = words_of(shown(state, terms, tmp_path))
    assert page.count("No contact for questions about this study was named") == 1
    shown(state, terms, tmp_path, "--contact", "study office, +49 30 123")
    capsys.readouterr()
    assert main(["accept", str(state.path), str(tmp_path / "plan.json")]) == 0
    assert CONTACT in capsys.readouterr().out
    page = words_of(shown(state, terms, tmp_path))
    assert CONTACT in page and "No contact" not in page and CONTACT in capsys.readouterr().out
    shown(state, terms, tmp_path, "--contact", "another office")
    assert state.contact(digest(terms)) == "another office"
    for wrong in ("two\nlines", " ", "x" * 301):
        shown(state, terms, tmp_path, "--contact", wrong, code=2)
    assert state.contact(digest(terms)) == "another office"


@pytest.mark.e2e
def test_the_operator_is_told_whether_one_person_is_held_out(tmp_path, capsys, monkeypatch):
    (cork, *_), terms = of_tables(tmp_path, held_out=0.3)
    page = words_of(shown(cork, terms, tmp_path))
    population, client = site_population(cork.settings())
    held_out = population.held_out_of[client]
    assert f"Held out {len(held_out)} rows of {len(held_out)} persons. No training uses them." in page
    assert (
        f"dpfl node status {cork.path} --person tells it to the operator" in page
        and "who knows both can compute it" in page
    )
    assert f"Together {ROWS} rows of {ROWS} persons" in page and "no: in this plan nothing of them is sent" in page

    page = words_of(shown(cork, terms, tmp_path, "--epsilon_limit", "1"))
    assert f"Held out {len(held_out)} rows" in page and "Left afterwards none: above your limit Your limit" in page
    assert "It does not fit: `--epsilon_limit` must be at least 2" in page

    def said(person: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{person}\n"))
        assert main(["status", str(cork.path), "--person"]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    capsys.readouterr()
    for row in (int(held_out[0]), int(population.train_of[client][0])):
        use = "held out, 1 row. No training uses them." if row in held_out else "used for training, 1 row."
        assert said(f"cork{row}") == f"Person cork{row}: {use}"
    assert said("nobody7") == "Person nobody7: no row at this site."
    assert main(["verify", str(cork.path), "--person"]) == 2
    for given, must in ("cork1\n", "be given for data that name persons"), ("\n", "be followed by a line with an id"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        assert main(["status", str(state_of(tmp_path / must, 0).path), "--person"]) == 2
        assert f"`--person` must {must}" in capsys.readouterr().err


@pytest.mark.e2e
def test_the_page_says_of_each_file_when_it_may_be_deleted(tmp_path, the_state_of_the_tests, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("DPFL_ACCOUNT", str(tmp_path / "data" / "account.jsonl"))
    states, terms = of_tables(tmp_path, held_out=0.3)
    for state in states:
        state.keep_contact(digest(terms), "study office, +49 30 123")
        accept(state, terms, 9, may_rise=True)
    nodes = [Node(state, open_study) for state in states]
    options = sites.configured(
        tmp_path / "run",
        clients={"count": 3, "learning_rate": 0.5, "batch_size": 20},
        data={
            "class_path": "dpfl_lightning.Population.from_dataframe",
            "init_args": {**states[0].settings().config["data"]["init_args"], "df": None},
        },
    )
    loop_over(options, Sites(terms, tuple(node.handle for node in nodes))).run()
    for node in nodes:
        node.close()
    state = states[0]
    folder = state.plan_folder(digest(terms))
    assert CONTACT in words_of((folder / "report.html").read_text())
    Node(state, None).handle(wire.encode(hello(digest(terms))))  # leaves error.log
    with state.serving(), sites.listening(nodes[0], state.path / "socket"):
        found = {file for file in state.path.rglob("*") if not file.is_dir()}
    found |= {file for name in ("state", "data") for file in (tmp_path / name).rglob("*") if file.is_file()}
    rows = re.findall(
        '<td data-title="where">(.*?)</td><td data-title="files">(.*?)</td>', (folder / "report.html").read_text()
    )
    places = {"folder of the plan": folder, "folder of the node": state.path}
    named = {places.get(where, Path(where)) / name for where, names in rows for name in names.split(", ")}
    folders = {one for one in named if one.is_dir()}
    assert {file for file in found if not {file, *file.parents} & named} == set(), "the table lacks it"
    in_places = {one for one in named if one.is_absolute()} - folders
    assert in_places <= found and {one.name for one in folders} == {"releases"}


@pytest.mark.e2e
def test_the_page_is_completed_after_the_run_and_what_may_be_deleted_may(tmp_path, capsys):
    nodes, terms, options = federation(tmp_path)
    state = nodes[0].state
    before = words_of(shown(state, terms, tmp_path))
    assert "0 of 2 planned releases were made. Not all are made: keep the files of section 7" in before
    today = date.today().isoformat()
    assert f"This site accepted this plan on {today}." in before and "0 of 2 planned releases were made." in before
    loop_over(options, Sites(terms, tuple(node.handle for node in nodes))).run()
    folder = state.plan_folder(digest(terms))
    completed, after = words_of((folder / "report.html").read_text()), words_of(shown(state, terms, tmp_path))
    for page in (completed, after):
        assert (
            f"2 of 2 planned releases were made, the last on {today}: 6 noised gradient steps in 2 releases. They cost "
            "epsilon 4, delta 0.001. All are made: once the server has ended the run, files that section 7 keeps until "
            "the study has ended may be deleted. Nothing is deleted by itself." in page
        )
        assert "belong on the page that was signed before acceptance" in page and "signature: ____" not in page
        assert "this site sends in this run" in page and "a later edition of the one before acceptance" in page
    fits = " This site has accepted the plan, and it fits the records."
    assert fits in after and completed == after.replace(fits, ""), "no exact score is in it"
    scores = words_of((folder / "scores.html").read_text())
    kept = read_scores(folder)
    model, constant = (f"{one:.2%}" for one in (kept.score.accuracy, kept.baseline["accuracy"]))
    assert f"better than giving all records one answer: accuracy {model} against {constant}." in scores
    assert scores.count("Private: ") == 3 and "Private: numbers of records by label and prediction" in scores
    assert (
        "All other plans (0 plans; this one not counted) 1 0" in completed
        and "Together (this plan counted) 54.6" in completed
    )
    for question in ("collusion", "deletion", "guesses", "withdrawal", "withdrawal of a person later", "audit"):
        assert QUESTIONS[question] in completed
    for node in nodes:
        node.close()
    shutil.rmtree(folder / "releases")
    for name in ("scores.json", "scores.html", "private.json", "error.log", "data_key"):
        (folder / name).unlink(missing_ok=True)
    capsys.readouterr()
    assert main(["verify", str(state.path)]) == 0 and main(["status", str(state.path)]) == 0
    assert "finished: 2 of 2 releases paid" in capsys.readouterr().out
    assert ledger_command([str(folder), "--export", str(tmp_path / "events.json")]) == 0
    (receipt,) = [one for client, one in read_receipts(Path(options.output_dir)).items() if client == 0]
    assert f"compare the chain {receipt.ledger.chain} with" in capsys.readouterr().out, "receipts.json has it"
    file = folder / "ledger.jsonl"
    file.write_text(file.read_text().replace("train", "trein", 1))
    assert main(["verify", str(state.path)]) == 2, "a later change is found"


# ---- nothing of a plan is opened, imported or run before it is accepted

TRACED = ("open", "import", "os.listdir", "os.scandir", "glob.glob", "subprocess.Popen", "os.system", "os.exec")
TRACED = (*TRACED, "os.posix_spawn", "socket.connect", "socket.getaddrinfo", "pickle.find_class", "ctypes.dlopen")
_seen: list[tuple[str, str]] | None = None


def _hook(event, arguments):
    if _seen is not None and event in TRACED:
        _seen.append((event, str(arguments[0]) if arguments else ""))


@contextmanager
def traced():
    """What this process opens, imports and starts, as (event, its first argument)."""
    global _seen
    if not getattr(sys, "_consent_hook", False):
        sys.addaudithook(_hook)  # stays until the process ends
        sys._consent_hook = True
    _seen = []
    try:
        yield _seen
    finally:
        _seen = None


def hostile(folder: Path) -> dict[str, dict]:
    """Options of plans that name code and files of their author, each with what an author could hope for."""
    place, module = str(folder / "bait.txt"), "bait_module"
    values = [
        place,
        f"file://{place}",
        f"~/{module}",
        "../bait.txt",
        f"{module}.Net",
        "http://127.0.0.1:9/bait",
        "$HOME",
    ]
    plans = {}
    for number, path in enumerate([f"{module}.Net", "os.system", "subprocess.run", "builtins.open", "torch.load"]):
        plans[f"class {path}"] = {"model": {"class_path": path, "init_args": {"command": f"touch {place}", "f": place}}}
        plans[f"class {path} without arguments"] = {"model": {"class_path": path}}
        plans[f"class and name {number}"] = {"model": {"name": "logistic", "class_path": path}}
        plans[f"strategy {path}"] = {"strategies": {f"0 {path}": "0" * 64}}
        plans[f"task {path}"] = {"task": path}
    for number, value in enumerate(values):
        plans[f"name {number}"] = {"model": {"name": value}}
        plans[f"option {number}"] = {"model": {"name": "logistic", "weights": value}}
        plans[f"data {number}"] = {"data": {"class_path": value, "init_args": {"df": value, "read": {"sep": value}}}}
        plans[f"caveat {number}"] = {"caveats": [f"See {value} and {{{{ 7*7 }}}} {{% include '{value}' %}}"]}
    for key in ("mechanism", "accountant", "adjacency", "unit", "sampling"):
        plans[f"privacy.{key}"] = {"of_privacy": {key: f"{module}.Net"}}
    plans["fix"] = {"model": {"name": "logistic", "fix": f"{module}.Net"}}
    plans["personal"] = {"model": {"name": "logistic", "personal_input": place}}
    plans["tags"] = {"model": {"name": "!!python/object/apply:os.system [true]"}}
    plans["list"] = {"model": [place]}
    plans["text"] = {"model": place}
    plans["deep"] = {"model": {"name": "logistic", "init_args": {place: {f"{module}.Net": [place] * 100}}}}
    plans["evaluation"] = {"evaluation": {"metrics": [f"{module}.Net"]}, "engine": {"name": f"{module}.Net"}}
    plans["seed"] = {"seed": place}
    return plans


@pytest.mark.e2e
def test_fifty_hostile_plans_build_open_and_import_nothing_that_an_honest_one_does_not(tmp_path, monkeypatch, capsys):
    (tmp_path / "bait_module.py").write_text("raise SystemExit('imported')")
    (tmp_path / "bait.txt").write_text("bait")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    honest, state = planned(tmp_path), state_of(tmp_path, 0, key=None)
    for flags in ([], ["--epsilon_limit", "3"], ["--epsilon_limit", "1"]):  # what fits, what does not: all is imported
        shown(state, honest, tmp_path, *flags)
    main(["accept", str(state.path), str(tmp_path / "none.json"), "--show"])
    refused = with_options(honest, model={"class_path": "nothing.Net"})
    shown(state, refused, tmp_path)
    shown(state, with_options(honest, model={"name": "logistc"}), tmp_path)
    with traced() as usual:
        shown(state, honest, tmp_path)
        shown(state, refused, tmp_path)
    usual, plans, pages, built = {*usual}, hostile(tmp_path), 0, []
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda self, *args, **options: built.append(type(self)))
    assert len(plans) >= 50 and any(name == "open" and "plan.json" in path for name, path in usual)
    file, page = str(tmp_path / "plan.json"), tmp_path / "page.html"
    for name, changed in plans.items():
        of_privacy = {"privacy": {**honest.plan.options["privacy"], **changed.pop("of_privacy", {})}}
        Path(file).write_text(wire.to_text(with_options(honest, **{**of_privacy, **changed})))
        for flags in ([], ["--page", str(page)]):
            page.unlink(missing_ok=True)
            with traced() as seen:
                code = main(["accept", str(state.path), file, "--show", *flags])
            pages += page.exists()
            assert code in (0, 2), name
            assert {*seen} - usual == set() and not built, name
            assert not state.plans() and "bait_module" not in sys.modules, name
        capsys.readouterr()
    assert pages >= 40, "most of them are shown, and refused with their reason"


def test_the_trace_sees_what_it_must(tmp_path, monkeypatch):
    (tmp_path / "bait_module.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    with traced() as seen:
        import bait_module  # noqa: F401

        (tmp_path / "bait_module.py").read_text()
        os.listdir(tmp_path)
    sys.modules.pop("bait_module")
    assert {("import", "bait_module"), ("os.listdir", str(tmp_path))} <= {*seen}
    assert any(event == "open" and path.endswith("bait_module.py") for event, path in seen)
