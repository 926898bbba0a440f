/* Draws of the global variables of a Gibbs sampler, one chain after another; see fedtorch/models/gibbs. */

#include <stdlib.h>

#include "../../dispatch/vector_math.h"
#include "../../random/philox.h"

/* Elements of draws of float64 numbers, as `fedtorch.random` makes them. */
static double uniform_of(int64_t key, uint64_t element) {
    uint32_t w[4];
    words_of(key, element / 2, 0, DRAW, w);
    const int at = element % 2 ? 2 : 0;
    return (whole(w[at]) * 0x1p21 + whole(w[at + 1] >> 11)) * 0x1p-53;
}

static double normal_of(int64_t key, uint64_t element) {
    uint32_t w[4];
    double one, other;
    words_of(key, element / 2, 0, DRAW, w);
    normals(inside(w[0], w[1]), inside(w[2], w[3]), &one, &other);
    return element % 2 ? other : one;
}

static double exponential_of(int64_t key, uint64_t element) {
    uint32_t w[4];
    words_of(key, element / 2, 0, DRAW, w);
    return -logarithm(element % 2 ? inside(w[2], w[3]) : inside(w[0], w[1]));
}

static double logit(double u) { return log(u / (1.0 - u)); }

static double log_density(double x, double variance) { return -0.5 * (log(variance) + x * x / variance); }

/* out (C, p) = N(A^-1 b, A^-1) with A = Q + diag(prior), b = score + Q centre, Q from its packed triangle; `theta` where A
   is not positive definite to rounding. Not zero where there is no memory. */
int move(const double *score, const double *packed, const double *theta, const double *centre, const double *prior,
         const double *z, int64_t chains, int64_t p, double *out) {
    double *factor = malloc((size_t)(p * p + 1) * sizeof(double));
    if (!factor) return 1;
    for (int64_t c = 0; c < chains; c++, score += p, theta += p, centre += p, prior += p, z += p, out += p) {
        for (int64_t i = 0; i < p; i++)
            for (int64_t j = 0; j <= i; j++) factor[j * p + i] = factor[i * p + j] = *packed++;
        for (int64_t i = 0; i < p; i++) {
            out[i] = score[i];
            for (int64_t j = 0; j < p; j++) out[i] += factor[i * p + j] * centre[j];
        }
        int fine = 1;
        for (int64_t i = 0; i < p && fine; i++) /* its lower triangle becomes L */
            for (int64_t j = 0; j <= i && fine; j++) {
                double rest = factor[i * p + j] + (i == j ? prior[i] : 0.0);
                for (int64_t k = 0; k < j; k++) rest -= factor[i * p + k] * factor[j * p + k];
                fine = i > j || rest > 0.0;
                factor[i * p + j] = i == j ? sqrt(rest) : rest / factor[j * p + j];
            }
        for (int64_t i = 0; i < p && fine; i++) {
            for (int64_t k = 0; k < i; k++) out[i] -= factor[i * p + k] * out[k];
            out[i] /= factor[i * p + i];
        }
        for (int64_t i = 0; i < p; i++) out[i] = fine ? out[i] + z[i] : theta[i];
        for (int64_t i = p - 1; i >= 0 && fine; i--) {
            for (int64_t k = i + 1; k < p; k++) out[i] -= factor[k * p + i] * out[k];
            out[i] /= factor[i * p + i];
        }
    }
    free(factor);
    return 0;
}

typedef struct {
    int64_t chains, size, shared;           /* C, p, whether one variance is of all */
    double spike, shape, rate, a, b;        /* of the prior */
    const double *variance_in, *inclusion_in, *estimate, *precision; /* (C, p) or (C, 1), (C,), (C, p), (C, p) */
    const int64_t *keys;                    /* (C,) */
    double *theta, *included, *variance, *inclusion;                 /* (C, p), (C, p), as above, (C,) */
} Slabs;

/* One step of `global_priors.spike_and_slab` of coefficients without groups. */
void spike_and_slab(const Slabs *s) {
    const int64_t p = s->size;
    for (int64_t c = 0; c < s->chains; c++) {
        int64_t key[5];
        for (int i = 0; i < 5; i++) key[i] = new_key(s->keys[c], i);
        const double *estimate = s->estimate + c * p, *precision = s->precision + c * p, odds = logit(s->inclusion_in[c]);
        double *theta = s->theta + c * p, *included = s->included + c * p, slabs = 0.0, energy = 0.0;
        for (int64_t j = 0; j < p; j++) {
            const double eta = s->shared ? s->variance_in[c] : s->variance_in[c * p + j], known = 1.0 / precision[j];
            const double evidence = log_density(estimate[j], eta + known) - log_density(estimate[j], s->spike * eta + known);
            included[j] = logit(uniform_of(key[0], (uint64_t)j)) < evidence + odds ? 1.0 : 0.0;
            const double posterior = precision[j] + 1.0 / ((included[j] + s->spike * (1.0 - included[j])) * eta);
            theta[j] = precision[j] * estimate[j] / posterior + normal_of(key[1], (uint64_t)j) / sqrt(posterior);
            slabs += included[j];
        }
        for (int64_t j = 0; j < p && !s->shared; j++) { /* given the others, with the variance and rho integrated out */
            const double half = theta[j] * theta[j] / 2.0, others = slabs - included[j];
            const double evidence = 0.5 * log(s->spike) +
                                    (s->shape + 0.5) * log((s->rate + half / s->spike) / (s->rate + half)) +
                                    log((s->a + others) / (s->b + (double)(p - 1) - others));
            included[j] = logit(uniform_of(key[4], (uint64_t)j)) < evidence ? 1.0 : 0.0;
            slabs = others + included[j];
        }
        for (int64_t j = 0; j < p; j++) {
            const double half = theta[j] * theta[j] / (included[j] + s->spike * (1.0 - included[j])) / 2.0;
            energy += half;
            if (!s->shared) s->variance[c * p + j] = (s->rate + half) / gamma_number(key[2], (uint64_t)j, s->shape + 0.5);
        }
        if (s->shared) s->variance[c] = (s->rate + energy) / gamma_number(key[2], 0, s->shape + (double)p / 2.0);
        const double one = gamma_number(new_key(key[3], 0), 0, s->a + slabs);
        const double other = gamma_number(new_key(key[3], 1), 0, s->b + (double)p - slabs);
        s->inclusion[c] = one / (one + other);
    }
}

typedef struct {
    int64_t chains, size, turns;
    double loosest, bound;                                       /* of factors, and of |log tau^2| */
    const double *clients, *energy, *rate, *auxiliary;           /* (C,), (C, p), (C, p), (C, p) */
    const double *precision_in, *factors_in;                     /* (C, p), (C, 2, p) */
    const int64_t *keys;                                         /* (C,) */
    double *precision, *factors;                                 /* as above */
} Levels;

/* Draws of `_levels.move`. */
void levels(const Levels *l) {
    const int64_t p = l->size;
    const double limit = exp(l->bound), least = 1.0 / l->loosest;
    for (int64_t c = 0; c < l->chains; c++) {
        const int64_t for_rates = new_key(l->keys[c], 0), for_draws = new_key(l->keys[c], 1);
        const double shape = (l->clients[c] + 1.0) / 2.0;
        for (int64_t j = 0; j < p; j++) {
            const int64_t at = c * p + j, first = 2 * c * p + j;
            double t = l->precision_in[at], w = l->factors_in[first], u = l->factors_in[first + p];
            for (int64_t draw = 0; draw < 3 * l->turns; draw++) {
                const uint64_t element = (uint64_t)(draw * p + j);
                const double x = exponential_of(for_rates, element), g = gamma_number(for_draws, element, shape);
                double t_new, w_new = w, u_new = u;
                if (draw % 3 == 0) {
                    t_new = g / (x / (1.0 + t) + l->energy[at] * w);
                } else if (draw % 3 == 1) {
                    const double inverse = g / (x / (1.0 + 1.0 / t) + l->rate[at] * w * u * t);
                    t_new = 1.0 / inverse, w_new = w * (inverse * t);
                } else {
                    t_new = g / (x / (1.0 + t) + l->auxiliary[at] * u / t);
                    w_new = w * (t / t_new), u_new = u * (t_new / t);
                }
                if (t_new <= limit && t_new * limit >= 1.0 && w_new <= l->loosest && w_new >= least &&
                    u_new <= l->loosest && u_new >= least)
                    t = t_new, w = w_new, u = u_new;
            }
            l->precision[at] = t, l->factors[first] = w, l->factors[first + p] = u;
        }
    }
}

typedef struct {
    int64_t chains, size, parts, points;
    double finest, bound;                                        /* spacing, and of |log tau^2| */
    const double *clients, *weight, *estimate, *scatter;         /* (C,), (C, p), (C, p), (C, p) */
    const double *precision_in, *share, *prior;                  /* (C, p), (k, C, p), (k, C, p) */
    const int64_t *keys;                                         /* (C,) */
    double *precision;                                           /* (C, p) */
} Scales;

/* Draws of `_scales.draw`. */
void scales(const Scales *q) {
    const int64_t p = q->size, n = q->points, all = q->chains * p;
    double cosh_of[n], x[n], height[n], variance[n], most[n], sum[n];
    for (int64_t at = 0; at < all; at++) {
        const int64_t c = at / p;
        const uint64_t j = (uint64_t)(at % p), step = (uint64_t)p;
        const double degrees = q->clients[c] - 1.0, width = sqrt(2.0 / q->clients[c]), scatter = q->scatter[at];
        const double guess = log(fmax(scatter / fmax(degrees, 1.0), 1e-300)), bound = q->bound;
        const double middle = fmin(fmax(guess, -bound), bound), square = q->estimate[at] * q->estimate[at];
        const double spacing = q->finest * (1.0 + uniform_of(q->keys[c], j));
        const double place = floor((double)n * uniform_of(q->keys[c], step + j));
        const double own = asinh((-log(q->precision_in[at]) - middle) / width), over = 1.0 / q->weight[at];
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {
            const double up = EXP(own + spacing * ((double)i - place)), down = 1.0 / up;
            cosh_of[i] = (up + down) / 2.0;
            x[i] = middle + width * ((up - down) / 2.0);
            variance[i] = EXP(fmin(fmax(x[i], -bound), bound));
            most[i] = -0x1p1023, sum[i] = 0.0;
        }
        for (int64_t k = 0; k < q->parts; k++) {
            const double prior = q->prior[k * all + at];
            const double log_weight = q->parts == 1 ? 0.0 : log(q->share[k * all + at]) + log(prior) / 2.0;
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {
                const double ratio = 1.0 + prior * variance[i] * over;
                const double log_of = log_weight - 0.5 * square * prior / ratio;
                const double larger = fmax(most[i], log_of);
                sum[i] = sum[i] * EXP(most[i] - larger) + EXP(log_of - larger) / sqrt(ratio);
                most[i] = larger;
            }
        }
        double highest = -INFINITY, total = 0.0;
        _Pragma("omp simd reduction(max : highest)") for (int64_t i = 0; i < n; i++) {
            const double log_of = 0.5 * ((1.0 - degrees) * x[i] - scatter / variance[i]) + most[i];
            const double log_height = log_of + LOG(cosh_of[i] * sum[i] / (1.0 + variance[i]));
            height[i] = fabs(x[i]) <= bound ? log_height : -INFINITY;
            highest = height[i] > highest ? height[i] : highest;
        }
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) height[i] = EXP(height[i] - highest);
        for (int64_t i = 0; i < n; i++) height[i] = total += height[i];
        const double coin = total * uniform_of(q->keys[c], 2 * step + j);
        int64_t chosen = 0;
        for (int64_t i = 0; i < n; i++) chosen += height[i] <= coin;
        q->precision[at] = exp(-x[chosen < n ? chosen : n - 1]);
    }
}
