"""What clients, sites, studies and columns may be called: others choose names, and terminals and pages show them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from unicodedata import category, normalize

from dpfl_lightning.errors import require

_LONGEST, _LONGEST_COLUMN = 64, 200
_MARKS = " -_.,'\N{RIGHT SINGLE QUOTATION MARK}()&+"
_NAME = (
    f"have 1 to {_LONGEST} letters and digits of any script, spaces and {_MARKS[1:]}, and begin with a letter or digit"
)
_COLUMN = f"have 1 to {_LONGEST_COLUMN} visible characters and spaces"


def is_name(text: object) -> bool:
    """Whether a text can be the name of a client, a site or a study: no path, markup or control character.

    >>> list(map(is_name, ["St. Mary's (Oslo)", "Charité", "../etc", ".hidden", "<b>"]))
    [True, True, False, False, False]
    """
    return (
        isinstance(text, str)
        and len(text) <= _LONGEST
        and text[:1].isalnum()
        and not text.endswith(" ")
        and all(one.isalnum() or one in _MARKS or category(one)[0] == "M" for one in text)
    )


def folded(text: str) -> str:
    """Return a text in the spelling in which it is compared: compatible characters, upper and lower case, spaces around
    it and invisible characters make no difference.

    >>> folded(" Ｂergen\u200b ") == folded("BERGEN")
    True
    """
    visible = "".join(one for one in text if category(one) != "Cf")
    return normalize("NFKC", normalize("NFKC", visible).casefold()).strip()


def check_names(key: str, names: Iterable[object]) -> None:
    """Raise UserError unless all names of clients, sites or studies are such, see `is_name`."""
    for name in names:
        require(is_name(name), key, _NAME, name, "Choose another name.")


def check_columns(key: str, names: Any) -> None:
    """Raise UserError unless all texts in a name, or in lists and mappings of names, can name a column or a category.

    Columns are "HbA1c (%)" and "LDL [mg/dL]", and categories "<=50K": all but control and invisible characters.
    """
    for text in _texts(names):
        fits = 0 < len(text) <= _LONGEST_COLUMN and all(one == " " or category(one)[0] in "LMNPS" for one in text)
        require(fits, key, _COLUMN, text, "Rename it.")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, Iterable):
        for one in value:
            yield from _texts(one)
