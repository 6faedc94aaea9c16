"""The sandbox of a program: namespaces, a separate root, no capabilities, Landlock, a filter of system calls.

    zygote ──clone──► first process: forks, reaps, mounts KV again
                          └──fork──► the program: builds the root, enters it, gives up its rights

Both processes are in new user, PID, mount, network, IPC, UTS and cgroup namespaces. Only the first process keeps a
capability, and only its mount namespace still has the host's tree. When the first process ends, the kernel ends all
processes in the sandbox. No part is optional: if the kernel refuses a part, the start fails with `Lacks`.
"""
