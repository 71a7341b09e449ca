"""Ranks that somebody else starts: torchrun, srun, mpirun, deepspeed, and DeepSpeed's launcher over ssh."""
