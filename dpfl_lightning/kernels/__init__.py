"""Loops that torch has no operator for, compiled by numba, each held to torch's own operators."""

LANES = 16  # float32 numbers in a vector: one register of AVX-512, two of AVX2
