"""The memory that this process keeps for itself."""

import ctypes


def keep_freed_memory() -> bool:
    """Let this process keep up to 512 MiB of freed tensors' memory, and return whether it does (only glibc can).

    By default glibc returns large, short-lived gradients to the system at once: 1,500 page faults in a pass.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in malloc.h
    return bool(mallopt(trim_threshold, 512 << 20) and mallopt(mmap_threshold, 32 << 20))
