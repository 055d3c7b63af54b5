"""A net without random draws, for checks that compare passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_DROPPING = {torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout, F.dropout}
_DROPPING |= {F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu}
_DRAWING = {torch.rand_like, torch.randn_like, torch.bernoulli, Tensor.bernoulli}
_MAKING = {torch.rand: torch.zeros, torch.randn: torch.zeros}
_FILLING = {Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.log_normal_, Tensor.random_}
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_NUMBER = 0.5  # instead of each random number


class ConstantDraws(TorchFunctionMode):
    """Within it dropout does nothing, and random numbers are a constant, also those of functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPPING:
            return args[0] if args else kwargs["input"]
        if func in _DRAWING:
            return torch.full_like(args[0] if args else kwargs["input"], _NUMBER)
        if func in _MAKING:
            return (
                _MAKING[func](*args, **{name: value for name, value in kwargs.items() if name != "generator"}) + _NUMBER
            )
        if func in _FILLING:
            return args[0].fill_(_NUMBER)
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, {**kwargs}
            if len(args) <= 4:
                kwargs["dropout_p"] = 0.0
        if func in _RECURRENT:
            place = 6 if isinstance(args[1], Tensor) and not args[1].is_floating_point() else 5  # packed sequences
            args = (*args[:place], 0.0, *args[place + 1 :])
        return func(*args, **kwargs)
