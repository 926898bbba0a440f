/* Exponentials and logarithms that a loop over numbers of REAL takes several of at once, where the C library has them.

   Include it in files that are compiled for REAL = float or double; without the macro it is double. */

#ifndef FEDTORCH_VECTOR_MATH
#define FEDTORCH_VECTOR_MATH

#include <math.h>

#ifndef REAL
#define REAL double
#endif

#if defined(__GLIBC__) && defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((simd("notinbranch"))) extern double exp(double);
__attribute__((simd("notinbranch"))) extern double log(double);
__attribute__((simd("notinbranch"))) extern float expf(float);
__attribute__((simd("notinbranch"))) extern float logf(float);
#endif

#define EXP(v) (sizeof(REAL) == 4 ? (REAL)expf((float)(v)) : (REAL)exp((double)(v)))
#define LOG(v) (sizeof(REAL) == 4 ? (REAL)logf((float)(v)) : (REAL)log((double)(v)))
#define SQRT(v) (sizeof(REAL) == 4 ? (REAL)sqrtf((float)(v)) : (REAL)sqrt((double)(v)))

#endif
