"""Ways to carry out one training: applied to an experiment, compared, and the fastest of them found."""
