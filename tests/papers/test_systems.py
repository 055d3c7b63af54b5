"""Every system that the papers name exists, plans and trains."""

from pathlib import Path

import pytest

from dpfl_lightning.config.yaml_text import read_yaml
from dpfl_lightning.errors import UserError
from experiments.papers import systems as module
from experiments.papers.__main__ import main
from experiments.papers.claims import PAPERS
from experiments.papers.systems import FILE, System, section, systems, trained
from experiments.papers.tables import noise_aware, robustness, selection


def test_every_system_names_options_that_exist():
    listed = systems()
    assert {one.paper for one in listed} == set(PAPERS) and len(listed) > 40
    for one in listed:
        assert one.loaded(Path("somewhere")).strategies == one.options["strategies"]
    for paper in PAPERS:
        assert section(paper).count("\n") == 1 + sum(one.paper == paper for one in listed)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("file", "papers/none.py", "be a file of"), ("steps", "copied", "be one of printed, released, sound, ours")],
)
def test_a_file_or_kind_of_steps_that_does_not_exist_is_refused(field, value, words, monkeypatch):
    text = read_yaml(str(FILE))
    text["systems"][3][field] = value
    monkeypatch.setattr(module, "read_yaml", lambda path: text)
    with pytest.raises(UserError, match=words):
        systems()


def test_a_system_whose_option_is_gone_fails_by_name(monkeypatch, capsys):
    good, *_ = systems()
    bad = System(**{**vars(good), "name": "old", "options": {"strategies": {"robust_hdp": {"block": 2}}}})
    monkeypatch.setattr(module, "systems", lambda: [bad])
    assert main(["systems"]) == 1
    out = capsys.readouterr().out
    assert "old" in out and "FAILED: `strategies.robust_hdp.block` must" in out and "0 of 1 systems" in out


@pytest.mark.e2e
@pytest.mark.parametrize("paper", PAPERS)
def test_one_round_of_every_system_is_planned_and_trained(paper):
    found = {one.name: words for one, words in trained([one for one in systems() if one.paper == paper])}
    assert found and not [words for words in found.values() if "FAILED" in words]
    infinite = {name for name, words in found.items() if words.startswith("No differential privacy")}
    plain = {one.name for one in systems() if one.paper == paper and one.options.get("privacy", "") is None}
    published = {"RC-DPFL, R-DPCFL as published", "f-CDPFL as published", "f-CDPFL, initial models of the code"}
    published |= {"DPFL-BCS, losses of the noiseless step", "DPFL-BCS as printed"}
    assert infinite == (plain | published) & set(found)


def test_printed_two_stages_say_all_that_is_not_printed_and_one_has_both_printed_steps():
    of = {one.name: one for one in systems() if "two_stages_as_printed" in one.options["strategies"]}
    for one in of.values():
        chosen = one.options["strategies"]["two_stages_as_printed"]
        assert ("xact composition" in one.differs) == ("calibration" not in chosen), one.name
        assert ("second loss is at the noisy update" in one.differs) == ("second_loss" not in chosen), one.name
        assert "hole quotas" in one.differs
    both = of["DPFL-BCS as printed"].options["strategies"]["two_stages_as_printed"]
    assert {"calibration": "linear", "second_loss": "noiseless_step"}.items() <= both.items()


def test_labels_say_which_pfa_projects_what():
    """Malekmohammadi et al. project the whole update, and `pfa` each tensor, as the code of Liu et al."""
    in_robustness = next(rule for rule in robustness.RULES if rule["name"] == "pfa")
    for title, options in (
        noise_aware._METHODS["pfa"],
        selection._METHODS["pfa"],
        (in_robustness["title"], in_robustness),
    ):
        assert title == f"PFA, {'whole update' if 'WholeUpdatePfa' in str(options) else 'per tensor'}"
    of_pfa = [one for one in systems() if one.name.startswith("PFA")]
    assert len(of_pfa) == 3
    for one in of_pfa:
        whole = "experiments.papers.noise_aware.pfa.WholeUpdatePfa" in one.options["strategies"]
        assert one.name == f"PFA, {'whole update' if whole else 'per tensor'}" and one.steps == "released"


def test_labels_say_whose_choices_have_noise():
    """f-CDPFL as the papers have it chooses without noise."""
    found = {one.name: one for one in systems() if one.name.startswith("f-CDPFL")}
    assert len(found) == 3
    for name, one in found.items():
        noised = one.options["strategies"]["ifca"].get("selection") != "paper_argmin"
        assert noised == (name == "f-CDPFL, private choices") == (one.steps == "sound")


def test_steps_of_a_released_code_are_not_called_printed():
    assert {one.steps for one in systems() if "code" in one.where} == {"released"}
