"""BERT, classification of texts: the published architecture, fine-tuned or from nothing."""
