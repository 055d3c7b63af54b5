"""Timing: contestants take turns, so that a busy moment of the machine affects all of them."""

import functools
import gc
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
import timeit
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from statistics import median
from typing import Any

import torch

from dpfl_lightning.federated.client.engines.serial import SerialEngine
from dpfl_lightning.runtime.threads import cores
from experiments.speed.baselines import Contestant, build_net, contestants
from experiments.speed.cases import HEAVY, Case
from experiments.speed.peers import PEERS, PeerMissing, peer_contestant, versions

Step = Callable[[], torch.Tensor]


def measure(
    name: str,
    case: Case,
    repeats: int,
    device: torch.device,
    engine: SerialEngine,
    say: Callable[[str], None],
    peers_python: str | None = None,
) -> dict[str, Any]:
    """Ours beside both loops, and then beside each peer alone, whose idle processes must not disturb the others.

    Ratios are of the rival's seconds / ours (median and range over repeats); `ours_beside_<peer>` is ours in turns with
    that peer, and `not_measured` has the reason for each missing one. Without `peers_python` there are no peers.
    """
    with warnings.catch_warnings():
        for words in ("Secure RNG turned off", "Full backward hook is firing"):  # Opacus, for every client
            warnings.filterwarnings("ignore", message=words)
        everyone = contestants(case, device, engine)
        turns, gpu = take_turns(name, everyone, repeats, device, say)
    found: dict[str, Any] = {
        "model": case.model,
        "input_shape": case.input_shape,
        "words": case.words,
        "parameters": sum(parameter.numel() for parameter in build_net(case).parameters()),
        "clients": case.clients,
        "records": case.records,
        "batch_size": " to ".join(map(str, sorted({min(case.sizes), max(case.sizes)}))),
        f"{case.unit}_per_second": {"ours": per_second(case, turns["ours"])},
        "seconds_per_round": {"ours": turns["ours"]},
        **({"gpu": gpu} if device.type == "cuda" else {}),
    }
    for rival in [one.name for one in everyone[1:]]:
        found = beside(found, case, rival, turns["ours"], turns[rival])
    for peer in PEERS if peers_python else ():
        try:
            found.setdefault("versions", {})[peer] = versions(peer, str(peers_python))
            with peer_contestant(peer, case, repeats + 1, cores(), str(peers_python)) as other:
                turns, _ = take_turns(name, [everyone[0], other], repeats, device, say)
        except PeerMissing as reason:
            say(f"not measured: {reason}")
            found.setdefault("not_measured", {})[peer] = str(reason)
        else:
            found = beside(found, case, peer, turns["ours"], turns[peer])
            found["seconds_per_round"][f"ours_beside_{peer}"] = turns["ours"]
            found[f"{case.unit}_per_second"][f"ours_beside_{peer}"] = per_second(case, turns["ours"])
    return found


def beside(
    found: Mapping[str, Any], case: Case, rival: str, ours: Sequence[float], theirs: Sequence[float]
) -> dict[str, Any]:
    """`found` with a rival's seconds, which took turns with `ours`."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    rates = f"{case.unit}_per_second"
    return {
        f"ratio_vs_{rival}": round(median(ratios), 3),
        f"range_vs_{rival}": [round(min(ratios), 3), round(max(ratios), 3)],
        **found,
        rates: {**found[rates], rival: per_second(case, theirs)},
        "seconds_per_round": {**found["seconds_per_round"], rival: theirs},
    }


def take_turns(
    name: str, everyone: Sequence[Contestant], repeats: int, device: torch.device, say: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Every contestant's round in turns, after a warm-up: seconds, and use of the GPU."""
    seconds: dict[str, list[float]] = {one.name: [] for one in everyone}
    gpu = {}
    for repeat in range(repeats + 1):
        for one in everyone:
            took, gpu[one.name] = timed(one, device)
            say(f"{name}: {one.name}, {f'round {repeat} of {repeats}' if repeat else 'warm-up'}, {took:.2f} s")
            if repeat:
                seconds[one.name].append(round(took, 4))
    return seconds, gpu


def in_turns(
    name: str, ours: Step, theirs: Step, repeats: int, steps: int, say: Callable[[str], None], rival: str
) -> dict[str, Any]:
    """Seconds of a step, ours and the rival's, in turns of `steps` steps, after a warm-up, and their ratios."""
    found: dict[str, list[float]] = {"seconds": [], f"{rival}_seconds": []}
    for repeat in range(repeats + 1):
        for who, step, times in zip(("ours", rival), (ours, theirs), found.values(), strict=True):
            begun = time.perf_counter()
            for _ in range(steps):
                done = step()
            float(done.sum())  # waits for a GPU
            took = (time.perf_counter() - begun) / steps
            if repeat:
                times.append(round(took, 6))
            say(f"{name}: {who}, {f'{repeat} of {repeats}' if repeat else 'warm-up'}, {took:.3f} s a step")
    ratios = [b / a for a, b in zip(*found.values(), strict=True)]
    return {
        f"ratio_vs_{rival}": round(median(ratios), 3),
        f"range_vs_{rival}": [round(min(ratios), 3), round(max(ratios), 3)],
        "threads": torch.get_num_threads(),
        **found,
    }


def per_second(case: Case, seconds: Sequence[float]) -> float:
    """Units a second at the median of the rounds, three digits or more."""
    rate = case.work / median(seconds)
    return round(rate, 1 if rate < 1000 else None)


def timed(contestant: Contestant, device: torch.device) -> tuple[float, dict[str, float]]:
    """Seconds of one round with the contestant's threads, and its use of the GPU."""
    gc.collect()  # Opacus' hooks leave cycles, and nobody shall sweep for another
    before = torch.get_num_threads()
    torch.set_num_threads(contestant.threads)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    contestant.round()
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - begun
    use = gpu_use() if device.type == "cuda" else {}
    torch.set_num_threads(before)
    return took, use


def gpu_use() -> dict[str, float]:
    """Peak memory in MiB of tensors, and the last utilisation in % by pynvml or nvidia-smi, if there is one."""
    use: dict[str, float] = {"peak_memory_mib": round(torch.cuda.max_memory_allocated() / 2**20)}
    if importlib.util.find_spec("pynvml"):
        use["utilisation_percent"] = torch.cuda.utilization()
    elif shutil.which("nvidia-smi"):
        properties: Any = torch.cuda.get_device_properties()
        query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        ask = ["nvidia-smi", f"--id=GPU-{properties.uuid}", *query]
        told = subprocess.run(ask, capture_output=True, text=True, timeout=10).stdout.strip()
        use |= {"utilisation_percent": int(told)} if told.isdigit() else {}
    return use


def startup(repeats: int) -> dict[str, Any]:
    """Median seconds of `python -m dpfl_lightning.fit --help` and of importing the package, and the `HEAVY` imports."""
    heavy = f"import sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    show_help = (
        "import runpy, sys; sys.argv = ['fit', '--help']\n"
        "try: runpy.run_module('dpfl_lightning.fit', run_name='__main__')\n"
        "except SystemExit: pass\n"
    )
    commands = {
        "fit_help": (["-m", "dpfl_lightning.fit", "--help"], show_help),
        "import": (["-c", "import dpfl_lightning"], "import dpfl_lightning\n"),
    }
    found: dict[str, Any] = {}
    for name, (words, same) in commands.items():
        seconds = timeit.repeat(functools.partial(_python, words), repeat=repeats, number=1)
        found[f"{name}_seconds"] = round(median(seconds), 3)
        found[f"{name}_imports"] = _python(["-c", same + heavy]).splitlines()[-1].split()
    return found


def _python(words: Sequence[str]) -> str:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout


def machine(device: torch.device) -> dict[str, Any]:
    """Facts on which the figures depend, without naming the machine."""
    return {
        "cores": cores(),
        "cpu": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "load_before": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "opacus": version("opacus"),
        "python": platform.python_version(),
    }
