/* Records the basic blocks that a test runs. The compiler inserts a call at the start of every block. See seen.py. */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef PLACE
#define PLACE "." /* directory of seen.py's files */
#define LIBRARY "extension.so"
#endif
#define MAX_BYTES (1 << 24) /* largest size of an extension's code */

extern const char __ehdr_start __attribute__((visibility("hidden")));

static uint32_t latest[MAX_BYTES]; /* the last test that ran each block, by address */

static void add(uint32_t test, int is_pytest, uintptr_t address) {
    const int kept = errno, file = open(PLACE "/blocks", O_WRONLY | O_APPEND | O_CLOEXEC);
    if (file < 0 || dprintf(file, "%d %u " LIBRARY " %lx\n", is_pytest, test, (unsigned long)address) < 0)
        abort();
    close(file);
    errno = kept;
}

__attribute__((visibility("hidden"))) /* each library has its own copy of this function */
void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void) {
    static const volatile uint32_t *now;
    const uintptr_t address = (uintptr_t)__builtin_return_address(0) - (uintptr_t)&__ehdr_start;
    if (now == NULL) {
        const int kept = errno, file = open(PLACE "/now", O_RDONLY | O_CLOEXEC);
        void *memory = mmap(NULL, 2 * sizeof *now, PROT_READ, MAP_SHARED, file, 0);
        if (memory == MAP_FAILED || address >= MAX_BYTES)
            abort();
        close(file);
        errno = kept;
        now = memory;
    }
    const int is_pytest = now[1] == (uint32_t)getpid();
    const uint32_t test = now[0], key = test << 2 | (uint32_t)is_pytest << 1 | 1;
    if (latest[address] != key) {
        latest[address] = key;
        add(test, is_pytest, address);
    }
}
