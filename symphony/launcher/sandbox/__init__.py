"""The sandbox of a program: namespaces, a root of its own, no capabilities, Landlock, a filter of system calls.

    zygote ──clone──► first process: builds the root, forks, reaps, mounts KV again
                          └──fork──► the program

Both are in user, PID, mount, network, IPC, UTS and cgroup namespaces of their own. The first process is the only one
that keeps a capability, and its mount namespace alone still has the host's tree. When it ends, the kernel ends all
that is in the sandbox. Nothing here is optional: what the kernel refuses ends the start with `Lacks`.
"""
