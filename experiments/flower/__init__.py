"""Federations over Flower on this machine: their speed, and what losses do. They need the extra `flower`."""
