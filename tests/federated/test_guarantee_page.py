"""The page: complete, self-contained, escaped, and of a bearable size."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from fakes import FRAME, a_result, a_view
from markupsafe import escape
from pages import EVIL, Reader, words_of

from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.federated.server.run import Run
from dpfl_lightning.privacy.accounting.guarantee import (
    NOT_COVERED,
    OTHER_RUNS,
    UNKNOWN_RUNS,
    CumulativeGuarantee,
    Guarantee,
)
from dpfl_lightning.reporting.guarantee_page import guarantee_page
from dpfl_lightning.reporting.odds import Odds


def a_page(view, guarantees, name=None, **changes):
    clients = [
        {**row, "epsilon_spent": promise.epsilon, "name": name or row["name"]}
        for row, promise in zip(a_result(view).clients, guarantees, strict=True)
    ]
    result = a_result(view, clients=tuple(clients), **changes)
    return guarantee_page(Run(view.run, result.rounds, result=result, stated=guarantees))


def promise(epsilon, **more):
    return Guarantee(epsilon=epsilon, delta=1e-3, **{**FRAME, "covers": ("570 noised steps in 30 releases",), **more})


def test_a_run_leaves_its_page(make_loop):
    loop = make_loop(privacy=PrivacyOptions(epsilon=[4.0, 6.0, 8.0, 10.0], delta=1e-3))
    result = loop.run()
    words = words_of((loop.output_dir / "guarantee.html").read_text())
    for part in (
        "add or remove one record",
        "Poisson sampling",
        "PLD (dp_accounting, upper bound)",
        "noised gradient steps in 3 releases",
        *(UNKNOWN_RUNS if gap == OTHER_RUNS else gap for gap in NOT_COVERED),
        "No other run on the same records is in the account.",
        f"dpfl ledger {loop.output_dir.name}",
        "all 3 rounds are done",
        "dp-accounting",
        "opacus",
        "at most 22,100 times as likely as if one record",
        "the weakest promise, that of client 3 (epsilon 10)",
        "everything: the records of all clients",
    ):
        assert part in words, part
    for client in result.clients:
        assert f"{client['noise_multiplier']:.5g}" in words and client["releases"] == 3


def test_nothing_is_loaded_and_nothing_runs(tmp_path):
    page = a_page(a_view(tmp_path), [promise(1.0)] * 3)
    reader = Reader(page)
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "img", "iframe", "object", "a", "form", "base"}
    names = {name for _, attributes in reader.tags for name in attributes}
    assert not {name for name in names if name.startswith("on")} and not names & {"src", "href", "action"}
    assert not re.search(r"https?:|//\w|url\(|@import|javascript:", page)


def test_every_value_is_escaped(tmp_path):
    view = a_view(tmp_path / EVIL.replace("/", ""), engine=EVIL, device=EVIL)
    evil = promise(1.0, sampling=EVIL, accountant=EVIL, adjacency=EVIL, unit=EVIL, covers=(EVIL,), not_covered=(EVIL,))
    bare = promise(float("inf"), unprotected=(EVIL,), caveats=(EVIL,))
    page = a_page(view, [evil, evil, bare], name=EVIL, reason=EVIL)
    assert "<script" not in page and "alert('" not in page
    plain = a_page(a_view(tmp_path), [promise(1.0)] * 3)
    assert {tag for tag, _ in Reader(page).tags} <= {tag for tag, _ in Reader(plain).tags}
    assert words_of(page).count("alert('1')") >= 11
    assert escape(EVIL) in page


def test_no_privacy_is_said_first(make_loop, tmp_path):
    bare = promise(float("inf"), covers=(), unprotected=("training losses were logged",))
    assert "No client has differential privacy." in words_of(a_page(a_view(tmp_path), [bare] * 3))
    mixed = words_of(a_page(a_view(tmp_path), [promise(1.0), bare, promise(2.0)]))
    assert "1 of 3 clients do not have differential privacy. No differential privacy per record: training" in mixed
    assert "no bound" in mixed and "times as likely as" not in mixed
    loop = make_loop(privacy=None)
    loop.run()
    words = words_of((loop.output_dir / "guarantee.html").read_text())
    assert "No client has differential privacy." in words and "un-noised gradient steps" in words
    assert "times as likely as" not in words


@pytest.mark.e2e
def test_ten_thousand_clients_are_summed_up(tmp_path):
    view = a_view(tmp_path, num_clients=10_000)
    promises = [promise(0.5 + i % 1000 / 1000, covers=(f"{i % 50} steps",)) for i in range(10_000)]
    page = a_page(view, promises)
    assert len(page) < 100_000
    assert Reader(page).rows() == 1 + 200 + 1 + 3 + 3 + 5 + 4
    words = words_of(page)
    for row in ("smallest 100 0.5 1 30 1.25", "largest 10,099 1.499 10000 30 1.25"):
        assert row in words, row
    assert "10,000 clients (0, 1, 2" in words and "11 and 9,988 more) trained" in words
    assert "The next table shows the 200 of 10,000 clients with the largest epsilon" in words
    assert words.count("see guarantees.json for each client") == 1


@pytest.mark.parametrize(
    ("epsilon", "delta", "factor", "exception"),
    [
        (3.0, 1e-5, "20.1", "1 in 100,000"),
        (0.0, 0.0, "1", "0"),
        (0.69, 3e-4, "2", "1 in 3,333"),
        (12.0, 0.1, "163,000", "1 in 10"),
    ],
)
def test_odds_are_rounded_to_the_unfavourable_side(epsilon, delta, factor, exception):
    odds = Odds.of(epsilon, delta)
    assert (odds.factor, odds.exception) == (factor, exception)
    assert math.exp(epsilon) <= float(factor.replace(",", "")) * (1 + 1e-9) <= 1.1 * math.exp(epsilon) + 1e-6
    # the best test between two sets, of which the worst pair has the outcomes 0 to 3 (Kairouz et al. 2015)
    p = [delta, (1 - delta) / (1 + math.exp(-epsilon)), (1 - delta) / (1 + math.exp(epsilon)), 0.0]
    best = sum(map(max, p, reversed(p))) / 2
    assert best <= float(odds.guesses.split()[0]) / 100 <= best + 0.001


def test_a_person_with_several_records_gets_the_bound_of_a_group(tmp_path):
    words = words_of(a_page(a_view(tmp_path), [promise(1.0)] * 3))
    assert "2 records of one client 7.39 1 in 268 88.2 of 100 cases" in words  # delta (e^2 - 1) / (e - 1)
    assert "4 records of one client 54.6 1 in 32" in words
    assert "4 records of one client no useful bound" in words_of(a_page(a_view(tmp_path), [promise(3.0)] * 3))
    of_persons = words_of(a_page(a_view(tmp_path), [promise(1.0, unit="person")] * 3))
    assert "promised to one person" in of_persons and "records of one client" not in of_persons


def test_sites_and_other_runs_are_told_apart(tmp_path):
    words = words_of(a_page(a_view(tmp_path), [promise(1.0)] * 3, at_sites=True))
    assert "Each client is a site" in words and "dpfl node verify NODE" in words and "not trusted" in words
    assert "NODE" not in words_of(a_page(a_view(tmp_path), [promise(1.0)] * 3))
    assert "cannot say what all of them cost. Each site has its own: dpfl node status" in words
    composed = {"delta": 1e-3, "accountant": "PLD", "adjacency": "", "sampling": ""}
    several = [
        CumulativeGuarantee(runs=2, epsilon=5.5, limit=8.0, **composed),
        CumulativeGuarantee(runs=0, epsilon=math.inf, **composed),
        None,
    ]
    words = words_of(a_page(a_view(tmp_path), [promise(1.0).with_account(one) for one in several]))
    assert "0 2 1 5.5 0.001 8 245 1 in 1,000" in words and "1 0 1 no bound 0.001 none no bound" in words
    assert "cannot say" not in words


def test_the_example_of_the_docs_has_the_parts_of_the_page(tmp_path):
    example = (Path(__file__).parents[2] / "docs" / "guarantee_example.html").read_text()
    page = a_page(a_view(tmp_path), [promise(1.0, unit="person")] * 3)
    headings, style = re.compile("<h2>.*?</h2>"), re.compile("<style>.*?</style>", re.DOTALL)
    assert headings.findall(example) == headings.findall(page) and style.findall(example) == style.findall(page)


def test_an_overspent_budget_is_seen(tmp_path):
    page = a_page(a_view(tmp_path, num_clients=1), [promise(1.5)])  # its budget is 1
    assert 'class="over"' in page and "150.0%" in page
    assert 'class="over"' not in a_page(a_view(tmp_path, num_clients=1), [promise(0.5)])


def test_a_run_without_noise_does_not_speak_of_noise(tmp_path):
    bare = [promise(math.inf, covers=())] * 3
    words = words_of(a_page(a_view(tmp_path, noise=0.0), bare))
    assert "sums over its records, without noise." in words and "every single release, without noise, of each" in words
    assert "records can be reconstructed" in words and "No client has differential privacy" in words
    for said in ("with random noise", "noisy release", "before noise", "Sampling, accountant", "section 1 allows"):
        assert said not in words, said


def test_a_huge_epsilon_promises_nothing_and_delta_counts_for_all_records(tmp_path):
    words = words_of(a_page(a_view(tmp_path), [promise(16.0)] * 3))
    assert "is possibly more than a million times as likely" in words
    assert "It hits anybody of all 303 records with probability 1 in 3 at most." in words
    tiny = [dataclasses.replace(promise(1.0), delta=1e-5)] * 3
    words = words_of(a_page(a_view(tmp_path), tiny))
    assert "delta 0.00001" in words and "at most 2.72 times as likely" in words


@pytest.mark.parametrize("noisy", [0, 2, 3])
def test_noise_is_promised_to_those_who_have_it_alone(tmp_path, noisy):
    view = a_view(tmp_path)
    promises = [promise(2.0) if client < noisy else promise(math.inf, covers=()) for client in range(3)]
    rows = [{**row, "noise_multiplier": 1.25 if row["client"] < noisy else 0.0} for row in a_result(view).clients]
    result = a_result(view, clients=tuple(rows))
    words = words_of(guarantee_page(Run(view.run, 10, result=result, stated=promises)))
    assert ("in which each record" in words) == (noisy > 0)
    assert ("of 2 of the 3 clients sums in which each record has a bounded part" in words) == (noisy == 2)
    assert ("of the others nothing that exact releases show" in words) == (noisy == 2)
    assert ("every single noisy release of each client" in words) == (noisy == 3)
    assert ("multiply" in words) == (noisy == 3), "no factor without a bound"


def test_a_probability_of_one_is_no_bound(tmp_path):
    view = a_view(tmp_path)
    promises = [Guarantee(epsilon=2.0, delta=0.01, **FRAME)] * 3
    words = words_of(a_page(view, promises))
    assert "1 in 1 " not in words
    assert "anybody of all 303 records is not excluded: expect up to 4 of them" in words
