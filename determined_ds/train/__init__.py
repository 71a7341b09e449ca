"""Inside a rank: runs a trial, here or on a cluster.

The way of a batch: data (which samples) -> loop (when what happens) -> trial (what is computed)
-> metrics (one reduction a report) -> the core context (a file here, the master there).
"""
