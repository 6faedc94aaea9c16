"""Attacks by other doors into the kernel: calls of 32-bit programs and of x32, which a filter may forget."""

import ctypes
import mmap

from attack import World, attack, syscall

GETPID_386 = 20
X32 = 0x40000000


@attack()
def i386_getpid(_world: World) -> str:
    """Makes a harmless system call by int 0x80."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    # push rbx; mov eax, getpid; int 0x80; movsxd rax, eax; pop rbx; ret
    page.write(b"\x53\xb8" + GETPID_386.to_bytes(4, "little") + b"\xcd\x80\x48\x63\xc0\x5b\xc3")
    call = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    return f"pid {call()}"


@attack()
def x32_getpid(_world: World) -> str:
    """Makes a harmless system call by its x32 number."""
    return f"pid {syscall(X32 | 39)}"


@attack(no_control="there is nothing to call")
def unknown_number(_world: World) -> str:
    """Calls numbers that no kernel has yet: a filter that lists what is forbidden would let them through."""
    answered = []
    for number in (*range(470, 520), 1000, 65535):
        try:
            syscall(number, 0, 0, 0, 0, 0, 0)
        except OSError as error:
            if error.errno not in (38, 1):
                answered.append(number)
            refusal = error
        else:
            answered.append(number)
    if not answered:
        raise refusal
    return f"calls {answered}"
