/* Cross-entropies of K clients and their derivatives by the logits; see _cross_entropy.py.

   Compiled once for REAL = float and once for double. */

#include <stdint.h>

#include "../dispatch/vector_math.h"

/* Of logits (K, rows, classes) and labels (K, rows) the losses (K,) and their derivatives (K, rows, classes); rows whose
   label is `ignored` do not count. Returns 1 if another label is no class, and 0 otherwise. */
int cross_entropy(int64_t clients, int64_t rows, int64_t classes, int64_t ignored, int64_t mean, const REAL *logits,
                  const int64_t *labels, REAL *losses, REAL *derivatives) {
    const int64_t size = rows * classes;
    for (int64_t k = 0; k < clients; k++, logits += size, labels += rows, derivatives += size) {
        int64_t seen = 0;
        double loss = 0;
        for (int64_t i = 0; i < rows; i++) {
            const REAL *restrict own = logits + i * classes;
            REAL *restrict shifted = derivatives + i * classes, most = own[0];
            if (labels[i] == ignored) {
                for (int64_t c = 0; c < classes; c++) shifted[c] = 0;
                continue;
            }
            if (labels[i] < 0 || labels[i] >= classes) return 1;
            for (int64_t c = 1; c < classes; c++) most = own[c] > most ? own[c] : most;
            for (int64_t c = 0; c < classes; c++) shifted[c] = own[c] - most;
            loss -= shifted[labels[i]];
            seen++;
        }
#pragma omp simd
        for (int64_t i = 0; i < size; i++) derivatives[i] = EXP(derivatives[i]);
        const REAL scale = mean ? (REAL)1 / (REAL)(seen ? seen : 1) : 1;
        for (int64_t i = 0; i < rows; i++) {
            REAL *restrict own = derivatives + i * classes, whole = 0;
            if (labels[i] == ignored) {
                for (int64_t c = 0; c < classes; c++) own[c] = 0;
                continue;
            }
            for (int64_t c = 0; c < classes; c++) whole += own[c];
            loss += log((double)whole);
            const REAL share = scale / whole;
            for (int64_t c = 0; c < classes; c++) own[c] *= share;
            own[labels[i]] -= scale;
        }
        losses[k] = (REAL)(mean ? loss / (double)seen : loss); /* 0 / 0 where no row counts, as in torch */
    }
    return 0;
}
