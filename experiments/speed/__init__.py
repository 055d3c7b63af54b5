"""What `python -m experiments.speed` measures, and how."""
