/* Largest values of windows of planes (H, W), and back; see _pooling.py.

   Compiled once for REAL = float with WHOLE = int32_t, and once for double with int64_t. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef REAL
#define REAL double
#define WHOLE int64_t
#endif

enum { LANES = 4 };
typedef REAL Reals __attribute__((vector_size(LANES * sizeof(REAL))));
typedef WHOLE Wholes __attribute__((vector_size(LANES * sizeof(REAL))));
typedef int32_t Places __attribute__((vector_size(LANES * sizeof(int32_t))));

typedef struct {
    int64_t height, width, out_height, out_width; /* of a plane, and of its results */
    int64_t window[2], stride[2], padding[2];
} Shape;

/* A row of results: the largest value of each window and its place in the plane. As in torch NaN is larger than all,
   and of equal values the first counts. */
static void row(const Shape *s, const REAL *plane, int64_t up, REAL *restrict best, int32_t *restrict place) {
    const int64_t top = up * s->stride[0] - s->padding[0], stride = s->stride[1];
    for (int64_t i = 0; i < s->out_width; i++) {
        best[i] = -(REAL)INFINITY;
        place[i] = -1;
    }
    for (int64_t h = top < 0 ? 0 : top; h < top + s->window[0] && h < s->height; h++)
        for (int64_t j = 0; j < s->window[1]; j++) {
            const int64_t shift = j - s->padding[1], inside = s->width - shift; /* shift: column of the first result */
            const int64_t low = shift < 0 ? (-shift + stride - 1) / stride : 0;
            const int64_t most = inside > 0 ? (inside + stride - 1) / stride : 0;
            const int64_t high = most < s->out_width ? most : s->out_width;
#pragma omp simd
            for (int64_t i = low; i < high; i++) {
                const int64_t at = h * s->width + shift + i * stride;
                const REAL value = plane[at];
                const int more = (value > best[i]) | (value != value) | (place[i] < 0);
                best[i] = more ? value : best[i];
                place[i] = more ? (int32_t)at : place[i];
            }
        }
}

static inline Reals loaded(const REAL *from) {
    Reals values;
    memcpy(&values, from, sizeof values);
    return values;
}

static inline Reals every_other(Reals a, Reals b, int odd) {
#ifdef __clang__
    return odd ? __builtin_shufflevector(a, b, 1, 3, 5, 7) : __builtin_shufflevector(a, b, 0, 2, 4, 6);
#else
    return __builtin_shuffle(a, b, odd ? (Wholes){1, 3, 5, 7} : (Wholes){0, 2, 4, 6});
#endif
}

/* Keeps the larger of two values and its place in the first; of equal ones it stays. */
static inline void keep(Reals *most, Wholes *where, Reals value, Wholes at) {
    const Wholes more = (value > *most) | (value != value) | (*where < 0);
    *most = (Reals)((more & (Wholes)value) | (~more & (Wholes)*most));
    *where = (more & at) | (~more & *where);
}

/* A row of results of windows of two by two that lie side by side; the last LANES of them may come a second time. */
static void quads(const REAL *plane, int64_t from, int64_t width, int64_t count, REAL *best, int32_t *place) {
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t first = i + LANES <= count ? i : count - LANES, at = from + 2 * first;
        const REAL *upper = plane + at, *lower = upper + width;
        const Reals a = loaded(upper), b = loaded(upper + LANES), c = loaded(lower), d = loaded(lower + LANES);
        Wholes where = (Wholes){0, 2, 4, 6} + (WHOLE)at;
        const Wholes left = where;
        Reals most = every_other(a, b, 0);
        keep(&most, &where, every_other(a, b, 1), left + 1);
        keep(&most, &where, every_other(c, d, 0), left + (WHOLE)width);
        keep(&most, &where, every_other(c, d, 1), left + (WHOLE)(width + 1));
        const Places places = __builtin_convertvector(where, Places);
        memcpy(best + first, &most, sizeof most);
        memcpy(place + first, &places, sizeof places);
    }
}

/* The results of a plane, whose windows all lie inside. */
static void windows(const Shape *s, const REAL *plane, REAL *best, int32_t *place) {
    const int64_t total = s->out_height * s->out_width, width = s->width;
    for (int64_t up = 0; up < s->out_height; up++) /* first where they begin */
        for (int64_t i = 0; i < s->out_width; i++)
            place[up * s->out_width + i] = (int32_t)(up * s->stride[0] * width + i * s->stride[1]);
    for (int64_t o = 0; o < total; o += LANES) {
        const int64_t lanes = o + LANES <= total ? LANES : total - o;
        int32_t at[LANES];
        for (int64_t i = 0; i < LANES; i++) at[i] = place[o + (i < lanes ? i : 0)];
        Reals most = {0};
        Wholes where = {-1, -1, -1, -1};
        for (int64_t h = 0; h < s->window[0]; h++)
            for (int64_t j = 0; j < s->window[1]; j++) {
                const REAL *from = plane + h * width + j;
                const Wholes here = (Wholes){at[0], at[1], at[2], at[3]} + (WHOLE)(h * width + j);
                const Reals value = {from[at[0]], from[at[1]], from[at[2]], from[at[3]]};
                keep(&most, &where, value, here);
            }
        for (int64_t i = 0; i < lanes; i++) {
            best[o + i] = most[i];
            place[o + i] = (int32_t)where[i];
        }
    }
}

void max_pool(const Shape *s, int64_t planes, const REAL *x, REAL *best, int32_t *place) {
    const int64_t count = s->out_width, total = s->out_height * count;
    int inside = (s->out_height - 1) * s->stride[0] + s->window[0] <= s->height, halves = count >= LANES;
    inside = inside && (count - 1) * s->stride[1] + s->window[1] <= s->width;
    for (int i = 0; i < 2; i++) {
        inside = inside && s->padding[i] == 0;
        halves = halves && s->window[i] == 2 && s->stride[i] == 2;
    }
    for (int64_t p = 0; p < planes; p++, x += s->height * s->width, best += total, place += total)
        if (inside && !halves)
            windows(s, x, best, place);
        else
            for (int64_t up = 0; up < s->out_height; up++) {
                if (inside)
                    quads(x, 2 * up * s->width, s->width, count, best + up * count, place + up * count);
                else
                    row(s, x, up, best + up * count, place + up * count);
            }
}

/* The gradient of the planes, of that of the results. */
void max_pool_backward(const Shape *s, int64_t planes, const REAL *restrict gradient, const int32_t *restrict place,
                       REAL *restrict out) {
    const int64_t count = s->out_height * s->out_width, size = s->height * s->width;
    for (int64_t p = 0; p < planes; p++, out += size, gradient += count, place += count) {
        memset(out, 0, size * sizeof(REAL));
        for (int64_t i = 0; i < count; i++) out[place[i]] += gradient[i];
    }
}
