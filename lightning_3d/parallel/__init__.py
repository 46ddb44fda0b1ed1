"""One package for each kind of parallelism, which never import each other, and below them what they share."""
