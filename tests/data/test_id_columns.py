"""Columns that name persons: known by names in several languages, never an input, and stated where rows repeat."""

import re
import warnings

import numpy as np
import pandas
import pytest
import yaml

from dpfl_lightning import Population
from dpfl_lightning.__main__ import main
from dpfl_lightning.data.id_names import names_persons
from dpfl_lightning.errors import UserError, UserNotice

USUAL = """
patient_id PatientID patientId pat_id PatID pat-nr Patienten-Nr. Patientennummer Patienten_ID Pat.-Nr. PID MRN mrn_no
medical_record_number MedicalRecordNo subject_id SUBJID USUBJID subject participant_id ParticipantNo person_id
PersonID personnummer proband Probanden-Nr. Probandennummer TeilnehmerID Versichertennummer KVNR AHV-Nr SSN NHS_number
CPR social_security_number BSN NIR codice_fiscale id_paziente paziente_id num_paziente id_paciente numero_paciente NHC
numero_historia_clinica cpr_nr DNI id_patient numero_patient ipp patient_hash Pseudonym patient_pseudonym pseudo_id
member_id enrolid study_id Studien-ID record_id empi user_id customer_id employee_id Fallnummer case_id patient_key
patient_code beneficiary_id Patient patient personne_id src_subject_id patient_id_hash anon_patient_id PATNR
Patient-Kennung CHI_number Versicherten-ID sujeto_id n\u00b0patient nhs_no hospital_no ID fødselsnummer cod_paciente
codigo_paciente numero_dossier KV-Nummer ID-Nr Chart_No OMOP_person_id patient_sk uid ppt_id pacjent_id numer_pacjenta
rodne_cislo henkilötunnus beteg_id hasta_no numero_utente NHI PHN \u0391\u039c\u039a\u0391 \u60a3\u8005\u756a\u53f7
donor_id
"""
OTHERS = """
age sex num_patients n_patients patient_age patient_sex patient_weight pt PT chi hospital case record study user member
persons_in_household personal_income person_years platelet paco2 patients beds number code nr hospital_size fall falls
case_count insurance insurance_type employee_count no_falls key_rate codes x y
"""


def test_usual_names_of_ids_are_known():
    assert [name for name in USUAL.split() if not names_persons(name)] == []
    assert [name for name in OTHERS.split() if names_persons(name)] == []


def admissions(column: str) -> pandas.DataFrame:
    """300 patients with up to five rows each."""
    rng = np.random.default_rng(0)
    person = np.repeat(rng.permutation(np.arange(41_000, 41_300)), rng.choice([1, 2, 5], 300, p=[0.7, 0.2, 0.1]))
    rows = len(person)
    return pandas.DataFrame({column: person, "age": rng.normal(60, 15, rows), "ill": rng.integers(0, 2, rows)})


def with_categories(values):
    return {**GIVEN, "columns": {**GIVEN["columns"], "Kennz": {"categories": values}}}


GIVEN = {"label": "ill", "num_classes": 2, "columns": {"age": {"scale": (60, 15)}}}


@pytest.mark.parametrize("options", [{"drop": ["Patienten-Nr."]}, {"features": ["age"]}, {}])
def test_whose_rows_repeat_must_be_stated(options):
    table = admissions("Patienten-Nr.")
    words = "got 'null, although values of Patienten-Nr. repeat'. Write person: Patienten-Nr., or person: none"
    with pytest.raises(UserError, match=f"`df: person` must name .*{re.escape(words)}"):
        Population.from_dataframe(table, **GIVEN, **options)
    named = {key: value for key, value in options.items() if key != "drop"}
    assert Population.from_dataframe(table, **GIVEN, **named, person="Patienten-Nr.").num_ids is not None
    kept = options or {"drop": ["Patienten-Nr."]}
    assert Population.from_dataframe(table, **GIVEN, **kept, person="none").unit_ids is None
    once = table.drop_duplicates("Patienten-Nr.")
    assert Population.from_dataframe(once, **GIVEN, **kept).unit_ids is None  # each row is another person already


@pytest.mark.parametrize("column", ["Patienten-Nr.", "id_paziente", "KVNR"])
def test_an_id_with_a_scale_is_no_input(column):
    table = admissions(column)
    given = {**GIVEN, "columns": {**GIVEN["columns"], column: {"scale": (41_150, 90)}}}
    with pytest.raises(UserError, match=f"`df: {column}` must hold measurements, got 'whole numbers as an identifier"):
        Population.from_dataframe(table, **given, person="none")


def test_a_scaled_column_that_looks_like_ids_is_said():
    table = admissions("Kennz")
    given = {**GIVEN, "columns": {**GIVEN["columns"], "Kennz": {"scale": (41_150, 90)}}}
    with pytest.warns(UserNotice, match="df: Kennz has whole numbers .*if it names persons, write person: Kennz"):
        Population.from_dataframe(table, **given)


@pytest.mark.parametrize(
    ("column", "written", "kind"),
    [
        ("Patienten-Nr.", int, "whole numbers"),
        ("KVNR", "A{}".format, "texts"),
        ("id_paziente", str, "whole numbers"),
        ("Kennz", "A{}".format, "texts"),
    ],
)
def test_ids_are_no_categories(column, written, kind):
    table = admissions(column)
    table = table if column in ("Patienten-Nr.", "id_paziente", "KVNR") else table.drop_duplicates(column)
    table[column] = table[column].map(written)
    given = {**GIVEN, "columns": {**GIVEN["columns"], column: {"categories": sorted(table[column].unique())}}}
    with pytest.raises(UserError, match=f"`df: {column}` must hold categories, got '{kind} as an identifier has'"):
        Population.from_dataframe(table, **given, person="none")


def test_categories_that_look_like_ids_are_said_and_few_codes_are_not():
    table = admissions("Kennz")
    with pytest.warns(UserNotice, match="df: Kennz has whole numbers .*if it names persons, write person: Kennz"):
        Population.from_dataframe(table, **with_categories(sorted(table["Kennz"].unique())))
    table["Kennz"] = table["Kennz"] % 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Population.from_dataframe(table, **with_categories(range(8)))


@pytest.mark.parametrize("column", ["Patienten-Nr.", "Kennz"])
def test_init_offers_no_id_as_an_input(column, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    admissions(column).to_csv("one.csv", index=False)
    assert main(["init", "mine", "--from", "one.csv"]) == 0
    made = yaml.safe_load((tmp_path / "mine" / "data.yaml").read_text())["data"]["init_args"]
    assert made["columns"] == {"age": {"scale": None}}
    assert (made["person"], made["drop"]) == ((column, []) if column == "Patienten-Nr." else (None, [column]))
    capsys.readouterr()
