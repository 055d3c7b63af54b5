"""Ids of persons as their owner means them: one text for each person, and no two persons under one text."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from decimal import Decimal
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor, finfo

from dpfl_lightning.data.frames import MARKERS, as_text
from dpfl_lightning.errors import require, warn_user

#: what is written where nobody knows the person: all such rows would be those of one
_WORDS = """
<na> nat ?? -- --- xx xxx
unbekannt unbek anonym ohne keine keiner kein fehlt leer inconnu inconnue anonyme sans aucun aucune
desconocido desconocida anonimo anónimo ninguno sconosciuto sconosciuta ignoto nessuno desconhecido desconhecida
onbekend okänd ukjent ukendt tuntematon nieznany neznámý neznámy ismeretlen anonymous anon unidentified
unk nd nn nil unkn blank anonymised anonymized
\u043d\u0435\u0438\u0437\u0432\u0435\u0441\u0442\u043d\u043e \u4e0d\u660e
"""
_PHRASES = "keine angabe; not known; not available; not applicable; no id; nicht bekannt; unknown patient; n d; n n"
_NOBODY_KNOWN = {*_WORDS.split(), *MARKERS, "", *_PHRASES.split("; ")}
_EXPONENT = re.compile(r"[+-]?\d+([.,]\d+)?[eE]\+\d+|[+-]?\d[.,]\d+[eE]\d+")  # a spreadsheet has cut digits off
_DIGITS_KEPT = 15  # of a number, by a spreadsheet
_MOST_ROUNDED = 0.9  # of large numbers
_UNSEEN = {*"\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0", *map(chr, range(0xFE00, 0xFE10))}
_FEWEST_ROUNDED = 8  # ids; each is a rounded one by chance with probability 1/2 or less
_MANY_ROWS = 10  # of a person, who has `_TIMES_MORE` as many as any other one
_TIMES_MORE = 4


def ids_of(given: Any, count: int, where: str) -> list[str]:
    """Return the id of each record's person as text: 7, 7.0 and Decimal("7.0") are one, and so are "7" and " 7".

    Texts are compared after NFKC and without signs that cannot be seen. Raises UserError if one is missing, if texts
    differ in case, width or invisible signs alone, if numbers and texts are mixed (7 may be what a reader made of
    "07"), and if a spreadsheet or a floating dtype has rounded them.
    """
    must, listed = f"name a person for each of the {count} records", not isinstance(given, str | Mapping | Set)
    require(listed and isinstance(given, Iterable), where, must, type(given).__name__)
    values = given.tolist() if hasattr(given, "tolist") else list(given)
    written = [_as_written(value) for value in values]
    canonical = {text: _canonical(text) for text in set(written)}
    ids = [canonical[text] for text in written]
    require(len(ids) == count, where, must, len(ids))
    missing = sum(map(_names_nobody, ids))
    advice = "Leave these records out, or give each an id of its own."
    require(missing == 0, where, must, f"{missing} without one", advice)
    kinds = {isinstance(value, str) for value in values}
    must, advice = "have ids of one kind", "Read them as text: 7 may have been 07, which is another person."
    require(len(kinds) < 2, where, must, "numbers and texts", advice)
    _require_exact(given, values, ids, where)
    _require_apart(written, ids, where)
    _warn_of_many_rows(ids, where)
    return ids


def _as_written(value: Any) -> str:
    """Return an id without spaces around it; whole numbers of any type have no decimal point."""
    if isinstance(value, Number) and not isinstance(value, bool | np.bool_ | complex | int):
        number = value if isinstance(value, Decimal) else float(value)  # type: ignore[arg-type]
        is_whole = number == number and abs(number) != float("inf") and number == int(number)
        return str(int(number)) if is_whole else str(value)
    return as_text(value).strip()


def _canonical(text: str) -> str:
    """Return a text after NFKC, without signs that cannot be seen, such as NUL and zero-width spaces."""
    normal = unicodedata.normalize("NFKC", text)
    seen = (sign for sign in normal if unicodedata.category(sign) not in ("Cc", "Cf") and sign not in _UNSEEN)
    return "".join(seen).strip()


def _names_nobody(text: str) -> bool:
    plain = " ".join(re.sub(r"[\W_]+", " ", text).casefold().split())
    return text.casefold() in _NOBODY_KNOWN or plain in _NOBODY_KNOWN or bool(re.fullmatch(r"-\d+|x{2,}", text.lower()))


def alike(text: str) -> str:
    """Return what ids have in common that look as if they were one person's.

    >>> {alike(one) for one in ("P 7", "p  7", "P-7")} == {"p 7", "p-7"}, alike("1000.0"), alike("'007")
    (True, '1000', '007')
    """
    dashes = "".join("-" if unicodedata.category(sign) == "Pd" or sign == "\u2212" else sign for sign in text)
    plain = re.sub(r"^=?[\"']|[\"']$", "", " ".join(dashes.casefold().split()))
    return re.sub(r"^(\d+)[.,]0+$", r"\1", plain)


def _require_apart(written: Sequence[str], ids: Sequence[str], where: str) -> None:
    """Raise UserError if texts that differ would be one person, or look as if they were."""
    forms: dict[str, set[str]] = {}
    for text, one in set(zip(written, ids, strict=True)):
        forms.setdefault(alike(one), set()).add(text)
    several = sum(len(texts) > 1 for texts in forms.values())
    got = f"{several} that are written in several ways, which differ in case, width, dashes or invisible signs alone"
    advice = "Write each person's id in one way, or change one of two persons' ids."
    require(several == 0, where, "have ids that differ visibly", got, advice)


def _require_exact(given: Any, values: Sequence[Any], ids: Sequence[str], where: str) -> None:
    """Raise UserError if numbers were rounded: by a floating dtype, also an earlier one, or by a spreadsheet."""
    must, advice = "have exact ids", "Read them as text."
    most = _most_exact(given)
    for value in values:
        if isinstance(value, float | np.floating):
            exact = min(most, _of_dtype(value.dtype)) if isinstance(value, np.floating) else most
            got = f"floating numbers above 2^{exact.bit_length() - 1}"
            require(abs(float(value)) < exact, where, must, got, advice)
    numbers = {int(text) for text in ids if re.fullmatch(r"\d{1,18}", text)} if len(ids) else set()
    large = [number for number in numbers if number >= 2**24]
    rounded = sum(int(np.float32(number)) == number for number in large)
    if len(large) >= _FEWEST_ROUNDED and rounded >= _MOST_ROUNDED * len(large):
        warn_user(f"{where}: ids look as if float32 had rounded them: if so, read them as text from the first file on")
    cut = sum(bool(_EXPONENT.fullmatch(text)) for text in ids)
    advice = "A spreadsheet has cut their digits off: export the column as text."
    require(cut == 0, where, must, f"{cut} with an exponent, as in 1.23E+12", advice)
    long = {text for text in ids if text.isdigit() and len(text) > _DIGITS_KEPT}
    if len(long) > 1 and all(set(text[_DIGITS_KEPT:]) == {"0"} for text in long):
        warn_user(f"{where}: ids have zeros after {_DIGITS_KEPT} digits, as a spreadsheet writes: export them as text")


def _most_exact(given: Any) -> int:
    """Return up to which number floating numbers of this kind tell whole numbers apart."""
    if isinstance(given, Tensor) and given.is_floating_point():
        return int(2 / finfo(given.dtype).eps)
    kind = getattr(given, "dtype", None)
    kind = getattr(kind, "numpy_dtype", kind)  # of pandas' and pyarrow's types
    if str(getattr(given, "type", "")) in ("float", "halffloat"):  # of a pyarrow array
        kind = np.dtype(np.float32 if str(given.type) == "float" else np.float16)
    return _of_dtype(kind) if isinstance(kind, np.dtype) and kind.kind == "f" else 2**53


def _of_dtype(kind: np.dtype[Any]) -> int:
    return int(2 / np.finfo(kind).eps)


def _warn_of_many_rows(ids: Sequence[str], where: str) -> None:
    """Tell the owner of the records if one id has far more rows than any other, as a word for nobody has."""
    counts: list[int] = [count for _, count in Counter(ids).most_common(2)]
    if len(counts) == 2 and counts[0] >= max(_MANY_ROWS, _TIMES_MORE * counts[1]):
        most, next_most = counts
        fact = f"{most} rows have one id, and no other id has more than {next_most}"
        warn_user(f"{where}: {fact}: if it stands for persons who are not known, give each row an id of its own")
