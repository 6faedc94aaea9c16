"""The launcher starts programs, keeps their output and ends them. Each user has one launcher for each daemon.

    symphony run ──control──► launcher ──► zygote ──fork──► program
                                 │  ▲                          │
                                 │  └──── its own socket ◄─────┘
                                 └──programs socket──► daemon

The launcher runs as its user. A command starts it on demand, and it ends when it is idle. The launcher loads neither
libsym nor the daemon's packages. The zygote loads libsym, so that programs start with it loaded.
"""
