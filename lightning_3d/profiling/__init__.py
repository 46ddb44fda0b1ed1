"""Measures the operations of this machine for the planner (`lightning-3d profile`)."""
