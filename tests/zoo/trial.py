"""One model of the zoo, judged, trained through the public names, and compared with a plain loop and with Opacus."""

import copy
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from zoo.judge import RECORDS, Verdict, apart, in_dtype, loop, losses_of, of_rows, without_draws
from zoo.models import Entry

from dpfl_lightning import ClientModule, ClientOptions, FederatedLoop, Population, PrivacyOptions, UserError
from dpfl_lightning.privacy.clipping.checked import clipped_sum_for
from dpfl_lightning.privacy.clipping.reference import ClippedSum, ClipRequest, Params

CLIENTS, BATCH, ROUNDS = {"berlin": 24, "oslo": 16}, 8, 2
EPSILON, DELTA = 8.0, 1e-3
TOLERANCE = 1e-4  # of gradients and clipped sums, relative; a float32 model has few more digits
TOLERANCE64 = 1e-9  # in float64, where float32 rounds across the kinks of a deep model, in the loop as well
COMPANY = 1e-5  # of a record's gradient in another place or other company
STEPS = (0.1, 0.01, 0.001)  # norms of steps, of which one should lower a loss
UNCLIPPED = 1e12  # a norm that no gradient has
TIMED, REPEATS, LONGEST = 16, 15, 20.0  # records, turns, CPU seconds of all turns


def tried(entry: Entry, verdict: Verdict) -> dict[str, Any]:
    """Return what became of a model that was judged so, as one line of `results.jsonl`.

    `outcome` is "works", "wrong" (it trains, but gradients differ, or it mixes records), "refused" (by a UserError)
    or "failed" (by another error).
    """
    row = described(entry, verdict)
    torch.manual_seed(0)
    model = entry.build()
    begun = time.process_time()
    try:
        trained = _train(entry, model)
    except UserError as error:
        return row | {"outcome": "refused", "sentence": _first_lines(error)}
    except Exception as error:  # whatever a user would see
        before = f"; before that: {_first_lines(error.__context__)}" if isinstance(error.__context__, UserError) else ""
        return row | {"outcome": "failed", "sentence": f"{type(error).__name__}: {_first_lines(error)[:150]}{before}"}
    row |= {"engine": trained.clients.engine.description, "seconds": round(time.process_time() - begun, 1)}
    try:
        compared = _compared(entry, trained)
        if compared["error"] > TOLERANCE:
            compared |= _compared_in_float64(entry, trained)
        few = compared["median_error"] <= TOLERANCE and compared.get("error64", 1.0) <= TOLERANCE64
        exact = compared["error"] <= TOLERANCE or few  # records across kinks
        equal = exact and compared["company"] <= COMPANY
        right = verdict.category == "trainable" and equal and compared["falls"]
        return row | compared | {"outcome": "works" if right else "wrong"} | _beside_opacus(entry, trained)
    except UserError as error:
        return row | {"outcome": "failed", "sentence": f"after training: {_first_lines(error)}"}


def described(entry: Entry, verdict: Verdict) -> dict[str, Any]:
    """Return what is known of a model before it is trained."""
    return {"name": entry.name, "source": entry.source, "judge": verdict.category, "why": verdict.reason}


def _first_lines(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]


def _train(entry: Entry, model: nn.Module) -> FederatedLoop:
    """Train a model as a user would. Raises RuntimeError if the run ends without having trained every client."""
    x, y = entry.records(sum(CLIENTS.values()), torch.Generator().manual_seed(1))
    ends = torch.tensor(list(CLIENTS.values())).cumsum(dim=0).tolist()
    rows = {name: slice(end - CLIENTS[name], end) for name, end in zip(CLIENTS, ends, strict=True)}
    hospitals = {name: (of_rows(x, some), y[some]) for name, some in rows.items()}
    population = Population.from_datasets(hospitals, num_classes=entry.num_classes)
    loss = None if isinstance(model, LightningModule) else entry.loss  # its `training_step` has one
    module = ClientModule(model, output=entry.output, loss=loss, task=entry.task, fix=entry.fix)
    start = module.flat
    with tempfile.TemporaryDirectory() as folder:
        federated = FederatedLoop(
            population,
            module,
            rounds=ROUNDS,
            clients=ClientOptions(batch_size=BATCH, learning_rate=0.1),
            privacy=PrivacyOptions(epsilon=EPSILON, delta=DELTA),
            output_dir=f"{folder}/run",
            device="cpu",
        )
        result = federated.run()
    engine, end = federated.clients.engine, federated.module.flat
    problems = {
        "it did not finish": not result.finished,
        "a client failed": federated.local_clients.folder.errors_file.exists(),
        "a client trained on no record": not engine.clients.counts[:, 0].all(),
        "parameters are not finite": not end.isfinite().all(),
        "parameters did not change": torch.equal(start, end),
        "a budget is exceeded": any(client["epsilon_spent"] > EPSILON for client in result.clients),
    }
    if broken := [problem for problem, found in problems.items() if found]:
        raise RuntimeError("; ".join(broken))
    return federated


def _gradients(clipped_sum: ClippedSum, params: Params, x: Any, y: Tensor) -> Tensor:
    """Return each record's gradient as the engine computes it, `[n, P]`."""
    each = ClipRequest(UNCLIPPED, group=torch.arange(len(y)), num_groups=len(y))
    return clipped_sum(params, x, y, each)[0].clone()


def _compared(entry: Entry, federated: FederatedLoop) -> dict[str, Any]:
    """Compare the engine's gradients and clipped sums with a plain loop in float32, or float64 if that is nearer.

    Also those of the same records in reverse, alone, and among others. Dropout is off.
    """
    net, engine = federated.module.net, federated.clients.engine
    without_draws(net)
    params = federated.module.unflatten(federated.module.flat)
    x, y = entry.records(2 * RECORDS, torch.Generator().manual_seed(2))
    few, few_y = of_rows(x, slice(RECORDS)), y[:RECORDS]
    ours = _gradients(engine.clipped_sum, params, few, few_y)
    exact = [
        plain
        for dtype in (torch.float32, torch.float64)
        if (plain := _plain(entry, net, few, few_y, dtype)) is not None
    ]
    clip = float(ours.norm(dim=1).median()) or 1.0  # trained to the end, half of the records may have no gradient
    clipped = engine.clipped_sum(params, few, few_y, ClipRequest(clip))[0].clone()
    errors = [max(apart(ours, plain), apart(clipped, _clip(plain, clip).sum(dim=0, keepdim=True))) for plain in exact]
    back = torch.arange(RECORDS - 1, -1, -1)
    reverse = _gradients(engine.clipped_sum, params, of_rows(few, back), few_y[back])[back]
    among = _gradients(engine.clipped_sum, params, x, y)[:RECORDS]
    rows = ([row] for row in range(RECORDS))
    alone = torch.cat([_gradients(engine.clipped_sum, params, of_rows(few, row), few_y[row]) for row in rows])
    others = (reverse, among, alone)
    return {
        "falls": _falls(entry, engine.clipped_sum, few, few_y),
        "error": min(errors),
        "median_error": min(median(map(apart, ours[:, None], plain[:, None])) for plain in exact),
        "company": max(apart(one, ours) for one in others),
        "same_bits": all(torch.equal(one, ours) for one in others),
    }


def _compared_in_float64(entry: Entry, federated: FederatedLoop) -> dict[str, Any]:
    """Compare gradients with the trained parameters, in float64, with those of a plain loop."""
    net = copy.deepcopy(without_draws(federated.module.net)).double()
    x, y = entry.records(RECORDS, torch.Generator().manual_seed(2))
    x = in_dtype(x, torch.float64)
    loss = None if isinstance(net, LightningModule) else entry.loss
    module = ClientModule(net, output=entry.output, loss=loss, task=entry.task)
    clipped_sum, _ = clipped_sum_for(module.net, module.sample_loss, of_rows(x, slice(1)), y[:1])
    params = {name: p.detach() for name, p in module.net.named_parameters() if p.requires_grad}
    plain = _plain(entry, net, x, y, torch.float64)
    assert plain is not None
    return {"error64": apart(_gradients(clipped_sum, params, x, y), plain)}


def _falls(entry: Entry, clipped_sum: ClippedSum, x: Any, y: Tensor, steps: int = 5) -> bool:
    """Return whether steps along clipped sums, without noise, lower the mean loss of some records from the start on."""
    torch.manual_seed(0)
    model = without_draws(entry.private())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in trained.items()}

    @torch.no_grad()
    def loss(params: Params) -> float:
        for name, p in params.items():
            trained[name].copy_(p)
        return float(losses_of(entry, model, x, y).mean())

    def loss_after(size: float) -> float:
        own = {name: p.clone() for name, p in start.items()}
        for _ in range(steps):
            direction = clipped_sum(own, x, y, ClipRequest(1.0))[0][0].clone()
            direction *= size / float(direction.norm() + 1e-12)
            for p, part in zip(own.values(), direction.split([p.numel() for p in own.values()]), strict=True):
                p -= part.view_as(p).to(p)
        return loss(own)

    before = loss(start)
    return any(loss_after(size) < before for size in STEPS)


def _plain(entry: Entry, net: nn.Module, x: Any, y: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the gradients of a plain loop with the trained parameters; None if the model cannot compute in float64."""
    model = without_draws(entry.private())
    model.load_state_dict(net.state_dict())
    try:
        return loop(entry, model.to(dtype), in_dtype(x, dtype), y).double()
    except RuntimeError:
        if dtype == torch.float32:
            raise
        return None


def _clip(gradients: Tensor, clip: float) -> Tensor:
    return gradients * (clip / gradients.norm(dim=1, keepdim=True)).clamp(max=1.0)


def _beside_opacus(entry: Entry, federated: FederatedLoop) -> dict[str, Any]:
    """Return the CPU time of a clipped sum of Opacus divided by ours, and how wrong its gradients are."""
    from opacus import GradSampleModule
    from opacus.validators import ModuleValidator

    x, y = entry.records(TIMED, torch.Generator().manual_seed(3))
    net, engine = federated.module.net, federated.clients.engine
    params = federated.module.unflatten(federated.module.flat)
    model, plain = (without_draws(entry.private()) for _ in range(2))
    for one in (model, plain):
        one.load_state_dict(net.state_dict())
    try:
        sampled = GradSampleModule(ModuleValidator.fix(model), loss_reduction="sum")  # LSTM by its own

        def gradients() -> Tensor:
            sampled.zero_grad(set_to_none=True)
            losses_of(entry, sampled, x, y).sum().backward()
            trained = [one for one in sampled.parameters() if one.requires_grad]
            return torch.cat([_of_each_record(one) for one in trained], dim=1)

        wrong = apart(gradients(), loop(entry, plain, x, y))
    except Exception as error:  # Opacus may refuse a layer in any way
        return {"opacus": f"{type(error).__name__}: {_first_lines(error)}"[:200]}
    request = ClipRequest(1.0, expected=TIMED)  # as a run with this batch size asks
    ours, theirs = _seconds_in_turns(
        lambda: engine.clipped_sum(params, x, y, request), lambda: _clip(gradients(), 1.0).sum(dim=0)
    )
    return {"ratio": round(theirs / ours, 2), "opacus_error": wrong}


def _of_each_record(parameter: Tensor) -> Tensor:
    """Return what Opacus leaves at a parameter, `[TIMED, p]`; one gradient for all records is repeated."""
    grad = getattr(parameter, "grad_sample", None)
    if grad is None:
        return parameter.new_zeros(TIMED, parameter.numel())
    return grad.reshape(len(grad), -1).expand(TIMED, -1)


def _seconds_in_turns(*contestants: Callable[[], object]) -> list[float]:
    """Return the CPU seconds of a call of each, the median of several in turns after one that prepares it.

    There are fewer turns of contestants that take long, but at least three.
    """
    times: list[list[float]] = []
    while len(times) <= REPEATS and (len(times) <= 3 or sum(map(sum, times)) < LONGEST):
        times.append([_seconds(work) for work in contestants])
    return [median(own) for own in zip(*times[1:], strict=True)]


def _seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun
