/* Log densities and scores of many small normal vectors whose covariances are sums of variance components; see
   fedtorch/kernels/variance_components.py.

   LANES nodes of a client are computed at once, each in its place of a vector of the processor, so that factorising
   their matrices takes as many instructions as factorising one. Matrices are lower triangles, row by row. Clients do
   not depend on each other, so that calls for several ranges of them may run in several threads. */

#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../dispatch/vector_math.h"

enum { LANES = 8, MOST = 16, TRIANGLE = MOST * (MOST + 1) / 2, AT_ONCE = 4 };

typedef double Vector __attribute__((vector_size(8 * LANES)));
typedef int64_t Bits __attribute__((vector_size(8 * LANES)));

typedef struct {
    int64_t nodes, size, components, width; /* R, d, T, q */
    int64_t values_client, values_node, values_column; /* strides; of clients 0 where all have the same */
    int64_t inputs_client, inputs_node, inputs_column, noise_client, noise_node;
    const double *values;             /* (K, R, T) c */
    const double *inputs;             /* (K, R, q) x */
    const double *noise;              /* (K, R) variances */
    const int64_t *rows, *columns;    /* (T,) i and j of E */
    const double *root;               /* (K, d, d) B */
    const double *shared;             /* (K, d, d) W */
    const double *origin, *centre, *slope; /* (K, q), (K, d), (K, q, d) */
    const double *weights;            /* (K, R), of the scores only */
    double *log;                      /* (K, R) log |M| + u'M⁻¹u */
    double *score;                    /* (K, d, R) M⁻¹u */
    double *information;              /* (K, d, d) Σ weights · M⁻¹ */
} Problem;

/* The lower triangle of B'E B for each component, padded with zeros to a multiple of AT_ONCE. */
static void component_matrices(const Problem *p, const double *root, int64_t padded, double *matrices) {
    const int64_t d = p->size;
    for (int64_t t = 0; t < p->components; t++) {
        const double *one = root + p->rows[t] * d, *other = root + p->columns[t] * d;
        double *to = matrices + t * padded;
        for (int64_t a = 0; a < d; a++)
            for (int64_t b = 0; b <= a; b++)
                *to++ = one == other ? one[a] * one[b] : one[a] * other[b] + other[a] * one[b];
    }
}

/* The numbers of `count` nodes, `stride` apart; the last one stands for those that are missing. */
static inline Vector lanes(const double *from, int64_t stride, int64_t count) {
    Vector read;
    if (count == LANES && stride == 1) {
        memcpy(&read, from, sizeof read);
        return read;
    }
    for (int64_t i = 0; i < LANES; i++) read[i] = from[(i < count ? i : count - 1) * stride];
    return read;
}

/* The factors of M = LDL' of LANES nodes, below the diagonal of `matrix`, 1 / D in `inverse`, and L⁻¹u in `misfit`. */
static void factorised(
    const Problem *p, int64_t client, int64_t node, int64_t count, int64_t padded, const double *matrices,
    Vector *restrict matrix, Vector *restrict inverse, Vector *restrict misfit, Vector *restrict mantissa,
    Bits *restrict exponent
) {
    const int64_t d = p->size, q = p->width, T = p->components;
    Vector read[T + 1];
    const Vector none = {0};
    const double *inputs = p->inputs + client * p->inputs_client + node * p->inputs_node;
    for (int64_t a = 0; a < d; a++) misfit[a] = none + p->centre[client * d + a];
    for (int64_t j = 0; j < q; j++) {
        const Vector input = lanes(inputs + j * p->inputs_column, p->inputs_node, count) - p->origin[client * q + j];
        for (int64_t a = 0; a < d; a++) misfit[a] -= input * p->slope[(client * q + j) * d + a];
    }
    const double *values = p->values + client * p->values_client + node * p->values_node;
    for (int64_t t = 0; t < T; t++) read[t] = lanes(values + t * p->values_column, p->values_node, count);
    const double *shared = p->shared + client * d * d;
    for (int64_t i = 0; i < padded; i += AT_ONCE) {
        Vector sums[AT_ONCE] = {none, none, none, none};
        for (int64_t t = 0; t < T; t++)
            for (int64_t k = 0; k < AT_ONCE; k++) sums[k] += read[t] * matrices[t * padded + i + k];
        for (int64_t k = 0; k < AT_ONCE; k++) matrix[i + k] = sums[k];
    }
    for (int64_t a = 0; a < d; a++)
        for (int64_t b = 0; b <= a; b++) matrix[a * (a + 1) / 2 + b] += shared[a * d + b];
    const double *noises = p->noise + client * p->noise_client + node * p->noise_node;
    const Vector noise = lanes(noises, p->noise_node, count);
    for (int64_t a = 0; a < d; a++) matrix[a * (a + 3) / 2] += noise;
    *mantissa = none + 1;
    *exponent = (Bits){0};
    Vector scaled[MOST]; /* the row of LD */
    for (int64_t a = 0; a < d; a++) {
        Vector *row = matrix + a * (a + 1) / 2, pivot = row[a], gap = misfit[a];
        for (int64_t b = 0; b < a; b++) {
            const Vector *above = matrix + b * (b + 1) / 2;
            Vector sum = row[b];
            for (int64_t i = 0; i < b; i++) sum -= scaled[i] * above[i];
            scaled[b] = sum;
            row[b] = sum * inverse[b];
            pivot -= sum * row[b];
            gap -= row[b] * misfit[b];
        }
        misfit[a] = gap;
        inverse[a] = 1.0 / pivot;
        const Bits bits = (Bits)pivot, usual = (pivot >= DBL_MIN) & (pivot <= DBL_MAX); /* true is -1, all bits */
        *exponent += (bits >> 52) - 1023;
        *mantissa *= (Vector)((((bits & 0xfffffffffffffLL) | 0x3ff0000000000000LL) & usual) |
                              (~usual & 0x7ff8000000000000LL)); /* NaN where M is not positive definite */
    }
}

/* Fills `log` of the clients [begin, end); returns 0, or 1 if there is no memory. */
int log_densities(const Problem *p, int64_t begin, int64_t end) {
    const int64_t d = p->size, padded = (d * (d + 1) / 2 + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
    double *matrices = calloc(p->components * padded + 1, sizeof(double));
    if (!matrices) return 1;
    for (int64_t client = begin; client < end; client++) {
        component_matrices(p, p->root + client * d * d, padded, matrices);
        for (int64_t node = 0; node < p->nodes; node += LANES) {
            const int64_t count = p->nodes - node < LANES ? p->nodes - node : LANES;
            Vector matrix[TRIANGLE], inverse[MOST], misfit[MOST], mantissa, square = {0};
            Bits exponent;
            factorised(p, client, node, count, padded, matrices, matrix, inverse, misfit, &mantissa, &exponent);
            for (int64_t a = 0; a < d; a++) square += misfit[a] * misfit[a] * inverse[a];
            double logs[LANES];
#pragma omp simd
            for (int64_t i = 0; i < LANES; i++) logs[i] = log(mantissa[i]);
            for (int64_t i = 0; i < LANES; i++) logs[i] += (double)exponent[i] * M_LN2 + square[i];
            memcpy(p->log + client * p->nodes + node, logs, count * sizeof(double));
        }
    }
    free(matrices);
    return 0;
}

/* L⁻¹ below the diagonal, in place. */
static void inverted(int64_t d, Vector *matrix) {
    for (int64_t a = 1; a < d; a++) {
        Vector *row = matrix + a * (a + 1) / 2, kept[MOST];
        for (int64_t b = 0; b < a; b++) kept[b] = row[b];
        for (int64_t b = 0; b < a; b++) {
            Vector sum = -kept[b];
            for (int64_t i = b + 1; i < a; i++) sum -= kept[i] * matrix[i * (i + 1) / 2 + b];
            row[b] = sum;
        }
    }
}

/* Fills `score` and `information` of the clients [begin, end); returns 0, or 1 if there is no memory. */
int scores(const Problem *p, int64_t begin, int64_t end) {
    const int64_t d = p->size, padded = (d * (d + 1) / 2 + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
    double *matrices = calloc(p->components * padded + 1, sizeof(double));
    if (!matrices) return 1;
    for (int64_t client = begin; client < end; client++) {
        Vector total[TRIANGLE];
        memset(total, 0, sizeof total);
        component_matrices(p, p->root + client * d * d, padded, matrices);
        for (int64_t node = 0; node < p->nodes; node += LANES) {
            const int64_t count = p->nodes - node < LANES ? p->nodes - node : LANES;
            Vector matrix[TRIANGLE], inverse[MOST], misfit[MOST], mantissa, weight = {0}, scaled[MOST];
            Bits exponent;
            factorised(p, client, node, count, padded, matrices, matrix, inverse, misfit, &mantissa, &exponent);
            inverted(d, matrix);
            memcpy(&weight, p->weights + client * p->nodes + node, count * sizeof(double)); /* 0 for those missing */
            weight *= mantissa / mantissa; /* NaN where M is not positive definite */
            for (int64_t a = 0; a < d; a++) {
                matrix[a * (a + 3) / 2] = (Vector){0} + 1;
                misfit[a] *= inverse[a];
                inverse[a] *= weight;
            }
            for (int64_t a = 0; a < d; a++) {
                const Vector *row = matrix + a * (a + 1) / 2;
                for (int64_t i = 0; i <= a; i++) scaled[i] = row[i] * inverse[a];
                for (int64_t i = 0; i <= a; i++)
                    for (int64_t j = 0; j <= i; j++) total[i * (i + 1) / 2 + j] += scaled[i] * row[j];
            }
            for (int64_t b = 0; b < d; b++) {
                Vector sum = misfit[b];
                for (int64_t a = b + 1; a < d; a++) sum += matrix[a * (a + 1) / 2 + b] * misfit[a];
                memcpy(p->score + (client * d + b) * p->nodes + node, &sum, count * sizeof(double));
            }
        }
        for (int64_t a = 0; a < d; a++)
            for (int64_t b = 0; b <= a; b++) {
                double sum = 0;
                for (int64_t i = 0; i < LANES; i++) sum += total[a * (a + 1) / 2 + b][i];
                p->information[(client * d + a) * d + b] = p->information[(client * d + b) * d + a] = sum;
            }
    }
    free(matrices);
    return 0;
}
