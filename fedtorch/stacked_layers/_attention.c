/* Attention over short sequences, a head after another, and its derivatives; see _attention_program.py.

   Compiled once for REAL = float and once for double. What a head reads is copied into rows of whole vectors, padded with
   zeros, so that each product is one loop over them. Heads do not depend on each other, so that calls for several ranges
   of batches may run in several threads. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../dispatch/vector_math.h"

enum { WIDTH = 32 / sizeof(REAL), AT_ONCE = 4, TENSORS = 5 };

#define LEAST (sizeof(REAL) == 4 ? (REAL)-80 : (REAL)-700)

typedef REAL Vector __attribute__((vector_size(32)));

typedef struct {
    int64_t heads, rows, columns, size, causal; /* H, L, S, D, whether a row sees the columns up to its own only */
    double scale;
    int64_t strides[TENSORS][3];                /* of q, k, v, out and d_out by batch, head and row; numbers follow */
    int64_t mask_strides[4];                    /* by batch, head, row and column */
    const REAL *q, *k, *v;                      /* (N, H, L, D), (N, H, S, D) */
    const REAL *mask;                           /* (N, H, L, S) what is added to scores, or NULL */
    REAL *out, *sums;                           /* as q; (N, H, L) logarithms of the sums of exponentials */
    const REAL *d_out;                          /* as q */
    REAL *d_q, *d_k, *d_v;                      /* (N, L, H, D), (N, S, H, D) */
} Attention;

enum { Q, K, V, OUT, D_OUT };

/* Copies rows of `size` numbers, `stride` apart, into rows of whole vectors, which are zero beyond. */
static void packed(const REAL *from, int64_t stride, int64_t rows, int64_t size, int64_t vectors, REAL *to) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < size; j++) to[i * vectors * WIDTH + j] = from[i * stride + j];
}

/* The same, its rows as columns. */
static void turned(const REAL *from, int64_t stride, int64_t rows, int64_t size, int64_t vectors, REAL *to) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < size; j++) to[j * vectors * WIDTH + i] = from[i * stride + j];
}

/* c (m, vectors) = a (m, n) b (n, vectors); numbers of a are `row` and `column` apart, and there are rows up to a
   multiple of AT_ONCE in a and in c. */
static inline void product(const REAL *a, int64_t row, int64_t column, int64_t m, int64_t n, const Vector *restrict b,
                           int64_t vectors, Vector *restrict c) {
    for (int64_t i = 0; i < m; i += AT_ONCE, a += AT_ONCE * row, c += AT_ONCE * vectors) {
        int64_t part = 0;
        for (; part + 1 < vectors; part += 2) {
            Vector one[AT_ONCE] = {{0}}, other[AT_ONCE] = {{0}};
            for (int64_t d = 0; d < n; d++)
                for (int r = 0; r < AT_ONCE; r++) {
                    one[r] += a[r * row + d * column] * b[d * vectors + part];
                    other[r] += a[r * row + d * column] * b[d * vectors + part + 1];
                }
            for (int r = 0; r < AT_ONCE; r++) c[r * vectors + part] = one[r], c[r * vectors + part + 1] = other[r];
        }
        if (part == vectors) continue;
        Vector sums[AT_ONCE] = {{0}};
        for (int64_t d = 0; d < n; d++)
            for (int r = 0; r < AT_ONCE; r++) sums[r] += a[r * row + d * column] * b[d * vectors + part];
        for (int r = 0; r < AT_ONCE; r++) c[r * vectors + part] = sums[r];
    }
}

typedef struct {
    int64_t rows, across, along; /* L up to a multiple of AT_ONCE; vectors of a row of scores, and of q */
    Vector *q, *keys, *scores;   /* (L, along), (D, across), (L, across) */
    Vector *k, *v, *values, *d_out, *d_scores, *result;
} Scratch;

static int64_t multiple(int64_t number, int64_t of) { return (number + of - 1) / of; }

/* Memory for a head, zeros; NULL if there is none. */
static void *scratch(const Attention *p, Scratch *s) {
    const int64_t most = (p->rows > p->columns ? p->rows : p->columns) + AT_ONCE;
    s->rows = multiple(p->rows, AT_ONCE) * AT_ONCE;
    s->across = multiple(p->columns, WIDTH), s->along = multiple(p->size, WIDTH);
    const int64_t row = most * s->along, turn = p->size * s->across, square = (most + WIDTH) * s->across;
    char *memory = calloc((size_t)(5 * row + 2 * turn + 2 * square + 1), sizeof(Vector));
    if (!memory) return NULL;
    Vector *at = (Vector *)(((uintptr_t)memory + sizeof(Vector) - 1) / sizeof(Vector) * sizeof(Vector));
    s->q = at, s->k = at += row, s->v = at += row, s->d_out = at += row, s->result = at += row;
    s->keys = at += row, s->values = at += turn, s->scores = at += turn, s->d_scores = at + square;
    return memory;
}

/* exp of numbers that are at most about 0, exactly 0 of those below LEAST: the C library takes long over infinite ones. */
static void exponentials(REAL *numbers, int64_t count) {
#pragma omp simd
    for (int64_t j = 0; j < count; j++) {
        const REAL number = numbers[j], power = EXP(number < LEAST ? LEAST : number);
        numbers[j] = number < LEAST ? 0 : power;
    }
}

#define HEAD(tensor, which) ((tensor) + n * p->strides[which][0] + h * p->strides[which][1])

/* Scores of a head with what is added to them. */
static void scored(const Attention *p, const Scratch *s, int64_t n, int64_t h) {
    const int64_t width = s->across * WIDTH;
    packed(HEAD(p->q, Q), p->strides[Q][2], p->rows, p->size, s->along, (REAL *)s->q);
    turned(HEAD(p->k, K), p->strides[K][2], p->columns, p->size, s->across, (REAL *)s->keys);
    product((REAL *)s->q, s->along * WIDTH, 1, p->rows, p->size, s->keys, s->across, s->scores);
    const REAL *mask = p->mask ? p->mask + n * p->mask_strides[0] + h * p->mask_strides[1] : NULL;
    for (int64_t i = 0; i < p->rows; i++) {
        REAL *row = (REAL *)s->scores + i * width;
        for (int64_t j = 0; j < width; j++) row[j] *= (REAL)p->scale;
        for (int64_t j = 0; j < p->columns && mask; j++) row[j] += mask[i * p->mask_strides[2] + j * p->mask_strides[3]];
        for (int64_t j = i + 1; j < p->columns && p->causal; j++) row[j] = -INFINITY;
        for (int64_t j = p->columns; j < width; j++) row[j] = -INFINITY;
    }
}

/* Fills `out` and `sums` of the batches [begin, end); returns 0, or 1 if there is no memory. */
int attend(const Attention *p, int64_t begin, int64_t end) {
    Scratch s;
    void *memory = scratch(p, &s);
    if (!memory) return 1;
    const int64_t width = s.across * WIDTH;
    for (int64_t n = begin; n < end; n++)
        for (int64_t h = 0; h < p->heads; h++) {
            scored(p, &s, n, h);
            packed(HEAD(p->v, V), p->strides[V][2], p->columns, p->size, s.along, (REAL *)s.v);
            REAL *scores = (REAL *)s.scores, *wholes = (REAL *)s.d_scores, *sums = p->sums + (n * p->heads + h) * p->rows;
            for (int64_t i = 0; i < p->rows; i++) {
                REAL most = -INFINITY, *row = scores + i * width, greatest[WIDTH];
                memcpy(greatest, row, sizeof greatest);
                for (int64_t part = 1; part < s.across; part++)
                    for (int j = 0; j < WIDTH; j++)
                        greatest[j] = row[part * WIDTH + j] > greatest[j] ? row[part * WIDTH + j] : greatest[j];
                for (int j = 0; j < WIDTH; j++) most = greatest[j] > most ? greatest[j] : most;
                sums[i] = most == -INFINITY ? 0 : most; /* where it sees nothing */
                for (int64_t j = 0; j < width; j++) row[j] -= sums[i];
            }
            exponentials(scores, p->rows * width);
            product(scores, width, 1, p->rows, p->columns, s.v, s.along, s.result);
            for (int64_t i = 0; i < p->rows; i++) {
                const REAL *found = (REAL *)(s.result + i * s.along);
                REAL whole = 0, *out = HEAD(p->out, OUT) + i * p->strides[OUT][2];
                Vector total = s.scores[i * s.across];
                for (int64_t part = 1; part < s.across; part++) total += s.scores[i * s.across + part];
                for (int j = 0; j < WIDTH; j++) whole += total[j];
                const REAL share = whole == 0 ? 0 : 1 / whole;
                for (int64_t j = 0; j < p->size; j++) out[j] = found[j] * share;
                wholes[i] = whole == 0 ? 1 : whole;
            }
#pragma omp simd
            for (int64_t i = 0; i < p->rows; i++) sums[i] += LOG(wholes[i]);
        }
    free(memory);
    return 0;
}

/* Fills the gradients of the batches [begin, end); returns 0, or 1 if there is no memory. */
int attend_back(const Attention *p, int64_t begin, int64_t end) {
    Scratch s;
    void *memory = scratch(p, &s);
    if (!memory) return 1;
    const int64_t width = s.across * WIDTH, long_width = s.along * WIDTH, step = p->heads * p->size;
    for (int64_t n = begin; n < end; n++)
        for (int64_t h = 0; h < p->heads; h++) {
            scored(p, &s, n, h);
            packed(HEAD(p->k, K), p->strides[K][2], p->columns, p->size, s.along, (REAL *)s.k);
            turned(HEAD(p->v, V), p->strides[V][2], p->columns, p->size, s.across, (REAL *)s.values);
            packed(HEAD(p->d_out, D_OUT), p->strides[D_OUT][2], p->rows, p->size, s.along, (REAL *)s.d_out);
            REAL *scores = (REAL *)s.scores, *d_scores = (REAL *)s.d_scores, *result = (REAL *)s.result;
            const REAL *sums = p->sums + (n * p->heads + h) * p->rows;
            for (int64_t i = 0; i < p->rows; i++)
                for (int64_t j = 0; j < width; j++) scores[i * width + j] -= sums[i];
            exponentials(scores, p->rows * width);
            product((REAL *)s.d_out, long_width, 1, p->rows, p->size, s.values, s.across, s.d_scores);
            for (int64_t i = 0; i < p->rows; i++) {
                const REAL *out = HEAD(p->out, OUT) + i * p->strides[OUT][2], *d_out = (REAL *)(s.d_out + i * s.along);
                REAL inner = 0;
                for (int64_t j = 0; j < p->size; j++) inner += out[j] * d_out[j];
                for (int64_t j = 0; j < width; j++)
                    d_scores[i * width + j] = scores[i * width + j] * (d_scores[i * width + j] - inner) * (REAL)p->scale;
            }
            REAL *d_q = p->d_q + n * p->rows * step + h * p->size, *d_k = p->d_k + n * p->columns * step + h * p->size;
            REAL *d_v = p->d_v + n * p->columns * step + h * p->size;
            product(d_scores, width, 1, p->rows, p->columns, s.k, s.along, s.result);
            for (int64_t i = 0; i < p->rows; i++) memcpy(d_q + i * step, result + i * long_width, p->size * sizeof(REAL));
            product(d_scores, 1, width, p->columns, p->rows, s.q, s.along, s.result);
            for (int64_t i = 0; i < p->columns; i++)
                memcpy(d_k + i * step, result + i * long_width, p->size * sizeof(REAL));
            product(scores, 1, width, p->columns, p->rows, s.d_out, s.along, s.result);
            for (int64_t i = 0; i < p->columns; i++)
                memcpy(d_v + i * step, result + i * long_width, p->size * sizeof(REAL));
        }
    free(memory);
    return 0;
}
