/* Layout of the next step: calls that have entries to compute are the policy's candidates, and the chosen calls become
 * chunks of one batch. The batch holds copies of the members' data, made under the lock, so a step needs no lock. */
#include "loop_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int32_t left(const sym_member *member) { return member->num_tokens - member->num_computed; }

/* Begin a new count of distinct pages: no page has been read yet. */
static void begin_reading(sym_loop *loop) {
    struct layout *layout = &loop->layout;
    if (++layout->stamp == 0) {
        memset(layout->stamps, 0, (size_t)loop->plan.num_pages * sizeof *layout->stamps);
        layout->stamp = 1;
    }
}

/* Return whether a call of this count has read the page already, and mark it as read. */
static int was_read(struct layout *layout, int32_t page) {
    const int was = layout->stamps[page] == layout->stamp;
    layout->stamps[page] = layout->stamp;
    return was;
}

/* Return how many of the member's entries an earlier candidate reads, too. */
static int32_t num_shared(sym_loop *loop, const sym_member *member) {
    const int32_t length = entries(member), num_pages = pages_for(length);
    int32_t count = 0;
    for (int32_t p = 0; p < num_pages; p++)
        if (was_read(&loop->layout, member->pages[p]))
            count += p + 1 < num_pages ? SYM_PAGE_ENTRIES : length - p * SYM_PAGE_ENTRIES;
    return count;
}

static int may_compute(const sym_member *member) { return member->state == SYM_COMPUTING && !member->in_step; }

static int has_draft(const sym_member *member) {
    return member->kind == SYM_GENERATION && member->num_computed == 0 && member->generation->num_draft > 0;
}

/* Shorten drafts evenly until the step has time for their guesses beside its decodes. If only one call is ready, its
 * draft may have max_digested guesses. */
static void trim_drafts(sym_loop *loop) {
    const sym_limits *limits = &loop->plan.limits;
    sym_work work = {0};
    int32_t num_drafts = 0, num_others = 0, most = limits->max_digested;
    for (int32_t i = 0; i < loop->num_places; i++) {
        const sym_member *member = loop->members[i];
        if (!may_compute(member))
            continue;
        num_drafts += has_draft(member);
        num_others += !has_draft(member);
        work.num_rows += has_draft(member) || left(member) == 1;
    }
    if (num_drafts == 0)
        return;
    work.num_wanted = work.num_rows;
    const double most_ns = sym_policy_most_ns(limits, &loop->cost, &work);
    for (sym_work with = work; num_drafts + num_others > 1 && most > 0; most--) {
        with.num_rows = with.num_wanted = work.num_rows + most;
        if (sym_cost_of(&loop->cost, &with) <= most_ns)
            break;
    }
    for (int32_t i = 0; i < loop->num_places; i++) {
        sym_member *member = loop->members[i];
        if (!may_compute(member) || !has_draft(member))
            continue;
        sym_trim_draft(member, most / num_drafts--);
        most -= member->generation->num_draft;
    }
}

/* Return whether the stretch is computed whole: one token, or a generation's token with forced tokens behind it. A step
 * has at most max_tokens forced rows. A stretch with more may be cut, so that stretch loses its draft: the rows of a
 * draft do not outlive their step. */
static int is_decode(const sym_loop *loop, sym_member *member, int32_t *num_forced) {
    if (left(member) == 1)
        return 1;
    if (member->kind != SYM_GENERATION || !member->generation->has_begun || member->num_computed > 0)
        return 0;
    const int32_t forced = left(member) - member->generation->num_draft - 1;
    if (*num_forced + forced > loop->plan.limits.max_tokens) {
        sym_trim_draft(member, 0);
        return left(member) == 1;
    }
    *num_forced += forced;
    return 1;
}

/* Fill `candidates` with the calls that may be in the next step, and return how many there are. End late calls. */
static int32_t find_candidates(sym_loop *loop, int64_t now_ns) {
    int32_t n = 0, num_forced = 0;
    if (loop->num_places > loop->room_candidates) {
        int32_t room[3] = {loop->room_candidates, loop->room_candidates, loop->room_candidates};
        if (sym_make_room(&loop->candidates, &room[0], loop->num_places, sizeof *loop->candidates) != 0 ||
            sym_make_room(&loop->candidate_of, &room[1], loop->num_places, sizeof(int32_t)) != 0 ||
            sym_make_room(&loop->num_now, &room[2], loop->num_places, sizeof(int32_t)) != 0)
            return -ENOMEM;
        loop->room_candidates = room[0];
    }
    begin_reading(loop);
    trim_drafts(loop);
    for (int32_t i = 0; i < loop->num_places; i++) {
        sym_member *member = loop->members[i];
        if ((member->state != SYM_COMPUTING && member->state != SYM_UNDECIDED) || member->in_step)
            continue;
        if (member->deadline_ns < now_ns) {
            sym_end_member(loop, i, SYM_END_DEADLINE);
            continue;
        }
        if (member->state == SYM_UNDECIDED) {
            loop->counts.num_undecided++;
            continue;
        }
        const int is_one = is_decode(loop, member, &num_forced);
        loop->candidate_of[n] = i;
        loop->candidates[n++] = (sym_candidate){
            .since_ns = member->since_ns,
            .deadline_ns = member->deadline_ns,
            .begun_ns = member->begun_ns,
            .share = member->share,
            .priority = member->priority,
            .length = entries(member) + member->num_computed,
            .num_shared = left(member) == 1 ? num_shared(loop, member) : 0,
            .left = left(member),
            .is_decode = is_one,
            .is_digested = member->num_rows > 1 && (member->rows == NULL || member->kind == SYM_GENERATION),
        };
    }
    return n;
}

/* Fill `seats` with the calls that the policy chooses, and return how many there are. Single rows come before chunks,
 * because backends compute them in this order. */
static int32_t choose_seats(sym_loop *loop, int32_t num_candidates, int64_t now_ns) {
    if (loop->room_candidates > loop->scratch_candidates || loop->room_shares > loop->scratch_shares) {
        sym_scratch *scratch = sym_scratch_new(loop->room_candidates, loop->room_shares);
        if (scratch == NULL)
            return -ENOMEM;
        sym_scratch_free(loop->scratch);
        loop->scratch = scratch;
        loop->scratch_candidates = loop->room_candidates;
        loop->scratch_shares = loop->room_shares;
    }
    const int32_t num_calls = sym_policy_plan(loop->candidates, num_candidates, loop->shares, loop->num_shares,
                                              &loop->plan.limits, &loop->cost, now_ns, loop->num_now, loop->scratch);
    if (num_calls <= 0)
        return num_calls;
    if (sym_make_room(&loop->seats, &loop->room_seats, num_calls, sizeof *loop->seats) != 0)
        return -ENOMEM;
    int32_t n = 0;
    for (int is_chunk = 0; is_chunk <= 1; is_chunk++)
        for (int32_t c = 0; c < num_candidates; c++)
            if (loop->num_now[c] > 0 && (loop->candidates[c].left > 1) == is_chunk) {
                const int32_t index = loop->candidate_of[c];
                loop->seats[n++] = (struct seat){.member = loop->members[index],
                                                 .index = index,
                                                 .num_now = loop->num_now[c],
                                                 .is_decode = loop->candidates[c].is_decode};
            }
    loop->num_seats = n;
    return n;
}

/* Return how many of the next `num_now` rows are wanted. Only the last `num_rows` rows of a stretch are wanted. */
static int32_t rows_wanted(const sym_member *member, int32_t num_now) {
    const int32_t wanted = member->num_rows - (left(member) - num_now);
    return wanted < 0 ? 0 : wanted < num_now ? wanted : num_now;
}

struct sizes {
    int32_t rows, chunks, pages, out, scratch, copies;
    size_t mask_words;
};

static struct sizes sizes_of(sym_loop *loop) {
    struct sizes sizes = {.chunks = loop->num_seats};
    for (int32_t c = 0; c < loop->num_seats; c++) {
        struct seat *seat = &loop->seats[c];
        const sym_member *member = seat->member;
        const int32_t num_pages = pages_for(entries(member) + member->num_computed + seat->num_now);
        seat->num_wanted = rows_wanted(member, seat->num_now);
        sizes.rows += seat->num_now;
        sizes.pages += num_pages;
        sizes.out += seat->num_wanted;
        sizes.scratch += member->rows == NULL ? seat->num_wanted : 0;
        sizes.copies += member->num_copies;
        if (asked_of(member)->mask != NULL)
            sizes.mask_words += (size_t)num_pages * (size_t)seat->num_now;
    }
    return sizes;
}

static int make_scratch(struct layout *layout, int32_t count, int32_t vocab_size) {
    if (count <= layout->num_scratch)
        return 0;
    float **longer = realloc(layout->scratch, (size_t)count * sizeof *longer);
    if (longer == NULL)
        return -1;
    layout->scratch = longer;
    while (layout->num_scratch < count) {
        float *row = aligned_alloc(64, ((size_t)vocab_size * sizeof(float) + 63) / 64 * 64);
        if (row == NULL)
            return -1;
        layout->scratch[layout->num_scratch++] = row;
    }
    return 0;
}

static int make_arrays(sym_loop *loop, const struct sizes *sizes) {
    struct layout *layout = &loop->layout;
    int32_t rows[2] = {layout->room_rows, layout->room_rows};
    if (sym_make_room(&layout->tokens, &rows[0], sizes->rows, sizeof(int32_t)) != 0 ||
        sym_make_room(&layout->positions, &rows[1], sizes->rows, sizeof(int32_t)) != 0)
        return -1;
    layout->room_rows = rows[0];
    const int32_t num_bounds = sizes->chunks + 1, old = layout->room_chunks;
    int32_t chunks[7] = {old, old, old, old, old, old, old};
    if (sym_make_room(&layout->first_row, &chunks[0], num_bounds, sizeof(int32_t)) != 0 ||
        sym_make_room(&layout->start, &chunks[1], num_bounds, sizeof(int32_t)) != 0 ||
        sym_make_room(&layout->first_page, &chunks[2], num_bounds, sizeof(int32_t)) != 0 ||
        sym_make_room(&layout->wanted, &chunks[3], num_bounds, sizeof(int32_t)) != 0 ||
        sym_make_room(&layout->masks, &chunks[4], num_bounds, sizeof *layout->masks) != 0 ||
        sym_make_room(&layout->mask_at, &chunks[5], num_bounds, sizeof *layout->mask_at) != 0 ||
        sym_make_room(&layout->masses, &chunks[6], num_bounds, sizeof *layout->masses) != 0)
        return -1;
    layout->room_chunks = chunks[0];
    if (sym_make_room(&layout->pages, &layout->room_pages, sizes->pages, sizeof(int32_t)) != 0 ||
        sym_make_room(&layout->out, &layout->room_out, sizes->out, sizeof *layout->out) != 0 ||
        sym_make_room(&layout->copies, &layout->room_copies, 3 * sizes->copies, sizeof(int32_t)) != 0 ||
        make_scratch(layout, sizes->scratch, loop->plan.vocab_size) != 0)
        return -1;
    if (sizes->mask_words > layout->room_mask_words) {
        uint32_t *longer = realloc(layout->mask_words, sizes->mask_words * sizeof *longer);
        if (longer == NULL)
            return -1;
        layout->mask_words = longer;
        layout->room_mask_words = sizes->mask_words;
    }
    return 0;
}

/* Write the mask of row `row` of a stretch: a bit for each entry up to the row's own entry. */
static void lay_mask_row(const sym_member *member, int32_t before, int32_t row, uint32_t *words, int32_t num_words) {
    const sym_asked *asked = asked_of(member);
    const int has_own_rows = asked->mask_columns > before;
    const uint8_t *bits = asked->mask + (size_t)(has_own_rows ? row : 0) * (size_t)asked->mask_row_bytes;
    const int32_t end = before + row + 1, known = has_own_rows ? end : before;
    memset(words, 0, (size_t)num_words * sizeof *words);
    for (int32_t byte = 0; byte < (known + 7) / 8; byte++) {
        const int32_t last = known - 8 * byte; /* bits of this byte that count, if fewer than 8 */
        const uint32_t value = last >= 8 ? bits[byte] : bits[byte] & ((1u << last) - 1);
        words[byte / 4] |= value << (byte % 4 * 8);
    }
    for (int32_t entry = known; entry < end; entry++) /* the mask does not cover these entries, so the row sees them */
        words[entry / 32] |= 1u << (entry % 32);
}

static void lay_mask(struct layout *layout, const struct seat *seat, int32_t chunk, size_t *num_words) {
    const sym_member *member = seat->member;
    layout->masks[chunk] = NULL;
    if (asked_of(member)->mask == NULL)
        return;
    const int32_t before = entries(member);
    const int32_t num_pages = pages_for(before + member->num_computed + seat->num_now);
    uint32_t *words = layout->mask_words + *num_words;
    layout->masks[chunk] = words;
    for (int32_t k = 0; k < seat->num_now; k++)
        lay_mask_row(member, before, member->num_computed + k, words + (size_t)k * (size_t)num_pages, num_pages);
    *num_words += (size_t)num_pages * (size_t)seat->num_now;
}

/* Add a seat to the work of the step: distinct entries that decodes read, and pairs of prefills. A call that asks for
 * attention counts twice, because its attention is computed again. */
static void weigh(sym_loop *loop, const struct seat *seat, int32_t start, int32_t num_pages) {
    const int64_t times = asked_of(seat->member)->mass.sums == NULL ? 1 : 2;
    if (left(seat->member) > 1) {
        loop->work.num_pairs +=
            times * ((int64_t)seat->num_now * start + (int64_t)seat->num_now * (seat->num_now + 1) / 2);
        loop->num_prefill_rows += seat->is_decode ? 0 : seat->num_now;
        return;
    }
    loop->work.num_seen += times * (start + 1);
    for (int32_t p = 0; p < num_pages; p++)
        if (!was_read(&loop->layout, seat->member->pages[p]))
            loop->work.num_entries += p + 1 < num_pages ? SYM_PAGE_ENTRIES : start + 1 - p * SYM_PAGE_ENTRIES;
}

static void lay_chunks(sym_loop *loop) {
    struct layout *layout = &loop->layout;
    sym_batch *batch = &loop->batch;
    int32_t num_rows = 0, num_pages = 0, num_out = 0, num_scratch = 0, num_copies = 0;
    size_t num_words = 0;
    int has_mass = 0;
    loop->work = (sym_work){0};
    loop->num_prefill_rows = 0;
    begin_reading(loop);
    for (int32_t c = 0; c < loop->num_seats; c++) {
        struct seat *seat = &loop->seats[c];
        sym_member *member = seat->member;
        const int32_t done = member->num_computed, start = entries(member) + done;
        const int32_t used = pages_for(start + seat->num_now);
        layout->first_row[c] = num_rows;
        layout->start[c] = start;
        layout->first_page[c] = num_pages;
        layout->wanted[c] = seat->num_wanted;
        memcpy(layout->tokens + num_rows, member->tokens + done, (size_t)seat->num_now * sizeof(int32_t));
        if (member->positions != NULL)
            memcpy(layout->positions + num_rows, member->positions + done, (size_t)seat->num_now * sizeof(int32_t));
        else
            for (int32_t k = 0; k < seat->num_now; k++)
                layout->positions[num_rows + k] = member->position + done + k;
        memcpy(layout->pages + num_pages, member->pages, (size_t)used * sizeof(int32_t));
        seat->first_out = num_out;
        const int32_t first_wanted = member->num_rows - (left(member) - seat->num_now) - seat->num_wanted;
        for (int32_t k = 0; k < seat->num_wanted; k++)
            layout->out[num_out++] =
                member->rows == NULL ? layout->scratch[num_scratch++] : member->rows[first_wanted + k];
        lay_mask(layout, seat, c, &num_words);
        layout->masses[c] = asked_of(member)->mass;
        has_mass |= layout->masses[c].sums != NULL;
        if (member->num_copies > 0)
            memcpy(layout->copies + 3 * num_copies, member->copies, 3 * (size_t)member->num_copies * sizeof(int32_t));
        num_copies += member->num_copies;
        weigh(loop, seat, start, used);
        member->in_step = 1;
        num_rows += seat->num_now;
        num_pages += used;
    }
    layout->first_row[loop->num_seats] = num_rows;
    layout->first_page[loop->num_seats] = num_pages;
    *batch = (sym_batch){
        .num_rows = num_rows,
        .num_chunks = loop->num_seats,
        .num_wanted = num_out,
        .num_copies = num_copies,
        .tokens = layout->tokens,
        .positions = layout->positions,
        .first_row = layout->first_row,
        .start = layout->start,
        .first_page = layout->first_page,
        .pages = layout->pages,
        .wanted = layout->wanted,
        .masks = layout->masks,
        .out = layout->out,
        .copies = layout->copies,
        .masses = has_mass ? layout->masses : NULL,
    };
}

int32_t sym_lay_out(sym_loop *loop, int64_t now_ns) {
    const int32_t num_candidates = find_candidates(loop, now_ns);
    if (num_candidates <= 0)
        return num_candidates;
    const int32_t num_calls = choose_seats(loop, num_candidates, now_ns);
    if (num_calls <= 0)
        return num_calls;
    const struct sizes sizes = sizes_of(loop);
    if (make_arrays(loop, &sizes) != 0) {
        loop->num_seats = 0;
        return -ENOMEM;
    }
    lay_chunks(loop);
    loop->work.num_rows = loop->batch.num_rows;
    loop->work.num_wanted = loop->batch.num_wanted;
    loop->predicted_ns = sym_cost_of(&loop->cost, &loop->work);
    return num_calls;
}
