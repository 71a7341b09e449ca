"""Ranks that another launcher starts: torchrun, srun, mpirun, deepspeed, and DeepSpeed's launcher over ssh."""
