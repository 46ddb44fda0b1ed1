"""Hydra plugins: the config groups of lightning_3d in every Hydra app, layout names without files,
and `recipe=`."""
