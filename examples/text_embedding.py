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


class MeanOfWords(nn.Module):
    """Tokens [B, LENGTH] (0: none) to outputs [B, 3]."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 64, padding_idx=0), nn.Linear(64, 3)
        nn.init.normal_(self.words.weight, std=0.3)

    def forward(self, tokens):
        used = (tokens > 0).unsqueeze(-1)
        return self.head((self.words(tokens) * used).sum(1) / used.sum(1))


torch.manual_seed(0)
texts = library_texts(SIZES)
test = texts.pop("test")
population = Population.from_datasets(texts, test, held_out=0, num_classes=3)
result = FederatedLoop(
    population,
    ClientModule(MeanOfWords()),
    rounds=15,
    clients=ClientOptions(batch_size=400, learning_rate=16.0),
    privacy=PrivacyOptions(epsilon=EPSILONS, delta=1e-4),
    callbacks=[Progress()],
).run()
save_figure("Which library?", accuracy=result)
