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
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpfl_lightning.build import ENGINES
from dpfl_lightning.config.published import BATCH_SIZES
from dpfl_lightning.errors import require_one_of
from dpfl_lightning.federated.client.channel import send_round
from dpfl_lightning.federated.client.client import HeldClients
from dpfl_lightning.federated.client.engines.fast import FastEngine
from dpfl_lightning.federated.transport.threads import Threads
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClipRequest, LoopClippedSum, cross_entropy_of
from dpfl_lightning.privacy.noise import NORMAL, RandomGenerator, Streams, integer_noise
from dpfl_lightning.runtime.devices import products
from experiments.attacks.nets import NETS
from experiments.attacks.search import search
from experiments.pages import RESULTS, markdown, written
from experiments.speed import report
from experiments.speed.baselines import build_net, our_loop, random_records
from experiments.speed.cases import CASES, Case
from experiments.speed.measure import machine, measure
from experiments.speed.sequence_nets import LSTMClassifier, Transformer

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


def taps(device: torch.device, tiny: bool, keep: Keep) -> None:
    """Hold classes with a forward pass of their own, under `vmap` with taps, to the loop on a CPU, and their bits."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, 50, (12, 16), generator=generator).float()
    models: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
        "an LSTM": (lambda: LSTMClassifier(50, 10, 32), words),
        "a transformer": (lambda: Transformer(50, 10, 16, 32), words),
        "a residual CNN": (_Residual, torch.randn(12, 3, 16, 16, generator=generator)),
    }
    labels, each = torch.arange(12) % 10, torch.arange(12)
    for name, (build, x) in models.items():
        torch.manual_seed(0)
        net = build()
        params = {key: p.detach() for key, p in net.named_parameters()}
        request = ClipRequest(1.0, group=each, num_groups=12, expected=12.0)
        expected = LoopClippedSum(net, cross_entropy_of(net))(params, x, labels, request)[0]
        net, x, y = net.to(device), x.to(device), labels.to(device)
        params = {key: p.detach() for key, p in net.named_parameters()}
        clipped_sum, reason = clipped_sum_for(net, None, x[:1], y[:1])
        request = dataclasses.replace(request, group=each.to(device))
        actual = clipped_sum(params, x, y, request)[0].clone()
        _hold(keep, f"{name} ({reason.partition(':')[0]})", _furthest(actual.cpu(), expected), TOLERANCE[torch.float32])
        back = clipped_sum(params, x.flip(0), y.flip(0), request)[0].flip(0)
        if not torch.equal(back, actual):
            raise ArithmeticError(f"{name}: bits depend on the place of a record")


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.second, self.last = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        return self.last((hidden + self.second(hidden)).relu().mean((2, 3)))


def whole(device: torch.device, tiny: bool, keep: Keep) -> None:
    """Run the main job, and ResNet-18 on its images, as a user does; the data set has to be here."""
    runs = {
        "main job": ["--config", "fmnist"],
        "ResNet-18": ["--config", "fmnist", "--model", "resnet18", "--rounds", "2"],
    }
    if tiny:
        runs = {"main job": ["--config", "digits", "--rounds", "2"]}
    for name, options in runs.items():
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "dpfl_lightning.fit", *options, "--engine.device", device.type]
            done = subprocess.run(
                [*command, "--output_dir", f"{folder}/run"],
                capture_output=True,
                text=True,
                env={**os.environ, "DPFL_HOME": folder, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"},
            )
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr.strip()[-200:]}")
        said = [line.strip() for line in done.stdout.splitlines() if "accuracy" in line]
        keep(**{name: f"{time.monotonic() - begun:.0f} s, {said[-1] if said else 'no accuracy'}"})


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
    channel = Threads(engine)
    channel.setup(loop.module, HeldClients(loop.population), Streams(bytes(32)), "poisson")
    plan = loop.view(state).plan()
    return send_round(channel, plan, state.models, [0] * case.clients).updates().released.double().cpu()


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
    "company": (70, company),
    "taps": (30, taps),
    "common": (60, _measured("common", 2)),
    "small_clients": (40, _measured("small_clients", 2)),
    "resnet18": (30, _measured("resnet18", 3)),
    "lora": (40, _measured("lora", 2)),
    "mixed": (50, _measured("mixed", 1)),
    "whole": (100, whole),
}


_OF_CORRECTNESS = ("correct", "company", "taps")
PAGE = RESULTS / "gpu.md"

# ---- one process a section


def check(argv: Sequence[str], device_of: Callable[[str], torch.device]) -> int:
    """Run all sections and print the report and one line of JSON; 1 if a correctness section failed."""
    parser = argparse.ArgumentParser(prog="python -m experiments.speed gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cuda)")
    parser.add_argument("--tiny", action="store_true", help="small rounds, which test the check")
    parser.add_argument("--save", metavar="FILE", help="keep the figures, and write experiments/results/gpu.md of them")
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
    print(text := gpu_report(results))
    print(json.dumps(results))
    if options.save:
        Path(options.save).write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(written("Speed on a GPU", f"python -m experiments.speed gpu --save {options.save}", text))
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

    >>> status({"correct": {}, "company": {}, "taps": {}, "common": {"failed": "not done after 80 s"}})
    0
    """
    return int(any("failed" in results[name] for name in _OF_CORRECTNESS))


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
        elif name == "whole":
            lines.append(f"- whole runs: {'; '.join(f'{one}: {said}' for one, said in found.items())}")
        elif name == "taps":
            distances = [value for value in found.values() if isinstance(value, float)]
            lines.append(f"- taps: passed, {len(distances)} distances of at most {max(distances):.2g}")
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
