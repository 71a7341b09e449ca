"""Ranks as processes of this machine: started together, watched, ended together."""
