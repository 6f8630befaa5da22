"""What is in a checkpoint, from its headers alone: roles, kinds of layers, formats, the ledger."""
