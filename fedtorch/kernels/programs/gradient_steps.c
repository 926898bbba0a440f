/* Full-batch gradient steps of linear models on the mean squared error in closed form, a client after another; see
   `_descended` of fedtorch/federation/solvers/least_squares.py. Clients do not depend on each other, so that calls for
   several ranges of them may run in several threads. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
    int64_t size, outputs, steps; /* p, o, T */
    double share, lr;             /* of X'X in the curvature; the steps' size, NaN for one over the largest curvature */
    const double *values;         /* (K, p) eigenvalues m of X'X / n */
    const double *basis;          /* (K, p, p) their vectors, one after the other */
    const double *spectral;       /* (K, p, o) the basis' products with X'y / n */
    const double *gram, *cross;   /* (K, p, p) X'X / n, (K, p, o) X'y / n */
    const double *power;          /* (K,) y'y / n */
    const double *precision;      /* (K,) of what is added, or 0 */
    const double *shift, *start;  /* (K, p, o) of what is added, or 0; where steps begin */
    double *end, *rates, *loss;   /* (K, p, o), (K,) the sum of the steps' sizes, (K,) */
} Problem;

/* rate times the sum of q^t over t < T for each of n numbers q, from T's binary digits: a sum of T powers twice over is
   that sum times 1 + q^T, and one more term is q^T. After the sums there is place for as many powers. */
static void reaches(const double *ratio, int64_t n, double rate, int64_t steps, double *restrict sums) {
    double *restrict powers = sums + n;
    int64_t digit = 1;
    while (digit <= steps / 2) digit *= 2;
    for (int64_t i = 0; i < n; i++) {
        powers[i] = ratio[i];
        sums[i] = 1;
    }
    for (digit /= 2; digit; digit /= 2)
        for (int64_t i = 0; i < n; i++) {
            sums[i] += sums[i] * powers[i];
            powers[i] *= powers[i];
            if (steps & digit) {
                sums[i] += powers[i];
                powers[i] *= ratio[i];
            }
        }
    for (int64_t i = 0; i < n; i++) sums[i] *= rate;
}

/* Fills what comes out of the clients [begin, end), of o outputs, with `slopes` and `curvature` for a client's. */
static inline void descended(const Problem *p, int64_t begin, int64_t end, const int64_t o, double *curvature,
                             double *slope) {
    const int64_t n = p->size;
    for (int64_t k = begin; k < end; k++) {
        const double *basis = p->basis + k * n * n, *start = p->start + k * n * o, *spectral = p->spectral + k * n * o;
        const double *shift = p->shift ? p->shift + k * n * o : 0, added = p->precision ? p->precision[k] : 0;
        double *restrict to = p->end + k * n * o, largest = -INFINITY, loss = 0;
        for (int64_t i = 0; i < n; i++) {
            const double number = curvature[i] = p->values[k * n + i] * p->share + added;
            if (number > largest || number != number) largest = number; /* NaN stays */
        }
        const double rate = p->lr == p->lr ? p->lr : largest <= 0 ? 0 : 1 / largest;
        for (int64_t i = 0; i < n * o; i++) to[i] = start[i];
        for (int64_t c = 0; c < o; c++)
            for (int64_t i = 0; i < n; i++) {
                const double *vector = basis + i * n;
                double here = 0, pull = 0;
                if (shift)
#pragma omp simd reduction(+ : here, pull)
                    for (int64_t j = 0; j < n; j++) {
                        here += vector[j] * start[j * o + c];
                        pull += vector[j] * shift[j * o + c];
                    }
                else
#pragma omp simd reduction(+ : here)
                    for (int64_t j = 0; j < n; j++) here += vector[j] * start[j * o + c];
                slope[i * o + c] = spectral[i * o + c] * p->share + pull - curvature[i] * here;
            }
        for (int64_t i = 0; i < n; i++) curvature[i] = 1 - rate * curvature[i];
        reaches(curvature, n, rate, p->steps, curvature + n);
        for (int64_t i = 0; i < n; i++)
            for (int64_t c = 0; c < o; c++) {
                const double by = slope[i * o + c] * curvature[n + i];
                for (int64_t j = 0; j < n; j++) to[j * o + c] += basis[i * n + j] * by;
            }
        for (int64_t c = 0; c < o; c++) {
            double *restrict image = curvature;
            for (int64_t i = 0; i < n; i++) image[i] = -2 * p->cross[(k * n + i) * o + c];
            for (int64_t j = 0; j < n; j++) {
                const double *row = p->gram + (k * n + j) * n, by = to[j * o + c]; /* a column, too */
                for (int64_t i = 0; i < n; i++) image[i] += row[i] * by;
            }
            for (int64_t i = 0; i < n; i++) loss += to[i * o + c] * image[i];
        }
        loss = (p->power[k] + loss) / (double)o;
        p->loss[k] = loss < 0 ? 0 : loss;
        p->rates[k] = (double)p->steps * rate;
    }
}

/* The same; returns 0, or 1 if there is no memory. */
int descend(const Problem *p, int64_t begin, int64_t end) {
    double *memory = malloc((size_t)(p->size * (3 + p->outputs) + 1) * sizeof(double)), *slope = memory + 3 * p->size;
    if (!memory) return 1;
    if (p->outputs == 1) descended(p, begin, end, 1, memory, slope);
    else descended(p, begin, end, p->outputs, memory, slope);
    free(memory);
    return 0;
}
