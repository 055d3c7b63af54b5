"""The data of the examples, made on this machine: nothing is downloaded."""

import ast
import random
import re
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas
import torch
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_breast_cancer, load_digits
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
#: values of each column of the admissions that is no number (public facts)
CATEGORIES = {
    "ward": ["surgery", "medicine", "cardiology", "neurology", "oncology", "geriatrics"],
    "diagnosis": [f"{letter}{number}" for letter in "ABCDEFGHIJ" for number in range(4)],
    "discharge": ["home", "care", "transfer"],
}
HOURS = 48  # of the longest series of vital signs


def hospital_csv(path: Path) -> Path:
    """Write scikit-learn's breast cancer data: the features, `diagnosis`, and `hospital` (three unequal ones; test)."""
    table = load_breast_cancer(as_frame=True)
    frame = table.data[list(FEATURES)].assign(diagnosis=table.target.map({0: "malignant", 1: "benign"}))
    frame = frame.sample(frac=1, random_state=0)
    sizes = {"berlin": 240, "paris": 140, "oslo": 75, "test": len(frame) - 455}
    frame.assign(hospital=[name for name, size in sizes.items() for _ in range(size)]).to_csv(path, index=False)
    return path


def admissions(sizes: dict[str, int]) -> dict[str, pandas.DataFrame]:
    """Return synthetic admissions of each client: `CATEGORIES`, age, days in hospital, and `readmitted` (0 or 1)."""
    rng, count = np.random.default_rng(0), sum(sizes.values())
    frame = pandas.DataFrame({name: rng.choice(values, count) for name, values in CATEGORIES.items()})
    frame["age"], frame["days"] = rng.integers(18, 95, count), rng.geometric(0.15, count)
    risk = (frame["age"] - 55) / 20 + (frame["days"] - 7) / 7 + rng.logistic(0, 0.5, count)
    for name, values in CATEGORIES.items():
        risk += frame[name].map(dict(zip(values, rng.normal(0, 2, len(values)), strict=True)))
    frame["readmitted"] = (risk > risk.quantile(0.6)).astype(int)
    ends = np.cumsum(list(sizes.values()))
    return {name: frame[end - sizes[name] : end] for name, end in zip(sizes, ends, strict=True)}


def vital_signs(sizes: dict[str, int]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return synthetic hourly series [n, HOURS, 3], lengths [n] and labels [n] of each client: is a patient in shock?

    Heart rate, blood pressure and temperature are scaled by public constants. In shock the heart rate rises and the
    pressure falls until the end; others have had such hours, and recovered.
    """
    draw, count = torch.Generator().manual_seed(0), sum(sizes.values())
    lengths, y = torch.randint(12, HOURS + 1, (count,), generator=draw), torch.randint(2, (count,), generator=draw)
    hour, stay = torch.arange(HOURS), lengths[:, None]
    begin = stay * (0.3 + 0.3 * torch.rand(count, 1, generator=draw))
    worse = ((hour - begin) / 6).clamp(0, 1) * ((y[:, None] == 1) | (hour < begin + 0.25 * stay))
    series = 0.5 * torch.randn(count, 1, 3, generator=draw) + 0.3 * torch.randn(count, HOURS, 3, generator=draw)
    series += worse[:, :, None] * torch.tensor([1.2, -1.2, 0.5])
    series[hour >= stay] = 0  # padding
    return _shared(sizes, series, lengths, y)


def cells(sizes: dict[str, int], pixels: int = 32) -> dict[str, tuple[Tensor, Tensor]]:
    """Return images of synthetic cells [n, 1, pixels, pixels] in [0, 1] and masks of the same shape of each client.

    Cells are ellipses of any brightness; fibres as bright, uneven light and noise are no cells.
    """
    draw, count = torch.Generator().manual_seed(0), sum(sizes.values())
    down, right = torch.meshgrid(torch.linspace(0, 1, pixels), torch.linspace(0, 1, pixels), indexing="ij")

    def between(low: float, high: float, each: int) -> Tensor:
        return low + (high - low) * torch.rand(count, each, 1, 1, generator=draw)

    high, wide = (down - between(0, 1, 5)) / between(0.07, 0.2, 5), (right - between(0, 1, 5)) / between(0.07, 0.2, 5)
    inside = high**2 + wide**2 < 1
    fibres = (down - between(0, 1, 3) - between(-1, 1, 3) * (right - 0.5)).abs() < 0.02
    bright = torch.cat([inside * between(0.25, 0.6, 5), fibres * between(0.25, 0.6, 3)], dim=1).amax(1, keepdim=True)
    light = between(0.1, 0.3, 1) + between(-0.2, 0.2, 1) * down + between(-0.2, 0.2, 1) * right
    images = light + bright + 0.08 * torch.randn(bright.shape, generator=draw)
    return _shared(sizes, images.clamp(0, 1), inside.any(1, keepdim=True).long())


def handwritten_digits(sizes: dict[str, int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return scikit-learn's digits of each client: images [n, 1, 8, 8] in [0, 1], and labels [n]."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(x / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return _shared(sizes, images[order], torch.tensor(y)[order])


def printed_digits(count: int) -> tuple[Tensor, Tensor]:
    """Return public images [n, 1, 8, 8] of digits in fonts of matplotlib, turned and stretched, and labels [n]."""
    draw, folder, images = random.Random(0), Path(get_data_path(), "fonts", "ttf"), []
    files = [file for name in ("DejaVuSans*", "STIXGeneral*", "cmr*", "cmss*", "cmtt*") for file in folder.glob(name)]
    fonts = [ImageFont.truetype(file, 48) for file in sorted(files) if "Display" not in file.name]
    labels = [draw.randrange(10) for _ in range(count)]
    for label in labels:
        image = Image.new("L", (96, 96))
        ImageDraw.Draw(image).text((48, 48), str(label), 255, draw.choice(fonts), "mm", stroke_width=draw.randint(0, 3))
        image = image.rotate(draw.uniform(-20, 20))
        image, left = (
            image.crop(image.getbbox()).resize((draw.randint(4, 7), 8), Image.Resampling.BOX),
            draw.randint(0, 1),
        )
        images.append(np.pad(np.asarray(image), ((0, 0), (left, 8 - left - image.width))))
    return torch.tensor(np.stack(images), dtype=torch.float32)[:, None] / 255, torch.tensor(labels)


def library_texts(sizes: dict[str, int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return tokens [n, LENGTH] and labels [n] of each client: is a sentence from numpy, torch or sklearn?"""
    texts = [
        [text for folder in folders for text in _sentences(library, folder)] for library, folders in LIBRARIES.items()
    ]
    x, y = _shuffled(texts, most=2400)
    return _shared(sizes, x, y)


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


def _shared(sizes: dict[str, int], *tensors: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """Return the rows of each client, one client after the other; the rest is not used."""
    used = [tensor[: sum(sizes.values())].split(list(sizes.values())) for tensor in tensors]
    return dict(zip(sizes, zip(*used, strict=True), strict=True))
