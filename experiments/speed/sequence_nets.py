"""Classifiers of sequences of words, which the package does not register as models."""

import importlib

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


class AdaptedBert(nn.Module):
    """A frozen BERT of random weights, adapters of peft on queries and values, and a head: x `[B, T]` as above.

    It has no dropout. Needs transformers and peft.
    """

    def __init__(self, words: int, num_classes: int, places: int, layers: int, width: int) -> None:
        super().__init__()
        transformers, peft = importlib.import_module("transformers"), importlib.import_module("peft")
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64}
        config = transformers.BertConfig(
            vocab_size=words,
            intermediate_size=4 * width,
            max_position_embeddings=places,
            num_labels=num_classes,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **sizes,
        )
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"])
        self.words = words
        self.bert = peft.get_peft_model(transformers.BertForSequenceClassification(config), lora)

    def forward(self, x: Tensor) -> Tensor:
        return self.bert(input_ids=word_ids(x, self.words)).logits
