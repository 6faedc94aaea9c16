"""Attacks by other doors into the kernel: calls of 32-bit programs and of x32, which a filter may forget."""

from __future__ import annotations

import ctypes
import mmap
import os

from attack import World, attack, syscall

GETPID_386, UNSHARE_386 = 20, 310
X32 = 0x40000000


def _int_0x80(number: int, argument: int = 0) -> int:
    """A system call of the i386 ABI, made by a few bytes of machine code."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    # push rbx; mov eax, number; mov ebx, argument; int 0x80; movsxd rax, eax; pop rbx; ret
    page.write(b"\x53\xb8" + number.to_bytes(4, "little") + b"\xbb" + argument.to_bytes(4, "little"))
    page.write(b"\xcd\x80\x48\x63\xc0\x5b\xc3")
    call = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    return int(call())


def _result(value: int) -> int:
    if value < 0:
        raise OSError(-value, os.strerror(-value))
    return value


@attack()
def i386_getpid(_world: World) -> str:
    """Makes a harmless system call by int 0x80."""
    return f"pid {_result(_int_0x80(GETPID_386))}"


@attack()
def i386_unshare(_world: World) -> str:
    """Makes a user namespace by int 0x80."""
    return f"unshare gave {_result(_int_0x80(UNSHARE_386, 0x10000000))}"


@attack()
def x32_getpid(_world: World) -> str:
    """Makes a harmless system call by its x32 number."""
    return f"pid {syscall(X32 | 39)}"


@attack()
def x32_unshare(_world: World) -> str:
    """Makes a user namespace by its x32 number."""
    return f"unshare gave {syscall(X32 | 272, 0x10000000)}"


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
