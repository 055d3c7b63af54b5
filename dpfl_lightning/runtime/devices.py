"""Copies to a device without waiting, and the precision of products of float32 numbers."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return `values`, which are on the CPU, on the device, without waiting for a GPU."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def products() -> str:
    """Return how products of float32 matrices are computed: "highest" is float32; "mixed" if backends may differ."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it refuses to read what the newer `fp32_precision` of a backend has set
        return "mixed"


def use_exact_products() -> None:
    """Compute products, convolutions and attention of float32 numbers on CUDA without TF32, with the same bits always.

    TF32 keeps 10 bits of each factor, and cuDNN's convolutions use it by default. Clipping bounds such gradients as
    well, but their rounding may depend on the size of a batch, and so on the other records. The fused kernels of
    attention add gradients in the order in which threads happen to end.
    """
    for fused in ("flash_sdp", "mem_efficient_sdp", "cudnn_sdp"):
        getattr(torch.backends.cuda, f"enable_{fused}")(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    backends: Any = torch.backends
    if hasattr(backends.cuda.matmul, "fp32_precision"):  # torch >= 2.9, where a more general setting may say otherwise
        for backend in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
            backend.fp32_precision = "ieee"


@functools.cache
def products_vary() -> bool:
    """Return whether bits of products depend on where matrices lie, because MKL began before this package was imported.

    The package sets MKL_CBWR, which MKL reads before its first product.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    mode = getattr(ctypes.CDLL(str(path)), "mkl_serv_cbwr_get", None) if path.exists() else None
    return mode is not None and mode(_BRANCH) == _OFF


_BRANCH, _OFF = 1, 1  # MKL_CBWR_BRANCH and MKL_CBWR_BRANCH_OFF of mkl_types.h
