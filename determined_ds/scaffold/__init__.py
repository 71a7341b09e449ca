"""A model of one's own, begun: what ``det-ds new`` writes. The texts lie beside this file, a folder a kind."""
