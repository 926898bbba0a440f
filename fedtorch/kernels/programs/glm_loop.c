/* Steps of gradient descent of K generalised linear models, each on its own rows; see `glm_loop` in
   fedtorch/kernels/glm_steps.py.

   Compiled once for REAL = float and once for double. A client's parameters (C, p) and its rows stay in the cache of
   one core for all steps of a call. Clients do not depend on each other, so that calls for several ranges of them may
   run in several threads. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef REAL
#define REAL double
#endif

#if defined(__GLIBC__) && defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((simd("notinbranch"))) extern double exp(double);
__attribute__((simd("notinbranch"))) extern double log(double);
__attribute__((simd("notinbranch"))) extern float expf(float);
__attribute__((simd("notinbranch"))) extern float logf(float);
#endif

#define EXP(v) (sizeof(REAL) == 4 ? (REAL)expf((float)(v)) : (REAL)exp((double)(v)))
#define LOG(v) (sizeof(REAL) == 4 ? (REAL)logf((float)(v)) : (REAL)log((double)(v)))

enum { GAUSSIAN, BERNOULLI, POISSON, CATEGORICAL };
enum { TILE = 64, IGNORED = -100 };

typedef struct {
    int64_t family, rows, features, parameters, classes; /* rows: of the longest client; parameters: with intercept */
    double lr;
    const REAL *x;                    /* (K, rows, features) */
    const void *y;                    /* (K, rows): REAL, of classes int64_t */
    const int64_t *total;             /* (K,) steps of each client */
    const REAL *precision, *shift;    /* (K,), (K, C, p), or NULL */
    REAL *theta;                      /* (K, C, p), in place */
    double *told;                     /* (K,) sums of the mean losses of steps, in place */
} Problem;

typedef struct {
    int64_t first, steps;             /* number of the first step, and how many */
    const int64_t *place, *size;      /* rows (S, K, B) or NULL for the first ones; how many count (S, K) */
    int64_t place_step, place_client, size_step, size_client; /* strides */
} Steps;

/* eta[i, c] of a tile of rows, four at a time, so that parameters are read once for them. */
static void predict(const Problem *p, const REAL *theta, const REAL *const *rows, int64_t count, REAL *eta) {
    const int64_t d = p->features, C = p->classes, quads = count - count % 4;
    for (int64_t i = 0; i < quads; i += 4) {
        const REAL *restrict a = rows[i], *restrict b = rows[i + 1], *restrict f = rows[i + 2], *restrict g = rows[i + 3];
        for (int64_t c = 0; c < C; c++) {
            const REAL *restrict own = theta + c * p->parameters;
            const REAL intercept = p->parameters > d ? own[d] : 0;
            REAL sa = intercept, sb = intercept, sf = intercept, sg = intercept;
#pragma omp simd reduction(+ : sa, sb, sf, sg)
            for (int64_t j = 0; j < d; j++) {
                sa += a[j] * own[j];
                sb += b[j] * own[j];
                sf += f[j] * own[j];
                sg += g[j] * own[j];
            }
            eta[i * C + c] = sa;
            eta[(i + 1) * C + c] = sb;
            eta[(i + 2) * C + c] = sf;
            eta[(i + 3) * C + c] = sg;
        }
    }
    for (int64_t i = quads; i < count; i++)
        for (int64_t c = 0; c < C; c++) {
            const REAL *restrict row = rows[i], *restrict own = theta + c * p->parameters;
            REAL sum = p->parameters > d ? own[d] : 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < d; j++) sum += row[j] * own[j];
            eta[i * C + c] = sum;
        }
}

/* Replaces eta by the derivatives of the losses, whose sum is returned. */
static double misfits(int64_t family, int64_t count, const REAL *restrict y, REAL *restrict eta) {
    REAL sum = 0;
    if (family == GAUSSIAN) {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < count; i++) {
            const REAL gap = eta[i] - y[i];
            sum += gap * gap;
            eta[i] = 2 * gap;
        }
    } else if (family == BERNOULLI) {
        REAL e[TILE], whole = 1; /* whole: a product of at most 2 ** TILE, which float holds */
#pragma omp simd
        for (int64_t i = 0; i < count; i++) e[i] = EXP(-(eta[i] < 0 ? -eta[i] : eta[i]));
#pragma omp simd reduction(+ : sum) reduction(* : whole)
        for (int64_t i = 0; i < count; i++) {
            const REAL positive = eta[i] > 0 ? eta[i] : 0;
            sum += positive - eta[i] * y[i];
            whole *= 1 + e[i];
            eta[i] = (eta[i] < 0 ? e[i] : 1) / (1 + e[i]) - y[i];
        }
        sum += LOG(whole);
    } else {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < count; i++) {
            const REAL mean = EXP(eta[i]);
            sum += mean - eta[i] * y[i];
            eta[i] = mean - y[i];
        }
    }
    return sum;
}

/* The same of classes: eta is (count, C). */
static double misfits_of_classes(int64_t count, int64_t C, const int64_t *y, REAL *restrict eta) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        REAL *own = eta + i * C, most = own[0];
        for (int64_t c = 1; c < C; c++) most = own[c] > most ? own[c] : most;
        for (int64_t c = 0; c < C; c++) own[c] -= most;
        sum -= own[y[i]];
    }
#pragma omp simd
    for (int64_t i = 0; i < count * C; i++) eta[i] = EXP(eta[i]);
    for (int64_t i = 0; i < count; i++) {
        REAL *own = eta + i * C, whole = 0;
        for (int64_t c = 0; c < C; c++) whole += own[c];
        sum += LOG(whole);
        for (int64_t c = 0; c < C; c++) own[c] /= whole;
        own[y[i]] -= 1;
    }
    return sum;
}

/* Adds the rows times their derivatives to the gradient, four at a time. */
static void add(const Problem *p, const REAL *const *rows, int64_t count, const REAL *eta, REAL *gradient) {
    const int64_t d = p->features, C = p->classes, quads = count - count % 4;
    for (int64_t i = 0; i < quads; i += 4) {
        const REAL *restrict a = rows[i], *restrict b = rows[i + 1], *restrict f = rows[i + 2], *restrict g = rows[i + 3];
        for (int64_t c = 0; c < C; c++) {
            REAL *restrict own = gradient + c * p->parameters;
            const REAL *gap = eta + i * C + c;
            const REAL ga = gap[0], gb = gap[C], gf = gap[2 * C], gg = gap[3 * C];
#pragma omp simd
            for (int64_t j = 0; j < d; j++) own[j] += (ga * a[j] + gb * b[j]) + (gf * f[j] + gg * g[j]);
            if (p->parameters > d) own[d] += (ga + gb) + (gf + gg);
        }
    }
    for (int64_t i = quads; i < count; i++)
        for (int64_t c = 0; c < C; c++) {
            const REAL *restrict row = rows[i];
            REAL *restrict own = gradient + c * p->parameters;
            const REAL gap = eta[i * C + c];
#pragma omp simd
            for (int64_t j = 0; j < d; j++) own[j] += gap * row[j];
            if (p->parameters > d) own[d] += gap;
        }
}

static void step(const Problem *p, int64_t client, const int64_t *place, int64_t size, REAL *eta, REAL *gradient) {
    const int64_t length = p->classes * p->parameters, base = client * p->rows;
    REAL *restrict theta = p->theta + client * length;
    const REAL *rows[TILE];
    REAL responses[TILE];
    int64_t labels[TILE], seen = 0;
    double loss = 0;
    memset(gradient, 0, length * sizeof(REAL));
    for (int64_t from = 0; from < size; from += TILE) {
        const int64_t to = from + TILE < size ? from + TILE : size;
        int64_t count = 0;
        for (int64_t i = from; i < to; i++) {
            const int64_t row = base + (place ? place[i] : i);
            if (p->family == CATEGORICAL) {
                labels[count] = ((const int64_t *)p->y)[row];
                if (labels[count] == IGNORED) continue;
            } else {
                responses[count] = ((const REAL *)p->y)[row];
            }
            rows[count++] = p->x + row * p->features;
        }
        predict(p, theta, rows, count, eta);
        loss += p->family == CATEGORICAL ? misfits_of_classes(count, p->classes, labels, eta)
                                         : misfits(p->family, count, responses, eta);
        add(p, rows, count, eta, gradient);
        seen += count;
    }
    const REAL rate = (REAL)(p->lr / (seen ? seen : 1));
    if (p->precision) {
        const REAL keep = (REAL)(1 - p->lr * p->precision[client]), lr = (REAL)p->lr;
        const REAL *restrict shift = p->shift + client * length;
#pragma omp simd
        for (int64_t j = 0; j < length; j++) theta[j] = theta[j] * keep + lr * shift[j];
    }
#pragma omp simd
    for (int64_t j = 0; j < length; j++) theta[j] -= rate * gradient[j];
    p->told[client] += loss / (double)seen; /* 0 / 0 where all rows are left out, as in torch */
}

/* Takes the steps of the clients [begin, end); returns 0, or 1 if there is no memory. */
int glm_loop(const Problem *p, const Steps *s, int64_t begin, int64_t end) {
    const int64_t length = p->classes * p->parameters;
    REAL *eta = malloc((TILE * p->classes + length) * sizeof(REAL));
    if (!eta) return 1;
    for (int64_t client = begin; client < end; client++)
        for (int64_t t = 0; t < s->steps && s->first + t < p->total[client]; t++) {
            const int64_t *place = s->place ? s->place + t * s->place_step + client * s->place_client : NULL;
            step(p, client, place, s->size[t * s->size_step + client * s->size_client], eta, eta + TILE * p->classes);
        }
    free(eta);
    return 0;
}
