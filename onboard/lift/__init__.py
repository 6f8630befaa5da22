"""The reference's own code, copied for what no block explains."""
