"""The folder of a run: status, metrics, frozen configuration, reports and sweeps. Imports no
torch."""
