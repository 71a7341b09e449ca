"""ViT, image classification: the published architecture from tiny to huge, as Hugging Face has it."""
