"""Search hostile models whose gradients depend on the company of a record."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpfl_lightning.auditing.company import LARGE, Difference, differences, hostile
from dpfl_lightning.privacy.clipping.checked import CheckedSum, clipped_sum_for, vmap_or_loop
from dpfl_lightning.privacy.clipping.reference import ClippedSum, ClipRequest, LoopClippedSum, SampleLoss
from dpfl_lightning.runtime.devices import use_exact_products
from dpfl_lightning.runtime.files import write_text
from experiments.attacks.nets import NETS, Case, loss_of
from experiments.pages import markdown

SIZES = (33, 7, 103, 31, 16, 64, 8, 130, 15, 32)  # records, the first ones in short searches
FLOAT64 = 1e-12  # clip norms: differences below come from sums in float64, whose rounding `ClippedSum` bounds
EXPECTED = (None, 6.0, 20.0, 50.0)  # records that the plan expects, which decide the size of passes
SCALES = (LARGE, LARGE, 1e5, 1.0)  # weights of the cancelling pairs


def fast(net: nn.Module, sample_loss: SampleLoss, x: Tensor, y: Tensor) -> CheckedSum:
    return clipped_sum_for(net, sample_loss, x, y)[0]


SUMS: Mapping[str, Callable[[nn.Module, SampleLoss, Tensor, Tensor], CheckedSum]] = {
    "fast": fast,
    "serial": vmap_or_loop,
}
CPU = torch.device("cpu")


def search(
    models: int,
    nets: Sequence[str] = (),
    sums: Sequence[str] = (),
    device: torch.device = CPU,
    file: Path | None = None,
) -> dict[str, Any]:
    """Try so many hostile models, in turn of each net with each sum; return what differed, by net and sum.

    `alone` says whether the net's gradients are computed one record at a time. `file` is written after each pair;
    pairs that it holds, of as many models, are not tried again.
    """
    if device.type == "cuda":
        use_exact_products()
    pairs = [(net, kind) for net in nets or NETS for kind in sums or SUMS]
    counts = [len(range(number, models, len(pairs))) for number in range(len(pairs))]
    held = json.loads(file.read_text())["rows"] if file is not None and file.exists() else []
    known = {(row["net"], row["sums"], row["models"]): row for row in held}
    ahead = {
        key: known[key] for key in ((*pair, seeds) for pair, seeds in zip(pairs, counts, strict=True)) if key in known
    }
    rows: list[dict[str, Any]] = []
    for (name, kind), seeds in zip(pairs, counts, strict=True):
        row = ahead.pop((name, kind, seeds), None)
        pair = {"net": name, "sums": kind, "models": seeds}
        rows.append(row or {**pair, **_pair(NETS[name], SUMS[kind], seeds, device)})
        every = [*rows, *ahead.values()]
        found = {"rows": every, "seconds": sum(row["seconds"] for row in every), "torch": torch.__version__}
        if file is not None:
            write_text(file, json.dumps(found, indent=1) + "\n")
    return found


def _pair(
    case: Case,
    sum_for: Callable[[nn.Module, SampleLoss, Tensor, Tensor], CheckedSum],
    seeds: int,
    device: torch.device,
) -> dict[str, Any]:
    began = time.monotonic()
    net = case.net().to(device)
    clipped_sum = sum_for(net, loss_of(net), *_on(device, case.records(0, 0)))
    found = [tried(clipped_sum, net, case, seed) for seed in range(seeds)]
    alone = isinstance(clipped_sum.choose(), LoopClippedSum)
    return {"alone": alone, **_summed(found), "seconds": time.monotonic() - began}


def _on(device: torch.device, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].to(device), batch[1].to(device)


def tried(clipped_sum: ClippedSum, net: nn.Module, case: Case, seed: int) -> list[Difference]:
    """Return the differences between the companies for one hostile model.

    Sizes, records, weights and the number of threads within an operator (1 or 2) follow from the seed.
    """
    size, large = SIZES[seed % len(SIZES)], SCALES[seed // len(SIZES) % len(SCALES)]
    params = hostile({name: p.detach() for name, p in net.named_parameters()}, seed, large)
    device = next(net.parameters()).device
    records, others = _on(device, case.records(size, 2 * seed)), _on(device, case.records(9, 2 * seed + 1))
    request = ClipRequest(1.0, expected=EXPECTED[seed // 3 % len(EXPECTED)])
    before = torch.get_num_threads()
    torch.set_num_threads(1 + seed // 2 % 2)
    try:
        return differences(clipped_sum, params, records, others, request, seed)
    finally:
        torch.set_num_threads(before)


def _summed(found: Sequence[Sequence[Difference]]) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    for model in found:
        kinds.update({one.kind for one in model if one.records})
    every = [one for model in found for one in model]
    return {
        "differing": sum(any(one.records for one in model) for model in found),
        "beyond_float64": sum(any(one.largest > FLOAT64 for one in model) for model in found),
        "largest": max((one.largest for one in every), default=0.0),
        "moved": max((one.moved for one in every), default=0.0),
        "by": dict(kinds),
    }


def table(results: Mapping[str, Any]) -> str:
    """Show the pairs of nets and sums that differed, and the total."""
    rows = results["rows"]
    differing = [row for row in rows if row["differing"]]
    lines = [
        (
            *(row["net"], row["sums"], f"{row['differing']} of {row['models']}", str(row["beyond_float64"])),
            *(f"{row['largest']:.2g}", f"{row['moved']:.2g}"),
            ", ".join(f"{kind} {count}" for kind, count in row["by"].items()),
        )
        for row in differing
    ]
    total, models = (sum(row[key] for row in rows) for key in ("differing", "models"))
    beyond = sum(row["beyond_float64"] for row in rows)
    text = f"{total} of {models} hostile models have records whose bits depend on their company ({beyond} by more than "
    text += f"sums in float64 round); {len(rows)} pairs of nets and sums, {len(differing)} of them differ; "
    text += f"{results['seconds']:.0f} s, torch {results['torch']}."
    head = ("net", "sums", "models", "beyond float64", "one record", "sum", "by")
    return "\n\n".join([*([markdown(head, lines)] if lines else []), text])
