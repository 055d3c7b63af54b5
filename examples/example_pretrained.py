"""Small transformers in folders, trained on public data within seconds, in place of those that you would download."""

from pathlib import Path

import torch
from example_data import LENGTH, VOCABULARY, printed_digits, public_texts
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

SIZE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "initializer_range": 0.1,
}


def bert(folder: Path) -> Path:
    """Save a BERT that was trained to tell folders of public documentation apart, without its head."""
    tokens, labels, classes = public_texts()
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, num_labels=classes, **SIZE)
    model = BertForSequenceClassification(config)
    _train(model, labels, passes=2, input_ids=tokens, attention_mask=(tokens > 0).long())
    model.bert.save_pretrained(folder)
    return folder


def vision_transformer(folder: Path) -> Path:
    """Save a ViT that reads printed digits."""
    images, labels = printed_digits(4000)
    config = ViTConfig(image_size=images.shape[-1], patch_size=2, num_channels=1, num_labels=10, **SIZE)
    model = ViTForImageClassification(config)
    _train(model, labels, passes=8, pixel_values=images)
    model.save_pretrained(folder)
    return folder


def _train(model: PreTrainedModel, labels: torch.Tensor, passes: int, **inputs: torch.Tensor) -> None:
    torch.set_num_threads(1)  # more do not help so small a model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for rows in (rows for _ in range(passes) for rows in torch.randperm(len(labels)).split(32)):
        optimizer.zero_grad()
        model(**{name: part[rows] for name, part in inputs.items()}, labels=labels[rows]).loss.backward()
        optimizer.step()
