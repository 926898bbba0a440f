/* Numbers from keys, one block of four words a lane; see fedtorch/random/philox.py.

   A tile of lanes is always computed whole, in the same vector instructions, so that a number's bits depend on its key
   and its place only and not on how many are drawn beside it. */

#include "philox.h"

enum { LANES = 32 };
enum { BITS, INTEGERS, COINS, UNIFORM, UNIFORM_WIDE, NORMAL, NORMAL_WIDE, EXPONENTIAL, EXPONENTIAL_WIDE };

typedef struct {
    uint32_t k0[LANES], k1[LANES], w0[LANES], w1[LANES], w2[LANES], w3[LANES];
} Tile;

typedef union {
    int64_t whole[4 * LANES];
    double wide[2 * LANES];
    float narrow[4 * LANES];
    uint8_t coin[4 * LANES];
} Numbers;

/* The counters of a run of lanes of one key. */
static void set(Tile *restrict t, int64_t lane, int64_t run, int64_t key, int64_t block, uint32_t purpose) {
    const uint32_t k0 = (uint32_t)key, k1 = (uint32_t)((uint64_t)key >> 32);
    for (int64_t i = 0; i < run; i++) {
        t->k0[lane + i] = k0, t->k1[lane + i] = k1;
        t->w0[lane + i] = (uint32_t)(block + i), t->w1[lane + i] = (uint32_t)((uint64_t)(block + i) >> 32);
        t->w2[lane + i] = 0, t->w3[lane + i] = purpose;
    }
}

static int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

static void words(Tile *restrict t) {
#pragma omp simd
    for (int i = 0; i < LANES; i++) philox(t->k0[i], t->k1[i], &t->w0[i], &t->w1[i], &t->w2[i], &t->w3[i]);
}

static double unit(uint32_t first, uint32_t second) {
    return (whole(first) * 0x1p21 + whole(second >> 11)) * 0x1p-53;
}

/* The numbers of a tile's words in order; argument: the threshold of coins, the digits of uniform numbers. */
static void convert(int64_t form, const Tile *restrict t, int64_t argument, Numbers *restrict out) {
    const uint32_t *restrict w0 = t->w0, *restrict w1 = t->w1, *restrict w2 = t->w2, *restrict w3 = t->w3;
    if (form == BITS) {
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            out->whole[4 * i] = w0[i], out->whole[4 * i + 1] = w1[i];
            out->whole[4 * i + 2] = w2[i], out->whole[4 * i + 3] = w3[i];
        }
    } else if (form == INTEGERS) {
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            out->whole[2 * i] = (int64_t)((uint64_t)w0[i] << 31 | w1[i] >> 1);
            out->whole[2 * i + 1] = (int64_t)((uint64_t)w2[i] << 31 | w3[i] >> 1);
        }
    } else if (form == COINS) {
        const uint32_t most = argument > 0 ? (uint32_t)(argument - 1) : 0; /* up to which a coin shows true */
        const uint8_t any = argument > 0;
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            out->coin[4 * i] = (w0[i] <= most) & any, out->coin[4 * i + 1] = (w1[i] <= most) & any;
            out->coin[4 * i + 2] = (w2[i] <= most) & any, out->coin[4 * i + 3] = (w3[i] <= most) & any;
        }
    } else if (form == UNIFORM) {
        const int less = 32 - (int)argument;
        const float unit_of = (float)of_bits((uint64_t)(1023 - argument) << 52);
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            out->narrow[4 * i] = (float)(int32_t)(w0[i] >> less) * unit_of;
            out->narrow[4 * i + 1] = (float)(int32_t)(w1[i] >> less) * unit_of;
            out->narrow[4 * i + 2] = (float)(int32_t)(w2[i] >> less) * unit_of;
            out->narrow[4 * i + 3] = (float)(int32_t)(w3[i] >> less) * unit_of;
        }
    } else if (form == UNIFORM_WIDE) {
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            out->wide[2 * i] = unit(w0[i], w1[i]);
            out->wide[2 * i + 1] = unit(w2[i], w3[i]);
        }
    } else if (form == NORMAL) {
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            double a, b, c, d;
            normals(inside_of_one(w0[i]), inside_of_one(w1[i]), &a, &b);
            normals(inside_of_one(w2[i]), inside_of_one(w3[i]), &c, &d);
            out->narrow[4 * i] = (float)a, out->narrow[4 * i + 1] = (float)b;
            out->narrow[4 * i + 2] = (float)c, out->narrow[4 * i + 3] = (float)d;
        }
    } else if (form == NORMAL_WIDE) {
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            double a, b;
            normals(inside(w0[i], w1[i]), inside(w2[i], w3[i]), &a, &b);
            out->wide[2 * i] = a, out->wide[2 * i + 1] = b;
        }
    } else if (form == EXPONENTIAL) {
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            out->narrow[4 * i] = (float)-logarithm(inside_of_one(w0[i]));
            out->narrow[4 * i + 1] = (float)-logarithm(inside_of_one(w1[i]));
            out->narrow[4 * i + 2] = (float)-logarithm(inside_of_one(w2[i]));
            out->narrow[4 * i + 3] = (float)-logarithm(inside_of_one(w3[i]));
        }
    } else {
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            out->wide[2 * i] = -logarithm(inside(w0[i], w1[i]));
            out->wide[2 * i + 1] = -logarithm(inside(w2[i], w3[i]));
        }
    }
}

/* Writes `count` numbers of a form for each key to `out`, (queries, count). */
void draw(int64_t form, const int64_t *keys, int64_t queries, int64_t count, int64_t argument, void *out) {
    const int64_t each = form == INTEGERS || form == UNIFORM_WIDE || form == NORMAL_WIDE || form == EXPONENTIAL_WIDE ? 2 : 4;
    const int64_t size = form == COINS ? 1 : form == UNIFORM || form == NORMAL || form == EXPONENTIAL ? 4 : 8;
    const int64_t blocks = (count + each - 1) / each;
    int64_t query = 0, block = 0; /* of the first lane */
    Tile tile = {0};
    Numbers numbers;
    for (int64_t left = queries * blocks; left > 0; left -= LANES) {
        const int64_t here = least(left, LANES);
        int64_t q = query, b = block;
        for (int64_t lane = 0, run; lane < here; lane += run) {
            run = least(here - lane, blocks - b);
            set(&tile, lane, run, keys[q], b, DRAW);
            if ((b += run) == blocks) b = 0, q++;
        }
        words(&tile);
        convert(form, &tile, argument, &numbers);
        for (int64_t lane = 0, run; lane < here; lane += run) {
            run = least(here - lane, blocks - block);
            const int64_t first = block * each;
            memcpy((char *)out + (query * count + first) * size, (char *)&numbers + lane * each * size,
                   (size_t)(least(run * each, count - first) * size));
            if ((block += run) == blocks) block = 0, query++;
        }
    }
}

/* Writes the new key of each pair of a key and a number to `out`, (rows, columns), given the strides of both. */
void fold(const int64_t *keys, int64_t key_row, int64_t key_column, const int64_t *numbers, int64_t number_row,
          int64_t number_column, int64_t rows, int64_t columns, int64_t *out) {
    int64_t row = 0, column = 0;
    Tile tile = {0};
    for (int64_t left = rows * columns; left > 0; left -= LANES) {
        const int64_t here = least(left, LANES);
        for (int64_t lane = 0; lane < here; lane++) {
            const int64_t number = numbers[row * number_row + column * number_column];
            set(&tile, lane, 1, keys[row * key_row + column * key_column], number, FOLD);
            if (++column == columns) column = 0, row++;
        }
        words(&tile);
        for (int64_t lane = 0; lane < here; lane++) *out++ = (int64_t)((uint64_t)tile.w1[lane] << 32 | tile.w0[lane]);
    }
}

/* Writes gamma numbers of shape parameters `a` to `out`, (queries, count); `stride` 0: one parameter for all. */
void gammas(const int64_t *keys, const double *a, int64_t stride, int64_t queries, int64_t count, double smallest,
            double *out) {
    for (int64_t q = 0; q < queries; q++)
        for (int64_t i = 0; i < count; i++, a += stride) {
            const double number = gamma_number(keys[q], (uint64_t)i, *a);
            *out++ = number < smallest ? smallest : number; /* NaN stays */
        }
}
