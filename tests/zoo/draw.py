"""Draw the models of `drawn.py` from the lists of names of libraries: `python -m tests.zoo.draw`.

A model is taken if a plain pass of autograd over two records of its kind works within two seconds, and it has at most
eight million parameters; of one module of timm or configuration of transformers there is only one. Nothing of this
package decides.
"""

import random
import sys
import time
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from zoo.drawn import DRAWN, entry_of
from zoo.judge import losses_of
from zoo.packages import missing

SEED, MOST, SECONDS = 20261129, 8_000_000, 2.0
COUNTS = {"timm": 14, "torchvision": 4, "sequence": 7, "tokens": 3, "language": 4, "vision": 4}
MAPPINGS = {"sequence": "SEQUENCE_CLASSIFICATION", "tokens": "TOKEN_CLASSIFICATION", "language": "CAUSAL_LM"}
MAPPINGS |= {"vision": "IMAGE_CLASSIFICATION"}


def names(kind: str) -> Iterator[tuple[str, str]]:
    """Yield a name, and what at most one model is taken of, in the order of the seed."""
    if kind == "timm":
        timm = import_module("timm")
        found = [(name, timm.models.model_entrypoint(name).__module__) for name in sorted(timm.list_models())]
    elif kind == "torchvision":
        models = import_module("torchvision.models")
        listed = models.list_models(module=models)
        found = [(name, models.get_model_builder(name).__module__) for name in listed]
    else:
        mapping = getattr(
            import_module("transformers.models.auto.modeling_auto"), f"MODEL_FOR_{MAPPINGS[kind]}_MAPPING_NAMES"
        )
        classes = [(one if isinstance(one, str) else one[0], config) for config, one in sorted(mapping.items())]
        found = [(f"{config} {name}", config) for name, config in classes]
    random.Random(f"{SEED} {kind}").shuffle(found)
    yield from found


def is_taken(kind: str, name: str, options: dict[str, Any]) -> bool:
    """Return whether a model is small, and a plain pass over two records works in time."""
    entry = entry_of(kind, name, options)
    try:
        with torch.device("meta"):
            if sum(one.numel() for one in entry.build().parameters()) > MOST:
                return False
    except Exception:  # of a library that reads numbers when it builds
        pass
    try:
        torch.manual_seed(0)
        model = entry.build()
        if sum(one.numel() for one in model.parameters()) > MOST:
            return False
        x, y = entry.records(2, torch.Generator().manual_seed(0))
        begun = time.process_time()
        losses = losses_of(entry, model, x, y)
        losses.sum().backward()
        return losses.shape == (2,) and bool(losses.isfinite().all()) and time.process_time() - begun <= SECONDS
    except Exception:  # of a library, for sizes that a model does not know
        return False


def draw() -> list[tuple[str, str, dict[str, Any]]]:
    """Return the kind, name and options of each model."""
    found, taken = [], set()
    for kind, count in COUNTS.items():
        left = count
        for name, family in names(kind):
            choices = [{"img_size": 64}, {}] if kind == "timm" else [{}]
            options = None if family in taken else next((one for one in choices if is_taken(kind, name, one)), None)
            if options is not None:
                found.append((kind, name, options))
                print(found[-1], file=sys.stderr, flush=True)
                taken.add(family)
                left -= 1
            if not left:
                break
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if absent := missing():
        raise SystemExit(absent)
    found = draw()
    print(*found, sep=",\n")
    print("as in drawn.py" if found == DRAWN else "other models than in drawn.py")
