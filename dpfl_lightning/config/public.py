"""Options as they may be published: without secrets, paths, and what the owner of a table alone knows."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpfl_lightning.runtime.text import without_credentials, without_secrets

LEFT_OUT = "(not published)"
#: arguments of this package's data that all clients and the server agree on
_AGREED = """
client person label features drop columns held_out classes num_classes seed size channels lazy
"""
AGREED = frozenset(_AGREED.split())


def published(value: Any) -> Any:
    """Return options without secrets and absolute paths; section `data` as by `published_data`.

    >>> published({"seed": 1, "output_dir": "~/runs", "data": {"name": "digits"}})
    {'seed': 1, 'output_dir': '(not published)', 'data': {'name': 'digits'}}
    """
    if isinstance(value, Mapping):
        public = {LEFT_OUT if _is_path(str(name)) else name: published(one) for name, one in value.items()}
        return without_secrets(public | {"data": published_data(value["data"])} if "data" in value else public)
    if isinstance(value, list | tuple):
        return [published(one) for one in value]
    return (LEFT_OUT if _is_path(value) else without_credentials(value)) if isinstance(value, str) else value


def published_data(data: Any) -> Any:
    """Return section `data` of a configuration, with those arguments of a user's data that are `AGREED` or numbers.

    >>> published_data({"class_path": "mine.table", "init_args": {"rows": 20, "file": "a.csv", "label": "ill"}})
    {'class_path': 'mine.table', 'init_args': {'rows': 20, 'file': '(not published)', 'label': 'ill'}}
    """
    if not isinstance(data, Mapping):
        return published(data)
    public = published({name: one for name, one in data.items() if name != "init_args"})
    if data.get("folder"):
        public["folder"] = LEFT_OUT
    given = data.get("init_args")
    if isinstance(given, Mapping):
        shown = {
            name: published(one) if name in AGREED or _says_little(one) else LEFT_OUT for name, one in given.items()
        }
        public["init_args"] = without_secrets(shown)
    elif "init_args" in data:
        public["init_args"] = published(given)
    return {name: public[name] for name in data}


def published_command(words: Sequence[str]) -> str:
    """Return a command line without absolute paths, of which the names remain, and without what it says of `data`.

    >>> published_command(["dpfl", "fit", "--config=~/a.yaml", "--data.init_args.df", "b.csv", "--rounds", "3"])
    "dpfl fit --config=a.yaml --data.init_args '(not published)' --rounds 3"
    """
    shown, of_data = list[str](), False
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            of_data = flag == "--data" or flag.startswith("--data.init_args")
            name = "--data.init_args" if flag.startswith("--data.init_args") else flag
            hidden = LEFT_OUT if of_data else _name(value)
            shown.append(f"{name}={hidden}" if equals else name)
        else:
            shown.append(LEFT_OUT if of_data else _name(word))
    return without_credentials(shlex.join(shown))


def _says_little(value: Any) -> bool:
    return value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 10_000)


def _name(word: str) -> str:
    return Path(word).name if _is_path(word) else word


def _is_path(text: str) -> bool:
    drive = text[1:2] == ":" and text[2:3] in ("\\", "/")
    return text.startswith(("/", "~", "\\\\")) or drive or "=/" in text
