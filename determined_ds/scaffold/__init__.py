"""Files of a new model: what ``det-ds new`` writes. The templates are beside this file, one folder a kind."""
