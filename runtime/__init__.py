"""The fixed trainer: blocks, weights, parallelism, training, export. Adding a model never edits it."""
