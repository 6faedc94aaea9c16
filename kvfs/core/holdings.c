/* Things that the daemon keeps in its own memory for a user, and their weights. */

#include "core.h"

const int64_t core_weights[CORE_KINDS] = {
    [CORE_FILE] = 6144,
    [CORE_HANDLE] = 3072,
    [CORE_OPEN] = 3072,
    [CORE_PLAIN] = 3072,
    [CORE_DOMAIN] = 8192,
    [CORE_VERSION] = 1024,
    [CORE_CALL] = 8192,
    [CORE_REQUEST] = 12288,
    [CORE_FRAME] = 0,
    [CORE_MESSAGE] = 768,
    [CORE_TOPIC] = 1536,
    [CORE_TEXT] = 192 << 10,
    [CORE_CONNECTION] = 128 << 10,
};

_Bool core_may_hold(const core_holdings *holdings, int32_t kind, int64_t num, int64_t num_bytes) {
    int64_t wanted = core_weights[kind] * num + num_bytes, limit = holdings->limit_bytes;
    int64_t most_lasting = limit - limit / CORE_HANDLES_PART;
    if (limit < 0 || wanted <= 0)
        return 1;
    if (kind == CORE_FILE || kind == CORE_DOMAIN)
        return holdings->num_bytes + wanted <= most_lasting;
    /* After the bound was lowered, files may weigh more than it allows. Their excess does not count here, because the
     * owner needs handles to remove files. */
    int64_t excess = holdings->bytes_of[CORE_FILE] + holdings->bytes_of[CORE_DOMAIN] - most_lasting;
    return holdings->num_bytes - (excess > 0 ? excess : 0) + wanted <= limit;
}

core_outcome core_hold(core_holdings *holdings, int32_t kind, int64_t num, int64_t num_bytes) {
    num_bytes += core_weights[kind] * num;
    holdings->num_bytes += num_bytes;
    holdings->num_of[kind] += num;
    holdings->bytes_of[kind] += num_bytes;
    return holdings->num_of[kind] < 0 || holdings->bytes_of[kind] < 0 ? CORE_BROKEN : CORE_DONE;
}
