"""Options as they may be published: without secrets, paths, and what the owner of a table alone knows."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfl_lightning.runtime.text import without_credentials, without_secrets

LEFT_OUT = "(not published)"
#: arguments of a user's data that say how a table is written, or where it is
OF_OWNERS = frozenset({"df", "test", "read", "replace", "rename", "path", "folder"})


def published(value: Any, within_data: bool = False) -> Any:
    """Return options without secrets, absolute paths, and what `data` says of tables and files.

    >>> published({"seed": 1, "data": {"init_args": {"df": "a.csv", "label": "ill", "replace": {"sex": {"w": "f"}}}}})
    {'seed': 1, 'data': {'init_args': {'df': '(not published)', 'label': 'ill', 'replace': '(not published)'}}}
    """
    if isinstance(value, Mapping):
        return {
            name: LEFT_OUT
            if within_data and name in OF_OWNERS and one is not None
            else published(one, within_data or name in ("data", "init_args"))
            for name, one in without_secrets(value).items()
        }
    if isinstance(value, list | tuple):
        return [published(one, within_data) for one in value]
    if isinstance(value, str) and (_is_absolute(value) or (within_data and _is_file(value))):
        return LEFT_OUT
    return without_credentials(value) if isinstance(value, str) else value


def published_command(words: Sequence[str]) -> str:
    """Return a command line without absolute paths, of which the names remain, and without values that `data` has."""
    shown, of_data = list[str](), False
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            of_data = flag == "--data" or flag.startswith("--data.")
            hidden = equals and of_data and not value.isidentifier()
            shown.append(f"{flag}={LEFT_OUT}" if hidden else word)
        elif of_data and not word.isidentifier():
            shown.append(LEFT_OUT)
        else:
            shown.append(Path(word).name if _is_absolute(word) else word)
    return without_credentials(shlex.join(shown))


def _is_absolute(text: str) -> bool:
    return text.startswith(("/", "~", "\\\\")) or (text[1:2] == ":" and text[2:3] in ("\\", "/"))


def _is_file(text: str) -> bool:
    return "/" in text or "\\" in text or Path(text).suffix in (".csv", ".parquet")
