"""Auditing: runs the real engines on dummy records, and checks their releases against the claimed guarantees."""
