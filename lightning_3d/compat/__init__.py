"""Private symbols of other libraries: the only modules that touch them.

Each function names the library, the versions that it was tried with, and why no public symbol will
do. `tests/compat` has contract tests: a new version that changes one of these symbols fails there,
not in a training run.
"""
