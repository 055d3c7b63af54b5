"""Modes that see each operator of torch."""

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A mode whose first operator does not import torch's compiler, which takes more than a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
