"""The records of a site, and its place among the clients of a plan."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dpfl_lightning.config.registry import call
from dpfl_lightning.data.datasets import load
from dpfl_lightning.data.frames import frame_of
from dpfl_lightning.data.images import ImageFolder
from dpfl_lightning.data.own import own_population
from dpfl_lightning.data.population import Population
from dpfl_lightning.errors import UserError, require

_TABLES = (".csv", ".parquet")
_SHARE = re.compile(r"(\w+):(\d+)/(\d+)")
_FUNCTION = re.compile(r"([\w.]+):(\w+)")


def seated(site: Population, client: int, num_clients: int, names: Sequence[str]) -> Population:
    """Return the records of a site, a population of one client, as those of client number `client` of N.

    The other clients have no records here. Held-out and test records are left out.
    """
    none = site.y.new_zeros(0, dtype=torch.long)
    train_of = [none] * num_clients
    train_of[client] = site.train_of[0]
    held_out_of = [none] * num_clients
    return dataclasses.replace(
        site, train_of=train_of, held_out_of=held_out_of, test=None, public=None, groups=None, names=tuple(names)
    )


def site_population(data: str, arguments: Mapping[str, Any], name: str) -> Population:
    """Return the records of one site as a population of one client, none of them held out unless asked for.

    Args:
        data: a CSV or Parquet file; a folder with one folder of images for each class; `module:function`, which returns
            a Population or a mapping of one client; or `digits:0/3`, the first of three equal shares of a public set.
        arguments: of a table those of `Population.from_dataframe` without `client`; of images `classes`, `size` and
            `channels`; of a function those of `Population.from_datasets`.
        name: of the site, for messages.

    Raises UserError if there is no such source, or it does not hold the records of one client.
    """
    path = Path(data)
    if path.suffix in _TABLES:
        frame = frame_of(path)
        column = "client of this site"
        options = call("data_args", {"table": _table}, "table", **arguments)
        return Population.from_dataframe(frame.assign(**{column: name}), client=column, **options)
    if path.is_dir():
        images = call("data_args", {"images": _images}, "images", **arguments)
        folder = ImageFolder(path, images["classes"], images["size"], images["channels"])
        count = len(images["classes"])
        return Population.from_datasets({name: folder}, held_out=0.0, num_classes=count, lazy=True)
    if share := _SHARE.fullmatch(data):
        place, count = int(share[2]), int(share[3])
        require(place < count, "--data", f"name a share below {count}", data)
        require(not arguments, "--data_args", "be left out for a public data set", dict(arguments))
        return one_client(Population.partitioned(load(share[1]), num_clients=count), place)
    if function := _FUNCTION.fullmatch(data):
        made = own_population(f"{function[1]}.{function[2]}", {}, arguments, None, usual={"held_out": 0.0})
        require(made.num_clients == 1, "--data", "give the records of one client", made.num_clients)
        return made
    must = "be a CSV or Parquet file, a folder of images, module:function, or a share such as digits:0/3"
    raise UserError(f"`--data` must {must}, got {data!r}.")


def one_client(population: Population, client: int) -> Population:
    """Return the population of one client, without its held-out records and the test set."""
    none = population.y.new_zeros(0, dtype=torch.long)
    rows = population.train_of[client]
    return dataclasses.replace(
        population, train_of=[rows], held_out_of=[none], test=None, public=None, groups=None, names=()
    )


def _table(
    label: Any,
    features: Any = None,
    scale: Any = None,
    categories: Any = None,
    num_classes: int | None = None,
    classes: Any = None,
    held_out: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    return dict(locals())


def _images(classes: Sequence[str], size: Sequence[int] | None = None, channels: int = 3) -> dict[str, Any]:
    return dict(locals())
