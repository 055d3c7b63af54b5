"""What a run is, for those who look at its curves: `run.json` with name, parameters, tags and data sets."""

import contextlib
import getpass
import hashlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dpfl_lightning
from dpfl_lightning.config.options import changed_options
from dpfl_lightning.config.public import published, published_command, published_data
from dpfl_lightning.errors import shortened
from dpfl_lightning.federated.messages.facts import Facts
from dpfl_lightning.federated.server.results import RunInfo
from dpfl_lightning.federated.server.run import ClientScore, Run
from dpfl_lightning.federated.server.scores import (
    badged,
    bound,
    formatted,
    in_words,
    listed,
    remarks,
    score_cells,
    stated,
)
from dpfl_lightning.federated.server.view import View
from dpfl_lightning.privacy.accounting.guarantee import Guarantee, RunGuarantee
from dpfl_lightning.privacy.accounting.noise_source import FRESH, NoiseSource
from dpfl_lightning.runtime.text import at_most, counted, flattened, span

#: parameters of every run; others are shown where they differ from their defaults
_ALWAYS = (
    "rounds",
    "seed",
    "data.name",
    "data.class_path",
    "model.name",
    "model.class_path",
    "clients.count",
    "clients.batch_size",
    "clients.learning_rate",
    "engine.name",
)
_NEVER = ("tracking", "output_dir", "privacy.epsilon")  # said by epsilon, or not compared
_LONGEST = 250  # characters of a parameter


def about(view: View) -> dict[str, Any]:
    """Return what `run.json` says beside the `RunInfo` at the start of a run: no secret and no private value."""
    run, options = view.run, view.run.options or _options_of(view)
    budgets = run.clients.budget if run.clients is not None and run.has_noise else ()
    more = {
        "epsilon": epsilon_span(budgets),
        "clients.count": view.facts.num_clients,
        "num_params": run.num_params,
    }
    return {
        "name": run_name(run.strategies, budgets, options, run.source),
        "params": params(options, more),
        "tags": {**_place(view), **run.assumptions, **program()},
        "datasets": {context: dataset(view.facts, run, context) for context in _contexts(view.facts)},
        "ended": None,
    }


def _contexts(facts: Facts) -> tuple[str, ...]:
    return ("training", "test") if facts.test_set else ("training",)


def _options_of(view: View) -> dict[str, Any]:
    """Return the most important options of a run that was built in Python."""
    optimizer = None if view.optimizer is None else type(view.optimizer).__name__.lower()
    model = {"class_path": type(view.module.net).__qualname__}
    seed_and_rounds = {"rounds": view.run.rounds, "seed": view.seed}
    return {**seed_and_rounds, "model": model, "clients": {"optimizer": {"name": optimizer}}}


def _place(view: View) -> dict[str, str]:
    run = view.run
    return {"engine": run.engine, "device": run.device, "dpfl_lightning": dpfl_lightning.__version__, "task": run.task}


def run_name(
    strategies: Iterable[str], budgets: Sequence[float], options: Mapping[str, Any], source: NoiseSource = FRESH
) -> str:
    """Name a run by its strategies, without the default rule, by the budgets of its clients (none: no privacy),
    by where its noise comes from, and by the optimiser and the model of its `options` if they were changed.

    >>> run_name(["size_weighted", "noise_aware"], [0.9, 2.9], {"model": {"class_path": "nets.Net2"}})
    'noise_aware eps 0.9-2.9 Net2'
    """
    changed = flattened(changed_options(options))
    kinds = [changed.get("clients.optimizer.name"), changed.get("model.class_path", changed.get("model.name"))]
    epsilon = f"{'eps ' if budgets else ''}{epsilon_span(budgets).replace(' to ', '-')}"
    known = [kind.rpartition(".")[2] for kind in kinds if kind not in (None, "null")]
    return " ".join([_joined(strategies), *filter(None, [source.label]), epsilon, *known])


def epsilon_span(budgets: Sequence[float]) -> str:
    """Return the range of the budgets in words."""
    return span(budgets, bound) or "no privacy"


def _joined(strategies: Iterable[str]) -> str:
    given = [name.rpartition(".")[2] for name in strategies]
    return " ".join(name for name in given if name != "size_weighted") or "size_weighted"


def params(options: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters by which runs are compared: the most important options, and those that were changed.

    `more` are resolved values, which replace options of the same name. Options that are null are left out.

    >>> params({"rounds": 10, "strategies": {"fedprox": {"pull": 0.1}}}, {"num_params": 650})
    {'strategies': 'fedprox', 'rounds': '10', 'strategies.fedprox.pull': '0.1', 'num_params': '650'}
    """
    flat, changed = (flattened(published(one)) for one in (options, changed_options(options)))
    head = {"strategies": _joined(options["strategies"])} if options.get("strategies") else {}
    chosen = {key: flat[key] for key in _ALWAYS if key in flat}
    chosen |= {key: text for key, text in changed.items() if text != "{}" and not key.startswith(_NEVER)}
    given = {**head, **chosen, **{key: str(value) for key, value in more.items()}}
    return {key: shortened(text, _LONGEST) for key, text in given.items() if text != "null"}


def dataset(facts: Facts, info: RunInfo, context: str) -> dict[str, str]:
    """Return name, digest, source and profile of the data set `context` (training or test) for MLflow.

    **Privacy** The digest is over public facts: options of the data, seed and sizes. It says nothing about the content
    of records, so the same digest does not prove the same records.
    """
    at_sites = facts.at_sites and context == "training"
    data = {} if at_sites else published_data(info.options.get("data") or {})
    name = "records of sites" if at_sites else str(data.get("name") or data.get("class_path") or "population")
    shapes = {"input_shape": facts.input_shape, "num_classes": facts.num_classes}
    profile: dict[str, Any] = {"num_clients": facts.num_clients, **shapes}
    if context == "training":
        counts, units = facts.num_records, f"{facts.unit}s"
        profile |= {f"num_{units}": sum(counts), f"{units}_per_client": span(counts)}
    public = {"data": data, "seed": info.options.get("seed"), "records": facts.num_records, "context": context}
    return {
        "name": name,
        "digest": hashlib.sha256(json.dumps(public, default=str).encode()).hexdigest()[:8],
        "source_type": "dpfl_lightning",
        "source": json.dumps(data, default=str),
        "profile": json.dumps(profile),
    }


def program() -> dict[str, str]:
    """Return tags that say who ran which command at which commit of the working directory."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    start = ["python", "-m", module.name.removesuffix(".__main__")] if module is not None else [sys.argv[0]]
    tags = {
        "mlflow.source.name": "dpfl_lightning",
        "mlflow.source.type": "LOCAL",
        "command": published_command([*start, *sys.argv[1:]]),
    }
    with contextlib.suppress(OSError, KeyError):  # no user name
        tags["mlflow.user"] = getpass.getuser()
    return tags | ({"mlflow.source.git.commit": found} if (found := commit()) else {})


def commit() -> str:
    """Return the commit of the working directory; empty without git or a repository."""
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""
    found = asked.stdout.strip()
    return found if re.fullmatch("[0-9a-f]{40,64}", found) else ""


def claim(guarantee: Guarantee) -> dict[str, str]:
    """Return a guarantee as tags: the largest epsilon over the clients, its delta and unit, and what it covers."""
    several = isinstance(guarantee, RunGuarantee) and guarantee.clients > 1
    whose = "of the client with the largest epsilon: " * several
    return {
        "guarantee": guarantee.words(),
        "epsilon": badged(at_most(guarantee.epsilon), guarantee.source),
        **({} if math.isinf(guarantee.epsilon) else {"delta": at_most(guarantee.delta)}),
        "unit": guarantee.unit,
        "covered": whose + ("; ".join(guarantee.covers) or "nothing"),
        "not_covered": "; ".join(guarantee.not_covered),
        **({} if guarantee.together is None else {"all_runs": guarantee.together.words()}),
    }


def markdown(run: Run) -> str:
    """Return Markdown for the top of the run's page: how it stands, its results, and the plan."""
    result, notes = run.result, run.info.strategy_notes
    plan = [f"**Plan.** {' '.join(notes)}"] if notes else []
    if result is None:
        return "\n\n".join([f"**{run.ending}.**", *plan])
    words, count = in_words(vars(result)), counted(len(result.clients), "client")
    worst = [] if run.worst_client is None else [_of_clients(run.worst_client, result.headline_mean, count)]
    fair = [f"{listed(result.fairness)}."] if result.fairness else []
    scores = [*([f"**{words}**"] if words else []), _largest(result.guarantee, count), *worst, *fair]
    scores += remarks([vars(result)])
    guarantee = f"{_guarantee(result.guarantee)} Details: see the artifact `guarantee.html`."
    return "\n\n".join([*scores, f"{guarantee}\n\n{_covered(result.guarantee)}", f"**Ended:** {run.ending}.", *plan])


def seeds_markdown(seeds: Sequence[int], results: Sequence[Mapping[str, Any]], guarantee: RunGuarantee) -> str:
    """Return Markdown for the top of the page of runs for several seeds, whose `guarantee` is that of all together."""
    means = ", ".join(f"{name} {cell}" for name, cell in score_cells(results).items())
    over = f"Mean and standard deviation over seeds {', '.join(map(str, seeds))}."
    largest = _largest(guarantee, counted(guarantee.clients, "client"))
    scores = [*([f"**{means}**"] if means else []), over, largest, *remarks(results)]
    return "\n\n".join([*scores, _guarantee(guarantee), _covered(guarantee)])


def _largest(guarantee: RunGuarantee, count: str) -> str:
    if math.isinf(guarantee.epsilon):
        return f"**{guarantee.words()}**"
    return f"**Epsilon {stated(guarantee)}**, the largest of {count}."


def _of_clients(worst: ClientScore, mean: float | None, count: str) -> str:
    name, score, value = worst
    return f"Over {count}: mean {score} {formatted(score, mean)}, worst {formatted(score, value)} ({name})."


def _guarantee(guarantee: RunGuarantee) -> str:
    return f"**Guarantee.** {guarantee.words()}"


def _covered(guarantee: RunGuarantee) -> str:
    said = claim(guarantee)
    return f"- Covered: {said['covered']}\n- Not covered: {said['not_covered']}"
