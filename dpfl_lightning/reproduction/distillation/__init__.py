"""Wang and Wang (2024), "DistDD: Distributed Data Distillation Aggregation through Gradient Matching": its table and
figures, and what its sets are compared with."""

from dpfl_lightning.reproduction.distillation.accuracy import TABLES
from dpfl_lightning.reproduction.distillation.figures import FIGURES
from dpfl_lightning.reproduction.distillation.published import PUBLISHED
from dpfl_lightning.reproduction.distillation.searches import SEARCHES
from dpfl_lightning.reproduction.distillation.yardsticks import YARDSTICKS

EXPERIMENTS = (*YARDSTICKS, PUBLISHED, *SEARCHES, *TABLES, *FIGURES)
