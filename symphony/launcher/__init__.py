"""Programs as processes: one launcher for each user and daemon, which starts them, keeps their output and ends them.

    symphony run ──control──► launcher ──► zygote ──fork──► program
                                 │  ▲                          │
                                 │  └──── its own socket ◄─────┘
                                 └──programs socket──► daemon

The launcher runs as its user, is started when somebody needs it, and goes when nobody does. It needs neither libsym nor
what the daemon needs; the zygote has libsym, so that programs start with it.
"""
