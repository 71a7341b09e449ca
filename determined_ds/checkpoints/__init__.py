"""Checkpoints: what a rank holds as slices, their index and files, written and read by any ranks."""
