/* Steps of gradient descent of K generalised linear models, each on its own rows; see `fedtorch/kernels/glm_loop.py`.

   Compiled once for REAL = float and once for double. A client's parameters (C, p) and its rows stay in the cache of
   one core for all steps of a call. Calls for several ranges of clients may run in several threads. Where all rows are
   taken in every step, and they are few and of few features, they are brought into columns once: a tile has blocks of
   LANES rows, a vector for each feature, so that no sum runs within a vector but the last of a step. Other rows are
   taken as they lie in memory. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../dispatch/vector_math.h"

#define SIMD _Pragma("omp simd")

typedef REAL Vector __attribute__((vector_size(64), may_alias));
enum { GAUSSIAN, BERNOULLI, POISSON, CATEGORICAL };
enum { PLAIN, MOMENTUM, ADAM, LANES = 64 / sizeof(REAL), TILE = 64, IGNORED = -100 };
enum { NARROW = 24, SUMS = 1024, RESIDENT = 1 << 15 }; /* most features, sums, and numbers of rows in columns */

typedef struct {
    int64_t family, rows, features, parameters, classes; /* rows: of the longest client; parameters: with intercept */
    const REAL *x;                    /* (K, rows, features) */
    const void *y;                    /* (K, rows): REAL, of classes int64_t */
    const int64_t *total;             /* (K,) steps of each client */
    const REAL *precision, *shift;    /* (K,), (K, C, p), or NULL */
    REAL *theta;                      /* (K, C, p), in place */
    double *told;                     /* (K,) sums of the mean losses of steps, in place */
    int64_t rule, nesterov;
    double beta1, beta2, eps;         /* of momentum: itself, and the dampening */
    int64_t rate_step;                /* 3, or 0 where the steps are alike */
    const double *rate;               /* (T, 3): size of a step, root of beta2's correction, 1 - lr * decay */
    REAL *mean, *square;              /* (K, C, p) moments, zero before the first step, in place, or NULL */
} Problem;

typedef struct {
    int64_t first, steps;             /* number of the first step, and how many */
    const int64_t *place, *size;      /* rows (S, K, B) or NULL for the first ones; how many count (S, K) */
    int64_t place_step, place_client, size_step, size_client; /* strides */
} Steps;

/* Rows of a batch, at most TILE. */
typedef struct {
    int64_t count;
    Vector *columns;                  /* (blocks, features), or NULL */
    const REAL *rows[TILE];           /* where each lies */
    REAL responses[TILE];
    int64_t labels[TILE];
} Tile;

typedef struct {
    Tile *tiles;                      /* one without columns first */
    int64_t most, size;               /* how many with; rows that they hold together, -1 for another client's */
    Vector *eta, *sums;               /* of a tile; of a step (C, p) */
    REAL *gradient;                   /* (C, p) */
} Workspace;

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
                sa += a[j] * own[j], sb += b[j] * own[j];
                sf += f[j] * own[j], sg += g[j] * own[j];
            }
            eta[i * C + c] = sa, eta[(i + 1) * C + c] = sb;
            eta[(i + 2) * C + c] = sf, eta[(i + 3) * C + c] = sg;
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
        SIMD for (int64_t i = 0; i < count; i++) e[i] = EXP(-(eta[i] < 0 ? -eta[i] : eta[i]));
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
    SIMD for (int64_t i = 0; i < count * C; i++) eta[i] = EXP(eta[i]);
    for (int64_t i = 0; i < count; i++) {
        REAL *own = eta + i * C, whole = 0;
        for (int64_t c = 0; c < C; c++) whole += own[c];
        sum += LOG(whole);
        for (int64_t c = 0; c < C; c++) own[c] /= whole;
        own[y[i]] -= 1;
    }
    return sum;
}

/* The same of blocks: eta is (blocks, C, LANES). */
static double misfits_of_blocks(int64_t count, int64_t C, const int64_t *y, REAL *restrict eta) {
    double sum = 0;
    for (int64_t from = 0; from < count; from += LANES, eta += C * LANES) {
        const int64_t left = count - from < LANES ? count - from : LANES;
        REAL most[LANES], whole[LANES] = {0};
        memcpy(most, eta, sizeof(most));
        for (int64_t c = 1; c < C; c++)
            SIMD for (int64_t i = 0; i < LANES; i++) most[i] = eta[c * LANES + i] > most[i] ? eta[c * LANES + i] : most[i];
        for (int64_t i = 0; i < left; i++) sum -= eta[y[from + i] * LANES + i] - most[i];
        for (int64_t c = 0; c < C; c++)
            SIMD for (int64_t i = 0; i < LANES; i++) {
                eta[c * LANES + i] = EXP(eta[c * LANES + i] - most[i]);
                whole[i] += eta[c * LANES + i];
            }
        for (int64_t i = 0; i < left; i++) sum += LOG(whole[i]);
        for (int64_t c = 0; c < C; c++)
            SIMD for (int64_t i = 0; i < LANES; i++) eta[c * LANES + i] /= whole[i];
        for (int64_t i = 0; i < left; i++) eta[y[from + i] * LANES + i] -= 1;
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
            SIMD for (int64_t j = 0; j < d; j++) own[j] += (ga * a[j] + gb * b[j]) + (gf * f[j] + gg * g[j]);
            if (p->parameters > d) own[d] += (ga + gb) + (gf + gg);
        }
    }
    for (int64_t i = quads; i < count; i++)
        for (int64_t c = 0; c < C; c++) {
            const REAL *restrict row = rows[i];
            REAL *restrict own = gradient + c * p->parameters;
            const REAL gap = eta[i * C + c];
            SIMD for (int64_t j = 0; j < d; j++) own[j] += gap * row[j];
            if (p->parameters > d) own[d] += gap;
        }
}

/* Takes the rows [from, to) of a batch of a client. */
static void take(const Problem *p, int64_t client, const int64_t *place, int64_t from, int64_t to, Tile *tile) {
    const int64_t base = client * p->rows, d = p->features;
    int64_t count = 0;
    for (int64_t i = from; i < to; i++) {
        const int64_t row = base + (place ? place[i] : i);
        if (p->family == CATEGORICAL) {
            tile->labels[count] = ((const int64_t *)p->y)[row];
            if (tile->labels[count] == IGNORED) continue;
        } else {
            tile->responses[count] = ((const REAL *)p->y)[row];
        }
        tile->rows[count++] = p->x + row * d;
    }
    tile->count = count;
    if (!tile->columns) return;
    for (int64_t block = 0; block * LANES < count; block++) {
        const int64_t left = count - block * LANES < LANES ? count - block * LANES : LANES;
        const REAL *const *rows = tile->rows + block * LANES;
        REAL *column = (REAL *)(tile->columns + block * d);
        if (left < LANES) memset(column, 0, d * sizeof(Vector)); /* beyond the last row nothing counts */
        for (int64_t i = 0; i < left; i++)
            for (int64_t j = 0; j < d; j++) column[j * LANES + i] = rows[i][j];
    }
}

/* Adds the gradients of a tile's losses to the sums, and returns the losses' sum. */
static double by_columns(const Problem *p, const REAL *theta, const Tile *tile, Vector *eta, Vector *sums) {
    const int64_t d = p->features, C = p->classes, P = p->parameters, count = tile->count;
    const int64_t blocks = (count + LANES - 1) / LANES;
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t c = 0; c < C; c++) {
            const Vector *column = tile->columns + block * d;
            const REAL *own = theta + c * P;
            Vector sum = {0};
            if (P > d) sum += own[d];
            for (int64_t j = 0; j < d; j++) sum += own[j] * column[j];
            eta[block * C + c] = sum;
        }
    REAL *gap = (REAL *)eta;
    const double loss = p->family == CATEGORICAL ? misfits_of_blocks(count, C, tile->labels, gap)
                                                 : misfits(p->family, count, tile->responses, gap);
    if (count % LANES)
        for (int64_t c = 0; c < C; c++)
            for (int64_t i = count % LANES; i < LANES; i++) gap[((blocks - 1) * C + c) * LANES + i] = 0;
    for (int64_t c = 0; c < C; c++) {
        for (int64_t j = 0; j < d; j++) {
            Vector sum = sums[c * P + j];
            for (int64_t block = 0; block < blocks; block++) sum += eta[block * C + c] * tile->columns[block * d + j];
            sums[c * P + j] = sum;
        }
        if (P > d)
            for (int64_t block = 0; block < blocks; block++) sums[c * P + d] += eta[block * C + c];
    }
    return loss;
}

/* Moves the parameters of a client by its gradient, a sum over so many rows, as step number t. */
static void move(const Problem *p, int64_t client, int64_t t, int64_t seen, const REAL *restrict gradient) {
    const int64_t length = p->classes * p->parameters;
    REAL *restrict theta = p->theta + client * length;
    const double *rate = p->rate + p->rate_step * t;
    const REAL *restrict shift = p->precision ? p->shift + client * length : NULL;
    const REAL lr = (REAL)rate[0], each = (REAL)(1.0 / (seen ? seen : 1)), by = (REAL)(rate[0] / (seen ? seen : 1));
    if (p->rule == PLAIN) {
        if (shift) {
            const REAL keep = (REAL)(1 - rate[0] * p->precision[client]);
            SIMD for (int64_t j = 0; j < length; j++) theta[j] = theta[j] * keep + lr * shift[j];
        }
        SIMD for (int64_t j = 0; j < length; j++) theta[j] -= by * gradient[j];
        return;
    }
    REAL *restrict mean = p->mean + client * length, pull = shift ? p->precision[client] : 0;
    if (p->rule == MOMENTUM) {
        const REAL beta = (REAL)p->beta1, fresh = t ? (REAL)(1 - p->beta2) : 1;
        const REAL now = p->nesterov ? 1 : 0, kept = p->nesterov ? beta : 1;
        SIMD for (int64_t j = 0; j < length; j++) {
            const REAL slope = gradient[j] * each + (shift ? pull * theta[j] - shift[j] : 0);
            mean[j] = beta * mean[j] + fresh * slope;
            theta[j] -= lr * (now * slope + kept * mean[j]);
        }
        return;
    }
    REAL *restrict square = p->square + client * length;
    const REAL fresh1 = (REAL)(1 - p->beta1), fresh2 = (REAL)(1 - p->beta2), beta2 = (REAL)p->beta2;
    const REAL root = (REAL)rate[1], keep = (REAL)rate[2], eps = (REAL)p->eps;
    SIMD for (int64_t j = 0; j < length; j++) {
        const REAL slope = gradient[j] * each + (shift ? pull * theta[j] - shift[j] : 0);
        mean[j] += fresh1 * (slope - mean[j]);
        square[j] = beta2 * square[j] + fresh2 * slope * slope;
        theta[j] = theta[j] * keep - lr * mean[j] / (SQRT(square[j]) / root + eps);
    }
}

/* Takes step number t of a client, on rows of its own. */
static void step(const Problem *p, int64_t client, int64_t t, const int64_t *place, int64_t size, Workspace *w) {
    const int64_t length = p->classes * p->parameters, tiles = (size + TILE - 1) / TILE;
    const int held = !place && tiles <= w->most;
    const REAL *theta = p->theta + client * length;
    REAL *const gradient = w->gradient;
    double loss = 0;
    int64_t seen = 0;
    if (held) memset(w->sums, 0, length * sizeof(Vector));
    else memset(gradient, 0, length * sizeof(REAL));
    for (int64_t i = 0; i < tiles; i++) {
        Tile *tile = w->tiles + (held ? i + 1 : 0);
        const int64_t from = i * TILE, to = from + TILE < size ? from + TILE : size;
        if (!held || w->size != size) take(p, client, place, from, to, tile);
        seen += tile->count;
        if (held) {
            loss += by_columns(p, theta, tile, w->eta, w->sums);
            continue;
        }
        REAL *const eta = (REAL *)w->eta;
        predict(p, theta, tile->rows, tile->count, eta);
        loss += p->family == CATEGORICAL ? misfits_of_classes(tile->count, p->classes, tile->labels, eta)
                                         : misfits(p->family, tile->count, tile->responses, eta);
        add(p, tile->rows, tile->count, eta, gradient);
    }
    w->size = held ? size : -1;
    for (int64_t j = 0; held && j < length; j++) {
        const REAL *sum = (const REAL *)(w->sums + j);
        REAL whole = 0;
#pragma omp simd reduction(+ : whole)
        for (int64_t i = 0; i < LANES; i++) whole += sum[i];
        gradient[j] = whole;
    }
    move(p, client, t, seen, gradient);
    p->told[client] += loss / (double)seen; /* 0 / 0 where all rows are left out, as in torch */
}

/* Takes the steps of the clients [begin, end); returns 0, or 1 if there is no memory. */
int glm_loop(const Problem *p, const Steps *s, int64_t begin, int64_t end) {
    const int64_t d = p->features, length = p->classes * p->parameters, across = TILE / LANES * d;
    const int narrow = !s->place && d > 0 && d <= NARROW && length <= SUMS;
    const int64_t longest = (p->rows + TILE - 1) / TILE, room = narrow ? RESIDENT / (d * TILE) : 0;
    const int64_t most = longest < room ? longest : room, etas = p->classes * TILE / LANES, sums = narrow ? length : 0;
    Vector *vectors = aligned_alloc(sizeof(Vector), (most * across + etas + sums) * sizeof(Vector));
    REAL *gradient = malloc(length * sizeof(REAL));
    Workspace w = {malloc((most + 1) * sizeof(Tile)), most, -1, vectors, vectors + etas, gradient};
    const int failed = !vectors || !gradient || !w.tiles;
    for (int64_t i = 0; !failed && i <= most; i++)
        w.tiles[i].columns = i ? vectors + etas + sums + (i - 1) * across : NULL;
    for (int64_t client = begin; !failed && client < end; client++) {
        w.size = -1;
        for (int64_t t = 0; t < s->steps && s->first + t < p->total[client]; t++) {
            const int64_t *place = s->place ? s->place + t * s->place_step + client * s->place_client : NULL;
            step(p, client, s->first + t, place, s->size[t * s->size_step + client * s->size_client], &w);
        }
    }
    free(vectors), free(gradient), free(w.tiles);
    return failed;
}
