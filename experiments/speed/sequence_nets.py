"""Small classifiers of sequences of words, which the package does not register as models."""

import torch
from torch import Tensor, nn


def word_ids(x: Tensor, words: int) -> Tensor:
    """Return numbers of words for records of the package, which are floating and may be anything in its checks."""
    return x.nan_to_num().abs().long() % words


class LSTMClassifier(nn.Module):
    """Embedding, one LSTM, and a linear layer on its last output: x `[B, T]` -> `[B, num_classes]`."""

    def __init__(self, words: int, num_classes: int, width: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.last = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(self.words(word_ids(x, self.words.num_embeddings)))[0][:, -1])


class Transformer(nn.Module):
    """Embeddings of words and places, two encoder layers, their mean: x `[B, T]` -> `[B, num_classes]`."""

    def __init__(self, words: int, num_classes: int, places: int, width: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(places, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.last = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        states = self.words(word_ids(x, self.words.num_embeddings)) + self.places(
            torch.arange(x.shape[1], device=x.device).expand_as(x)
        )
        for layer in self.layers:
            states = layer(states)
        return self.last(states.mean(dim=1))
