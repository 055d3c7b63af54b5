"""The data of the examples, made on this machine: nothing is downloaded."""

import ast
import random
import re
import zlib
from importlib.util import find_spec
from pathlib import Path

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor

#: typical value and spread of each feature, rounded from the published description of the data set (public facts)
FEATURES = {
    "mean radius": (14, 4),
    "mean texture": (19, 4),
    "mean concavity": (0.09, 0.08),
    "mean concave points": (0.05, 0.04),
    "radius error": (0.4, 0.3),
    "worst radius": (16, 5),
    "worst texture": (26, 6),
    "worst smoothness": (0.13, 0.02),
    "worst concave points": (0.11, 0.07),
    "worst symmetry": (0.29, 0.06),
}
VOCABULARY = 4096  # words are hashed to so many numbers, so that no text decides the vocabulary; 0 fills up sentences
LENGTH = 24  # words of a sentence; longer ones are cut
#: folders whose docstrings are the texts
LIBRARIES = {
    "numpy": ("lib", "_core", "polynomial", "linalg"),
    "torch": ("nn", "nn/modules", "utils", "optim", "autograd"),
    "sklearn": ("linear_model", "ensemble", "cluster", "metrics", "model_selection"),
}


def hospital_csv(path: Path) -> Path:
    """Write scikit-learn's breast cancer data: the features, `diagnosis`, and `hospital` (three unequal ones; test)."""
    table = load_breast_cancer(as_frame=True)
    frame = table.data[list(FEATURES)].assign(diagnosis=table.target.map({0: "malignant", 1: "benign"}))
    frame = frame.sample(frac=1, random_state=0)
    sizes = {"berlin": 240, "paris": 140, "oslo": 75, "test": len(frame) - 455}
    frame.assign(hospital=[name for name, size in sizes.items() for _ in range(size)]).to_csv(path, index=False)
    return path


def library_texts(sizes: dict[str, int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return tokens [n, LENGTH] and labels [n] of each client: is a sentence from numpy, torch or sklearn?"""
    texts = [
        [text for folder in folders for text in _sentences(library, folder)] for library, folders in LIBRARIES.items()
    ]
    x, y = _shuffled(texts, most=2400)
    split = [*sizes.values(), len(y) - sum(sizes.values())]  # the rest is not used
    return dict(zip(sizes, zip(x.split(split), y.split(split), strict=True), strict=False))


def public_texts() -> tuple[Tensor, Tensor, int]:
    """Return tokens [n, LENGTH] and labels [n] of sentences of other files, and how many labels there are: folders."""
    texts = [_sentences(library, folder, True) for library, folders in LIBRARIES.items() for folder in folders]
    return *_shuffled(texts, most=500), len(texts)


def _sentences(library: str, folder: str, public: bool = False) -> list[list[str]]:
    """Return the sentences in docstrings of public or of other files, each as words without the library's name."""
    found = {}
    for file in sorted((Path(find_spec(library).origin).parent / folder).glob("*.py")):
        nodes = ast.walk(ast.parse(file.read_text())) if zlib.crc32(file.name.encode()) % 2 != public else ()
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        for sentence in (one for text in texts if "\n\n" in text for one in re.split(r"\n\s*\n|[.:]\s", text)):
            words = [word for word in re.findall("[a-z]{2,}", sentence.lower()) if word != library]
            if 6 <= len(words) <= 60 and ">>>" not in sentence:
                found[" ".join(words)] = words  # each once
    return list(found.values())


def _shuffled(classes: list[list[list[str]]], most: int) -> tuple[Tensor, Tensor]:
    draw = random.Random(0)
    records = [
        (text, label) for label, texts in enumerate(classes) for text in draw.sample(texts, min(most, len(texts)))
    ]
    draw.shuffle(records)
    rows = [[1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in text[:LENGTH]] for text, _ in records]
    labels = torch.tensor([label for _, label in records])
    return torch.tensor([row + [0] * (LENGTH - len(row)) for row in rows]), labels
