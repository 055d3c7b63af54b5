"""Attacks by a server that chooses the weights."""
