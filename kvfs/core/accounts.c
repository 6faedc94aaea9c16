/* Accounts: charges for pages and files, and checks of quotas. */

#include "inside.h"

int64_t core_names_bytes(int64_t num_files) {
    return num_files > CORE_FREE_NAMES ? (num_files - CORE_FREE_NAMES) * CORE_NAME_BYTES : 0;
}

int64_t core_page_bytes(const core_sizes *sizes, int64_t base, const int32_t *pages, int64_t num) {
    for (int64_t i = 0; num && i < sizes->num_others; i++)
        if (base + pages[0] >= sizes->others[i].first && base + pages[0] < sizes->others[i].stop)
            return sizes->others[i].page_bytes;
    return sizes->page_bytes;
}

_Bool core_may_count(const core_account *account, int64_t other_bytes) {
    while (account->parent)
        account = account->parent;
    return other_bytes <= 0 || (other_bytes <= (INT64_C(1) << 56) - account->other_bytes &&
                                other_bytes <= (INT64_C(1) << 61) - account->total->other_bytes);
}

static _Bool refuse(const core_account *account, int64_t num_bytes, int64_t num_files) {
    account->total->refused = account->number;
    account->total->wanted_bytes = num_bytes;
    account->total->wanted_files = num_files;
    return 0;
}

_Bool core_may_have(const core_account *account, int64_t num_bytes, int64_t num_files) {
    int64_t names = core_names_bytes(account->num_files);
    int64_t most = account->most_bytes - account->page_bytes - account->other_bytes - names;
    num_bytes += core_names_bytes(account->num_files + num_files) - names;
    return num_bytes <= 0 || account->most_bytes < 0 || num_bytes <= most || refuse(account, num_bytes, 0);
}

_Bool core_has_room_for_files(const core_account *account, int64_t num, int64_t other_bytes) {
    for (;; account = account->parent) {
        if (!core_may_have(account, other_bytes, num))
            return 0;
        if (account->most_files >= 0 && account->num_files + num > account->most_files)
            return refuse(account, 0, num);
        if (!account->parent)
            return core_may_hold(account->holdings, CORE_FILE, num, 0) || refuse(account, 0, 0);
    }
}

core_outcome core_charge_files(core_account *account, int64_t num) {
    account->total->num_files += num;
    for (;; account = account->parent) {
        account->num_files += num;
        account->has_news = account->is_watched;
        if (account->num_files < 0)
            return CORE_BROKEN;
        if (!account->parent)
            return core_hold(account->holdings, CORE_FILE, num, 0);
    }
}

core_outcome core_charge_bytes(core_account *account, int64_t num_bytes) {
    account->total->other_bytes += num_bytes;
    for (; account; account = account->parent) {
        account->other_bytes += num_bytes;
        account->has_news = account->is_watched;
        if (account->other_bytes < 0)
            return CORE_BROKEN;
    }
    return CORE_DONE;
}

_Bool core_has_room(const core_account *account, int64_t num_pages, int64_t page_bytes) {
    for (; account; account = account->parent)
        if (!core_may_have(account, num_pages * page_bytes, 0))
            return 0;
    return 1;
}

_Bool core_has_room_for(core_account *account, int64_t base, const int32_t *pages, int64_t num, int64_t other_bytes,
                        int64_t num_files) {
    for (int64_t page_bytes = core_page_bytes(account->sizes, base, pages, num); account; account = account->parent)
        if (account->most_bytes >= 0 &&
            !core_may_have(account, counts_num_new(&account->pages, base, pages, num) * page_bytes + other_bytes, num_files))
            return 0;
    return 1;
}

core_outcome core_charge(core_account *account, int64_t base, const int32_t *pages, int64_t num) {
    for (; account; account = account->parent) {
        int64_t num_new = counts_add(&account->pages, base, pages, num);
        if (num_new < 0)
            return CORE_BROKEN;
        account->page_bytes += num_new * core_page_bytes(account->sizes, base, pages, num);
        account->has_news = account->is_watched;
    }
    return CORE_DONE;
}

core_outcome core_refund(core_account *account, int64_t base, const int32_t *pages, int64_t num) {
    for (; account; account = account->parent) {
        int64_t num_gone = counts_subtract(&account->pages, base, pages, num);
        if (num_gone < 0)
            return CORE_BROKEN;
        account->page_bytes -= num_gone * core_page_bytes(account->sizes, base, pages, num);
        account->has_news = account->is_watched;
    }
    return CORE_DONE;
}
