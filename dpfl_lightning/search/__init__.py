"""Searches for hyperparameters and architectures on distilled, public or private records."""
