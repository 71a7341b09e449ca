"""The shape of a model, built on torch's meta device: parameters and activations counted, no memory taken."""
