"""Tokenize text into a folder of shards: what `lightning-3d tokenize` does.

`sources` reads documents in batches, `pool` hands the batches to processes in order, `encoding`
tokenizes one batch, `shard_writer` writes the shards, and `job` composes them. The format of the
shards is in `training/data`: `indexed_file` and `shard_manifest`.
"""
