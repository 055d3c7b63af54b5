"""Ma, Zhou, Li, Sheng, Cui and Liu, "The Power of Bias: Optimizing Client Selection in Federated Learning with
Heterogeneous Differential Privacy": its tables and figures."""

from dpfl_lightning.reproduction.selection.accuracy import TABLES
from dpfl_lightning.reproduction.selection.beyond import BEYOND
from dpfl_lightning.reproduction.selection.computed import COMPUTED
from dpfl_lightning.reproduction.selection.training_figures import TRAINED

EXPERIMENTS = (*TABLES, *TRAINED, *COMPUTED, *BEYOND)
