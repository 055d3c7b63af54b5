"""The precision of products on CUDA, whose settings torch keeps without a GPU as well."""

import pytest
import torch

from dpfl_lightning.runtime.devices import products, use_exact_products

NEWER = hasattr(torch.backends.cuda.matmul, "fp32_precision")


def settings_of_all():
    return torch.backends, torch.backends.cudnn, torch.backends.cudnn.conv, torch.backends.cuda.matmul


@pytest.mark.parametrize("chosen", range(5))
def test_no_setting_leaves_tf32_on(chosen):
    """cuDNN's default, and each of the newer settings; then torch's compiler can read all of the older ones."""
    if chosen and not NEWER:
        pytest.skip("torch is older")
    try:
        if chosen:
            settings_of_all()[chosen - 1].fp32_precision = "tf32"
        else:
            torch.backends.cudnn.allow_tf32 = True
        use_exact_products()
        assert products() == "highest"
        assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
        assert not NEWER or {torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision} == {
            "ieee"
        }
    finally:
        for backend in settings_of_all()[:2] if NEWER else ():
            backend.fp32_precision = "none"
