"""Configuration of a run: keys, options, and the check of a whole run. Imports no torch."""
