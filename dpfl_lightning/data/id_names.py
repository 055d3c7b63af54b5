"""Names of columns that name a person, in the languages and customs of hospitals, insurers and trials."""

import re
import unicodedata

_PERSON = (
    "patient(in|en)?|pat|pacjent|pacjenta|beteg|hasta|donor|ppt|ptnt|paziente|paciente|pasient|patientin|potilas|person(en)?|persona|personne|henkilo|individual|"
    "subject|subj|usubj|sujet|sujeto|soggetto|participante?|partecipante|deltagare|deltaker|deelnemer|proband(in|en)?|"
    "teilnehmer(in)?"
)
#: they name a person with a word for its number only: alone they may be a score, a drug or a role
_PERSON_IF_NUMBERED = (
    "pt|ptnt|versicherten?|mitglieds?|member|enrollee|beneficiary|bene|kunden?|customer|user|employee|nhs|chi|cpr|ahv|"
    "medicalrecord|hospital|klinik|krankenhaus|socialsecurity|sozialversicherungs?|krankenversicherten|historiaclinica|"
    "health(card|insurance)|chart|dossier|kv|insurance|study|studien?|screening|randomi[sz]ation|record|case|fall|akten?|pseudo|volunteer"
)
_NUMBER = (
    "ids?|nr|no|num|number|numer|sk|codice|codigo|cod|nummer|numero|n|key|code|kennung|kennzeichen|kennziffer|identifier|identifiant|ident|"
    "schluessel|schlussel|pseudonym|hash|uuid|guid"
)
_WHOLE = (
    "id|idnr|idno|uid|mrn|mrnn?[or]|mrnnumber|pid|puid|kvnr|kvn|egk|svnr|ssn|nhsno|cpr|bsn|nir|insee|dni|nie|ipp|nip|nhc|nuhsa|empi|mpi|upi|nric|pesel|"
    "nhi|phn|rodnecislo|henkilotunnus|numeroutente|numerodossier|omoppersonid|codicepaziente|usubjid|subjid|enrolid|personnummer|fodselsnummer|personalnummer|codicefiscale|"
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
_AMBIGUOUS = re.compile("cpr|bsn|nir|dni|nie|nip|ipp|nhc|nhi|phn|chi|upi|egk|donor|hasta|pat")
#: in Greek, Russian and Japanese
_IN_OTHER_LETTERS = (
    "\u03b1\u03bc\u03ba\u03b1",
    "\u043d\u043e\u043c\u0435\u0440\u043f\u0430\u0446\u0438\u0435\u043d\u0442\u0430",
    "\u60a3\u8005\u756a\u53f7",
    "\u60a3\u8005id",
)
_NOT_COMPOSED = str.maketrans({"\u00f8": "o", "\u00e6": "ae", "\u0142": "l", "\u00df": "ss", "\u0131": "i"})
_IDENTIFIER = re.compile(r"(^|[_ .-])(id|nr|no|num|number|mrn|key|code)$|^(id|mrn)")


def names_persons(column: object) -> bool:
    """Return whether a column is called as one with the ids of persons usually is.

    >>> [names_persons(name) for name in ("Patienten-Nr.", "PatientID", "id_paziente", "num_patients", "patient_age")]
    [True, True, True, False, False]
    """
    return bool(_PERSONS.fullmatch(_plain(column))) or _letters(column) in _IN_OTHER_LETTERS


def is_ambiguous(column: object) -> bool:
    """Return whether the name of an id is one of a measurement, too, such as CPR, in minutes."""
    return bool(_AMBIGUOUS.fullmatch(_plain(column)))


def _letters(column: object) -> str:
    return "".join(sign for sign in str(column).casefold() if sign.isalnum())


def _plain(column: object) -> str:
    latin = str(column).casefold().translate(_NOT_COMPOSED)
    return "".join(sign for sign in unicodedata.normalize("NFKD", latin) if sign.isascii() and sign.isalnum())


def names_identifier(column: object) -> bool:
    """Return whether a column is called an identifier, of persons or of anything else."""
    return names_persons(column) or bool(_IDENTIFIER.search(str(column).lower()))
