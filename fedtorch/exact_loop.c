/* Exact sums in limbs: see fedtorch/exact.py, whose numbers these are to the bit. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LIMBS = 10, SCALE = 160, WORDS = 24 };
#define LARGEST 0x1p148

typedef unsigned __int128 wide;

/* A whole number in two's complement, lowest word first; what goes beyond its words is not needed. Sums below 2**384 in
   magnitude have products of three below 2**1152. */
typedef struct {
    uint64_t word[WORDS];
} Whole;

/* out (n, LIMBS) = the limbs of values (n,), or those that `out` has and these. */
void limbs(const double *values, int64_t n, int64_t add, double *out) {
    for (int64_t i = 0; i < n; i++, out += LIMBS) {
        const double value = values[i];
        double found[LIMBS] = {0};
        if (!(fabs(value) < LARGEST)) {
            for (int j = 0; j < LIMBS; j++) found[j] = NAN;
        } else if (value != 0.0) {
            int exponent;
            uint64_t whole = (uint64_t)(frexp(fabs(value), &exponent) * 0x1p53);
            int position = exponent + SCALE - 53;
            if (position < 0) {
                whole = position < -54 ? 0 : whole >> -position;
                position = 0;
            }
            const int place = position / 32, shift = position % 32;
            const uint64_t low = (whole & 0xFFFFFFFFu) << shift, high = (whole >> 32) << shift;
            const uint64_t parts[3] = {low & 0xFFFFFFFFu, (low >> 32) + (high & 0xFFFFFFFFu), high >> 32};
            for (int j = 0; j < 3 && place + j < LIMBS; j++) found[place + j] = copysign((double)parts[j], value);
        }
        for (int j = 0; j < LIMBS; j++) out[j] = add ? out[j] + found[j] : found[j];
    }
}

/* w x as two numbers of n each, w x**2 as four, without rounding. */
void products(const double *w, const double *x, int64_t n, double *first, double *second) {
    for (int64_t i = 0; i < n; i++) {
        const double high = w[i] * x[i], low = fma(w[i], x[i], -high), a = high * x[i], b = low * x[i];
        first[i] = high, first[n + i] = low;
        second[i] = a, second[n + i] = fma(high, x[i], -a);
        second[2 * n + i] = b, second[3 * n + i] = fma(low, x[i], -b);
    }
}

static Whole read(const double *limb) {
    Whole number;
    int64_t carry = 0;
    for (int j = 0; j < LIMBS / 2; j++) {
        uint64_t word = 0;
        for (int half = 0; half < 2; half++) {
            carry += (int64_t)limb[2 * j + half];
            word |= (uint64_t)(carry & 0xFFFFFFFF) << 32 * half;
            carry >>= 32;
        }
        number.word[j] = word;
    }
    number.word[LIMBS / 2] = (uint64_t)carry;
    for (int j = LIMBS / 2 + 1; j < WORDS; j++) number.word[j] = carry < 0 ? UINT64_MAX : 0;
    return number;
}

static Whole minus(const Whole *a, const Whole *b) {
    Whole out;
    uint64_t borrow = 0;
    for (int j = 0; j < WORDS; j++) {
        const wide got = (wide)a->word[j] - b->word[j] - borrow;
        out.word[j] = (uint64_t)got;
        borrow = (uint64_t)(got >> 64) & 1;
    }
    return out;
}

static Whole times(const Whole *a, const Whole *b) {
    Whole out = {{0}};
    for (int i = 0; i < WORDS; i++) {
        uint64_t carry = 0;
        if (!a->word[i]) continue;
        for (int j = 0; i + j < WORDS; j++) {
            const wide got = (wide)a->word[i] * b->word[j] + out.word[i + j] + carry;
            out.word[i + j] = (uint64_t)got;
            carry = (uint64_t)(got >> 64);
        }
    }
    return out;
}

static Whole shifted(const Whole *a, int bits) {
    const int words = bits / 64, rest = bits % 64;
    Whole out = {{0}};
    for (int j = WORDS - 1; j >= words; j--) {
        out.word[j] = a->word[j - words] << rest;
        if (rest && j > words) out.word[j] |= a->word[j - words - 1] >> (64 - rest);
    }
    return out;
}

/* The float64 number nearest to a whole number over 2**scale. */
static double nearest(const Whole *number, int scale) {
    Whole size = *number;
    const int negative = size.word[WORDS - 1] >> 63;
    if (negative) {
        const Whole zero = {{0}};
        size = minus(&zero, number);
    }
    int top = WORDS - 1;
    while (top >= 0 && !size.word[top]) top--;
    if (top < 0) return 0.0;
    const int empty = __builtin_clzll(size.word[top]);
    uint64_t leading = size.word[top] << empty; /* 64 bits, of which the last says whether there are more */
    uint64_t more = 0;
    if (top > 0) {
        if (empty) leading |= size.word[top - 1] >> (64 - empty);
        more = size.word[top - 1] << empty;
        for (int j = top - 2; j >= 0; j--) more |= size.word[j];
    }
    const double found = ldexp((double)(leading | (more != 0)), 64 * top - empty - scale);
    return negative ? -found : found;
}

static int finite_all(const double *numbers, int64_t n) {
    int fine = 1;
    for (int64_t i = 0; i < n; i++) fine &= fabs(numbers[i]) < INFINITY;
    return fine;
}

/* out (n,) = the values of sums (n, LIMBS); not zero where one is not finite. */
int values(const double *sums, int64_t n, double *out) {
    if (!finite_all(sums, n * LIMBS)) return 1;
    for (int64_t i = 0; i < n; i++) {
        const Whole number = read(sums + i * LIMBS);
        out[i] = nearest(&number, SCALE);
    }
    return 0;
}

/* out (3, n) = sums of w, w (x - c) and w (x - c)**2 of those of w, w x, w x**2 and of c, (n, LIMBS) each; not zero where
   one is not finite. */
int about(const double *zeroth, const double *first, const double *second, const double *centre, int64_t n, double *out) {
    const int64_t size = n * LIMBS;
    if (!(finite_all(zeroth, size) && finite_all(first, size) && finite_all(second, size) && finite_all(centre, size)))
        return 1;
    for (int64_t i = 0; i < n; i++) {
        const Whole w = read(zeroth + i * LIMBS), wx = read(first + i * LIMBS), wxx = read(second + i * LIMBS);
        const Whole c = read(centre + i * LIMBS), cw = times(&c, &w);
        const Whole once = shifted(&wx, SCALE), gap = minus(&once, &cw); /* of 2**-320 */
        const Whole twice = shifted(&wx, SCALE + 1), rest = minus(&twice, &cw), less = times(&c, &rest);
        const Whole raised = shifted(&wxx, 2 * SCALE), scatter = minus(&raised, &less); /* of 2**-480 */
        out[i] = nearest(&w, SCALE), out[n + i] = nearest(&gap, 2 * SCALE), out[2 * n + i] = nearest(&scatter, 3 * SCALE);
    }
    return 0;
}
