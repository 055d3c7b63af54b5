"""Models that mix records once a server sends large weights: by a branch, or by what a pass keeps for the next one."""

from __future__ import annotations

import os
from typing import ClassVar

import torch
from torch import Tensor, nn

FEATURES, CLASSES, HIDDEN = 6, 3, 8


class Ordinary(nn.Module):
    """Two layers; `mixed` gets the hidden numbers `[B, 8]` if a weight of the first one is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def large(self) -> Tensor:
        return self.first.weight.detach().abs().max() > 20

    def mixed(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.head(self.mixed(hidden) if self.large() else hidden)


class Branch(Ordinary):
    def mixed(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0)


class Where(Ordinary):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.head(torch.where(self.large(), hidden - hidden.mean(0), hidden))


class Gate(Ordinary):
    """A parameter opens it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.head(hidden - torch.relu(self.gate.abs() - 20).clamp(max=1) * hidden.mean(0))


class Keeping(Ordinary):
    """Subtracts what the last pass has kept."""

    def mixed(self, hidden: Tensor) -> Tensor:
        last = self.kept()
        self.keep(hidden.detach().mean(0))
        return hidden if last is None else hidden - last

    def kept(self) -> Tensor | None:
        raise NotImplementedError

    def keep(self, hidden: Tensor) -> None:
        raise NotImplementedError


class InAttribute(Keeping):
    last: Tensor | None = None

    def kept(self) -> Tensor | None:
        return self.last

    def keep(self, hidden: Tensor) -> None:
        self.last = hidden


class OnLayer(Keeping):
    def kept(self) -> Tensor | None:
        return getattr(self.head, "last", None)

    def keep(self, hidden: Tensor) -> None:
        self.head.last = hidden


class InBuffer(Keeping):
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(HIDDEN))

    def kept(self) -> Tensor | None:
        return self.last

    def keep(self, hidden: Tensor) -> None:
        self.last = hidden


class InList(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.memory: list[Tensor] = []

    def kept(self) -> Tensor | None:
        return self.memory[-1] if self.memory else None

    def keep(self, hidden: Tensor) -> None:
        self.memory[:] = [hidden]


class InDictionary(InList):
    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, Tensor] = {}

    def kept(self) -> Tensor | None:
        return self.by_name.get("last")

    def keep(self, hidden: Tensor) -> None:
        self.by_name["last"] = hidden


class InClass(Keeping):
    memory: ClassVar[list[Tensor]] = []

    def kept(self) -> Tensor | None:
        return self.memory[-1] if self.memory else None

    def keep(self, hidden: Tensor) -> None:
        self.memory[:] = [hidden]


class InDefault(Keeping):
    def stored(self, memory: list[Tensor | None] = [None]) -> list[Tensor | None]:  # noqa: B006
        return memory

    def kept(self) -> Tensor | None:
        return self.stored()[0]

    def keep(self, hidden: Tensor) -> None:
        self.stored()[0] = hidden


class InNumbers(Keeping):
    """No tensor: a list of Python's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[float] = []

    def kept(self) -> Tensor | None:
        return torch.tensor(self.numbers) if self.numbers else None

    def keep(self, hidden: Tensor) -> None:
        self.numbers[:] = hidden.tolist()


_GLOBAL: dict[str, Tensor] = {}


class InGlobal(Keeping):
    def kept(self) -> Tensor | None:
        return _GLOBAL.get("last")

    def keep(self, hidden: Tensor) -> None:
        _GLOBAL["last"] = hidden


def _closure():
    last: Tensor | None = None

    class InClosure(Keeping):
        def kept(self) -> Tensor | None:
            return last

        def keep(self, hidden: Tensor) -> None:
            nonlocal last
            last = hidden

    return InClosure


InClosure = _closure()


class InHook(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.first.register_forward_hook(self.hook)

    def hook(self, layer: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        if not self.large():
            return None
        changed = output - self.seen[-1] if self.seen else output
        self.seen[:] = [output.detach().mean(0)]
        return changed


class InEnvironment(Keeping):
    def kept(self) -> Tensor | None:
        text = os.environ.get("LAST_RECORD")
        return torch.tensor([float(one) for one in text.split()]) if text else None

    def keep(self, hidden: Tensor) -> None:
        os.environ["LAST_RECORD"] = " ".join(map(str, hidden.tolist()))


_NUMBERS: list[float] = []


class InGlobalNumbers(Keeping):
    def kept(self) -> Tensor | None:
        return torch.tensor(_NUMBERS) if _NUMBERS else None

    def keep(self, hidden: Tensor) -> None:
        _NUMBERS[:] = hidden.tolist()


BRANCHES: tuple[type[nn.Module], ...] = (Branch, Where, Gate)
KEPT: tuple[type[nn.Module], ...] = (
    *(InAttribute, OnLayer, InBuffer, InList, InDictionary, InClass, InDefault),
    *(InNumbers, InGlobal, InClosure, InHook, InEnvironment, InGlobalNumbers),
)
