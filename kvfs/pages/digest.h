/* cffi reads this file: declarations only. */
#ifndef KVFS_DIGEST_H
#define KVFS_DIGEST_H

#include <stdint.h>

/* Return whether this processor can run digest_pages(). */
int digest_is_fast(void);

/* Write the digests of eight pages to `out`, one after the other. */
void digest_pages(const uint8_t *const pages[], uint64_t page_bytes, uint8_t *out);

#endif
