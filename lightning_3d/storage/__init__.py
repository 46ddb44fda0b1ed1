"""Paths and URLs, locks, and the names of checkpoints. Imports no torch."""
