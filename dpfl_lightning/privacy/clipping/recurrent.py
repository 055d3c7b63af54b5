"""LSTM and GRU for records under `vmap`: all steps in one function, which computes every record's at once.

Torch's kernels have no rules for `vmap`, and single steps under it take four times as long. Here the inputs' part of
the gates comes from a linear operator, and the hidden part is a zero `[T, N, G]` that is added: its gradient and the
hidden states are what the gradient of the hidden weights needs. Shapes are `[T, N, ...]`, as torch's without
`batch_first`, of one direction of one layer; N are the sequences of one record, and of all records in the functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpfl_lightning.privacy.clipping.folded import OfRecords


class LSTMSteps(OfRecords):
    """(gates i, f, g, o by inputs; a zero; hidden state, cell `[N, H]`; weight `[4 H, H]`; bias `[4 H]` or None).

    Returns outputs `[T, N, H]`, the last cell, and what the backward pass and the rule need: hidden states and cells
    `[T + 1, N, H]`, activated gates, and tangents of the cells.
    """

    without_steps, as_given, results_without_steps = frozenset({2, 3}), frozenset({4, 5}), frozenset({1})

    @staticmethod
    def forward(
        gates: Tensor, zero: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        gates = gates.contiguous().clone() if bias is None else (gates + bias).contiguous()
        steps, size = len(gates), hidden.shape[1]
        hiddens, cells = (first.new_empty(steps + 1, *first.shape) for first in (hidden, cell))
        hiddens[0], cells[0] = hidden, cell
        tanhs = torch.empty_like(cells[1:])
        h, c, recurrent = hiddens.unbind(), cells.unbind(), weight.mT
        i, f, g, o = (gate.unbind() for gate in gates.chunk(4, dim=2))
        i_and_f = gates[:, :, : 2 * size].unbind()
        for t, (step, tanh) in enumerate(zip(gates.unbind(), tanhs.unbind(), strict=True)):
            step.addmm_(h[t], recurrent)
            i_and_f[t].sigmoid_()
            g[t].tanh_()
            o[t].sigmoid_()
            torch.mul(f[t], c[t], out=c[t + 1]).addcmul_(i[t], g[t])
            torch.mul(o[t], torch.tanh(c[t + 1], out=tanh), out=h[t + 1])
        return hiddens[1:].clone(), cells[-1].clone(), hiddens, cells, gates, tanhs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, _, *kept = output
        ctx.save_for_backward(inputs[4], *kept[1:])
        ctx.mark_non_differentiable(*kept)

    @staticmethod
    def backward(ctx: Any, doutput: Tensor, dcell: Tensor, *_: Any) -> tuple[Any, ...]:
        with torch._C.DisableTorchFunction():  # this code is known: no mode needs to see it
            dgates, dhidden, dcell = _LSTMStepsBack.apply(doutput, dcell, *ctx.saved_tensors)
        return dgates, dgates, dhidden, dcell, None, None


class _LSTMStepsBack(OfRecords):
    without_steps, as_given, results_without_steps = frozenset({1}), frozenset({2}), frozenset({1, 2})

    @staticmethod
    def forward(
        doutput: Tensor, dcell: Tensor, weight: Tensor, cells: Tensor, gates: Tensor, tanhs: Tensor
    ) -> tuple[Tensor, ...]:
        i, f, g, o = gates.chunk(4, dim=2)
        dgates = tanhs.new_empty(*tanhs.shape[:2], 4, tanhs.shape[2])
        # at first the derivatives of the cell by its three gates, and of the output by the last one
        to_i, to_f, to_g, to_o = dgates.unbind(2)
        torch.addcmul(i, i, i, value=-1, out=to_i).mul_(g)
        torch.addcmul(f, f, f, value=-1, out=to_f).mul_(cells[:-1])
        torch.addcmul(i, i * g, g, value=-1, out=to_g)
        torch.addcmul(o, o, o, value=-1, out=to_o).mul_(tanhs)
        to_cell = torch.addcmul(o, o * tanhs, tanhs, value=-1).unbind()
        of_cell, of_output, flat = dgates[:, :, :3].unbind(), to_o.unbind(), dgates.flatten(2).unbind()
        dh, dc, forgets, doutputs = torch.zeros_like(doutput[0]), dcell.clone(), f.unbind(), doutput.unbind()
        for t in reversed(range(len(dgates))):
            dh = dh + doutputs[t]
            dc.addcmul_(dh, to_cell[t])
            of_cell[t].mul_(dc[:, None])
            of_output[t].mul_(dh)
            dc.mul_(forgets[t])
            dh = flat[t] @ weight
        return dgates.flatten(2), dh, dc


class GRUSteps(OfRecords):
    """(gates r, z, n by inputs; a zero; hidden state `[N, H]`; weight `[3 H, H]`; bias `[3 H]` or None).

    Returns outputs `[T, N, H]`, hidden states `[T + 1, N, H]`, activated gates, and candidates: the hidden part of
    the last gate, before its reset.
    """

    without_steps, as_given = frozenset({2}), frozenset({3, 4})

    @staticmethod
    def forward(gates: Tensor, zero: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        gates, size, recurrent = gates.contiguous().clone(), hidden.shape[1], weight.mT
        bias = weight.new_zeros(3 * size) if bias is None else bias
        hiddens, by_hidden = hidden.new_empty(len(gates) + 1, *hidden.shape), torch.empty_like(gates)
        hiddens[0] = hidden
        h, r, z, n = hiddens.unbind(), *(gate.unbind() for gate in gates.chunk(3, dim=2))
        r_and_z, from_h = (part[:, :, : 2 * size].unbind() for part in (gates, by_hidden))
        candidates = by_hidden[:, :, 2 * size :]
        for t, (step, candidate) in enumerate(zip(by_hidden.unbind(), candidates.unbind(), strict=True)):
            torch.addmm(bias, h[t], recurrent, out=step)
            r_and_z[t].add_(from_h[t]).sigmoid_()
            n[t].addcmul_(r[t], candidate).tanh_()
            torch.lerp(n[t], h[t], z[t], out=h[t + 1])
        return hiddens[1:].clone(), hiddens, gates, candidates

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, *kept = output
        ctx.save_for_backward(inputs[3], *kept)
        ctx.mark_non_differentiable(*kept)

    @staticmethod
    def backward(ctx: Any, doutput: Tensor, *_: Any) -> tuple[Any, ...]:
        with torch._C.DisableTorchFunction():
            dgates, dzero, dhidden = _GRUStepsBack.apply(doutput, *ctx.saved_tensors)
        return dgates, dzero, dhidden, None, None


class _GRUStepsBack(OfRecords):
    as_given, results_without_steps = frozenset({1}), frozenset({2})

    @staticmethod
    def forward(
        doutput: Tensor, weight: Tensor, hiddens: Tensor, gates: Tensor, candidates: Tensor
    ) -> tuple[Tensor, ...]:
        r, z, n = gates.chunk(3, dim=2)
        dhiddens = torch.empty_like(hiddens[1:])
        dzero = dhiddens.new_empty(*dhiddens.shape[:2], 3, dhiddens.shape[2])
        # at first the derivatives of the hidden state by the hidden part of the gates
        to_r, to_z, to_n = dzero.unbind(2)
        to_new = torch.addcmul(1 - z, (1 - z).mul_(n), n, value=-1)
        torch.mul(to_new, r, out=to_n)
        torch.addcmul(to_n, to_n, r, value=-1, out=to_r).mul_(candidates)
        torch.addcmul(z, z, z, value=-1, out=to_z).mul_(hiddens[:-1] - n)
        flat, kept, doutputs = dzero.flatten(2).unbind(), z.unbind(), doutput.unbind()
        steps, dh = [*zip(dhiddens.unbind(), dzero.unbind(), strict=True)], torch.zeros_like(doutput[0])
        for t in reversed(range(len(steps))):
            total, parts = steps[t]
            torch.add(dh, doutputs[t], out=total)
            parts.mul_(total[:, None])
            dh = torch.addmm(total * kept[t], flat[t], weight)
        dgates = dzero.clone()
        torch.mul(to_new, dhiddens, out=dgates.unbind(2)[2])  # the inputs' part of the last gate is not reset
        return dgates.flatten(2), dzero.flatten(2), dh


FUNCTIONS = (LSTMSteps, _LSTMStepsBack, GRUSteps, _GRUStepsBack)
STEPS: dict[Any, type[OfRecords]] = {torch.lstm: LSTMSteps, torch.gru: GRUSteps}
