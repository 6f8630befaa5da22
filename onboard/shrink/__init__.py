"""A small model of the same kind."""
