"""The daemon under a service manager: notifications, inherited sockets, the journal, and the mount helper."""
