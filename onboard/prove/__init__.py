"""Blocks, layers and models held against the reference, and what changes with its config."""
