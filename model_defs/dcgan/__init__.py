"""A generative adversarial network of convolutions: two models, two engines, one trial."""
