"""The training loop: batches, validations, metrics, reports, and when to stop."""
