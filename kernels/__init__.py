"""Operators: a PyTorch reference each, faster backends beside it, one registry that chooses."""
