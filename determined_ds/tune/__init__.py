"""Ways to carry out one training: laid over an experiment, compared, and the fastest of them found."""
