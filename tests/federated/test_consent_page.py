"""`dpfl node accept --show --page`: what an officer is told before signing, and that a plan does nothing before it."""

import dataclasses
import os
import re
import shutil
import stat
import sys
from contextlib import contextmanager
from pathlib import Path

import pandas
import pytest
import sites
import torch
from pages import EVIL, Reader, words_of
from sites import federation, planned, state_of

from dpfl_lightning.commands.ledger import main as ledger_command
from dpfl_lightning.commands.node import main
from dpfl_lightning.config.mapping import from_mapping
from dpfl_lightning.reporting.site_page import TOTALS
from dpfl_lightning.runtime.spoken import words_of as spoken
from dpfl_lightning.sites import wire
from dpfl_lightning.sites.exchange import Hello
from dpfl_lightning.sites.node.accept import accept, open_study, site_of
from dpfl_lightning.sites.node.records import settings_of, site_population
from dpfl_lightning.sites.node.service import Node
from dpfl_lightning.sites.node.state import StateFolder
from dpfl_lightning.sites.server.clients import Sites
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
    states, facts = [], []
    for number, name in enumerate(("cork", "dijon", "essen")):
        file = folder / f"{name}.csv"
        table = TABLE.assign(Fallnummer=[f"{name}{row}" for row in range(ROWS)], age=TABLE.age + number)
        table.to_csv(file, index=False)
        arguments = {"df": str(file), "label": "died", "classes": ["no", "yes"], "scale": {"age": [60, 20]}}
        arguments |= {"categories": {"sex": ["f", "m"]}, "person": "Fallnummer", "held_out": held_out}
        data = {"class_path": "dpfl_lightning.Population.from_dataframe", "init_args": arguments}
        privacy = {"epsilon": 5, "delta": 0.01}
        settings = settings_of(from_mapping({"data": data, "privacy": privacy}), name)
        facts.append(site_of(settings, *site_population(settings), sites.key_of(number)))
        states.append(StateFolder.create(folder / name, settings, facts[-1], sites.key_of(number)))
    options = {"data": {"class_path": data["class_path"], "init_args": {**arguments, "df": None}}}
    clients = {"count": 3, "learning_rate": 0.5, "batch_size": 20}
    asked = sites.configured(folder / "planned", clients=clients, **options, **more)
    return states, terms_of(planning_loop(asked, facts), facts)


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
    "who sees what": "the server, which is not trusted every noisy update of this site, its name, its number of "
    "records for training, names and scales of columns, classes, its budget, that it takes part, and when it answers "
    "records, noise, exact scores, anything before noise was added",
    "worst case": "somebody who knows all other records, and tosses a coin on whether this one was in the data, "
    "is right in 50 of 100 cases. With all that this site would send in this run they are right in at most 95.3 of "
    "100",
    "what epsilon 3 means": "Experts write this promise as epsilon 3 and delta 0.001 : the factor is "
    "exp(epsilon), 21, and delta is the probability of the exception.",
    "deletion": "data_key, releases/, scores.json, report.html, private.json, error.log, contact.txt once the "
    "study has ended; do so then, because data_key lets its reader test guesses of records",
    "withdrawal of a person": "If they are held out (section 2 says how to find out), the study goes on without "
    "them. If they are used for training, the plan no longer fits, and the node refuses it: all sites need a new "
    "plan. This site then sets up a new node, whose limits are smaller by all that this node has reserved for its "
    "plans (section 5).",
    "withdrawal": "From then on the node refuses the server. What was sent cannot be called back",
    "audit": "compares the ledger with the accepted plan; shows all plans and the limit",
    "contact": "Contact for questions about this study: Dr. A. Muster, +49 30 123.",
    "other studies": "plans times as likely, at most except with probability right guesses, at most epsilon "
    "delta Before this plan (0 plans; this one not counted) 1 0 50 of 100 cases 0 0 This plan alone 21 1 in 1,000 "
    "95.3 of 100 cases 3 0.001 Together, if you sign (this plan counted) 21 1 in 1,000 95.3 of 100 cases 3 0.001 "
    "Your limit 150 1 in 100 99.4 of 100 cases 5 0.01 Left afterwards 7.4 1 in 111 88.2 of 100 cases 2 0.009 Your "
    "limit is the most that all plans of this node may ever cost together: the node refuses a plan above it. It fits.",
    "held-out records": "120 rows. No training uses them. They score models that the server sends, in general "
    "the final one. The exact scores stay here. Nothing of them leaves this site: no score, no count, not even their "
    "number.",
    "what is private": "Private: this page stays with the operator and the data protection officer of this site.",
    "collusion": "If all sites and the server put together what they know (collusion), the promise of section 1 "
    "is the same",
    "what changed since the last plan": "This is the first plan at this node.",
}


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
        "at most 7.4 times as likely",
        "with probability 1 in 1,000",
        "88.1 of 100 cases",
        "epsilon 2 and delta 0.001",
        "60 records of this site",
        "Held out no row",
        "age, sex; beside them only the label and, if there is one, the column that names persons",
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
    assert "Fallnummer" not in page and "cork7" not in page and ".csv" not in page
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
    assert "Not for this node: its noise follows from a test key" in page


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
    lies = {"schema": {"columns": ["all of it is safe"], "label": ["all of it is safe"]}, "unit": "harmless"}
    liars = tuple(dataclasses.replace(one, **lies) for one in terms.sites)
    page = words_of(shown(state, dataclasses.replace(terms, sites=liars), tmp_path))
    assert "harmless" not in page.replace("'unit harmless instead of record'", "") and "does not fit" in page
    assert "none by name: records are numbers of shape" in page and page.count("all of it is safe") <= 1
    other = dataclasses.replace(terms, version="0.0 and safe")
    assert "dpfl_lightning 0.0" not in words_of(shown(state, other, tmp_path))


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
        "budget epsilon 2, delta 0.001 epsilon 1, delta 0.001",
        "rounds 2 3",
        "option model.name 'logistic' 'convnet'",
        "Before this plan (1 plan; this one not counted) 7.4 1 in 1,000 88.1 of 100 cases 2 0.001",
        "This plan alone 2.8 1 in 1,000",
        "Together, if you sign (this plan counted) 21 1 in 500 95.3 of 100 cases 3 0.002",
    ):
        assert part in page, part
    assert "columns none" not in page and "label what" not in page


def test_without_the_rows_of_one_person_the_plan_is_refused(tmp_path):
    """As the page says about the withdrawal of one person."""
    (cork, *_), terms = of_tables(tmp_path)
    accept(cork, terms, 2.5)
    assert Node(cork, open_study).problem(digest(terms)) is None
    file = tmp_path / "cork.csv"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if ",cork7," not in line))
    assert "must have the public facts of this site" in Node(cork, open_study).problem(digest(terms))
    assert QUESTIONS["withdrawal of a person"] in words_of(shown(cork, terms, tmp_path))
    assert "Held out not counted, because the plan does not fit" in words_of(shown(cork, terms, tmp_path))


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


def test_the_operator_is_told_whether_one_person_is_held_out(tmp_path, capsys):
    (cork, *_), terms = of_tables(tmp_path, held_out=0.3)
    page = words_of(shown(cork, terms, tmp_path))
    population, client = site_population(cork.settings())
    held_out = population.held_out_of[client]
    assert f"Held out {len(held_out)} rows of {len(held_out)} persons. No training uses them." in page
    assert f"dpfl node status {cork.path} --person ID" in page and "This is no secret" in page

    page = words_of(shown(cork, terms, tmp_path, "--epsilon_limit", "1"))
    assert f"Held out {len(held_out)} rows" in page and "Left afterwards none: above your limit - - - -" in page
    assert "It does not fit: `--epsilon_limit` must be at least 2" in page

    def said(person: str) -> str:
        assert main(["status", str(cork.path), "--person", person]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    capsys.readouterr()
    for row in (int(held_out[0]), int(population.train_of[client][0])):
        use = "held out, 1 row. No training uses them." if row in held_out else "used for training, 1 row."
        assert said(f"cork{row}") == f"Person cork{row}: {use}"
    assert said("nobody7") == "Person nobody7: no row at this site."
    assert main(["verify", str(cork.path), "--person", "cork1"]) == 2
    assert main(["status", str(state_of(tmp_path, 0).path), "--person", "cork1"]) == 2
    assert "`--person` must be given for data that name persons" in capsys.readouterr().err


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
    Node(state, None).handle(wire.encode(Hello(digest(terms), "")))  # leaves error.log
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
    assert "This site has accepted this plan." in before and "0 of 2 planned releases were made." in before
    loop_over(options, Sites(terms, tuple(node.handle for node in nodes))).run()
    folder = state.plan_folder(digest(terms))
    completed, after = words_of((folder / "report.html").read_text()), words_of(shown(state, terms, tmp_path))
    for page in (completed, after):
        assert (
            "2 of 2 planned releases were made, which cost epsilon 4" in page and "this site sends in this run" in page
        )
    private = "10. Private: exact scores on held-out records"
    assert private in completed and private not in after
    assert "Section 10 has exact figures about held-out records: give it to nobody." in completed
    assert completed.count("Private: ") == 4 and "Private: numbers of records by label and prediction" in completed
    assert (
        "All other plans (0 plans; this one not counted) 1 0" in completed
        and "Together (this plan counted) 55" in completed
    )
    for question in ("collusion", "deletion", "withdrawal", "audit"):
        assert QUESTIONS[question] in completed
    for node in nodes:
        node.close()
    shutil.rmtree(folder / "releases")
    for name in ("scores.json", "report.html", "private.json", "error.log"):
        (folder / name).unlink(missing_ok=True)
    capsys.readouterr()
    assert main(["verify", str(state.path)]) == 0 and main(["status", str(state.path)]) == 0
    assert "finished: 2 of 2 releases paid" in capsys.readouterr().out
    assert ledger_command([str(folder), "--export", str(tmp_path / "events.json")]) == 0


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
