"""Checkpoints to other programs, and weights of other programs to checkpoints; one process, no engine, no GPU.

checkpoint -> VerifiedEngine -> Outgoing tensors, by their names out there -> files aside -> renamed
"""
