"""All models of the zoo: those that were listed, those that a seed has drawn, and LightningModules."""

from zoo import drawn, lightning_modules
from zoo.models import ZOO

__all__ = ["ZOO", "drawn", "lightning_modules"]
