/* How ranks on one machine wait for each other: see fedtorch/federation/populations/_shared_memory.py.

   A line of memory per rank, which only that rank writes: the number of the last part that it has written, −1 once it
   has given up; then how many bytes an even and an odd part have. Numbers grow. */

#include <sched.h>
#include <stdint.h>
#include <time.h>

enum { LINE = 16, SPIN = 50, YIELD = 500, SHARE = 16, SHORTEST = 30, LONGEST = 2000 }; /* int64; microseconds */

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* Tell that this rank's part of a number is written, or by −1 that it gives up. */
void publish(int64_t *lines, int64_t rank, int64_t number, int64_t bytes) {
    int64_t *own = lines + rank * LINE;
    if (number >= 0) own[1 + number % 2] = bytes;
    __atomic_store_n(own, number, __ATOMIC_RELEASE);
}

/* Wait until all have told of a number: −1; or return a rank that has not, as soon as one has given up or the time is
   over; or −2 − rank of one whose part has other bytes. First the processor spins, for a rank on another core that is
   done in a moment; then it lets others run; then it sleeps for a share of the time that it has waited. */
int64_t await_all(const int64_t *lines, int64_t ranks, int64_t number, int64_t bytes, int64_t most) {
    const int64_t began = microseconds();
    for (int64_t rank = 0; rank < ranks; rank++) {
        const int64_t *line = lines + rank * LINE;
        int64_t told;
        while ((told = __atomic_load_n(line, __ATOMIC_ACQUIRE)) < number) {
            const int64_t waited = microseconds() - began;
            if (told < 0 || waited >= most) return rank;
            if (waited < SPIN) {
                for (int i = 0; i < 16; i++) pause_briefly();
            } else if (waited < YIELD) {
                sched_yield();
            } else {
                const int64_t share = waited / SHARE;
                const int64_t nap = share < SHORTEST ? SHORTEST : share > LONGEST ? LONGEST : share;
                const struct timespec time = {0, nap * 1000};
                nanosleep(&time, NULL);
            }
        }
        if (line[1 + number % 2] != bytes) return -2 - rank;
    }
    return -1;
}
