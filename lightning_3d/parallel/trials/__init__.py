"""Answers that a clone of a module, or of an optimizer, gives on random numbers. The name of a
class decides nothing."""
