"""Configuration, the daemon (the composition root) and the command line."""

__version__ = "0.2.0"
"""Of all packages of this tree: one release for all of them."""
