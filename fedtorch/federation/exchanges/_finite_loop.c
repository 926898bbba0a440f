/* Whether all numbers of many tensors are finite; see `is_finite` of fedtorch/federation/exchanges/exchange.py. */

#include <stdint.h>

enum { SINGLE = 1, WEIGHTS = 2 };

/* x - x is 0, or NaN where x is NaN or Inf. */
#define LOOK(REAL)                                                                                                     \
    {                                                                                                                  \
        const REAL *numbers = places[t];                                                                               \
        REAL gap = 0;                                                                                                  \
        _Pragma("omp simd reduction(+ : gap)") for (int64_t i = 0; i < counts[t]; i++) gap += numbers[i] - numbers[i]; \
        if (gap != 0) return 0;                                                                                        \
        if (kinds[t] & WEIGHTS)                                                                                        \
            for (int64_t i = 0; i < counts[t]; i++)                                                                    \
                if (numbers[i] < 0) return 0;                                                                          \
    }

/* Returns 1 if each of n tensors, of so many numbers of a kind, is finite and, of weights, not negative, else 0. */
int all_finite(const void *const *places, const int64_t *counts, const int64_t *kinds, int64_t n) {
    for (int64_t t = 0; t < n; t++)
        if (kinds[t] & SINGLE) LOOK(float)
        else LOOK(double)
    return 1;
}
