/* A step of recurrent cells of K clients but for its products, forwards and backwards; see _cells.py.

   Compiled once for REAL = float and once for double. Tensors are (K, T, B, ...) over all steps, or (K, B, ...) of one.
   Clients do not depend on each other, so that calls for several ranges of them may run in several threads. */

#include <stddef.h>
#include <stdint.h>

#include "../dispatch/vector_math.h"

typedef struct {
    int64_t steps, rows, size;         /* T, B, H */
    const REAL *added, *product;       /* (K, T, B, GH) of the inputs, (K, B, GH) of the states */
    const REAL *first;                 /* (K, B, H) the state, of an LSTM the cell, before the first step */
    REAL *outputs, *gates;             /* (K, T, B, H), (K, T, B, GH) */
    REAL *cells, *kept;                /* (K, T, B, H): the cells and their tanh; of a GRU kept: what it resets */
    const REAL *d_outputs, *d_cells;   /* gradients (K, T, B, H); d_cells may be NULL */
    REAL *d_state, *d_cell;            /* (K, B, H), from the step after this one */
    REAL *d_gates, *d_new;             /* (K, T, B, GH) of what states add; of a GRU d_new (K, T, B, H) of the inputs */
} Cells;

static inline REAL sigmoid(REAL value) { return 1 / (1 + EXP(-value)); }
static inline REAL squashed(REAL value) { return 2 / (1 + EXP(-2 * value)) - 1; } /* tanh; rounds as a number near one */

static void lstm_row(int64_t n, const REAL *restrict added, const REAL *restrict product, const REAL *restrict before,
                     REAL *restrict gates, REAL *restrict cell, REAL *restrict kept, REAL *restrict output) {
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        const REAL write = sigmoid(added[j] + product[j]), keep = sigmoid(added[n + j] + product[n + j]);
        const REAL new = squashed(added[2 * n + j] + product[2 * n + j]), show = sigmoid(added[3 * n + j] + product[3 * n + j]);
        const REAL after = keep * before[j] + write * new, tanh_c = squashed(after);
        gates[j] = write, gates[n + j] = keep, gates[2 * n + j] = new, gates[3 * n + j] = show;
        cell[j] = after, kept[j] = tanh_c, output[j] = show * tanh_c;
    }
}

static void lstm_row_back(int64_t n, const REAL *restrict gates, const REAL *restrict before, const REAL *restrict kept,
                          const REAL *restrict d_output, const REAL *restrict d_after, const REAL *restrict d_state,
                          REAL *restrict d_cell, REAL *restrict d_gates) {
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        const REAL write = gates[j], keep = gates[n + j], new = gates[2 * n + j], show = gates[3 * n + j];
        const REAL tanh_c = kept[j], d = d_output[j] + d_state[j], slope = show * (1 - tanh_c * tanh_c);
        const REAL d_c = d_cell[j] + (d_after ? d_after[j] : 0) + d * slope;
        d_gates[j] = d_c * (write * new * (1 - write));
        d_gates[n + j] = d_c * (before[j] * keep * (1 - keep));
        d_gates[2 * n + j] = d_c * (write * (1 - new * new));
        d_gates[3 * n + j] = d * (tanh_c * show * (1 - show));
        d_cell[j] = d_c * keep;
    }
}

static void gru_row(int64_t n, const REAL *restrict added, const REAL *restrict product, const REAL *restrict before,
                    REAL *restrict gates, REAL *restrict kept, REAL *restrict output) {
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        const REAL reset = sigmoid(added[j] + product[j]), update = sigmoid(added[n + j] + product[n + j]);
        const REAL new = squashed(added[2 * n + j] + reset * product[2 * n + j]);
        gates[j] = reset, gates[n + j] = update, gates[2 * n + j] = new;
        kept[j] = product[2 * n + j], output[j] = new + update * (before[j] - new);
    }
}

static void gru_row_back(int64_t n, const REAL *restrict gates, const REAL *restrict before, const REAL *restrict kept,
                         const REAL *restrict d_output, REAL *restrict d_state, REAL *restrict d_gates,
                         REAL *restrict d_new) {
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        const REAL reset = gates[j], update = gates[n + j], new = gates[2 * n + j], d = d_output[j] + d_state[j];
        const REAL inner = d * ((1 - new * new) * (1 - update));
        d_gates[j] = inner * kept[j] * reset * (1 - reset);
        d_gates[n + j] = d * (before[j] - new) * update * (1 - update);
        d_gates[2 * n + j] = inner * reset;
        d_new[j] = inner;
        d_state[j] = d * update;
    }
}

/* Where the rows of a client's step are in a tensor (K, T, B, width); the states before it. */
#define AT(tensor, width) ((tensor) + ((k * c->steps + t) * c->rows + b) * (width))
#define BEFORE(states) (t ? AT(states, n) - c->rows * n : c->first + (k * c->rows + b) * n)
#define NOW(tensor, width) ((tensor) + (k * c->rows + b) * (width))
#define EACH(begin, end) \
    for (int64_t k = (begin), n = c->size; k < (end); k++) \
        for (int64_t b = 0; b < c->rows; b++)

void lstm_step(const Cells *c, int64_t t, int64_t begin, int64_t end) {
    EACH(begin, end)
    lstm_row(n, AT(c->added, 4 * n), NOW(c->product, 4 * n), BEFORE(c->cells), AT(c->gates, 4 * n), AT(c->cells, n),
             AT(c->kept, n), AT(c->outputs, n));
}

void lstm_step_back(const Cells *c, int64_t t, int64_t begin, int64_t end) {
    EACH(begin, end)
    lstm_row_back(n, AT(c->gates, 4 * n), BEFORE(c->cells), AT(c->kept, n), AT(c->d_outputs, n),
                  c->d_cells ? AT(c->d_cells, n) : NULL, NOW(c->d_state, n), NOW(c->d_cell, n), AT(c->d_gates, 4 * n));
}

void gru_step(const Cells *c, int64_t t, int64_t begin, int64_t end) {
    EACH(begin, end)
    gru_row(n, AT(c->added, 3 * n), NOW(c->product, 3 * n), BEFORE(c->outputs), AT(c->gates, 3 * n), AT(c->kept, n),
            AT(c->outputs, n));
}

void gru_step_back(const Cells *c, int64_t t, int64_t begin, int64_t end) {
    EACH(begin, end)
    gru_row_back(n, AT(c->gates, 3 * n), BEFORE(c->outputs), AT(c->kept, n), AT(c->d_outputs, n), NOW(c->d_state, n),
                 AT(c->d_gates, 3 * n), AT(c->d_new, n));
}
