"""Loops that torch has no operator for, compiled by numba and checked against torch's operators.

Without one of them a whole job on a CPU takes longer: the main job 1.31 times as long without `sparse_conv`, and 1.22
times without `product_loops`.
"""

LOSER = 4  # the number of a place in a 2 x 2 window that passes no gradient on
LANES = 16  # float32 numbers in a vector: one register of AVX-512, two of AVX2
