"""A logistic regression without privacy on all hospitals' rows together: `python pooled.py data.yaml site.yaml`."""

import sys
from pathlib import Path

import torch
import yaml
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from dpfl_lightning import Population

given = [yaml.safe_load(Path(path).read_text())["data"]["init_args"] for path in sys.argv[1:]]
people = Population.from_dataframe(**{name: value for one in given for name, value in one.items()})
rows, test = torch.cat(people.train_of), people.test
model = LogisticRegression(C=1e6, max_iter=1000).fit(people.x[rows].numpy(), people.y[rows].numpy())
auroc = roc_auc_score(people.y[test].numpy(), model.decision_function(people.x[test].numpy()))
print(f"AUROC {auroc:.3f}")
