"""A model of one's own, begun: the files that ``det-ds new`` writes. Beside this file lie their texts, a folder a kind."""
