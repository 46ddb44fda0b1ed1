"""A user's script in a run that `lightning-3d verify` compares with another run: what is changed in
it, and what is recorded."""
