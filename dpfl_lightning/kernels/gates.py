"""Steps of an LSTM in float32 on a CPU, where torch's small operations take several times as long.

The loops of `gate_loops.py` get the tensors of all steps, and the number of a step.
"""

import functools
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

    generator, state = torch.Generator().manual_seed(0), (3, 9)
    gates, c, dh, dc, doutput = (
        3 * torch.randn(shape, generator=generator) for shape in ((3, 36), state, state, state, state)
    )
    inputs = gates.clone().requires_grad_(), c.clone().requires_grad_()
    with torch.enable_grad():
        expected = torch.lstm_cell(inputs[0], (torch.zeros(state), inputs[1]), torch.eye(36), torch.zeros(36, 9))
        grads = torch.autograd.grad(expected, inputs, (dh + doutput, dc))
    cells, hiddens, tanhs = torch.stack((c, c)), torch.empty(2, *state), torch.empty(1, *state)
    gates, dgates = gates[None], torch.empty(1, 3, 36)
    gate_loops.lstm_step(0, *arrays(gates, cells, tanhs, hiddens))
    gate_loops.lstm_step_back(0, *arrays(gates, cells, tanhs, doutput[:, None], dh, dc, dgates))
    pairs = zip((hiddens[1], cells[1], dgates[0], dc), (*expected, *grads), strict=True)
    if not all(torch.allclose(actual, exact, rtol=1e-4, atol=1e-5) for actual, exact in pairs):
        raise RuntimeError("compiled loops give wrong steps of an LSTM on this processor: please report it")
    return gate_loops
