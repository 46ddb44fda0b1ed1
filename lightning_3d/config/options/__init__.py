"""Options of the strategy and the configuration, one file for each group. Imports no torch."""
