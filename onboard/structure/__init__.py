"""What a reference model is made of, found by what flows between its modules."""
