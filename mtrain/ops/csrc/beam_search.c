/* Several positions of a beam search in one call, in float: for each, the decoder layers, the best tokens of
 * each hypothesis, and the best candidates of each sentence. mtrain/decode/beam.py does the same with one
 * call for each operation. */
#include "vec.h"

#ifndef BF16

/* The first columns of `ints`, `reals`, `ended_ints` and `ended_reals` (see ops.h). */
enum { SENTENCE, CELL, TOKEN, LENGTH, WRITTEN };
enum { LOG_PROB, LOG_PROBS };
enum { ENDED_SENTENCE, ENDED_LENGTH, ENDED_IDS };
enum { ENDED_LOG_PROB, ENDED_SCORE, ENDED_LOG_PROBS };

/* The best candidates of a sentence, at most `limit`, best first; among equals, the first considered. */
typedef struct {
    double *log_prob;       /* of the whole hypothesis */
    int64_t *parent, *rank; /* the row that it extends, and the rank of its token among that row's best */
    int64_t count, limit;
} choice;

/* Insert a candidate if it is among the best. */
static void consider(choice *best, double log_prob, int64_t parent, int64_t rank) {
    if (best->count == best->limit) {
        if (!best->limit || !(log_prob > best->log_prob[best->limit - 1])) return;
        best->count--;
    }
    int64_t at = best->count++;
    for (; at > 0 && best->log_prob[at - 1] < log_prob; at--) {
        best->log_prob[at] = best->log_prob[at - 1];
        best->parent[at] = best->parent[at - 1];
        best->rank[at] = best->rank[at - 1];
    }
    best->log_prob[at] = log_prob, best->parent[at] = parent, best->rank[at] = rank;
}

/* Insert a score into the `count` best of a sentence, best first, if it is among them. */
static void add_score(double *best, int64_t count, double score) {
    int64_t at = count - 1;
    if (!(score > best[at])) return;
    for (; at > 0 && best[at - 1] < score; at--) best[at] = best[at - 1];
    best[at] = score;
}

/* The column offsets of a search, and buffers [rows, ...] for one position; rows = num_sentences * beam. */
typedef struct {
    int64_t rows, num_candidates;
    int64_t past, source, num_ints, num_reals, num_written; /* first columns of slots; numbers of columns */
    int64_t *next_ints, *ids, *positions, *candidates;
    double *next_reals;
    float *log_probs, *states; /* all pointers are NULL if there is no memory */
    choice best;
} search_space;

static search_space plan(const search_shape *is, const decoder_shape *at) {
    search_space own = {.rows = is->num_sentences * is->beam,
                        .num_candidates = min_of(is->beam, at->num_tokens - is->num_never),
                        .num_written = is->written_count + is->num_positions};
    own.past = WRITTEN + own.num_written;
    own.source = own.past + at->past_count + is->num_positions;
    own.num_ints = own.source + at->source_count;
    own.num_reals = LOG_PROBS + own.num_written;
    int64_t wide = own.num_ints + own.num_reals + 2 + own.num_candidates; /* of 8 bytes, for each row */
    int64_t narrow = own.num_candidates + at->heads * at->k;
    int64_t *memory = alloc_floats(2 * (own.rows * wide + 3 * is->beam) + own.rows * narrow);
    if (!memory) return own;
    own.next_ints = memory;
    own.next_reals = (double *)(own.next_ints + own.rows * own.num_ints);
    own.ids = (int64_t *)(own.next_reals + own.rows * own.num_reals);
    own.positions = own.ids + own.rows;
    own.candidates = own.positions + own.rows;
    own.best.parent = own.candidates + own.rows * own.num_candidates;
    own.best.rank = own.best.parent + is->beam;
    own.best.log_prob = (double *)(own.best.rank + is->beam);
    own.log_probs = (float *)(own.best.log_prob + is->beam);
    own.states = own.log_probs + own.rows * own.num_candidates;
    return own;
}

/* Whether the arguments are in range: rows are sorted by sentence, at most `beam` of each; each maximum
 * length has a penalty; each sentence has 0 to `beam` places; and each shortlist has enough tokens. */
static int is_valid(const search_shape *is, const search_space *own, const shortlist *shortlists,
                    const int64_t *ints, int64_t rows, const int64_t *max_lengths,
                    const int64_t *num_places) {
    int64_t last = 0, of_sentence = 0;
    if (rows < 1 || rows > own->rows || own->num_candidates < 1 || is->num_best < 1) return 0;
    for (int64_t b = 0; b < is->num_sentences; b++)
        if (max_lengths[b] < 0 || max_lengths[b] + 1 >= is->num_penalties || num_places[b] < 0 ||
            num_places[b] > is->beam)
            return 0;
    for (int64_t b = 0; shortlists && b < is->num_sentences; b++)
        if (shortlists[b].size < own->num_candidates) return 0;
    for (int64_t n = 0; n < rows; n++) {
        const int64_t *row = ints + n * own->num_ints;
        if (row[SENTENCE] < last || row[SENTENCE] >= is->num_sentences || row[LENGTH] < 0) return 0;
        of_sentence = row[SENTENCE] == last ? of_sentence + 1 : 1;
        if (of_sentence > is->beam) return 0;
        last = row[SENTENCE];
    }
    return 1;
}

/* The best tokens of all rows, and their log-probabilities, which become 0 with `argmax_only`. *are_finite
 * becomes 0 if one of the computed log-probabilities is NaN or infinite. */
static status find_candidates(const search_shape *is, const decoder_shape *at, const search_space *own,
                              const output_layer *output, const int64_t *never, const int64_t *ints,
                              int64_t rows, int *are_finite) {
    int64_t d = at->heads * at->k, count = rows * own->num_candidates;
    status result = OPS_OK;
    int is_scanned = is->argmax_only && output->scan.packed && !output->shortlists;
    if (output->shortlists)
        for (int64_t first = 0, end; first < rows && result == OPS_OK; first = end) {
            int64_t sentence = ints[first * own->num_ints + SENTENCE], *ids = own->candidates;
            const shortlist *ranked = output->shortlists + sentence;
            for (end = first + 1; end < rows && ints[end * own->num_ints + SENTENCE] == sentence; end++) {}
            result = packed_topk_float(&ranked->map, own->states + first * d, NULL,
                                       ids + first * own->num_candidates,
                                       own->log_probs + first * own->num_candidates, end - first, d,
                                       ranked->size, 0, own->num_candidates);
            for (int64_t i = first * own->num_candidates;
                 result == OPS_OK && i < end * own->num_candidates; i++)
                ids[i] = ranked->ids[ids[i]];
        }
    else if (is_scanned)
        result = packed_argmax_float(&output->scan, own->states, output->weight, output->bounds, never,
                                     own->candidates, rows, d, at->num_tokens, is->num_never);
    else
        result = packed_topk_float(&output->map, own->states, never, own->candidates, own->log_probs, rows,
                                   d, at->num_tokens, is->num_never, own->num_candidates);
    if (result != OPS_OK) return result;
    for (int64_t i = 0; i < count; i++) {
        if (is_scanned) own->log_probs[i] = own->candidates[i] < 0 ? -INFINITY : 0.0f;
        *are_finite &= isfinite(own->log_probs[i]) != 0;
        if (is->argmax_only) own->log_probs[i] = 0.0f;
    }
    return OPS_OK;
}

status search_steps_float(const search_shape *is, const decoder_shape *decoder, const stack_layer *layers,
                          void *const *pasts, const void *const *sources, const output_layer *output,
                          const float *table, const float *encodings, const int64_t *never,
                          const double *penalties, const int64_t *max_lengths, const int64_t *free_slots,
                          int64_t *num_places, double *best_scores, int64_t *ints, double *reals,
                          int64_t *ended_ints, double *ended_reals, int64_t *counts) {
    decoder_shape at = *decoder;
    search_space own = plan(is, decoder);
    if (!own.next_ints) return OPS_NO_MEMORY;
    int64_t rows = at.rows, used = 0, num_ended = 0, done = 0, *to = own.next_ints, *from = ints;
    double *to_real = own.next_reals, *from_real = reals;
    status result = is_valid(is, &own, output->shortlists, ints, rows, max_lengths, num_places) ? OPS_OK : OPS_BAD_INDEX;
    int has_ended = 0;
    at.past_stride = at.source_stride = own.num_ints;
    for (; done < is->num_positions && result == OPS_OK && rows && !has_ended; done++) {
        int64_t written = is->written_count + done, past = decoder->past_count + done;
        int must_leave = used + rows > is->num_free;
        for (int64_t n = 0; n < rows; n++) {
            int64_t *row = from + n * own.num_ints;
            must_leave |= max_lengths[row[SENTENCE]] <= row[LENGTH];
            own.ids[n] = row[TOKEN], own.positions[n] = row[LENGTH];
        }
        if (must_leave) break;
        for (int64_t n = 0; n < rows; n++) from[n * own.num_ints + own.past + past] = free_slots[used + n];
        at.rows = rows, at.past_count = past + 1, at.past_window = min_of(past + 1, is->window);
        int are_finite = 1;
        result = decoder_step_float(&at, layers, pasts, sources, own.ids, own.positions, table, encodings,
                                    from + own.past, from + own.source, own.states);
        if (result == OPS_OK) result = find_candidates(is, &at, &own, output, never, from, rows, &are_finite);
        if (result != OPS_OK || !are_finite) break;
        used += rows;
        int64_t open = 0;
        for (int64_t first = 0, end; first < rows; first = end) {
            int64_t sentence = from[first * own.num_ints + SENTENCE], kept = open;
            double *best = best_scores + sentence * is->num_best, bound = -INFINITY;
            own.best.count = 0, own.best.limit = min_of(num_places[sentence], is->beam);
            for (end = first; end < rows && from[end * own.num_ints + SENTENCE] == sentence; end++)
                for (int64_t c = 0; c < own.num_candidates; c++) {
                    double own_log_prob = own.log_probs[end * own.num_candidates + c];
                    consider(&own.best, from_real[end * own.num_reals + LOG_PROB] + own_log_prob, end, c);
                }
            for (int64_t i = 0; i < own.best.count; i++) {
                int64_t parent = own.best.parent[i];
                int64_t cell = parent * own.num_candidates + own.best.rank[i], token = own.candidates[cell];
                const int64_t *row = from + parent * own.num_ints;
                const double *row_real = from_real + parent * own.num_reals;
                double log_prob = own.best.log_prob[i];
                int64_t length = row[LENGTH] + 1;
                if (token == is->eos) {
                    int64_t *ended = ended_ints + num_ended * (ENDED_IDS + own.num_written);
                    double *ended_real = ended_reals + num_ended++ * (ENDED_LOG_PROBS + own.num_written);
                    int64_t start = own.num_written - written - 1; /* right-aligned */
                    ended[ENDED_SENTENCE] = sentence, ended[ENDED_LENGTH] = length;
                    memcpy(ended + ENDED_IDS + start, row + WRITTEN, written * sizeof *row);
                    ended[ENDED_IDS + own.num_written - 1] = token;
                    ended_real[ENDED_LOG_PROB] = log_prob;
                    ended_real[ENDED_SCORE] = log_prob / penalties[length];
                    memcpy(ended_real + ENDED_LOG_PROBS + start, row_real + LOG_PROBS,
                           written * sizeof *row_real);
                    ended_real[ENDED_LOG_PROBS + own.num_written - 1] = own.log_probs[cell];
                    add_score(best, is->num_best, ended_real[ENDED_SCORE]);
                    num_places[sentence]--;
                    continue;
                }
                int64_t *grown = to + open * own.num_ints;
                double *grown_real = to_real + open++ * own.num_reals;
                memcpy(grown, row, own.num_ints * sizeof *row);
                memcpy(grown_real, row_real, own.num_reals * sizeof *row_real);
                grown[CELL] = sentence * is->beam + i, grown[TOKEN] = token, grown[LENGTH] = length;
                grown[WRITTEN + written] = token;
                grown_real[LOG_PROB] = log_prob, grown_real[LOG_PROBS + written] = own.log_probs[cell];
                int64_t longest = is->early_stop ? length : max_lengths[sentence];
                double possible = log_prob / penalties[longest + 1];
                bound = possible > bound ? possible : bound;
            }
            if (is->beam > 1 && !(bound > best[is->num_best - 1])) open = kept;
            has_ended |= open == kept;
        }
        rows = open;
        int64_t *swap = from;
        double *swap_real = from_real;
        from = to, to = swap, from_real = to_real, to_real = swap_real;
    }
    if (result == OPS_OK && from != ints) {
        memcpy(ints, from, rows * own.num_ints * sizeof *ints);
        memcpy(reals, from_real, rows * own.num_reals * sizeof *reals);
    }
    counts[0] = done, counts[1] = rows, counts[2] = num_ended, counts[3] = used;
    free(own.next_ints);
    return result;
}

#endif
