"""Configuration, the daemon (the composition root) and the command line."""

__version__ = "0.2.0"
"""Release number of all packages in this tree."""
