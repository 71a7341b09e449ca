"""Determined's hyperparameter searches, run here without a cluster."""
