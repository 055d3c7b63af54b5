"""The claims of the papers: their verdicts follow from cells, and their page from both."""

import re

import pytest

from dpfl_lightning.errors import UserError
from experiments.papers import claims
from experiments.papers.cells import RESULTS
from experiments.papers.claims import CONFIRMED, NOT, REFUTED, UNDECIDED, Claim, verdict_of


@pytest.mark.parametrize(
    ("differences", "effect", "within", "verdict"),
    [
        ([2.0, 2.2, 1.8], 4.0, 0.0, CONFIRMED),
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


def test_a_claim_without_cells_is_open_and_counts_them(tmp_path):
    part = {"table": "clustered.paired", "row": "paper_all", "rivals": ["oracle_all"], "columns": ["rotation"]}
    claim = Claim("X", "clustered", "as good", compare=[part])
    assert claim.verdict(tmp_path) == "open"
    assert re.search(r"lack \d+ cells", claims._left(claim, tmp_path))


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


@pytest.mark.e2e
def test_the_page_has_all_claims_and_is_that_of_the_finished_cells():
    listed = claims.claims()
    assert len(listed) == 28
    assert len({one.id for one in listed}) == 28
    assert claims.PAGE.read_text(encoding="utf-8") == claims.page(RESULTS), "python -m experiments.papers claims"
