"""A node and a hostile server: what is asked for, what is answered, and the ledger before and after."""

import dataclasses
import json
import os
import random
import re
import socket
import stat
import threading
import time
from pathlib import Path

import pandas
import pytest
import torch
from hostile import HOSTILE, MODEL, ROUNDS, UNFIT, hostile, selection
from sites import (
    SITES,
    a_question,
    a_request,
    accepting,
    an_evaluation,
    asked,
    charges,
    hello,
    key_of,
    listening,
    planned,
    reply_in,
    state_of,
)

from dpfl_lightning.commands.node import main
from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.events import NonPrivateEvent
from dpfl_lightning.privacy.ledger.file import Head
from dpfl_lightning.sites import sockets, wire
from dpfl_lightning.sites.exchange import REFUSALS, Refused, Released, Reply, Welcome
from dpfl_lightning.sites.node.accept import accept, open_study, verified
from dpfl_lightning.sites.node.records import settings_of, site_population
from dpfl_lightning.sites.node.service import Node
from dpfl_lightning.sites.node.state import StateFolder
from dpfl_lightning.sites.wire import digest

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "federation.md"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("site")


@pytest.fixture(scope="module")
def terms(place):
    """IFCA: updates, and choices of models by the exponential mechanism."""
    return planned(place, strategies={"ifca": {"num_clusters": 2}}, rounds=ROUNDS)


@pytest.fixture(scope="module")
def node(place, terms):
    """A node with fresh noise, which no refusal of this module changes."""
    with accepting(place, terms) as node:
        yield node


def test_codes_are_all_that_others_learn(node, terms, place):
    assert asked(node, hello("0" * 64)) == asked(node, hello("../" + digest(terms))) == Refused("unknown_plan")
    assert asked(node, Refused("spent")) == asked(node, Released(1, ())) == Refused("malformed")
    assert reply_in(node.handle(b"GET / HTTP/1.1\r\n")) == Refused("malformed")
    assert all(code.isidentifier() for code in REFUSALS)
    assert asked(node, hello(digest(terms))) == Welcome(True, asked(node, hello(digest(terms))).paid)


@pytest.fixture
def fresh(tmp_path, terms):
    """A node on its first day."""
    with accepting(tmp_path, terms) as node:
        yield node


def test_releases_are_charged_once_sent_again_free_and_end_with_the_plan(fresh, terms):
    first = asked(fresh, a_request(terms, MODEL))
    assert isinstance(first, Released) and len(first.paid) == 1 and first.value.shape == MODEL.shape
    assert asked(fresh, a_request(terms, MODEL)).value.equal(first.value), "the same bytes"
    assert len(charges(fresh.state, terms)) == 1
    other = asked(fresh, a_request(terms, MODEL + 1))  # the same round from another start is another release
    assert [one.number for one in other.paid] == [0, 1] and len(charges(fresh.state, terms)) == 2
    halves = [asked(fresh, a_request(terms, MODEL, round=1, learning_rate=rate)) for rate in (0.1, 0.2)]
    assert isinstance(halves[0], Released) and halves[1] == Refused("spent")
    assert asked(fresh, a_request(terms, MODEL, round=2)) == Refused("spent")
    assert len(charges(fresh.state, terms)) == ROUNDS and verified(fresh.state, digest(terms)) <= 2.0
    choice = asked(fresh, a_question(digest(terms), 1, selection(terms)))
    assert choice.value in (0, 1) and asked(fresh, a_question(digest(terms), 1, selection(terms))).value == choice.value
    fresh.state.withdraw(digest(terms))
    assert asked(fresh, a_request(terms, MODEL)) == Refused("withdrawn")
    assert fresh.state.plans()[digest(terms)].epsilon > 1.9, "it stays reserved"


def table() -> dict[str, tuple[str, str]]:
    """What is asked for -> what the page says that it gets, and how the ledger changes."""
    section = PAGE.read_text().partition("## What a server can ask for\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    return {asks: (gets, ledger) for asks, gets, ledger in rows[2:]}


def test_every_line_of_the_table_of_the_page(fresh, terms, monkeypatch):
    first = []

    def train(model=MODEL, **changed):
        return asked(fresh, a_request(terms, model, **changed))

    def not_planned():
        replies = {what: asked(fresh, hostile(terms, what)) for what in HOSTILE}
        assert replies == dict.fromkeys(HOSTILE, Refused("not_planned"))
        return [*replies.values()]

    def at_once():
        replies = []
        requests = [a_request(terms, MODEL), a_question(digest(terms), 1, selection(terms))]
        threads = [threading.Thread(target=lambda one=one: replies.append(asked(fresh, one))) for one in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first.extend(reply.value for reply in replies if not isinstance(reply.value, int))
        return replies

    def failing():
        monkeypatch.setattr(fresh._studies[digest(terms)].clients.engine, "compute", None)
        replies = [train(MODEL + 2, round=3), asked(fresh, hello(digest(terms)))]
        (fresh.state.plan_folder(digest(terms)) / "error.log").unlink()
        return replies

    def of_no_study():
        replies = [asked(fresh, hello("0" * 64)), reply_in(fresh.handle(b"GET / HTTP/1.1\r\n"))]
        fresh.state.withdraw(digest(terms))
        return [*replies, train()]

    cases = {  # in the order in which one node is asked, with the lines that its ledger gets
        "less noise": (not_planned, 0),
        "several releases at once": (at_once, 2),
        "the same release again": (lambda: [train()], 0),
        "anything, with a signed head": (lambda: [train(known=Head("0" * 32, 1, "0" * 32))], 0),
        "that the site scores": (lambda: [asked(fresh, an_evaluation(digest(terms), 1, MODEL))], 0),
        "a model that is not finite": (lambda: [train(model) for model in UNFIT.values()], 0),
        "the same round from another model": (lambda: [train(MODEL + 1)], 1),
        "something whose computation fails": (failing, 1),
        "another round": (lambda: [train(round=4)], 0),
        "anything with another hash": (of_no_study, 0),
    }
    left = table()
    for asks, (ask, lines) in cases.items():
        (line,) = [one for one in left if one.startswith(asks)]
        (gets, ledger), before = left.pop(line), charges(fresh.state, terms)
        replies = ask()
        codes = {reply.code for reply in replies if isinstance(reply, Refused)}
        assert codes == {*re.findall("`([a-z_]+)`", gets)}, line
        assert codes or all(isinstance(reply, Released | Welcome) for reply in replies), line
        assert len(charges(fresh.state, terms)) == len(before) + lines, line
        assert ledger.startswith("unchanged" if lines == 0 else "one line"), line
        assert asks != "the same release again" or replies[0].value.equal(first[0])
    assert not left, "the table has further lines"


def test_an_error_after_the_charge_halts_the_plan_and_its_text_stays(fresh, terms, monkeypatch):
    asked(fresh, hello(digest(terms)))
    study = fresh._studies[digest(terms)]

    def failing(*args):
        raise ValueError("record 17 has label 99")

    monkeypatch.setattr(study.clients.engine, "compute", failing)
    assert asked(fresh, a_request(terms, MODEL)) == Refused("halted")
    assert len(charges(fresh.state, terms)) == 1, "charged before it was computed"
    assert asked(fresh, hello(digest(terms))) == Refused("halted")
    log = fresh.state.plan_folder(digest(terms)) / "error.log"
    assert "record 17" in log.read_text() and stat.S_IMODE(log.stat().st_mode) == 0o600
    log.unlink()  # the operator has looked at it
    assert isinstance(asked(fresh, a_request(terms, MODEL)), Released)
    assert len(charges(fresh.state, terms)) == 2


def test_a_crash_between_charge_and_release_costs_the_charge_only(fresh, terms, monkeypatch):
    asked(fresh, hello(digest(terms)))
    with monkeypatch.context() as patch:

        def cut(*args):
            raise KeyboardInterrupt

        patch.setattr(fresh._studies[digest(terms)], "_keep", cut)
        with pytest.raises(KeyboardInterrupt):
            asked(fresh, a_request(terms, MODEL))
    fresh.close()
    again = Node(fresh.state, open_study)
    reply = asked(again, a_request(terms, MODEL))
    assert [one.number for one in reply.paid] == [0, 1] and len(charges(again.state, terms)) == 2
    again.close()


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fuzzed_messages_crash_nothing_and_charge_nothing(node, terms, count):
    draw, before = random.Random(1), charges(node.state, terms)
    honest = wire.encode(a_request(terms, MODEL))
    start = honest.index(b'"message"')
    hashed = honest.index(digest(terms).encode())
    for number in range(count):
        fuzzed = bytearray(honest)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(start, hashed + 200) if number % 2 else draw.randrange(len(fuzzed) - 2600)
            fuzzed[place] = draw.randrange(256)
        if bytes(fuzzed) == honest:
            continue
        content = node.handle(bytes(fuzzed))
        reply = reply_in(content)
        after = charges(node.state, terms)
        if isinstance(reply, Released):  # the changed bytes were free values, such as the learning rate
            assert after in (before, [*before, after[-1]]), "what was released before is sent again, and costs nothing"
        else:
            assert reply.code in REFUSALS and b"Traceback" not in content and after == before
        before = after


@pytest.mark.e2e
def test_on_the_socket_replies_leave_at_slots_and_hostile_streams_end(node, terms, tmp_path):
    path, slot = tmp_path / "socket", 0.2
    with listening(node, path, slot):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
        with pytest.raises(UserError, match="Another node listens"), listening(node, path):
            pass

        def exchange(content: bytes) -> tuple[Reply, float]:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                begun = time.monotonic()
                connection.sendall(content)
                reply = reply_in(sockets.receive(connection, wire.Limits(1 << 20, 1 << 20), 30.0))
                return reply, time.monotonic() - begun

        for content in (wire.encode(hello(digest(terms))), wire.encode(hello("?"))):
            _, seconds = exchange(content)
            assert seconds >= slot
        huge = wire.PREFIX.pack(b"DPFL", wire.VERSION, 100, 1 << 60)
        assert exchange(huge)[0] == exchange(b"\0" * wire.PREFIX.size)[0] == Refused("malformed")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(wire.encode(hello("?"))[:-1])  # cut off
        assert exchange(wire.encode(hello("?")))[0] == Refused("unknown_plan"), "the node still answers"
        replies = []
        threads = [threading.Thread(target=lambda: replies.append(exchange(wire.encode(hello("?"))))) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(replies) == 5
    assert not path.exists()


def changed_row(terms, **changed):
    rows = list(terms.plan.schedule.clients)
    (line, *others) = rows[0].planned
    rows[0] = dataclasses.replace(rows[0], planned=(dataclasses.replace(line, **changed), *others))
    schedule = dataclasses.replace(terms.plan.schedule, clients=tuple(rows))
    return dataclasses.replace(terms, plan=dataclasses.replace(terms.plan, schedule=schedule))


def of_site(terms, **changed):
    """The plan with other public facts of the first site."""
    return dataclasses.replace(terms, sites=(dataclasses.replace(terms.sites[0], **changed), *terms.sites[1:]))


def with_options(terms, **changed):
    options = {**terms.plan.options, **changed}
    return dataclasses.replace(terms, plan=dataclasses.replace(terms.plan, options=options))


#: a plan that no site should accept -> words of the error
PLANS = {
    "less noise than the budget pays": (
        lambda t: changed_row(
            t, event=dataclasses.replace(t.plan.schedule.clients[0].planned[0].event, noise_multiplier=0.3)
        ),
        "at most the budget",
    ),
    "more releases than the budget pays": (lambda t: changed_row(t, count=1000), "at most the budget"),
    "a release without noise": (lambda t: changed_row(t, event=NonPrivateEvent("everything")), "noisy releases only"),
    "noise of zero": (
        lambda t: changed_row(
            t, event=dataclasses.replace(t.plan.schedule.clients[0].planned[0].event, noise_multiplier=0.0)
        ),
        "finite cost",
    ),
    "code of the server": (lambda t: with_options(t, model={"class_path": "os.system"}), "model of dpfl_lightning"),
    "another model": (
        lambda t: with_options(t, model={"name": "convnet", "width": 4, "depth": 2}),
        "the model that this installation builds",
    ),
    "shuffled batches": (
        lambda t: with_options(t, privacy={**t.plan.options["privacy"], "sampling": "shuffle"}),
        "Poisson samples",
    ),
    "another version": (lambda t: dataclasses.replace(t, version="9.9"), "version of dpfl_lightning"),
    "another number of records": (
        lambda t: dataclasses.replace(
            t,
            plan=dataclasses.replace(
                t.plan, settings=(dataclasses.replace(t.plan.settings[0], num_records=9), *t.plan.settings[1:])
            ),
        ),
        "state the 480 records",
    ),
    "records of another shape": (
        lambda t: of_site(t, inputs=torch.zeros(0, 1, 9, 9)),
        "public facts of this site, got 'inputs of shape",
    ),
    "another key": (lambda t: of_site(t, public_key="ab" * 32), "public facts of this site, got 'other public_key'"),
    "no client of this name": (lambda t: of_site(t, name="a"), "client named 0"),
}


@pytest.mark.parametrize("what", PLANS)
def test_a_plan_that_does_not_hold_is_not_accepted(node, terms, what, tmp_path):
    change, words = PLANS[what]
    before = node.state.plans()
    with pytest.raises(UserError, match=words):
        accept(node.state, change(terms), 100.0, may_rise=True)
    assert node.state.plans() == before


def test_the_command_from_init_to_withdraw(place, terms, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dpfl_lightning.sites.node.accept.new_key", lambda: key_of(0))  # which the plan has

    def said(*words) -> str:
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr().out

    plan, state = tmp_path / "plan.json", tmp_path / "site"
    plan.write_text(wire.to_text(terms))
    site = ["--name", "0", "--data.name", "digits", "--clients.count", SITES, "--privacy.epsilon", 5]
    assert "480 records, 10 classes. 0 accepted plans" in said("init", state, *site, "--privacy.delta", 0.01)
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert stat.S_IMODE((state / "node.key").stat().st_mode) == 0o600
    assert "noise_key" in json.loads((state / "node.json").read_text())
    words = said("accept", state, plan, "--show")
    assert (
        "uses SizeWeighted, Ifca." in words
        and "(2, 0.001)-differential privacy per record" in words
        and "3 sites" in words
    )
    assert "epsilon 5 of 5" in said("status", state)
    assert main(["accept", str(state), str(plan), "--hash", "f" * 32]) == 2
    assert "read it with --show" in capsys.readouterr().err
    accepted = said("accept", state, plan, "--hash", digest(terms)[:32])
    assert f"Accepted as {digest(terms)}" in accepted and "epsilon 3 of 5" in accepted
    node = Node(StateFolder(state), open_study)
    asked(node, a_request(terms, MODEL))
    assert "active: 1 of " in said("status", state)
    assert "1 plan verified" in said("verify", state)
    node.close()
    with StateFolder(state).serving():
        assert main(["serve", str(state)]) == 2 and "served by one process" in capsys.readouterr().err
    ledger = StateFolder(state).plan_folder(digest(terms)) / "ledger.jsonl"
    kept = ledger.read_bytes()
    ledger.write_bytes(kept.replace(b'"round": 1', b'"round": 2'))
    assert main(["verify", str(state)]) == 2 and "must be unchanged" in capsys.readouterr().err
    ledger.write_bytes(kept)
    assert "still reserves 2" in said("withdraw", state, digest(terms)[:8])
    assert "withdrawn: 1 of" in said("status", state)
    for words, problem in (
        (["withdraw", state, "ffffff"], "one accepted plan"),
        (["serve", tmp_path / "nowhere"], "be the folder of a node"),
        (["accept", state], "`PLAN` must be a file"),
        (["accept", state, state / "site.json"], "wrote"),
        (["init", state, *site], "new or empty"),
        (["init", tmp_path / "b", *site, "--client", "3"], "`--client` must be one of 0, 1, 2, got '3'"),
        (["init", tmp_path / "b", *site, "--data.nme", "x"], "Did you mean `data.name`?"),
        (["init", tmp_path / "b", *site, "--privacy.clip_norm", 2], "`privacy.clip_norm` must be left out"),
        (["init", tmp_path / "b", *site, "--rounds", 3], "`--rounds` must be left out of this command"),
        (["init", tmp_path / "b", *site[:-2]], "`privacy.epsilon` must be a budget"),
        (["init", tmp_path / "b", *site, "--privacy.epsilon", "[1, 2, 3]"], "have 1 values"),
        (["accept", tmp_path / "site", plan, "--epsilon_limit", 0], "--epsilon_limit"),
    ):
        assert main([str(word) for word in words]) == 2, words
        assert problem in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_records_that_changed_after_the_first_release_halt_the_plan(tmp_path, terms):
    state = state_of(tmp_path, 0, key=None)
    accept(state, terms, 2.5)
    node = Node(state, open_study)
    asked(node, a_request(terms, MODEL))
    node.close()
    state.save(dataclasses.replace(state.settings(), client="1"))  # other records
    assert asked(Node(state, open_study), hello(digest(terms))) == Refused("halted")


def test_a_site_reads_its_records_as_fit_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pandas.DataFrame({"age": range(20), "city": ["oslo", "rome"] * 10, "ill": [0, 1] * 10}).to_csv(
        "records.csv", index=False
    )
    own = {"df": "records.csv", "label": "ill", "num_classes": 2, "features": ["age"]}

    def records_of(whose=None, **init_args):
        data = {"class_path": "dpfl_lightning.Population.from_dataframe", "init_args": own | init_args}
        options = from_mapping({"data": data, "privacy": {"epsilon": 3}})
        return site_population(settings_of(options, "rome", whose))

    assert records_of(held_out=0)[0].num_records == (20,), "without a column of clients"
    population, client = records_of("oslo", client="city", held_out=0)
    assert population.names[client] == "oslo", "or one of the clients of a table"
    with pytest.raises(
        UserError, match=r"`label` must name columns of the table \(age, city, ill\).*Did you mean `ill`"
    ):
        records_of(label="il")
    options = from_mapping({"data": {"class_path": "x.y", "init_args": own}, "privacy": {"epsilon": 3}})
    settings = settings_of(options, "a")
    assert settings.config["data"]["init_args"]["df"] == str(tmp_path / "records.csv"), "served from any folder"
