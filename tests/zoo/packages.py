"""The libraries of the zoo, which are no dependencies of the tests: found in the folder that `TEST_SUITES` names."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

FOLDER, REQUIREMENTS = "TEST_SUITES", Path(__file__).parent / "requirements.txt"
COMMAND = f"pip install --no-deps --target FOLDER -r tests/zoo/{REQUIREMENTS.name}"
LIBRARIES = ["transformers", "peft", "timm", "monai", "torchvision", "vit_pytorch", "rtdl_revisiting_models"]
LIBRARIES += ["tabm", "tab_transformer_pytorch", "pytorch_tcn"]

_KEPT: list[torch.library.Library] = []


def missing() -> str:
    """Make the libraries importable, after those of the environment; return the sentence if one is missing, else ""."""
    folder = os.environ.get(FOLDER)
    if folder and folder not in sys.path:
        sys.path.append(folder)
    if absent := [one for one in LIBRARIES if find_spec(one) is None]:
        return f"{', '.join(absent)} not installed: {COMMAND}, and set {FOLDER}=FOLDER"
    if (
        not _KEPT
    ):  # torchvision of PyPI has no compiled operators for a torch of another build, but asks for their names
        _KEPT.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                _KEPT[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return ""
