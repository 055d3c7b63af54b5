"""Ma, Zhou, Li, Sheng, Cui and Liu, "The Power of Bias: Optimizing Client Selection in Federated Learning with
Heterogeneous Differential Privacy": its tables and figures."""

from experiments.papers.selection.accuracy import TABLES
from experiments.papers.selection.beyond import BEYOND
from experiments.papers.selection.computed import COMPUTED
from experiments.papers.selection.training_figures import TRAINED

EXPERIMENTS = (*TABLES, *TRAINED, *COMPUTED, *BEYOND)
