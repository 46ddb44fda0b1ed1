"""Measurement of operations on this machine for the planner (`lightning-3d profile`)."""
