"""One package for each kind of parallelism, which never import each other, and the modules that
they share."""
