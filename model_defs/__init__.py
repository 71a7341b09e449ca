"""Models to train: one folder a model, each with its network, its data and its trial."""
