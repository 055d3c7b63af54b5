"""The claims of the papers: their verdicts follow from cells, and their page from both."""

import re
from pathlib import Path

import pytest
from fake_experiments import held

from dpfl_lightning.errors import UserError
from experiments.papers import __main__ as command
from experiments.papers import claims
from experiments.papers.cells import RESULTS, contents, declaration, missing_cells, write
from experiments.papers.claims import (
    CONFIRMED,
    DIRECTION,
    MIXED,
    NO_VERDICT,
    NOT,
    OPEN,
    REFUTED,
    SMALLER,
    UNDECIDED,
    Claim,
    papers_effect,
    verdict_of,
    with_needed,
)
from experiments.papers.registry import experiments


@pytest.mark.parametrize(
    ("differences", "effect", "within", "verdict"),
    [
        ([2.0, 2.2, 1.8], 3.0, 0.0, CONFIRMED),  # 1.5 to 2.5
        ([2.0, 2.2, 1.8], None, 0.0, CONFIRMED),
        ([2.0, 2.2, 1.8], -3.0, 0.0, CONFIRMED),  # the paper's own difference is against its claim
        ([2.0, 2.2, 1.8], 4.0, 0.0, DIRECTION),  # half of the paper's 4 points lies within the interval
        ([2.0, 2.2, 1.8], 5.2, 0.0, SMALLER),  # half of the paper's 5.2 points is above it
        ([-2.0, -2.2, -1.8], 9.0, 3.0, CONFIRMED),  # a claim of equality has no effect
        ([0.0, 0.2, -0.2], 4.0, 0.0, NOT),  # excludes half of the paper's 4 points
        ([0.0, 0.2, -0.2], 0.3, 0.0, UNDECIDED),
        ([-2.0, -2.2, -1.8], None, 0.0, NOT),
        ([-2.0, -2.2, -1.8], None, 3.0, CONFIRMED),  # about as good
        ([-4.0, -4.2, -3.8], None, 3.0, NOT),
        ([5.0, 5.0], 4.0, 0.0, UNDECIDED),  # two seeds are no verdict
        ([9.0, -1.0, 1.0], 4.0, 0.0, UNDECIDED),
    ],
)
def test_an_interval_decides(differences, effect, within, verdict):
    assert verdict_of(differences, effect, within) == verdict


def test_a_formula_is_refuted_by_one_column():
    cost = {"table": "clustered.full_batch_cost", "row": "increase", "at_most": 20}
    (finding,) = Claim("X", "clustered", "cheap", facts=[cost]).findings(RESULTS)
    assert (finding.verdict, finding.papers) == (REFUTED, "at most 20")
    (finding,) = Claim("X", "clustered", "cheap", facts=[{**cost, "at_most": 40}]).findings(RESULTS)
    assert finding.verdict == CONFIRMED


def test_a_fact_may_fall_from_column_to_column():
    rate = {"table": "clustered.theorem43", "row": "rate", "falls": True}
    (finding,) = Claim("X", "clustered", "faster", facts=[rate]).findings(RESULTS)
    assert finding.verdict == CONFIRMED and "at 1 to" in finding.ours
    (finding,) = Claim(
        "X", "clustered", "wider", facts=[{**rate, "row": "separation", "table": "clustered.lemma42"}]
    ).findings(RESULTS)
    assert finding.verdict == REFUTED


def test_a_claim_without_cells_is_not_decided_and_tells_its_cells_and_hours(tmp_path):
    part = {"table": "clustered.paired", "row": "paper_all", "rivals": ["oracle_all"], "columns": ["rotation"]}
    claim = Claim("X", "clustered", "as good", compare=[part])
    assert claim.verdict(tmp_path) == OPEN == "not decided at this scale"
    cells = claim.cells()
    assert {(cell.row, cell.column) for cell in cells} == {("paper", "rotation"), ("oracle", "rotation")}
    assert "None of the 10 cells is made yet." in claims._details(claim, {"clustered.paired": "rounds."}, tmp_path)
    needed = {cell.experiment for cell in with_needed(cells)} - {"clustered.paired"}
    assert needed == {"clustered.rates"}, "rates are chosen from cells that are made first"
    hours, left = map(float, claims._cost(claim, tmp_path).split(", "))
    assert hours == left > (10 * 16 + 30 * 3) / 60 - 0.1


def test_mixed_parts_show_their_verdicts_and_what_is_missing():
    (claim,) = (one for one in claims.claims() if one.id == "R2")
    text = claims._details(claim, dict.fromkeys(claim.tables, "rounds."), RESULTS)
    assert claim.verdict(RESULTS) == MIXED and ": *undecided*" in text and ": *confirmed*" in text
    missing = missing_cells(claim.cells(), RESULTS)
    assert f"{len(missing)} of {len(claim.cells())} cells are not made yet." in text


@pytest.mark.parametrize("table", ["clustered.table5", "clustered.table6"])
def test_a_method_above_its_upper_bound_has_no_verdict(table):
    """The bound is that of Table 5, whose runs Table 6 shows."""
    row, rival = ("paper_all", "ifca_argmin_all") if table.endswith("5") else ("paper_worst", "ifca_argmin_worst")
    part = {"table": table, "row": row, "rivals": [rival], "columns": ["eps5"]}
    (finding,) = Claim("X", "clustered", "better", compare=[part]).findings(RESULTS)
    assert finding.verdict == NO_VERDICT and finding.ours.endswith("not tuned")


def test_a_column_without_its_upper_bound_has_no_verdict_if_another_one_shows_that_rates_are_not_tuned():
    """At epsilon 2, with the rates of epsilon 5, the oracle has no cell."""
    part = {"table": "clustered.table6", "row": "paper_worst", "rivals": ["ifca_argmin_worst"], "columns": ["eps2"]}
    (finding,) = Claim("X", "clustered", "better", compare=[part]).findings(RESULTS)
    assert finding.verdict == NO_VERDICT


def test_a_lead_grows_if_it_is_larger_in_the_other_column_seed_by_seed(monkeypatch, tmp_path):
    leads = {"dist6_n20": [1.0, 3.0, 2.0], "dist6_n60": [3.1, 4.9, 4.0, 9.0]}  # the last seed is not paired
    cells = {("weiavg", column): [0.0] * len(of_seed) for column, of_seed in leads.items()}
    cells |= {("robust_hdp", column): of_seed for column, of_seed in leads.items()}
    made = {
        place: [{"seed": seed, "values": {"test_accuracy": 60 + one}} for seed, one in enumerate(of_seed)]
        for place, of_seed in cells.items()
    }
    monkeypatch.setattr(claims, "finished", lambda *given: made)
    part = {"table": "noise_aware.clients", "row": "robust_hdp", "rivals": ["weiavg"]}
    for places, verdict, lead in (
        ({"from": "dist6_n20", "to": "dist6_n60"}, CONFIRMED, "+2.00 ± 0.06"),
        ({"from": "dist6_n60", "to": "dist6_n20"}, NOT, "-2.00 ± 0.06"),
    ):
        claim = Claim("X", "noise_aware", "grows", grows=[part | places])
        (finding,) = claim.findings(tmp_path)
        assert claim.verdict(tmp_path) == finding.verdict == verdict and claim.tables == ["noise_aware.clients"]
        assert f"over WeiAvg, from {'20' if lead[0] == '+' else '60'} clients to" in finding.ours
        assert f"{lead} (3 seeds;" in finding.ours


@pytest.mark.parametrize("key", ["row", "columns"])
def test_a_claim_names_rows_and_columns_that_exist(key, monkeypatch):
    part = {"table": "clustered.table5", "row": "paper_all", "rivals": ["oracle_all"], "columns": ["eps5"]}
    wrong = {**part, key: "none" if key == "row" else ["none"]}
    text = {"claims": [{"id": "X1", "paper": "clustered", "claim": "good", "compare": [wrong]}]}
    monkeypatch.setattr(claims, "read_yaml", lambda file: text)
    with pytest.raises(UserError, match=r"`X1.clustered.table5` must have such a"):
        claims.claims()


def parts():
    return [(one, part) for one in claims.claims() for part in one.parts]


def test_bounds_of_our_own_are_marked_in_the_claim():
    for claim, part in parts():
        own = [part[key] for key in ("within", "at_most", "at_least", "regret") if key in part]
        own += [part["factor"]] if part.get("factor", 1) != 1 else []
        for number in own:
            if (claim.id, number) == ("B7", 1):
                continue  # a budget is the paper's bound
            assert "here: " in claim.claim and re.search(rf"\b{number:g}\b", f"{claim.claim} {claim.remark}"), claim.id


def test_the_papers_own_numbers_are_within_a_tolerance():
    for claim, part in parts():
        for rival in part.get("rivals", ()) if "within" in part else ():
            for column in part["columns"]:
                experiment, place = experiments()[part["table"]], part.get("from", column)
                effect = papers_effect(experiment, part["row"], rival, column, place)
                assert effect is None or effect >= -part["within"], claim.id


def test_each_table_of_a_claim_says_how_it_differs_from_the_paper():
    differs = claims.read_yaml(str(claims.FILE))["differs"]
    assert {table for one in claims.claims() for table in one.tables} <= set(differs)


def test_the_rows_of_a_claim_are_the_papers():
    of = {one.id: one for one in claims.claims()}
    assert [part["row"] for part in of["B1"].compare] == ["least_noise"]
    assert not {rival for part in of["B2"].compare for rival in part["rivals"]} & {"least_noise", "biased", "ours"}
    assert [part["rivals"] for part in of["D2"].compare] == [["local_own"]]


def test_a_search_is_judged_by_its_choice_and_by_its_seconds():
    of = {one.id: one for one in claims.claims()}
    found = of["D4"].findings(RESULTS)
    assert {one.verdict for one in found} == {UNDECIDED} and "0.65" in found[0].ours and "0.08" in found[0].ours
    assert "1.2 points below the best, that of the federation 0.0, that of as many random records 0.8" in found[0].ours
    (nas, hpo) = of["D5"].findings(RESULTS)
    assert nas.verdict == hpo.verdict == CONFIRMED and "554 s of them for the set" in nas.ours


@pytest.mark.e2e
def test_the_page_of_other_results_lies_beside_them(tmp_path, monkeypatch, capsys):
    before = claims.PAGE.read_bytes()
    assert command.main(["claims", "--results", str(tmp_path)]) == 0
    assert claims.PAGE.read_bytes() == before and OPEN in (tmp_path / "papers.md").read_text(encoding="utf-8")


def test_what_is_left_is_counted_once_though_several_claims_need_it(tmp_path):
    """R3 and R5 read the same cells of noise_aware.paired, and rates of noise_aware.tuning."""
    chosen = [one for one in claims.claims() if one.id in ("R3", "R5")]
    text = claims._left(chosen, {"noise_aware.clients": 1.5}, tmp_path)
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| noise")
    ]
    cells = with_needed(cell for one in chosen for cell in one.cells())
    assert {line[0] for line in lines} == {f"noise_aware.{name}" for name in ("paired", "clients", "tuning")}
    assert lines[0][:2] == ["noise_aware.clients", "1.5"], "in the order of the allotment"
    assert sum(int(line[2]) for line in lines) == len(cells) < sum(len(with_needed(one.cells())) for one in chosen)
    assert next(line[4] for line in lines if line[0] == "noise_aware.paired") == "R3, R5"
    assert sum(float(line[3]) for line in lines) == pytest.approx(claims.hours(cells, tmp_path), abs=0.02)


def test_the_command_of_a_claim_makes_its_cells_alone_and_judges_it(tmp_path, capsys):
    assert command.main(["claims", "C10", "--results", str(tmp_path), "--show"]) == 0
    assert "None of the 5 cells is made yet." in capsys.readouterr().out
    assert command.main(["claims", "C10", "B7", "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "**C10** Lemma 4.1" in printed and "variance, ratio: 602 to 880" in printed and "**B7** Quotas" in printed
    made = [line for path in tmp_path.glob("*.jsonl") for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(made) == 5 + 4 and not (tmp_path / "papers.md").exists()
    assert command.main(["claims", "C99", "--results", str(tmp_path)]) == 2
    assert "`NAME` must be a claim" in capsys.readouterr().err
    for words in (["--rows", "paper"], ["--seeds", "1"], ["--again"], ["--rounds", "5"]):
        assert command.main(["claims", "C10", *words, "--results", str(tmp_path)]) == 2
        assert f"`{words[0]}` must be left out after claims" in capsys.readouterr().err


@pytest.mark.e2e
def test_cells_that_a_claim_waits_for_are_made_before(tmp_path, monkeypatch):
    """Rates first; where the best is an end of the range, the rate beyond it is known only then."""
    (claim,) = (one for one in claims.claims() if one.id == "C1")
    order = []

    def make(cells, runner):
        for cell in cells:
            order.append(cell)
            best = 80.0 if cell.row.endswith("_0.625") else 60.0
            write(runner.results, cell, {**held(accuracy=best), "declared": declaration(cell)})
        return []

    monkeypatch.setattr(command, "make", make)
    assert command.main(["claims", "C1", "--results", str(tmp_path)]) == 0
    assert order[0].experiment == "clustered.rates" and set(claim.cells()) <= set(order)
    beyond = [place for place, cell in enumerate(order) if cell.row.endswith("_beyond")]
    assert beyond and max(beyond) < order.index(claim.cells()[0])
    assert len(order) == len(set(order)) == 20 + 2 * 2 * (5 + 1) * 3


@pytest.mark.e2e
def test_thirty_hours_are_allotted_to_the_tables_of_the_claims():
    allotted = claims.read_yaml(str(claims.FILE))["allotted"]
    needed = {cell.experiment for one in claims.claims() for cell in with_needed(one.cells())}
    missing = {cell.experiment for one in claims.claims() for cell in missing_cells(with_needed(one.cells()), RESULTS)}
    assert missing <= set(allotted) <= needed and 0 < sum(allotted.values()) <= 30


@pytest.mark.e2e
def test_cells_tell_their_commit_or_that_they_have_none():
    text = {one.id: claims._details(one, dict.fromkeys(one.tables, "rounds."), RESULTS) for one in claims.claims()}
    assert "Cells of commits b9d7fee8, b9d7fee8+." in text["C6"]
    assert "Cells of 2026-11-20, without a commit." in text["C4"]


def test_the_rate_of_pfa_is_part_of_its_lead_at_dist7():
    """The remark's numbers are those of kept cells, and their command stands beside them."""
    (remark,) = (one.remark for one in claims.claims() if one.id == "R2")
    cells = {
        (one["row"], one["column"], bool(one["overrides"])): one["values"]["accuracy"]
        for one in contents(RESULTS, "noise_aware.table13").values()
        if one["scale"] == "small"
    }
    plain, at_rate, pfa = (
        cells[key] for key in (("robust_hdp", "dist7", False), ("robust_hdp", "dist7", True), ("pfa", "dist7", False))
    )
    assert f"{at_rate:.1f} %" in remark and f"{at_rate - plain:.1f} of the {pfa - plain:.1f} points" in remark
    assert "--rows robust_hdp --columns dist7 --clients.learning_rate 0.006667`" in remark


@pytest.mark.e2e
def test_the_page_has_all_claims_and_is_that_of_the_finished_cells():
    listed = claims.claims()
    assert len({one.id for one in listed}) == len(listed)
    assert f"[{len(listed)} claims of the papers](papers.md)" in Path("docs/results.md").read_text(encoding="utf-8")
    assert claims.PAGE.read_text(encoding="utf-8") == claims.page(RESULTS), "python -m experiments.papers claims"
