"""A script as a rank of ``det-ds run``: what its process is given, as a cluster would give it."""
