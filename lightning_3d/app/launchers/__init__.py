"""Hand a run to torchrun, SLURM, Kubernetes, SkyPilot or dstack. Imports no torch."""
