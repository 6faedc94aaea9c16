"""Configuration, the daemon (the composition root) and the command line."""
