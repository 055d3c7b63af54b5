"""LightningModules as users write them, by the tutorials: own steps, schedules, metrics and callbacks of layers."""

import functools
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from zoo.models import CLASSES, VOCABULARY, Records, add, images, labels_of, series

OWN = "lightning 2.6.6"


class Classifier(lightning.LightningModule):
    """A step with cross entropy, metrics of its own, an optimizer and a schedule."""

    def __init__(self, body: nn.Module, smoothing: float = 0.0) -> None:
        super().__init__()
        self.body, self.smoothing = body, smoothing
        self.accuracy, self.f1 = MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y, label_smoothing=self.smoothing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.accuracy(self(x), y)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)]


class Reader(nn.Module):
    """The last output of a recurrent layer, and a linear layer."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.read = kind(3, 32, batch_first=True, **options)
        self.head = nn.Linear(64 if options.get("bidirectional") else 32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(x)[0][:, -1])


class SentenceTransformer(nn.Module):
    """Tokens and their places, two layers of attention with a mask for padding, and the mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 32, padding_idx=0), nn.Parameter(torch.zeros(1, 24, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        padding = x == 0
        hidden = self.encoder(self.tokens(x) + self.places[:, : x.shape[1]], src_key_padding_mask=padding)
        kept = (~padding)[..., None]
        return self.head((hidden * kept).sum(1) / kept.sum(1).clamp(min=1))


def sentences(n: int, generator: torch.Generator) -> Records:
    """Return token numbers `[n, 24]` of sentences of different lengths; 0 is padding."""
    ids = torch.randint(1, VOCABULARY, (n, 24), generator=generator)
    lengths = torch.randint(4, 25, (n,), generator=generator)
    return ids * (torch.arange(24) < lengths[:, None]), labels_of(ids[:, 0].float())


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(2048, CLASSES)),
    )


smoothed = functools.partial(F.cross_entropy, reduction="none", label_smoothing=0.1)
add("lightning-cnn", OWN, lambda: Classifier(convolutions(), smoothing=0.1), images(32), loss=smoothed)
add("lightning-lstm", OWN, lambda: Classifier(Reader(nn.LSTM, num_layers=2, dropout=0.1)), series(32, 3))
add("lightning-gru", OWN, lambda: Classifier(Reader(nn.GRU, bidirectional=True)), series(32, 3))
add("lightning-encoder", OWN, lambda: Classifier(SentenceTransformer()), sentences)
