"""`lightning-3d doctor`: checks of a machine or a cluster before the first run. Each check measures
on every rank; rank 0 judges."""
