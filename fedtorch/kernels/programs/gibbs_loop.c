/* Gibbs sweeps of regressions under a horseshoe; see `gibbs_sweeps` in fedtorch/kernels/gibbs_sweeps.py.

   A lane is a problem, one chain of one client, and LANES of them go side by side through all sweeps in the cache of one
   core. A tile is always computed whole, in the same vector instructions, so that a problem's bits do not depend on what
   is beside it. Problems do not depend on each other: calls for several ranges may run in several threads. */

#include <stdlib.h>

#include "../../random/philox.h"

enum { LANES = 8 };

typedef double Lanes[LANES];

typedef struct {
    int64_t chains, size, sweeps;
    const double *gram, *estimate, *least, *degrees;        /* (K, p, p), (K, p), (K,), (K,) */
    const double *centre, *shared, *scale;                  /* (K, C, p), (K, C, p), (K, C) */
    const double *w_in, *u_in, *noise_in;                   /* (K, C, p), (K, C, p), (K, C) */
    const int64_t *keys;                                    /* (K, C) */
    double *delta, *w, *u, *noise;                          /* (K, C, p), (K, C, p), (K, C, p), (K, C) */
} Problem;

/* Keys of lanes, and the second number of the last pair. */
typedef struct {
    uint32_t low[LANES], high[LANES];
    Lanes spare;
} Stream;

#define EACH_LANE _Pragma("omp simd") for (int l = 0; l < LANES; l++)

static void open_stream(Stream *stream, const int64_t keys[LANES], int64_t purpose) {
    for (int l = 0; l < LANES; l++) {
        const uint64_t key = (uint64_t)new_key(keys[l], purpose);
        stream->low[l] = (uint32_t)key, stream->high[l] = (uint32_t)(key >> 32);
    }
}

/* The next elements of a draw: `next` counts them from 0. */
static void read_stream(Stream *restrict stream, int64_t next, int normal, double *restrict out) {
    if (next % 2) {
        EACH_LANE out[l] = stream->spare[l];
        return;
    }
    const uint64_t block = (uint64_t)next / 2;
    uint32_t w0[LANES], w1[LANES], w2[LANES], w3[LANES];
    EACH_LANE {
        w0[l] = (uint32_t)block, w1[l] = (uint32_t)(block >> 32), w2[l] = 0, w3[l] = DRAW;
        philox(stream->low[l], stream->high[l], &w0[l], &w1[l], &w2[l], &w3[l]);
    }
    if (normal) {
        EACH_LANE {
            double one, other;
            normals(inside(w0[l], w1[l]), inside(w2[l], w3[l]), &one, &other);
            out[l] = one, stream->spare[l] = other;
        }
    } else {
        EACH_LANE {
            out[l] = -logarithm(inside(w0[l], w1[l]));
            stream->spare[l] = -logarithm(inside(w2[l], w3[l]));
        }
    }
}

/* Draws from N(A^-1 b, A^-1) into b, A being the upper triangle of `matrix`: U x = c + sqrt(u) z. No pivot is less than
   the prior's part of it; one that is, by rounding where columns depend on each other, is that, nothing beside it. */
static void eliminate(int64_t p, Lanes *restrict matrix, Lanes *restrict b, const Lanes *restrict prior,
                      const Lanes *restrict z) {
    for (int64_t j = 0; j < p; j++) {
        Lanes *restrict row = matrix + j * p;
        Lanes keep, over;
        EACH_LANE {
            const int short_of = row[j][l] < prior[j][l];
            keep[l] = short_of ? 0.0 : 1.0;
            row[j][l] = short_of ? prior[j][l] : row[j][l];
            b[j][l] = short_of ? 0.0 : b[j][l];
            over[l] = keep[l] / row[j][l];
        }
        for (int64_t i = j + 1; i < p; i++) {
            Lanes *restrict below = matrix + i * p;
            Lanes factor;
            EACH_LANE factor[l] = row[i][l] * over[l];
            EACH_LANE b[i][l] -= factor[l] * b[j][l];
            for (int64_t k = i; k < p; k++) EACH_LANE below[k][l] -= factor[l] * row[k][l];
        }
        for (int64_t i = j + 1; i < p; i++) EACH_LANE row[i][l] = keep[l] == 0.0 ? 0.0 : row[i][l];
    }
    for (int64_t j = p - 1; j >= 0; j--) {
        const Lanes *restrict row = matrix + j * p;
        EACH_LANE b[j][l] += sqrt(row[j][l]) * z[j][l];
        for (int64_t k = j + 1; k < p; k++) EACH_LANE b[j][l] -= row[k][l] * b[k][l];
        EACH_LANE b[j][l] /= row[j][l];
    }
}

/* Does all sweeps of the problems of a tile, of which `here` count; `room` holds 2 p p + 9 p lanes. */
static void sweep_tile(const Problem *q, int64_t first, int64_t here, Lanes *room) {
    const int64_t p = q->size;
    Lanes *gram = room, *matrix = gram + p * p, *gap = matrix + p * p, *right = gap + p, *b = right + p, *z = b + p;
    Lanes *prior = z + p, *shared = prior + p, *w = shared + p, *u = w + p, *product = u + p;
    Lanes least, degrees, scale, noise;
    Stream for_normals, for_first, for_second;
    int64_t keys[LANES], for_noise[LANES], for_mixing[LANES], problem[LANES], client[LANES];
    for (int l = 0; l < LANES; l++) { /* lanes that do not count repeat the last one */
        const int64_t at = problem[l] = first + (l < here ? l : here - 1), k = client[l] = at / q->chains;
        keys[l] = q->keys[at];
        least[l] = q->least[k], degrees[l] = q->degrees[k], scale[l] = q->scale[at], noise[l] = q->noise_in[at];
        for (int64_t i = 0; i < p * p; i++) gram[i][l] = q->gram[k * p * p + i];
        for (int64_t i = 0; i < p; i++) {
            gap[i][l] = q->estimate[k * p + i] - q->centre[at * p + i];
            shared[i][l] = q->shared[at * p + i], w[i][l] = q->w_in[at * p + i], u[i][l] = q->u_in[at * p + i];
        }
        for_noise[l] = new_key(keys[l], 1), for_mixing[l] = new_key(keys[l], 2);
    }
    open_stream(&for_normals, keys, 0);
    open_stream(&for_first, for_mixing, 0);
    open_stream(&for_second, for_mixing, 1);
    for (int64_t i = 0; i < p; i++) {
        EACH_LANE right[i][l] = 0.0;
        for (int64_t j = 0; j < p; j++) EACH_LANE right[i][l] += gram[i * p + j][l] * gap[j][l];
    }
    for (int64_t s = 0; s < q->sweeps; s++) {
        for (int64_t i = 0; i < p; i++) {
            EACH_LANE prior[i][l] = w[i][l] * shared[i][l];
            EACH_LANE b[i][l] = right[i][l] * noise[l];
            for (int64_t j = i; j < p; j++) EACH_LANE matrix[i * p + j][l] = gram[i * p + j][l] * noise[l];
            EACH_LANE matrix[i * p + i][l] += prior[i][l];
            read_stream(&for_normals, s * p + i, 1, z[i]);
        }
        eliminate(p, matrix, b, prior, z);
        Lanes squares, number;
        EACH_LANE squares[l] = 0.0;
        for (int64_t i = 0; i < p; i++) {
            EACH_LANE product[i][l] = 0.0;
            for (int64_t j = 0; j < p; j++) EACH_LANE product[i][l] += gram[i * p + j][l] * (b[j][l] - gap[j][l]);
            EACH_LANE squares[l] += product[i][l] * (b[i][l] - gap[i][l]);
        }
        for (int64_t i = 0; i < p; i++) {
            read_stream(&for_first, s * p + i, 0, number);
            EACH_LANE w[i][l] = number[l] / (u[i][l] + b[i][l] * b[i][l] * shared[i][l] / 2);
            read_stream(&for_second, s * p + i, 0, number);
            EACH_LANE u[i][l] = number[l] / (w[i][l] + 1);
        }
        for (int l = 0; l < LANES; l++) number[l] = l < here ? gamma_number(for_noise[l], (uint64_t)s, degrees[l]) : 1.0;
        EACH_LANE noise[l] = number[l] / (scale[l] + (least[l] + squares[l]) / 2);
    }
    for (int64_t l = 0; l < here; l++) {
        const int64_t at = first + l;
        q->noise[at] = noise[l];
        for (int64_t i = 0; i < p; i++)
            q->delta[at * p + i] = b[i][l], q->w[at * p + i] = w[i][l], q->u[at * p + i] = u[i][l];
    }
}

/* score (K, C, p) = G (b - x) / s^2 and packed (K, C, p (p + 1) / 2) = G / s^2, its lower triangle, of moves of places x
   (K, C, p) in regressions of Gram matrices G (K, p, p) and estimates b (K, p); noise (K, C) is 1 / s^2. */
void likelihoods(const double *gram, const double *estimate, const double *place, const double *noise, int64_t clients,
                 int64_t chains, int64_t p, double *score, double *packed) {
    for (int64_t problem = 0; problem < clients * chains; problem++, place += p, score += p) {
        const double *own = gram + problem / chains * p * p, *fit = estimate + problem / chains * p;
        for (int64_t i = 0; i < p; i++) {
            double total = 0.0;
            for (int64_t j = 0; j < p; j++) total += own[i * p + j] * (fit[j] - place[j]);
            score[i] = total * noise[problem];
            for (int64_t j = 0; j <= i; j++) *packed++ = own[i * p + j] * noise[problem];
        }
    }
}

/* Does all sweeps of problems `begin` to `end`; not zero where there is no memory. */
int gibbs_sweeps(const Problem *q, int64_t begin, int64_t end) {
    const size_t lanes = (size_t)(2 * q->size * q->size + 9 * q->size);
    Lanes *room = aligned_alloc(sizeof(Lanes), (lanes + 1) * sizeof(Lanes));
    if (!room) return 1;
    for (int64_t first = begin; first < end; first += LANES)
        sweep_tile(q, first, end - first < LANES ? end - first : LANES, room);
    free(room);
    return 0;
}
