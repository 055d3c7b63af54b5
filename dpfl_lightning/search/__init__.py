"""Searches for hyperparameters and architectures, on data that costs no privacy, or charged for in full."""
