"""Steps of recurrent layers in float32 on a CPU, where torch's small operations take several times as long.

The loops of `gate_loops.py` get the tensors of all steps, and the number of a step.
"""

import functools
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch
from torch import Tensor


def suits(gates: Tensor) -> bool:
    """Return whether the loops support these gates; depends on dtype and device alone."""
    return gates.dtype == torch.float32 and gates.device.type == "cpu"


def arrays(*tensors: Tensor) -> tuple[np.ndarray, ...]:
    """Return arrays that share the tensors' memory; the loops are compiled anew for others than contiguous ones."""
    return tuple(tensor.detach().numpy() for tensor in tensors)


@functools.cache
def loops() -> ModuleType:
    """Return `gate_loops`, after checking it against torch."""
    from dpfl_lightning.kernels import gate_loops  # importing numba takes half a second

    with torch.enable_grad():
        pairs = [*_lstm_pairs(gate_loops), *_gru_pairs(gate_loops)]
    if not all(torch.allclose(actual, expected, rtol=1e-4, atol=1e-5) for actual, expected in pairs):
        raise RuntimeError("compiled loops give wrong steps of recurrent layers on this processor: please report it")
    return gate_loops


def _random(*shapes: tuple[int, ...]) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(shape, generator=generator) for shape in shapes)


def _lstm_pairs(gate_loops: ModuleType) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what the loops compute for one step, and what torch does."""
    state = (3, 9)
    gates, c, dh, dc, doutput = _random((3, 36), state, state, state, state)
    inputs = gates.clone().requires_grad_(), c.clone().requires_grad_()
    expected = torch.lstm_cell(inputs[0], (torch.zeros(state), inputs[1]), torch.eye(36), torch.zeros(36, 9))
    expected_grads = torch.autograd.grad(expected, inputs, (dh + doutput, dc))
    cells, hiddens, tanhs, dgates = torch.stack((c, c)), torch.empty(2, *state), torch.empty(1, *state), gates[None] + 0
    gates = gates[None]
    gate_loops.lstm_step(0, *arrays(gates, cells, tanhs, hiddens))
    gate_loops.lstm_step_back(0, *arrays(gates, cells, tanhs, doutput[:, None], dh, dc, dgates))
    return zip((hiddens[1], cells[1], dgates[0], dc), (*expected, *expected_grads), strict=True)


def _gru_pairs(gate_loops: ModuleType) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what the loops compute for one step, and what torch does."""
    state, weights = (3, 9), (27, 9)
    gates, h, dh, doutput, w_hh = _random((3, 27), state, state, state, weights)
    inputs = gates.clone().requires_grad_(), h.clone().requires_grad_()
    expected = torch.gru_cell(*inputs, torch.eye(27), w_hh)
    expected_grads = torch.autograd.grad(expected, inputs, dh + doutput)
    gates, hiddens, recurrent = gates[None], torch.stack((h, h)), (h @ w_hh.mT)[None]
    dgates, drecurrent = torch.empty_like(gates), torch.empty_like(gates[0])
    gate_loops.gru_step(0, *arrays(gates, recurrent, hiddens))
    gate_loops.gru_step_back(0, *arrays(gates, hiddens, recurrent, doutput[:, None], dh, dgates, drecurrent))
    dh += drecurrent @ w_hh
    return zip((hiddens[1], dgates[0], dh), (expected, *expected_grads), strict=True)
