"""Options of the strategy, one file for each group. Imports no torch."""
