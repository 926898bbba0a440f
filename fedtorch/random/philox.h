/* Philox-4x32-10 and the numbers that are made of its words, for programs in C: the words of fedtorch/random/words.py
   and the formulas of fedtorch/random/philox_program.py.

   Everything is without branches and calls of the mathematical library, but for `gamma_number`, so that loops over these
   functions become vector instructions; a loop of a fixed number of lanes gives the same bits in each of them. */

#ifndef FEDTORCH_PHILOX_H
#define FEDTORCH_PHILOX_H

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { DRAW, FOLD, GAMMA }; /* the last counter word, as in fedtorch/random/words.py */

/* Replaces a counter by its four words. */
static inline __attribute__((always_inline)) void philox(uint32_t k0, uint32_t k1, uint32_t *a, uint32_t *b,
                                                         uint32_t *c, uint32_t *d) {
    uint32_t c0 = *a, c1 = *b, c2 = *c, c3 = *d;
    for (int i = 0; i < 10; i++) {
        const uint64_t first = (uint64_t)c0 * 0xD2511F53u, second = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(second >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)second;
        c2 = (uint32_t)(first >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)first;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    *a = c0, *b = c1, *c = c2, *d = c3;
}

static inline double of_bits(uint64_t bits) {
    double number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline uint64_t to_bits(double number) {
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

/* A whole number below 2**52 as double: the significand of one between 2**52 and 2**53. */
static inline double whole(uint64_t number) { return of_bits(number | 0x4330000000000000u) - 0x1p52; }

/* Uniform strictly between 0 and 1: of 52 bits of two words, or of one. */
static inline double inside(uint32_t first, uint32_t second) {
    return (whole((uint64_t)first << 20 | second >> 12) + 0.5) * 0x1p-52;
}

static inline double inside_of_one(uint32_t word) { return (whole(word) + 0.5) * 0x1p-32; }

/* log x of a normal number, to less than one unit in the last place: x = 2**k m, m from sqrt(1/2) to sqrt(2), and log m
   by its series in s = f / (2 + f), f = m - 1 (the method and coefficients of FreeBSD's e_log.c, Sun Microsystems). */
static inline double logarithm(double x) {
    const uint64_t bits = to_bits(x) + (0x3ff0000000000000u - 0x3fe6a09e667f3bcdu);
    const double k = whole(bits >> 52) - 1023.0;
    const double f = of_bits((bits & 0xfffffffffffffu) + 0x3fe6a09e667f3bcdu) - 1.0;
    const double s = f / (2.0 + f), z = s * s, w = z * z, half = 0.5 * f * f;
    const double even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    const double odd = z * (6.666666666666735130e-01 +
                            w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
    return k * 6.93147180369123816490e-01 - ((half - (s * (half + even + odd) + k * 1.90821492927058770002e-10)) - f);
}

/* cos and sin of 2 pi turns, turns in [0, 1], by Taylor series on an eighth of a turn. */
static inline void cosine_and_sine(double turns, double *cosine, double *sine) {
    const double quarters = turns * 4.0, nearest = (quarters + 0x1.8p52) - 0x1.8p52;
    const double x = (quarters - nearest) * 1.5707963267948966, y = x * x;
    double s = y * -7.647163731819816e-13 + 1.6059043836821613e-10;
    s = s * y - 2.505210838544172e-08;
    s = s * y + 2.7557319223985893e-06;
    s = s * y - 0.0001984126984126984;
    s = s * y + 0.008333333333333333;
    s = s * y - 0.16666666666666666;
    s = x + x * y * s;
    double c = y * 4.779477332387385e-14 - 1.1470745597729725e-11;
    c = c * y + 2.08767569878681e-09;
    c = c * y - 2.755731922398589e-07;
    c = c * y + 2.48015873015873e-05;
    c = c * y - 0.001388888888888889;
    c = c * y + 0.041666666666666664;
    c = 1.0 - 0.5 * y + y * y * c;
    const double one = nearest == 1.0 || nearest == 3.0 ? s : c, other = nearest == 1.0 || nearest == 3.0 ? c : s;
    *cosine = nearest == 1.0 || nearest == 2.0 ? -one : one;
    *sine = nearest == 2.0 || nearest == 3.0 ? -other : other;
}

/* Two standard normal numbers of two uniform ones. */
static inline void normals(double radius, double turns, double *one, double *other) {
    const double length = sqrt(-2.0 * logarithm(radius));
    double cosine, sine;
    cosine_and_sine(turns, &cosine, &sine);
    *one = length * cosine, *other = length * sine;
}

/* The four words of a counter (block, attempt, purpose). */
static inline void words_of(int64_t key, uint64_t block, uint32_t attempt, uint32_t purpose, uint32_t w[4]) {
    w[0] = (uint32_t)block, w[1] = (uint32_t)(block >> 32), w[2] = attempt, w[3] = purpose;
    philox((uint32_t)key, (uint32_t)((uint64_t)key >> 32), &w[0], &w[1], &w[2], &w[3]);
}

static inline int64_t new_key(int64_t key, int64_t number) {
    uint32_t w[4];
    words_of(key, (uint64_t)number, 0, FOLD, w);
    return (int64_t)((uint64_t)w[1] << 32 | w[0]);
}

/* A gamma number of rate one; NaN unless its shape parameter is finite and positive. */
static inline double gamma_number(int64_t key, uint64_t element, double a) {
    if (!(a > 0.0) || a > 0x1.fffffffffffffp1023) return NAN;
    const double raised = a < 1.0 ? a + 1.0 : a, d = raised - 1.0 / 3.0, c = sqrt(9.0 * d);
    uint32_t w[4];
    double v, x, unused;
    for (uint32_t attempt = 0;; attempt++) {
        words_of(key, element, attempt, GAMMA, w);
        normals(inside(w[0], w[1]), whole(w[2]) * 0x1p-32, &x, &unused);
        const double root = x / c + 1.0;
        v = root * root * root;
        if (v > 0.0 && logarithm(inside_of_one(w[3])) < x * x / 2.0 + d * (1.0 - v + logarithm(v))) break;
    }
    if (a >= 1.0) return d * v;
    words_of(key, element, 0xFFFFFFFFu, GAMMA, w);
    return d * v * exp(logarithm(inside(w[0], w[1])) / a);
}

#endif
