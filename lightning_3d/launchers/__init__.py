"""Hand a run to torchrun, SLURM or Kubernetes. Imports no torch."""
