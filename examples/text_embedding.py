"""Text with an embedding: the mean of trained word vectors, and a linear layer.

The model learns which library a sentence of documentation is from. Inputs are whole numbers: words are hashed to a
fixed range, because a vocabulary of the clients' words would reveal them.
"""

import torch
from example_data import VOCABULARY, library_texts
from figure import save_figure
from torch import nn

from dpfl_lightning import ClientModule, ClientOptions, FederatedLoop, Population, PrivacyOptions, Progress

SIZES = {"berlin": 3000, "paris": 1800, "oslo": 900, "test": 1000}
EPSILONS = {"berlin": 2.0, "paris": 4.0, "oslo": 8.0}


def mean_of_words() -> nn.Module:
    """Return a model of tokens [B, LENGTH] (0: none): layers of torch alone, which have exact rules."""
    words, mean = nn.Embedding(VOCABULARY, 64, padding_idx=0), nn.AdaptiveAvgPool2d((1, 64))
    nn.init.normal_(words.weight, std=0.3)
    nn.init.zeros_(words.weight[0].detach())
    return nn.Sequential(words, nn.Unflatten(1, (1, -1)), mean, nn.Flatten(1), nn.Linear(64, 3))


torch.manual_seed(0)
texts = library_texts(SIZES)
test = texts.pop("test")
population = Population.from_datasets(texts, test, held_out=0, num_classes=3)
result = FederatedLoop(
    population,
    ClientModule(mean_of_words()),
    rounds=15,
    clients=ClientOptions(batch_size=400, learning_rate=8.0),
    privacy=PrivacyOptions(epsilon=EPSILONS, delta=1e-4),
    callbacks=[Progress()],
).run()
save_figure("Which library?", accuracy=result)
