"""The reference implementation, run where it can do no harm, and what is seen of it."""
