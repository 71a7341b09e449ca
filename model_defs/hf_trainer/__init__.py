"""A causal language model trained by Hugging Face's Trainer, from a script of a few lines."""
