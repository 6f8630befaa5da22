"""Reads a checkpoint once, proves an adapter for it, and writes generated/<model>/."""
