"""Names of columns that name a person, in the languages and customs of hospitals, insurers and trials."""

import re
import unicodedata

_PERSON = (
    "patient(in|en)?|pat|paziente|paciente|pasient|patientin|potilas|person(en)?|persona|personne|henkilo|individual|"
    "subject|subj|usubj|sujet|sujeto|soggetto|participante?|partecipante|deltagare|deltaker|deelnemer|proband(in|en)?|"
    "teilnehmer(in)?"
)
#: they name a person with a word for its number only: alone they may be a score, a drug or a role
_PERSON_IF_NUMBERED = (
    "pt|ptnt|versicherten?|mitglieds?|member|enrollee|beneficiary|bene|kunden?|customer|user|employee|nhs|chi|cpr|ahv|"
    "medicalrecord|hospital|klinik|krankenhaus|socialsecurity|sozialversicherungs?|krankenversicherten|historiaclinica|"
    "health(card|insurance)|insurance|study|studien?|screening|randomi[sz]ation|record|case|fall|akten?|pseudo|volunteer"
)
_NUMBER = (
    "ids?|nr|no|num|number|nummer|numero|n|key|code|kennung|kennzeichen|kennziffer|identifier|identifiant|ident|"
    "schluessel|schlussel|pseudonym|hash|uuid|guid"
)
_WHOLE = (
    "id|mrn|mrnn?[or]|mrnnumber|pid|puid|kvnr|kvn|egk|svnr|ssn|nhsno|cpr|bsn|nir|insee|dni|nie|ipp|nip|nhc|nuhsa|empi|mpi|upi|nric|pesel|"
    "usubjid|subjid|enrolid|personnummer|fodselsnummer|personalnummer|codicefiscale|"
    "(n|num|numero)?(de)?historia(clinica)?|"
    "pseudonyme?(id)?|aadhaar"
)
_ALTERED = "hash(ed)?|enc|encrypted|anon(ymi[sz]ed)?|pseudo"
_BEFORE = f"({_ALTERED}|src|source|unique|deidentified|internal|local|site|study|trial|new|my)*"
_AFTER = f"({_ALTERED}|sha|md|x|y|\\d+)*"
_PERSONS = re.compile(
    f"{_BEFORE}(({_PERSON})({_NUMBER})*|({_PERSON_IF_NUMBERED})({_NUMBER})|({_NUMBER})(de|del|du|di|of)?({_PERSON})|"
    f"{_WHOLE}){_AFTER}"
)
_IDENTIFIER = re.compile(r"(^|[_ .-])(id|nr|no|num|number|mrn|key|code)$|^(id|mrn)")


def names_persons(column: object) -> bool:
    """Return whether a column is called as one with the ids of persons usually is.

    >>> [names_persons(name) for name in ("Patienten-Nr.", "PatientID", "id_paziente", "num_patients", "patient_age")]
    [True, True, True, False, False]
    """
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", unicodedata.normalize("NFKD", str(column)))
    plain = "".join(sign for sign in apart.casefold() if sign.isascii() and sign.isalnum())
    return bool(_PERSONS.fullmatch(plain))


def names_identifier(column: object) -> bool:
    """Return whether a column is called an identifier, of persons or of anything else."""
    return names_persons(column) or bool(_IDENTIFIER.search(str(column).lower()))
