"""Loops that torch has no operator for, compiled by numba and checked against torch's operators."""

LANES = 16  # float32 numbers in a vector: one register of AVX-512, two of AVX2
