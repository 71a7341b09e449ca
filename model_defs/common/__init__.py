"""What several models share: the parser of a section, the split, text and images on disk, parameters, checkpoints."""
