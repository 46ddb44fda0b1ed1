"""One file for each group of options of the strategy and the configuration. Imports no torch."""
