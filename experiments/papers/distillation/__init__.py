"""Wang and Wang (2024), "DistDD: Distributed Data Distillation Aggregation through Gradient Matching": its table and
figures, and what its sets are compared with."""

from experiments.papers.distillation.accuracy import TABLES
from experiments.papers.distillation.figures import FIGURES
from experiments.papers.distillation.published import PUBLISHED
from experiments.papers.distillation.references import YARDSTICKS
from experiments.papers.distillation.searches import SEARCHES

EXPERIMENTS = (*YARDSTICKS, PUBLISHED, *SEARCHES, *TABLES, *FIGURES)
