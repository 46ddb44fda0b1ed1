"""The processes of a run on this machine: starting, watching and ending them. Imports no torch."""
