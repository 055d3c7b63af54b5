"""Hooks of MkDocs: pages that are written from the code, and links that leave the folder of the docs."""

import importlib
import inspect
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import dpfl_lightning
from dpfl_lightning.__main__ import COMMANDS
from dpfl_lightning.config.options import SECTIONS, all_keys
from dpfl_lightning.config.registry import NAMES, REGISTRIES, names_of, options_in_words
from dpfl_lightning.config.typed import in_words
from dpfl_lightning.config.yaml_text import dump
from dpfl_lightning.strategies import STRATEGIES, classes
from experiments.pages import markdown

ROOT = Path(__file__).parents[1]
#: objects that hooks of strategies and callbacks receive
RECEIVED = (
    "server.view.View",
    "messages.update.ClientUpdates",
    "messages.plan.RoundPlan",
    "server.results.RoundReport",
)

#: names at the top of the page
FIRST = ("FederatedLoop", "Population", "ClientModule", "ClientOptions", "PrivacyOptions", "RunResult")

#: class -> its methods and attributes that users call, also inherited ones; of other classes all are shown
SHOWN = {
    "ClientModule": ["sample_loss", "personal_mask"],
    "FederatedLoop": ["run", "client_model"],
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are written from the code, files of the project's root, and the figures of examples."""
    pages = {
        "reference/python.md": _python_page(),
        "reference/strategies.md": _strategies_page(),
        "reference/options.md": _options_page(),
        "reference/commands.md": _commands_page(),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text(),
        "examples/scripts.md": (ROOT / "examples" / "README.md").read_text(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for figure in sorted((ROOT / "examples").glob("*.png")):
        files.append(File.generated(config, str(figure.relative_to(ROOT)), abs_src_path=str(figure)))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Point to the copies of pages that lie outside of the folder, and keep a number and its error on one line."""
    text = re.sub(r"(?<=\d) ± (?=\d)", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}", text)
    if page.file.src_uri in ("contributing.md", "changelog.md"):
        text = text.replace("](docs/", "](").replace("](README.md)", "](tutorials/first_run.md)")
    if page.file.src_uri == "examples/scripts.md":
        text = re.sub(r"\[(\w+\.py)\]\(\1\)", r"`\1`", text).replace("](../docs/", "](../")
    return text.replace("](../../examples/README.md)", "](../examples/scripts.md)").replace(
        "](../examples/README.md)", "](examples/scripts.md)"
    )


def _python_page() -> str:
    paths = [_path(importlib.import_module(f"dpfl_lightning.{home}"), name) for name, home in _homes()]
    received = [f"dpfl_lightning.federated.{path}" for path in RECEIVED]
    return "\n".join(
        [
            "# Python",
            "These names are imported from `dpfl_lightning`.",
            *(f"\n::: {path}{_members(path.rpartition('.')[2])}" for path in paths),
            "\n## What hooks receive",
            "Hooks of strategies and callbacks receive these objects. They hold public facts and noised releases only.",
            *(f"\n::: {path}\n    options: {{heading_level: 3}}" for path in received),
        ]
    )


def _members(name: str) -> str:
    if name not in SHOWN:
        return ""
    return f"\n    options: {{inherited_members: true, members: [{', '.join(SHOWN[name])}]}}"


def _homes() -> Iterable[tuple[str, str]]:
    return sorted(dpfl_lightning._HOME.items(), key=lambda one: (*[one[0] != name for name in FIRST], one[0]))


def _path(module: Any, name: str) -> str:
    return f"{getattr(module, name).__module__}.{name}"


def _strategies_page() -> str:
    parts = [
        "# Strategies",
        "A configuration names strategies as `strategies: {name: {option: value}}`. "
        "[Which strategy when](../choosing.md) helps to choose one.",
    ]
    for room in sorted({file.rpartition(".")[0] for file, _ in STRATEGIES.values()}, reverse=True):
        parts.append(f"\n## {room.replace('.', ': ').replace('_', ' ').capitalize()}")
        for name, (file, kind) in STRATEGIES.items():
            if file.rpartition(".")[0] == room:
                options = f"{{members: false, heading: {name}, toc_label: {name}, heading_level: 3}}"
                parts.append(f"\n::: dpfl_lightning.{file}.{kind}\n    options: {options}\n")
                rows = [[f"`{option}`", words] for option, words in options_in_words(classes()[name]).items()]
                parts += [markdown(["option", "value (default)"], rows)] if rows else []
    return "\n".join(parts)


def _options_page() -> str:
    parts = [
        "# Options",
        "Every key can be set in the YAML file and on the command line, as in `--privacy.epsilon 3`. "
        "`--print_config` prints all keys with their values.",
    ]
    for section in ("", *SECTIONS):
        title, about = "The run", "Keys at the top of the file."
        if section:
            title, about = section, (inspect.getdoc(SECTIONS[section]) or "").partition("\nArgs:")[0]
        parts += [f"\n## {title}\n", about]
        for key, known in all_keys().items():
            if key.rpartition(".")[0] == section:
                about = f"{known.help[:1].upper()}{known.help[1:]}".replace("<", "&lt;")
                parts.append(f"\n`{key}` ({in_words(known.hint)}; default `{_shown(known.default)}`)\n:   {about}")
    parts += ["\n## Names\n", "These keys select an entry by its name. Options of an entry follow its name.\n"]
    named = [key for key in (*REGISTRIES, *NAMES) if not key.startswith("sweep.")]
    parts.append(markdown(["key", "names"], [[f"`{key}`", ", ".join(names_of(key))] for key in named]))
    return "\n".join(parts)


def _shown(value: object) -> str:
    return dump(value).strip() if isinstance(value, dict) else json.dumps(value)


def _commands_page() -> str:
    rows = []
    for name in COMMANDS:
        about = (inspect.getdoc(importlib.import_module(f"dpfl_lightning.commands.{name}")) or "").splitlines()[0]
        rows.append([f"`dpfl {name}`", f"`python -m dpfl_lightning {name}`", about.partition("`: ")[2]])
    return "\n".join(
        [
            "# Commands",
            "`dpfl COMMAND --help` shows the flags of a command. Both forms run the same program.\n",
            markdown(["command", "as a module", "purpose"], rows),
        ]
    )
