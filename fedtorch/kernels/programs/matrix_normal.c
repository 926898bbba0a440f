/* What the server of HM1 computes of all devices in a round; see fedtorch/models/low_rank.py and
   fedtorch/federation/algorithms/matrix_normal/noise.py.

   Matrices have their rows one after the other where nothing else is said. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SWEEPS = 60, AT_ONCE = 4 };

/* a'a, b'b and a'b. */
static void products(const double *a, const double *b, int64_t n, double *aa, double *bb, double *ab) {
    double one = 0, other = 0, both = 0;
#pragma omp simd reduction(+ : one, other, both)
    for (int64_t i = 0; i < n; i++) {
        one += a[i] * a[i];
        other += b[i] * b[i];
        both += a[i] * b[i];
    }
    *aa = one, *bb = other, *ab = both;
}

/* Makes the `count` columns of n numbers orthogonal by rotations of two (one-sided Jacobi, which finds small singular
   values as exactly as large ones); returns 0, or 1 if they do not get there. */
static int rotated(double *columns, int64_t n, int64_t count) {
    const double rounding = (1 + sqrt((double)n)) * DBL_EPSILON;
    for (int sweep = 0; sweep < SWEEPS; sweep++) {
        int moved = 0;
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = i + 1; j < count; j++) {
                double *restrict a = columns + i * n, *restrict b = columns + j * n, aa, bb, ab;
                products(a, b, n, &aa, &bb, &ab);
                if (fabs(ab) <= rounding * sqrt(aa) * sqrt(bb)) continue;
                const double zeta = (bb - aa) / (2 * ab), sign = zeta < 0 ? -1 : 1;
                const double t = sign / (fabs(zeta) + sqrt(1 + zeta * zeta)), c = 1 / sqrt(1 + t * t), s = c * t;
                if (t == 0) continue;
                moved = 1;
#pragma omp simd
                for (int64_t k = 0; k < n; k++) {
                    const double before = a[k];
                    a[k] = c * before - s * b[k];
                    b[k] = s * before + c * b[k];
                }
            }
        if (!moved) return 0;
    }
    return 1;
}

/* vectors (rank, K), values (rank,) and the multiple of `LowRank.from_factor` of a factor (K, count), whose multiple
   comes in. Returns 0; 1 where the factor is not finite or does not yield; 2 if there is no memory. */
int factored(const double *factor, int64_t units, int64_t count, int64_t rank, double *multiple, double *vectors,
             double *values) {
    double largest = 0;
    for (int64_t i = 0; i < units * count; i++) {
        if (!isfinite(factor[i])) return 1;
        largest = fmax(largest, fabs(factor[i]));
    }
    memset(vectors, 0, (size_t)(units * rank) * sizeof(double));
    memset(values, 0, (size_t)rank * sizeof(double));
    if (largest == 0) return 0;
    int exponent;
    frexp(largest, &exponent); /* squares of what is brought to this size neither overflow nor vanish */
    if (exponent < -1000) exponent = -1000;
    const double down = ldexp(1, -exponent), up = ldexp(1, exponent);
    double *columns = malloc((size_t)((units + 1) * count) * sizeof(double)), *size = columns + units * count;
    int64_t *order = malloc((size_t)count * sizeof(int64_t));
    if (!columns || !order) {
        free(columns), free(order);
        return 2;
    }
    for (int64_t k = 0; k < units; k++)
        for (int64_t j = 0; j < count; j++) columns[j * units + k] = factor[k * count + j] * down;
    const int failed = rotated(columns, units, count);
    for (int64_t j = 0; j < count; j++) {
        double none, square;
        products(columns + j * units, columns + j * units, units, &square, &none, &none);
        size[j] = sqrt(square);
        int64_t at = j;
        for (; at > 0 && size[order[at - 1]] < size[j]; at--) order[at] = order[at - 1];
        order[at] = j;
    }
    const int64_t found = units < count ? units : count;
    const double top = size[order[0]] * up, least = DBL_EPSILON * top * top;
    double beyond = 0;
    for (int64_t r = 0; r < found && !failed; r++) {
        const double *column = columns + order[r] * units, length = size[order[r]] * up;
        if (!(length * length > least)) break; /* rounding, as are those that follow */
        if (r >= rank) {
            beyond += length * length;
            continue;
        }
        int64_t largest_at = 0;
        for (int64_t k = 1; k < units; k++)
            if (fabs(column[k]) > fabs(column[largest_at])) largest_at = k;
        const double scale = (column[largest_at] < 0 ? -1 : 1) / size[order[r]];
        values[r] = length * length;
        for (int64_t k = 0; k < units; k++) vectors[r * units + k] = column[k] * scale;
    }
    if (found > rank) {
        beyond /= (double)(units - rank > 1 ? units - rank : 1);
        *multiple += beyond;
        for (int64_t r = 0; r < rank; r++) values[r] = values[r] > beyond ? values[r] - beyond : 0;
    }
    free(columns), free(order);
    return failed;
}

/* How many eigenvalues of a symmetric matrix (n, n) are positive; the matrix is overwritten. */
static int64_t positive(double *matrix, int64_t n, double *work) {
    for (int64_t k = 0; k + 2 < n; k++) { /* Householder's reflections make it tridiagonal */
        double *column = work, *image = work + n, square = 0, inner = 0;
        for (int64_t i = k + 1; i < n; i++) {
            column[i] = matrix[i * n + k];
            square += column[i] * column[i];
        }
        const double rest = square - column[k + 1] * column[k + 1];
        if (!(rest > 0)) continue;
        const double end = column[k + 1] > 0 ? -sqrt(square) : sqrt(square);
        const double half = square - column[k + 1] * end; /* half the squared length of the reflection's vector */
        column[k + 1] -= end;
        for (int64_t i = k + 1; i < n; i++) {
            double sum = 0;
            const double *row = matrix + i * n;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = k + 1; j < n; j++) sum += row[j] * column[j];
            image[i] = sum / half;
            inner += image[i] * column[i];
        }
        for (int64_t i = k + 1; i < n; i++) image[i] -= inner / (2 * half) * column[i];
        for (int64_t i = k + 1; i < n; i++) {
            double *row = matrix + i * n;
            const double one = column[i], other = image[i];
#pragma omp simd
            for (int64_t j = k + 1; j < n; j++) row[j] -= one * image[j] + other * column[j];
        }
        matrix[(k + 1) * n + k] = end;
    }
    int64_t count = 0;
    double pivot = 1;
    for (int64_t i = 0; i < n; i++) { /* the signs of the pivots are those of the eigenvalues */
        const double beside = i ? matrix[i * n + i - 1] : 0;
        pivot = matrix[i * n + i] - beside * beside / pivot;
        if (fabs(pivot) < DBL_MIN) pivot = -DBL_MIN;
        count += pivot > 0;
    }
    return count;
}

typedef struct {
    int64_t units, width, directions, row, column; /* K, d, those of V, and from one row or column of V to the next */
    double accuracy;
    const double *multiple, *vectors, *values, *theta; /* (), (K, directions), (directions,), (K, d) */
    double *precision, *shift;                         /* (K,), (K, d) */
} Majorised;

/* Whether E - ZZ' has an eigenvalue above c, by the law of inertia. */
static int above(int64_t units, int64_t r, double c, const double *z, const double *weights, double *inner) {
    double shares[AT_ONCE], *work = inner + r * r;
    int64_t count = 0;
    memset(inner, 0, (size_t)(r * r) * sizeof(double));
    for (int64_t i = 0; i < r; i++) inner[i * r + i] = 1;
    for (int64_t begin = 0; begin < units; begin += AT_ONCE) {
        const double *rows[AT_ONCE];
        for (int64_t m = 0; m < AT_ONCE; m++) {
            const int64_t k = begin + m < units ? begin + m : units - 1;
            double gap = weights[k] - c;
            if (fabs(gap) < 1e-14 * c) gap = -1e-14 * c;
            count += begin + m < units && gap > 0;
            shares[m] = begin + m < units ? weights[k] / gap : 0;
            rows[m] = z + k * r;
        }
        for (int64_t i = 0; i < r; i++) {
            double *to = inner + i * r, by[AT_ONCE];
            for (int m = 0; m < AT_ONCE; m++) by[m] = shares[m] * rows[m][i];
#pragma omp simd
            for (int64_t j = 0; j <= i; j++)
                to[j] -= by[0] * rows[0][j] + by[1] * rows[1][j] + by[2] * rows[2][j] + by[3] * rows[3][j];
        }
    }
    for (int64_t i = 0; i < r; i++)
        for (int64_t j = 0; j < i; j++) inner[j * r + i] = inner[i * r + j];
    return count + positive(inner, r, work) > r;
}

/* Fills precision and shift of `low_rank.majorised`; returns 0, or 1 if there is no memory. */
int majorised(const Majorised *p) {
    const int64_t K = p->units, d = p->width;
    const double a = *p->multiple;
    int64_t r = 0; /* columns that stand for something */
    while (r < p->directions && p->values[r] > 0) r++;
    double *memory = calloc((size_t)(K * (r + 1) + r * (r + 3) + 2 * r * d + 1), sizeof(double));
    if (!memory) return 1;
    double *weights = memory, *z = weights + K, *root = z + K * r, *inner = root + r, *inside = inner + r * (r + 2);
    double *scaled = inside + r * d, high = -INFINITY;
    for (int64_t i = 0; i < r; i++) root[i] = sqrt(p->values[i] / (a + p->values[i]));
    for (int64_t i = 0; i < r; i++)
        for (int64_t k = 0; k < K; k++) z[k * r + i] = p->vectors[k * p->row + i * p->column];
    for (int64_t k = 0; k < K; k++) {
        const double *row = z + k * r, *theta = p->theta + k * d;
        double length = 0, known = 0;
        for (int64_t i = 0; i < r; i++) {
            const double square = row[i] * row[i];
            length += square;
            known += square / (a + p->values[i]);
            for (int64_t j = 0; j < d; j++) inside[i * d + j] += row[i] * theta[j];
        }
        p->precision[k] = (length > 1 ? 0 : 1 - length) / a + known;
        weights[k] = 1 / (a * p->precision[k]);
        if (weights[k] > high || weights[k] != weights[k]) high = weights[k]; /* NaN stays */
    }
    for (int64_t i = 0; i < r * d; i++) scaled[i] = inside[i] / (a + p->values[i / d]);
    for (int64_t k = 0; k < K; k++) { /* Ω⁻¹Θ, then rows of Z in the place of those of V */
        const double *theta = p->theta + k * d;
        double *restrict shift = p->shift + k * d, *restrict row = z + k * r;
        for (int64_t j = 0; j < d; j++) shift[j] = theta[j];
        for (int64_t i = 0; i < r; i++)
            for (int64_t j = 0; j < d; j++) shift[j] -= row[i] * inside[i * d + j];
        for (int64_t j = 0; j < d; j++) shift[j] /= a;
        for (int64_t i = 0; i < r; i++)
            for (int64_t j = 0; j < d; j++) shift[j] += row[i] * scaled[i * d + j];
        for (int64_t i = 0; i < r; i++) row[i] *= root[i];
    }
    double low = 1, ratio = high = high > (double)K ? (double)K : high;
    if (ratio != ratio) high = 1; /* of an infinite multiple */
    while (ratio > 1 + p->accuracy) {
        const double middle = sqrt(low * high);
        ratio = sqrt(ratio);
        *(above(K, r, middle, z, weights, inner) ? &low : &high) = middle;
    }
    if (high < 1) high = 1;
    for (int64_t k = 0; k < K; k++) {
        p->precision[k] *= high;
        for (int64_t j = 0; j < d; j++) p->shift[k * d + j] = p->precision[k] * p->theta[k * d + j] - p->shift[k * d + j];
    }
    free(memory);
    return 0;
}

/* out (K,) = each device's noise variance, drawn to that of all with the weight of `pooling` degrees of freedom. */
void noise_variance(const double *residual, const double *freedom, int64_t units, double pooling, double *out) {
    double sum = 0, free_sum = 0;
    for (int64_t k = 0; k < units; k++) sum += residual[k], free_sum += freedom[k];
    const double pooled = free_sum > 0 ? sum / (free_sum > 1 ? free_sum : 1) : INFINITY;
    for (int64_t k = 0; k < units; k++) out[k] = (residual[k] + pooling * pooled) / (freedom[k] + pooling);
}

/* What devices are sent: noise variances (K,), and precisions (K,) and shifts (K, d) in place, which are 0, and the
   variance 1, where the variance is not known or, unless `heard` (K,) is 0, the device has not been heard. */
void priors(const double *residual, const double *freedom, const uint8_t *heard, int64_t units, int64_t d,
            double pooling, double *variance, double *precision, double *shift) {
    noise_variance(residual, freedom, units, pooling, variance);
    for (int64_t k = 0; k < units; k++) {
        if (isfinite(variance[k]) && (!heard || heard[k])) continue;
        variance[k] = 1;
        precision[k] = 0;
        memset(shift + k * d, 0, (size_t)d * sizeof(double));
    }
}

/* The number at place `wanted` of n that are ascending; they are moved about. */
static double chosen(double *numbers, int64_t n, int64_t wanted) {
    int64_t low = 0, high = n - 1;
    while (low < high) {
        const double pivot = numbers[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (numbers[i] < pivot) i++;
            while (numbers[j] > pivot) j--;
            if (i <= j) {
                const double kept = numbers[i];
                numbers[i++] = numbers[j];
                numbers[j--] = kept;
            }
        }
        if (wanted <= j) high = j;
        else if (wanted >= i) low = i;
        else break;
    }
    return numbers[wanted];
}

typedef struct {
    int64_t units, width, answered; /* K, d, M */
    double pooling;
    const int64_t *ids;                        /* (M,) */
    const double *change;                      /* (M, d) */
    const double *fresh[3];                    /* (M,) residual, freedom and spread */
    const double *noise;                       /* (K,) as given, or 0 */
    double *theta, *summary[3], *known;        /* (K, d), (K,) in place; (K, d) */
    uint8_t *heard;                            /* (K,) in place */
    double *numbers;                           /* (4,) whether the noise is finite, reach, units, typical variance */
} Renewed;

/* What the server makes of the devices that answered, before it renews their covariance. Returns 0; 1 where one that
   answered is not among the devices; 2 if there is no memory. */
int renewed(const Renewed *p) {
    const int64_t K = p->units, d = p->width;
    for (int64_t m = 0; m < p->answered; m++)
        if (p->ids[m] < 0 || p->ids[m] >= K) return 1;
    double *variance = malloc((size_t)(2 * K + 1) * sizeof(double)), *typical = variance + K;
    if (!variance) return 2;
    for (int64_t m = 0; m < p->answered; m++) {
        const int64_t k = p->ids[m];
        for (int64_t j = 0; j < d; j++) p->theta[k * d + j] += p->change[m * d + j];
        for (int i = 0; i < 3; i++) p->summary[i][k] = p->fresh[i][m];
        p->heard[k] = 1;
    }
    if (p->noise) memcpy(variance, p->noise, (size_t)K * sizeof(double));
    else noise_variance(p->summary[0], p->summary[1], K, p->pooling, variance);
    double reach = 0;
    int64_t units = 0, count = 0, finite = 1;
    for (int64_t k = 0; k < K; k++) {
        for (int64_t j = 0; j < d; j++) {
            const double number = p->heard[k] ? p->theta[k * d + j] : 0;
            p->known[k * d + j] = number;
            reach += number * number;
        }
        units += p->heard[k];
        finite &= isfinite(variance[k]) != 0;
        const double spread = p->summary[2][k], sampling = variance[k] * spread;
        if (!(spread <= 0) && sampling == sampling) typical[count++] = sampling;
    }
    p->numbers[0] = (double)finite;
    p->numbers[1] = reach;
    p->numbers[2] = (double)units;
    p->numbers[3] = count ? fmax(chosen(typical, count, (count - 1) / 2), -DBL_MAX) : 0;
    free(variance);
    return 0;
}
