"""Loops that torch has no operator for, compiled by numba and checked against torch's operators.

A loop is here because some training step took at least 1.2 times as long without it, on two cores of an AMD EPYC with
AVX-512; each file says how long.
"""
