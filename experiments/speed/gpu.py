"""`python -m experiments.speed gpu`: is the package right on a GPU, and how fast is it there? In under eight minutes.

Each section is a process with a time limit, so that a hang, a crash or minutes of compiling cost that section only.
Time that a section does not use is added to the next one. It runs on a CPU as well, which tests the check itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.published import BATCH_SIZES
from dpfl_lightning.errors import require_one_of
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.privacy.noise import NORMAL, RandomGenerator, Streams, integer_noise
from dpfl_lightning.runtime.devices import products
from experiments.attacks.nets import NETS
from experiments.attacks.search import search
from experiments.pages import markdown
from experiments.speed import report
from experiments.speed.baselines import build_net, our_loop, random_records
from experiments.speed.cases import CASES, Case
from experiments.speed.measure import machine, measure

#: largest relative distance of un-noised updates
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}

SEARCH_SECONDS = 50  # then no further model is searched

Keep = Callable[..., None]  # stores figures by name, also if the section does not come to its end


def _cases(tiny: bool) -> dict[str, Case]:
    """The measured rounds; `mixed` has the batch sizes of the main job."""
    lora = Case("bert_base_lora", (128,), clients=2, records=64, batch_size=32, words=30_000)
    cases = {**CASES, "mixed": dataclasses.replace(CASES["common"], batch_sizes=BATCH_SIZES[20]), "lora": lora}
    small: dict[str, dict[str, Any]] = {
        "common": {"clients": 2, "records": 64},
        "mixed": {"clients": 3, "records": 64, "batch_sizes": (16, 32, 64)},
        "small_clients": {"clients": 8},
        "resnet18": {"model": "lenet5", "clients": 1, "records": 4, "batch_size": 4},
        "lora": {"model": "small_bert_lora", "clients": 1, "records": 4, "batch_size": 4},
    }
    return {name: dataclasses.replace(cases[name], **small[name]) if tiny else cases[name] for name in small}


# ---- sections


def correct(device: torch.device, tiny: bool, keep: Keep) -> None:
    """Hold engines to `serial` on sums without noise: one step, several, and unequal batches; `serial` to the CPU.

    ResNet-20 has 64-bit numbers: rounding of 32-bit ones crosses its kinks, which moves updates by up to 2e-3.
    """
    nets = {"cnn_small": ((1, 28, 28), torch.float32), "resnet20": ((3, 32, 32), torch.float64)}
    records = 24 if tiny else 100
    for net, (shape, dtype) in [*nets.items()][: 1 if tiny else 2]:
        for batch_sizes in ((records,) * 3, (3, records // 4, records // 2)):
            case = Case(net, shape, clients=3, records=records, batch_size=records, batch_sizes=batch_sizes)
            words = f"{net}, batches {', '.join(map(str, batch_sizes))}"
            exact = _updates(case, device, "serial", dtype)
            if batch_sizes[0] == records:
                on_cpu = _updates(case, torch.device("cpu"), "serial", dtype)
                _hold(keep, f"serial beside a CPU, {words}", _furthest(exact, on_cpu), TOLERANCE[dtype])
            for engine in ("fast", "trainer"):
                actual = _updates(case, device, engine, dtype)
                _hold(keep, f"{engine}, {words}", _furthest(actual, exact), TOLERANCE[dtype])
    noise = integer_noise(
        RandomGenerator(os.urandom(32)), NORMAL, 2.0**20, torch.zeros(1 << 20, device=device)
    ).double()
    scale = float(noise.std()) / 2**20
    keep(products=products(), cudnn_tf32=torch.backends.cudnn.allow_tf32, noise_scale=f"{scale:.4f}")
    if abs(scale - 1) > 0.005:  # seven standard deviations
        raise ArithmeticError(f"the scale of the noise is {scale:.4f} times what is asked for")


def company(device: torch.device, tiny: bool, keep: Keep) -> None:
    """Hold a record's clipped gradient to that in other batches, for hostile models of many nets.

    What sums in float64 round, which noise covers, is counted and does not fail.
    """
    begun, rows, left = time.monotonic(), list[Mapping[str, Any]](), list(NETS)[: 2 if tiny else None]
    while left and time.monotonic() - begun < SEARCH_SECONDS:
        rows += search(44 if tiny else 8, [left.pop(0)], device=device)["rows"]
        alone = [f"{row['net']} ({row['sums']})" for row in rows if row["alone"]]
        wrong = {f"{row['net']} ({row['sums']})": row for row in rows if row["beyond_float64"]}
        models, last_bits = (sum(row[key] for row in rows) for key in ("models", "differing"))
        keep(models=models, last_bits=last_bits, differing=wrong, alone=alone, not_searched=left)
    if wrong:
        raise ArithmeticError(f"bits depend on other records for {', '.join(wrong)}")


class _Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def _updates(case: Case, device: torch.device, name: str, dtype: torch.dtype) -> Tensor:
    """The updates `[C, P]` of a round without noise, with the same draws for every engine."""
    engine = ENGINES[name]()
    net = nn.Sequential(_Cast(dtype), build_net(case).to(dtype))
    loop, state = our_loop(case, net, random_records(case), device, engine, noise_multiplier=0.0)
    engine.setup(loop.module, loop.population, Streams(bytes(32)), "poisson")
    plan = loop.view(state).plan()
    return engine.train(plan, state.models, [0] * case.clients).released.double().cpu()


def _furthest(updates: Tensor, expected: Tensor) -> float:
    return float(((updates - expected).norm(dim=1) / expected.norm(dim=1)).max())


def _hold(keep: Keep, words: str, distance: float, tolerance: float) -> None:
    keep(**{words: float(f"{distance:.2g}")})
    if not distance <= tolerance:
        raise ArithmeticError(f"{words}: {distance:.2g} is above {tolerance:g}")


def _measured(name: str, repeats: int) -> Callable[[torch.device, bool, Keep], None]:
    """A section that measures a round of the default engine beside both loops."""

    def section(device: torch.device, tiny: bool, keep: Keep) -> None:
        keep(**measure(name, _cases(tiny)[name], 1 if tiny else repeats, device, FastEngine(), _say))

    return section


#: name -> seconds, and what it does: from what is surest to run to what takes longest
SECTIONS: dict[str, tuple[float, Callable[[torch.device, bool, Keep], None]]] = {
    "correct": (60, correct),
    "company": (80, company),
    "common": (80, _measured("common", 2)),
    "small_clients": (60, _measured("small_clients", 2)),
    "resnet18": (30, _measured("resnet18", 3)),
    "lora": (60, _measured("lora", 2)),
    "mixed": (80, _measured("mixed", 1)),
}


# ---- one process a section


def check(argv: Sequence[str], device_of: Callable[[str], torch.device]) -> int:
    """Run all sections and print the report and one line of JSON; 1 if a correctness section failed."""
    parser = argparse.ArgumentParser(prog="python -m experiments.speed gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cuda)")
    parser.add_argument("--tiny", action="store_true", help="small rounds, which test the check")
    parser.add_argument("--section", choices=SECTIONS, help="this section alone, in this process")
    options = parser.parse_args(argv)
    require_one_of(("cpu", "cuda"), "--device", options.device)
    device = device_of(options.device)
    if options.section:
        _run(options.section, device, options.tiny)
        return 0
    begun, due = time.monotonic(), 0.0
    results: dict[str, Any] = {"machine": machine(device), "tiny": options.tiny}
    for name, (seconds, _) in SECTIONS.items():
        due += seconds * (4 if options.tiny else 1)  # a test may run on a slow, busy machine
        words = ["--device", device.type, "--section", name, *(["--tiny"] if options.tiny else [])]
        left = due - (time.monotonic() - begun)
        _say(f"section {name}, at most {left:.0f} s")
        command = [sys.executable, "-m", "experiments.speed", "gpu", *words]
        results[name] = in_process(command, left)
    results["seconds"] = round(time.monotonic() - begun, 1)
    print(gpu_report(results))
    print(json.dumps(results))
    return status(results)


def in_process(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """The last JSON object that a command prints, and why it `failed`, if it did: it is killed when time is up."""
    root, reason = Path(__file__).parents[2], ""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, start_new_session=True)
    try:
        out, _ = process.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # a compiler's processes included
        out, reason = process.communicate()[0], f"not done after {seconds:.0f} s"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    code = process.returncode
    if code and not reason:
        reason = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    lines = [line for line in out.splitlines() if line.startswith("{") and line.endswith("}")]
    return {**(json.loads(lines[-1]) if lines else {}), **({"failed": reason} if reason else {})}


def _run(name: str, device: torch.device, tiny: bool) -> None:
    """Print what the section has found, after each finding."""
    found: dict[str, Any] = {}
    if tiny:  # on a busy machine several threads cost more than they gain
        torch.set_num_threads(1)

    def keep(**more: Any) -> None:
        found.update(more)
        print(json.dumps(found), flush=True)

    try:
        SECTIONS[name][1](device, tiny, keep)
    except Exception as error:  # whatever it is: the other sections go on
        keep(failed=f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- report


def status(results: Mapping[str, Any]) -> int:
    """1 if a correctness section failed, else 0.

    >>> status({"correct": {}, "company": {}, "common": {"failed": "not done after 80 s"}})
    0
    """
    return int(any("failed" in results[name] for name in ("correct", "company")))


def gpu_report(results: Mapping[str, Any]) -> str:
    """The results in words, as Markdown."""
    rows, lines = [], []
    for name in SECTIONS:
        found = results[name]
        if "failed" in found:
            lines.append(f"- {name}: FAILED, {found['failed']}")
        elif name == "company":
            alone = f"one record at a time: {', '.join(found['alone']) or 'none'}"
            bits = f"{found['models']} models, {found['last_bits']} with other last bits of sums in float64"
            lines.append(f"- company: passed, {bits}; {alone}; {len(found['not_searched'])} nets left out")
        elif name == "correct":
            distances = [value for value in found.values() if isinstance(value, float)]
            tf32 = f"products {found['products']}, TF32 of cuDNN {'on' if found['cudnn_tf32'] else 'off'}"
            lines.append(f"- {name}: passed, {len(distances)} distances of at most {max(distances):.2g}; {tf32}")
        else:
            rows += report.rows_of(name, found)
            lines.append(report.work_of(name, found))
    table = [markdown(report.COLUMNS, rows)] if rows else []
    tiny = "Tiny rounds test the check; their rates mean nothing. " if results["tiny"] else ""
    words = f"{tiny}On {results['machine']['device']}, torch {results['machine']['torch']}, {results['seconds']} s."
    return "\n\n".join([*table, "\n".join(lines), words])
