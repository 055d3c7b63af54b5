"""Callbacks that only watch: progress on the terminal, the tracked run."""
