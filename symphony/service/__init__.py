"""The daemon under a service manager: what it tells it, what it is handed, and the helper that mounts for it."""
