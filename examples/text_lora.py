"""Text with LoRA: a BERT from a folder is frozen; clients train the adapters of peft and a new head.

The model learns which library a sentence of documentation is from. Records are dictionaries, as a tokenizer makes them.
Frozen parameters are neither sent nor noised. It needs `pip install transformers peft`.
"""

from pathlib import Path

import example_pretrained
import torch
from example_data import library_texts
from figure import save_figure
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from dpfl_lightning import ClientModule, ClientOptions, FederatedLoop, Population, PrivacyOptions, Progress

SIZES = {"berlin": 3000, "paris": 1800, "oslo": 900, "test": 1000}
EPSILONS = {"berlin": 1.0, "paris": 2.0, "oslo": 4.0}


torch.manual_seed(0)
folder = example_pretrained.bert(Path("bert"))  # or the folder of a model that you have downloaded
model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"]))

texts = {
    site: {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": labels}
    for site, (tokens, labels) in library_texts(SIZES).items()
}
test = texts.pop("test")
result = FederatedLoop(
    Population.from_datasets(texts, test, held_out=0, num_classes=3),
    ClientModule(model),
    rounds=6,
    clients=ClientOptions(batch_size=100, learning_rate=1.0),
    privacy=PrivacyOptions(epsilon=EPSILONS, delta=1e-4),
    callbacks=[Progress()],
).run()
save_figure("Which library?", accuracy=result)
