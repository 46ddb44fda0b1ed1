"""Hydra plugin: launchers that run each job of a sweep in fresh processes, from a frozen
configuration."""
