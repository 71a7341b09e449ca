"""Ranks as processes of this machine: started together, watched, ended together, and what became of them."""
