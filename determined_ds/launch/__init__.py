"""Launchers that an entrypoint may name in place of Determined's."""
