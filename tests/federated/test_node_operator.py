"""What the operator of a node sees and decides: limits, plans that are shown, opened, left, and cut off by a crash."""

import dataclasses
import json
import sys
from pathlib import Path

import pandas
import pytest
import sites
import torch
from sites import a_request, asked, charges, configured, nodes_of, over, planned, site, state_of

from dpfl_lightning.commands.node import main
from dpfl_lightning.commands.plan import main as plan_command
from dpfl_lightning.errors import UserError
from dpfl_lightning.federated.client import answers
from dpfl_lightning.federated.messages.clients import LostClients
from dpfl_lightning.federated.messages.jobs import ClassGradients
from dpfl_lightning.federated.messages.query import SelectModel
from dpfl_lightning.federated.messages.requests import Ask
from dpfl_lightning.federated.server.strategy import Strategy
from dpfl_lightning.privacy.accounting.events import GaussianEvent, SelectionEvent
from dpfl_lightning.privacy.accounting.planned import Planned
from dpfl_lightning.privacy.accounting.units import Record
from dpfl_lightning.privacy.mechanism import ExponentialMechanism
from dpfl_lightning.runtime.spoken import WORDS, digits_of, words_of
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import MOST_HEADER
from dpfl_lightning.sites.node.accept import accept, open_study
from dpfl_lightning.sites.node.service import Node
from dpfl_lightning.sites.node.state import StateFolder, kept_releases
from dpfl_lightning.sites.server.deploy import planning_loop, server_population, terms_of
from dpfl_lightning.sites.terms import cost_of, read_terms
from dpfl_lightning.sites.wire import digest

MODEL = torch.zeros(650)


@pytest.fixture(scope="module")
def terms(tmp_path_factory):
    return planned(tmp_path_factory.mktemp("plan"))


@pytest.fixture
def state(tmp_path):
    return state_of(tmp_path, 0, key=None)


@pytest.fixture
def said(state, terms, tmp_path, capsys):
    """Run a verb of the node on its folder; return what it prints, and its errors."""
    (tmp_path / "plan.json").write_text(wire.to_text(terms))

    def run(verb, *words, plan=None, code=0) -> str:
        file = [str(tmp_path / "plan.json")] if verb == "accept" else [] if plan is None else [plan]
        assert main([verb, str(state.path), *file, *map(str, words)]) == code
        return "".join(capsys.readouterr())

    return run


@pytest.mark.e2e
def test_a_crash_after_the_reservation_does_not_hide_the_limit(state, terms, said, monkeypatch):
    def cut(self, *args):
        raise KeyboardInterrupt

    for name in ("save", "_write"):  # the machine stops at either write
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(StateFolder, name, cut)
            accept(state, terms, 3.0)
        assert not state.plans() or "epsilon 2 and delta 0.001 are reserved; epsilon 1 of 3" in said("status")
    accept(state, terms)
    assert "epsilon 1 of 3" in said("status"), "the limit was given before the crash"


def test_shown_plans_are_compared_with_the_limit(said):
    assert "This plan alone: times as likely, at most 7.39; " in said("accept", "--show")
    assert "does not fit" in said("accept", "--show", "--epsilon_limit", 1.5)
    shown = said("accept", "--show", "--epsilon_limit", 3)
    assert "epsilon 3; delta 0.01.\nLeft" in shown and "epsilon 1; delta 0.009." in shown
    assert "It fits." in shown
    assert "0 accepted plans" in said("status")
    said("accept", "--epsilon_limit", 3)
    shown = said("accept", "--show")
    assert (
        "has accepted the plan, and it fits the records" in shown
        and "Left now: times as likely, at most 2.71; " in shown
    )


def test_a_plan_of_another_key_is_shown_as_one_that_does_not_fit(terms, said, tmp_path):
    other = dataclasses.replace(terms.sites[0], public_key=terms.sites[1].public_key)
    plan = dataclasses.replace(terms, sites=(other, *terms.sites[1:]))
    (tmp_path / "plan.json").write_text(wire.to_text(plan))
    assert "does not fit: `PLAN` must have the public facts" in said("accept", "--show", "--epsilon_limit", 3)
    assert "`PLAN` must have the public facts" in said("accept", "--epsilon_limit", 3, code=2)


def test_a_node_without_its_own_key_is_neither_served_nor_verified(state, said):
    assert f"public key is {state.site().public_key}" in said("status")
    file = state.path / "node.key"
    for content, words in ("07" * 32, "belong to site.json"), ("", "hold 64 hexadecimal digits"):
        file.write_text(content)
        for verb in ("serve", "status", "verify"):
            assert words in (error := said(verb, code=2)) and str(file) in error


def test_sites_of_one_key_are_named(terms):
    sites = [terms.sites[0], terms.sites[1], dataclasses.replace(terms.sites[2], public_key=terms.sites[1].public_key)]
    with pytest.raises(UserError, match="one key of 1 and 2"):
        server_population(configured(Path("unused")), sites)


def test_a_limit_is_raised_by_a_word_and_never_silently(state, said, terms, tmp_path):
    said("accept", "--epsilon_limit", 3)
    (tmp_path / "plan.json").write_text(wire.to_text(planned(tmp_path, rounds=1)))
    assert "`--epsilon_limit` must be at most 3" in said("accept", "--epsilon_limit", 9, code=2)
    assert state.settings().epsilon_limit == 3
    accepted = said("accept", "--epsilon_limit", 9, "--raise_limits")
    assert "The limit of epsilon was 3 and is now 9." in accepted
    assert "2 accepted plans: epsilon 4 " in said("status")
    said("withdraw", plan=digest(terms)[:8])
    assert "1 accepted plan and 1 withdrawn: epsilon 2 " in said("status")


@pytest.mark.e2e
def test_limits_of_persons_are_said_and_plans_of_another_unit_refused(tmp_path, terms, capsys):
    of_persons = planned(tmp_path, **sites.OF_PERSONS, clients={"count": 3, "batch_size": 60})
    state = state_of(tmp_path / "persons", 0, key=None, persons=True)
    (tmp_path / "plan.json").write_text(wire.to_text(of_persons))
    assert main(["accept", str(state.path), str(tmp_path / "plan.json")]) == 0
    shown = capsys.readouterr().out
    count = site(0, persons=True).num_records
    for words in (
        f"rows of {count} persons",
        "each person's gradient, the mean over at most 3 of the person's rows, is clipped",
        "privacy per person (add or remove one person of one client), Poisson sampling of persons, at most 3 rows of",
        "what other sites send of the same person",
        "its number of persons for training",
        "is left per person",
    ):
        assert words in shown, words
    with pytest.raises(UserError, match="public facts of this site, got 'unit record instead of person'"):
        accept(state, terms)
    with pytest.raises(UserError, match="public facts of this site, got 'unit person instead of record'"):
        accept(state_of(tmp_path, 0, key=None), of_persons)
    for key, value, ours in (("unit", "record", "person"), ("rows_per_person", 4, "3")):
        options = {**of_persons.plan.options, "privacy": {**of_persons.plan.options["privacy"], key: value}}
        forged = dataclasses.replace(of_persons, plan=dataclasses.replace(of_persons.plan, options=options))
        with pytest.raises(UserError, match=f"`PLAN` must have the privacy.{key} of this site, {ours}, got .?{value}"):
            accept(state, forged)
        with pytest.raises(UserError, match=f"`privacy.{key}` must be that of site 0, {ours}, got .?{value}"):
            server = configured(tmp_path, privacy={**sites.OF_PERSONS["privacy"], key: value})
            server_population(server, of_persons.sites)


@pytest.mark.e2e
def test_gradients_of_classes_are_refused_where_persons_are_protected(tmp_path):
    terms = planned(tmp_path, **sites.OF_PERSONS, clients={"count": 3})  # one step
    state = state_of(tmp_path, 0, key=None, persons=True)
    accept(state, terms)
    node = Node(state, open_study)
    assert asked(node, a_request(terms, MODEL, job=ClassGradients(num_classes=10))).code == "not_planned"
    assert not charges(state, terms) and asked(node, a_request(terms, MODEL)).value.shape == MODEL.shape
    node.close()


@pytest.mark.parametrize(
    ("most", "says"),
    [(None, "a person may have several"), (4, "for all records of a person with several, at the same delta")],
)
def test_a_plan_of_records_says_at_sites_what_holds_for_persons(most, says, tmp_path, monkeypatch):
    privacy, data = {"rows_per_person": most}, {"name": "digits", "records_per_person": 4}
    monkeypatch.setattr(sites, "OF_PERSONS", {"data": data, "privacy": privacy})
    person = dataclasses.replace(site(0, 1, persons=True), schema={"person": "patient"}, unit=Record(most))
    options = configured(tmp_path, data=data, privacy={"epsilon": 2, **privacy}, clients={"count": 1})
    terms = terms_of(planning_loop(options, [person]), [person])
    assert says in str(cost_of(terms, 0).guarantee)
    assert most or says in " ".join(terms.plan.caveats)


def test_lines_that_release_nothing_are_refused(terms):
    (line,) = terms.plan.schedule.clients[0].planned
    for empty in (
        dataclasses.replace(line, purpose="more", event=GaussianEvent(1.0, 5.0, 0)),
        dataclasses.replace(line, purpose="more", event=SelectionEvent(1.0, 0)),
        dataclasses.replace(line, purpose="more", count=-1),
    ):
        first = dataclasses.replace(terms.plan.schedule.clients[0], planned=(line, empty))
        schedule = dataclasses.replace(terms.plan.schedule, clients=(first, *terms.plan.schedule.clients[1:]))
        forged = dataclasses.replace(terms, plan=dataclasses.replace(terms.plan, schedule=schedule))
        with pytest.raises(UserError, match="PLAN"):
            cost_of(forged, 0)


@pytest.mark.e2e
def test_plans_are_opened_before_a_node_listens(state, terms, said, monkeypatch):
    monkeypatch.setattr("dpfl_lightning.sites.node.service.Listener.serve", lambda self: None)
    accept(state, terms, 3.0)
    assert f"{digest(terms)[:12]}  active: 0 of 2 releases paid" in said("serve") and "ready" in said("serve")
    own = {"class_path": "dpfl_lightning.Population.from_dataframe", "init_args": {"df": "nowhere.csv", "label": "x"}}
    data = {**state.settings().config["data"], "name": None, **own}
    state.save(dataclasses.replace(state.settings(), config={**state.settings().config, "clients": {}, "data": data}))
    late = said("serve", code=2)
    assert "not ready" in late and "nowhere.csv" in late, "the operator learns it now, and not at the first request"
    assert "listens at" not in late and "`STATE_DIR` must have an active plan that is ready" in late
    assert not (state.plan_folder(digest(terms)) / "error.log").exists()
    state.withdraw(digest(terms))
    assert "ready" not in said("serve")


@pytest.mark.e2e
def test_releases_of_another_format_are_not_served(state, terms, said):
    accept(state, terms, 3.0)
    node = Node(state, open_study)
    assert asked(node, a_request(terms, MODEL)).value.shape == MODEL.shape
    node.close()
    (file,) = kept_releases(state.plan_folder(digest(terms)))
    content = file.read_bytes()
    file.write_bytes(content[:4] + bytes([wire.VERSION + 1]) + content[5:])
    assert "not ready: the message is of format 5, not of 4" in said("serve", code=2)


@pytest.mark.e2e
def test_requests_are_as_large_as_the_accepted_plans_need(state, terms, tmp_path):
    node = Node(state, open_study)
    assert node.limits == wire.Limits(MOST_HEADER, 0), "nobody needs more without a plan"
    accept(state, terms, 9.0)
    numbers = node.limits.numbers
    assert numbers == 2 * 650 * 4, "a model and an anchor"
    request = a_request(terms, MODEL, anchor=MODEL, pull=0.1)
    assert asked(node, request).value.shape == MODEL.shape
    accept(state, planned(tmp_path, strategies={"ifca": {}}), 9.0)
    assert numbers < node.limits.numbers <= 64 * 650 * 4, "models of a question"
    long = wire.PREFIX.pack(b"DPFL", wire.VERSION, MOST_HEADER + 1, 0)
    large = wire.PREFIX.pack(b"DPFL", wire.VERSION, 10, node.limits.numbers + 1)
    for prefix in (long, large):
        with pytest.raises(wire.WireError, match="too long"):
            wire.sizes(prefix, node.limits)
    node.close()


@pytest.mark.e2e
def test_the_server_says_which_questions_are_too_long_for_nodes(tmp_path):
    terms = planned(tmp_path, strategies={"ifca": {}})
    nodes = nodes_of(tmp_path, terms)
    clients = over(nodes, terms, configured(tmp_path / "run", strategies={"ifca": {}})).clients
    question = SelectModel(mechanism_of={0: ExponentialMechanism(0.06)}, models=torch.zeros(65, 650), loss_bound=2.0)
    ((_, answer),) = clients.channel.send({0: Ask(1, question)}, {})
    assert isinstance(answer, LostClients)
    assert not charges(nodes[0].state, terms)


def test_a_plan_is_accepted_by_at_least_128_bits_of_its_hash_as_digits_or_words(state, terms, said, tmp_path):
    found = digest(terms)
    words = words_of(found[:32])
    shown_words = said("accept", "--show")
    assert f"Plan {found}, in words: {words}." in shown_words, "both forms"
    other = digest(dataclasses.replace(terms, run="f" * 32))
    forged = found[:12] + other[12:]  # another plan with the same 12 digits is found in a minute
    for short in (found[:12], found[:31], " ".join(words.split()[:15]), "", forged[:12]):
        assert "`--hash` must be at least 32 hexadecimal digits or 16 words" in said("accept", "--hash", short, code=2)
    for wrong in (
        other,
        forged,
        forged[:32],
        words_of(other),
        words_of(f"{found[:30]}{int(found[30:32], 16) ^ 1:02x}"),
        found + "00",
    ):
        assert "`--hash` must be the hash of" in said("accept", "--hash", wrong, "--epsilon_limit", 5, code=2)
    misheard = words.replace(words.split()[3], "xylophone")
    assert "16 words" in said("accept", "--hash", misheard, code=2)
    assert not state.plans()
    for given in (found, found[:32], found[:40].upper(), words, words.title().replace(" ", "-"), words_of(found)):
        assert "This plan alone: " in said("accept", "--show", "--hash", given)
    assert f"Accepted as {found}." in said("accept", "--hash", words, "--epsilon_limit", 5)


def test_the_server_prints_the_hash_that_sites_compare(tmp_path, capsys):
    state_of(tmp_path, 0)
    file = tmp_path / "plan.json"
    argv = ["--config", "digits", "--privacy.epsilon", "2", "--rounds", "1"]
    argv += ["--sites", str(tmp_path / "site0" / "site.json"), "--export", str(file)]
    assert plan_command(argv) == 0
    found = digest(read_terms(file))
    printed = capsys.readouterr().out
    assert found in printed and words_of(found[:32]) in printed
    assert plan_command([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hash"] == digest(read_terms(file))


def test_words_of_a_digest_are_distinct_and_read_back():
    assert len({*WORDS}) == 256 and sorted(WORDS) == WORDS and not any({*word} <= {*"abcdef"} for word in WORDS)
    everything = bytes(range(256)).hex()
    assert digits_of(words_of(everything)) == digits_of(everything) == everything


def test_sites_of_other_columns_are_named_with_what_differs(terms):
    table = dataclasses.replace(terms.sites[0], inputs=torch.zeros(0, 2), features={"names": ["age", "sex=f"]})
    table = dataclasses.replace(table, schema={"classes": ["no", "yes"]})
    for changed, words in (
        ({"features": {"names": ["age", "bmi"]}}, "1: more columns bmi and no columns sex=f"),
        ({"features": {"names": ["sex=f", "age"]}}, "the columns in the order sex=f, age instead of age, sex=f"),
        (
            {"features": {"names": ["age", "sex=f"], "encoding": {"age": {"scale": [1, 2]}}}},
            r"1: encoding {age: {scale: \[1, 2\]}} instead of null",
        ),
        ({"schema": {"classes": ["yes", "no"]}}, r"1: classes \['yes', 'no'\] instead of \['no', 'yes'\]"),
        ({"schema": {"classes": ["no", "yes"], "fill": {"crp": "1"}}}, "1: fill {crp: '1'} instead of null"),
        ({"num_classes": 3}, "3 classes instead of 10"),
        ({"inputs": torch.zeros(0, 3)}, r"1: inputs of shape \(3,\) and labels of torch.int64 instead of \(2,\)"),
    ):
        other = dataclasses.replace(table, name="1", public_key=terms.sites[1].public_key, **changed)
        with pytest.raises(UserError, match=words):
            server_population(configured(Path("unused")), [table, other])


@pytest.mark.e2e
def test_a_server_of_a_table_names_its_test_set_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pandas.DataFrame({"age": [1, 2] * 20, "ill": [0, 1] * 20}).to_csv("a.csv", index=False)
    table = "class_path: dpfl_lightning.Population.from_dataframe, init_args: {label: ill, num_classes: 2, held_out: 0}"
    Path("site.yaml").write_text(f"data: {{{table}}}\nprivacy: {{delta: 1.0e-3}}\n")
    Path("run.yaml").write_text("model: {name: logistic}\nprivacy: {epsilon: {rome: 2}}\nclients: {batch_size: 8}\n")
    words = ["--config", "site.yaml", "--data.init_args.df", "a.csv", "--privacy.epsilon", "3"]
    assert main(["init", "rome", *words]) == 0
    plan = ["--config", "site.yaml", "--config", "run.yaml", "--sites", "rome/site.json", "--rounds", "1", "--json"]
    for test in ([], ["--data.init_args.test", "a.csv"]):
        assert plan_command([*plan, *test, "--export", "plan.json"]) == 0
    assert main(["accept", "rome", "plan.json"]) == 0
    assert (
        plan_command([*plan, "--data.init_args.test", "a.csv", "--data.init_args.columns", "{age: {scale: [1, 2]}}"])
        == 2
    )
    assert (
        "`test set` must have records like those of the sites, got 'encoding {age: {scale: [1.0, 2.0]}} instead of"
        in capsys.readouterr().err
    )
    assert plan_command([*plan, "--clients.count", "2"]) == 2
    assert "`--clients.count` must be 1 or left out" in capsys.readouterr().err


class Own(SelectModel):
    """A query of a user's own, which is not registered."""


class Curious(Strategy):
    """A strategy whose module has a query of its own, which it asks of the first client once."""

    def plan_run(self, schedule, view):
        one = Planned("select", SelectionEvent(0.1), 1)
        return schedule.replan(lambda i, client: dataclasses.replace(client, planned=(*client.planned, one)))

    def plan_round(self, plan, view):
        if view.round == 1:
            models = view.state.models[0].expand(2, -1)
            self._answers = view.ask(Own(mechanism_of={0: ExponentialMechanism(0.1)}, models=models, loss_bound=2.0))
        return plan

    def metrics(self, view):
        return {"answers": float(len(self._answers))}


class OwnModel(torch.nn.Module):
    """A model of a user's own, beside the query that it brings to the sites."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    def forward(self, x):
        return self.layers(x)


OWN_MODEL = f"{__name__}.OwnModel"


def test_a_question_that_nodes_cannot_read_is_refused_when_the_run_is_planned(tmp_path):
    options = configured(tmp_path, strategies={f"{__name__}.Curious": {}})
    with pytest.raises(UserError, match=r"ask questions that nodes can read, got 'Own'.*wire.register"):
        terms_of(planning_loop(options, [site(client) for client in range(3)]), [])


@pytest.mark.e2e
def test_a_question_of_the_class_path_that_sites_allow_is_answered(tmp_path, monkeypatch):
    monkeypatch.setitem(wire.MESSAGES, "Own", Own)  # as `wire.register(Own)` in the module of the model
    given = {"strategies": {f"{__name__}.Curious": {}}, "model": {"class_path": OWN_MODEL}}
    with pytest.raises(UserError, match=r"ask questions that nodes can answer, got 'Own'.*rows_of"):
        planned(tmp_path, **given)
    monkeypatch.setattr(answers, "_ROWS", dict(answers._ROWS))
    answers.rows_of(Own)(answers._ROWS[SelectModel])
    options, terms = configured(tmp_path / "run", **given), planned(tmp_path, **given)
    words = f"`PLAN` must name a model of dpfl_lightning, got '{OWN_MODEL}'. To allow a class that you have read, give"
    with pytest.raises(UserError, match=f"{words} model.class_path and model.init_args to `dpfl node init`"):
        accept(state_of(tmp_path / "other", 0), terms)
    usual = sites.settings_for
    monkeypatch.setattr(sites, "settings_for", lambda *args: dataclasses.replace(usual(*args), model=OWN_MODEL))
    nodes = nodes_of(tmp_path, terms, key=None)
    loop = over(nodes, terms, options)
    assert loop.run().metrics["answers"] == 1.0


TELLING = """
import pathlib
import torch

def tell(what):
    with pathlib.Path(__file__).with_name("told.txt").open("a") as file:
        file.write(f"{what}\\n")

tell("imported")

class Net(torch.nn.Module):
    def __init__(self, weights, width=1):
        super().__init__()
        tell(f"{weights} {width}")
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    def forward(self, x):
        return self.layers(x)
"""
FIXED = {"weights": "start.pt", "width": 1}


@pytest.fixture
def told(tmp_path, monkeypatch):
    """What a class of the site has told since it was asked before: when it is imported, and its arguments."""
    (tmp_path / "telling.py").write_text(TELLING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "telling", raising=False)
    usual, file = sites.settings_for, tmp_path / "told.txt"
    fixed = {"model": "telling.Net", "model_args": FIXED}
    monkeypatch.setattr(sites, "settings_for", lambda *args, **more: dataclasses.replace(usual(*args, **more), **fixed))

    def since() -> list[str]:
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines

    yield since
    sys.modules.pop("telling", None)


def of_class(tmp_path, told, arguments):
    """A plan whose model is a class of the site; what the server's planning told is forgotten."""
    found = planned(tmp_path, model={"class_path": "telling.Net", "init_args": arguments})
    told()
    sys.modules.pop("telling")
    return found


@pytest.mark.e2e
def test_nothing_of_a_plan_is_imported_or_built_before_it_is_accepted(tmp_path, told, monkeypatch, capsys):
    terms, file, state = of_class(tmp_path, told, FIXED), tmp_path / "plan.json", state_of(tmp_path, 0, key=None)
    file.write_text(wire.to_text(terms))
    monkeypatch.setattr("dpfl_lightning.sites.node.service.Listener.serve", lambda self: None)

    def run(*words) -> tuple[int, str]:
        return main([words[0], str(state.path), *map(str, words[1:])]), "".join(capsys.readouterr())

    code, shown = run("accept", file, "--show", "--epsilon_limit", 3)
    assert code == 0 and "epsilon 2; delta 0.001." in shown and "It fits." in shown
    for words in ("{'class_path': 'telling.Net'}", "{'init_args': {'weights': 'start.pt'}}", "{'optimizer': SGD("):
        assert words in shown
    for words in (("status",), ("verify",), ("serve",), ("accept", file, "--hash", "f" * 32)):
        run(*words)
    assert run("accept", file, "--epsilon_limit", 1)[0] == 2, "the limits come first"
    assert told() == [] and "telling" not in sys.modules
    assert run("accept", file, "--epsilon_limit", 3)[0] == 0
    assert told() == ["imported", "start.pt 1"], "once"
    run("status")
    run("verify")
    run("accept", file, "--show")
    assert told() == []
    assert "ready" in run("serve")[1] and told() == ["start.pt 1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({**FIXED, "weights": "/etc/passwd\x1b[2J"}, r"init_args.weights .* of 'start.pt', got '/etc/passwd\\x1b\[2J'"),
        ({**FIXED, "width": True}, "init_args.width .* of 1, got True"),
        ({"weights": "start.pt"}, "init_args.width .* of 1, got 'none'"),
        ({}, "init_args.weights .* of 'start.pt', got 'none'"),
        ({**FIXED, "depth": 2}, "init_args.depth .* without it, got 2"),
        (["start.pt"], "a mapping model.init_args"),
    ],
)
def test_other_arguments_than_the_site_has_fixed_are_refused_before_anything_is_built(arguments, words, tmp_path, told):
    terms, state = of_class(tmp_path, told, FIXED), state_of(tmp_path, 0, key=None)
    options = {**terms.plan.options, "model": {"class_path": "telling.Net", "init_args": arguments}}
    forged = dataclasses.replace(terms, plan=dataclasses.replace(terms.plan, options=options))
    with pytest.raises(UserError, match=f"`PLAN` must have .*{words}"):
        accept(state, forged)
    with pytest.raises(UserError, match=r"or the class telling\.Net of this site, got 'os.system'"):
        options = {**terms.plan.options, "model": {"class_path": "os.system", "init_args": {"command": "true"}}}
        accept(state, dataclasses.replace(terms, plan=dataclasses.replace(terms.plan, options=options)))
    assert told() == [] and not state.plans()


def test_init_fixes_the_class_of_a_model_and_its_arguments(tmp_path, told, capsys):
    words = ["--name", "0", "--data.name", "digits", "--clients.count", "3", "--privacy.epsilon", "5"]
    model = [
        "--model.class_path",
        "telling.Net",
        "--model.init_args.weights",
        "start.pt",
        "--model.init_args.width",
        "1",
    ]
    assert main(["init", str(tmp_path / "own"), *words, *model]) == 0
    assert f"Plans may name the model telling.Net with the arguments {FIXED}, and no others." in capsys.readouterr().out
    settings = StateFolder(tmp_path / "own").settings()
    assert (settings.model, settings.model_args) == ("telling.Net", FIXED)
    assert told() == [], "the operator has read it"
