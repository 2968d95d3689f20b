/* Which cache lines do several threads touch, and who writes them?
 *
 * The compiler's instrumentation for ThreadSanitizer calls a function of a runtime for each load and store
 * (`-Zsanitizer=thread`). This is another runtime behind the same names (LLVM's
 * lib/Transforms/Instrumentation/ThreadSanitizer.cpp has the list): instead of looking for races it counts
 * the loads and stores of each thread to each cache line. What `perf c2c` samples on a processor that has
 * such events is counted here, all of it, on any machine. What it cannot see is the C library, the kernel and
 * code that was not compiled with it.
 *
 * It counts from LINES_AFTER seconds (default 1) after the start for LINES_FOR seconds (default 1), and
 * writes one line of JSON for each cache line that two threads touched and one wrote to the file LINES_OUT.
 * scripts/lines.py says what the lines are. */

#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#define THREADS 16         /* more than that are not counted, and said */
#define SIZE (1u << 19)    /* cache lines that can be told apart */
#define SHIFT 6            /* 64 bytes */

struct line {
    _Atomic uint64_t key; /* its address / 64; 0: free */
    _Atomic uint32_t count[2][THREADS]; /* loads, stores */
    uintptr_t from[2][THREADS]; /* the code of the last one */
};

static struct line *table;
static char names[THREADS][16];
static atomic_int threads;
static atomic_bool on;
static atomic_uint lost;
static _Thread_local int self = -1;
static struct timespec begun;
static double after = 1, lasts = 1;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (now.tv_sec - begun.tv_sec) + (now.tv_nsec - begun.tv_nsec) * 1e-9;
}

/* How a thread looks at the clock: each 4096th access, so that the clock is no cost. */
static inline bool counting(void) {
    static _Thread_local unsigned turn;
    if (table && ++turn % 4096 == 0) {
        double now = seconds();
        atomic_store_explicit(&on, now >= after && now < after + lasts, memory_order_relaxed);
    }
    return atomic_load_explicit(&on, memory_order_relaxed);
}

static void touch(uintptr_t address, int store, uintptr_t from) {
    if (self < 0) {
        self = atomic_fetch_add(&threads, 1);
        if (self < THREADS)
            prctl(PR_GET_NAME, names[self]);
    }
    if (self >= THREADS) {
        atomic_fetch_add(&lost, 1);
        return;
    }
    uint64_t key = address >> SHIFT;
    for (uint32_t at = (uint32_t)(key * 0x9e3779b97f4a7c15ull >> 45), tries = 0; tries < 64; at++, tries++) {
        struct line *line = &table[at % SIZE];
        uint64_t found = atomic_load_explicit(&line->key, memory_order_relaxed);
        if (found == 0 && atomic_compare_exchange_strong(&line->key, &found, key))
            found = key;
        if (found == key) {
            atomic_fetch_add_explicit(&line->count[store][self], 1, memory_order_relaxed);
            line->from[store][self] = from;
            return;
        }
    }
    atomic_fetch_add(&lost, 1);
}

#define HERE ((uintptr_t)__builtin_return_address(0))
#define SEE(address, store) \
    do { \
        if (counting()) \
            touch((uintptr_t)(address), store, HERE); \
    } while (0)

static inline void see_all(const void *start, size_t bytes, int store, uintptr_t from) {
    if (bytes == 0 || !counting())
        return;
    uintptr_t end = (uintptr_t)start + bytes;
    for (uintptr_t at = (uintptr_t)start & ~(uintptr_t)63; at < end; at += 64)
        touch(at, store, from);
}

void __tsan_init(void) {
    if (table)
        return;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    const char *text = getenv("LINES_AFTER");
    after = text ? atof(text) : after;
    text = getenv("LINES_FOR");
    lasts = text ? atof(text) : lasts;
    void *made = mmap(NULL, sizeof(struct line) * SIZE, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    table = made == MAP_FAILED ? NULL : made;
}

static void list(FILE *out, const char *name, struct line *line, int store) {
    fprintf(out, "\"%s\": {", name);
    bool first = true;
    for (int at = 0; at < THREADS; at++) {
        uint32_t count = line->count[store][at];
        if (count == 0)
            continue;
        fprintf(out, "%s\"%d\": [%u, \"%lx\"]", first ? "" : ", ", at, count, (unsigned long)line->from[store][at]);
        first = false;
    }
    fprintf(out, "}");
}

__attribute__((destructor)) static void end(void) {
    atomic_store(&on, false);
    const char *path = getenv("LINES_OUT");
    FILE *out = path && table ? fopen(path, "w") : NULL;
    if (!out)
        return;
    /* Where this program lies, so that addresses can be looked up in its file. */
    FILE *maps = fopen("/proc/self/maps", "r");
    unsigned long base = 0;
    if (!maps || fscanf(maps, "%lx", &base) != 1)
        base = 0;
    fprintf(out, "{\"base\": \"%lx\", \"lost\": %u, \"threads\": [", base, atomic_load(&lost));
    int all = atomic_load(&threads) < THREADS ? atomic_load(&threads) : THREADS;
    for (int at = 0; at < all; at++)
        fprintf(out, "%s\"%.15s\"", at ? ", " : "", names[at]);
    fprintf(out, "]}\n");
    for (uint32_t at = 0; at < SIZE; at++) {
        struct line *line = &table[at];
        int touched = 0, wrote = 0;
        for (int one = 0; one < THREADS; one++) {
            touched += line->count[0][one] || line->count[1][one];
            wrote += line->count[1][one] != 0;
        }
        if (touched < 2 || wrote == 0)
            continue;
        fprintf(out, "{\"line\": \"%lx\", ", (unsigned long)line->key << SHIFT);
        list(out, "loads", line, 0);
        fprintf(out, ", ");
        list(out, "stores", line, 1);
        fprintf(out, "}\n");
    }
    fclose(out);
}

void __tsan_func_entry(void *from) { (void)from; }
void __tsan_func_exit(void) {}
void __tsan_ignore_thread_begin(void) {}
void __tsan_ignore_thread_end(void) {}
void __tsan_vptr_read(void **at) { SEE(at, 0); }
void __tsan_vptr_update(void **at, void *value) { (void)value; SEE(at, 1); }
void __tsan_read_range(void *at, size_t bytes) { see_all(at, bytes, 0, HERE); }
void __tsan_write_range(void *at, size_t bytes) { see_all(at, bytes, 1, HERE); }

#define ACCESS(bytes) \
    void __tsan_read##bytes(void *at) { SEE(at, 0); } \
    void __tsan_write##bytes(void *at) { SEE(at, 1); } \
    void __tsan_read_write##bytes(void *at) { SEE(at, 1); } \
    void __tsan_volatile_read##bytes(void *at) { SEE(at, 0); } \
    void __tsan_volatile_write##bytes(void *at) { SEE(at, 1); } \
    void __tsan_unaligned_read##bytes(void *at) { SEE(at, 0); } \
    void __tsan_unaligned_write##bytes(void *at) { SEE(at, 1); } \
    void __tsan_unaligned_read_write##bytes(void *at) { SEE(at, 1); } \
    void __tsan_unaligned_volatile_read##bytes(void *at) { SEE(at, 0); } \
    void __tsan_unaligned_volatile_write##bytes(void *at) { SEE(at, 1); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

void *__tsan_memcpy(void *to, const void *from, size_t bytes) {
    see_all(from, bytes, 0, HERE);
    see_all(to, bytes, 1, HERE);
    return memcpy(to, from, bytes);
}
void *__tsan_memmove(void *to, const void *from, size_t bytes) {
    see_all(from, bytes, 0, HERE);
    see_all(to, bytes, 1, HERE);
    return memmove(to, from, bytes);
}
void *__tsan_memset(void *to, int value, size_t bytes) {
    see_all(to, bytes, 1, HERE);
    return memset(to, value, bytes);
}

#define FETCH(bits, name, builtin) \
    uint##bits##_t __tsan_atomic##bits##_##name(volatile uint##bits##_t *at, uint##bits##_t value, int order) { \
        (void)order; \
        SEE(at, 1); \
        return builtin(at, value, __ATOMIC_SEQ_CST); \
    }
#define ATOMIC(bits) \
    uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t *at, int order) { \
        (void)order; \
        SEE(at, 0); \
        return __atomic_load_n(at, __ATOMIC_SEQ_CST); \
    } \
    void __tsan_atomic##bits##_store(volatile uint##bits##_t *at, uint##bits##_t value, int order) { \
        (void)order; \
        SEE(at, 1); \
        __atomic_store_n(at, value, __ATOMIC_SEQ_CST); \
    } \
    uint##bits##_t __tsan_atomic##bits##_compare_exchange_val(volatile uint##bits##_t *at, uint##bits##_t old, \
                                                              uint##bits##_t value, int order, int other) { \
        (void)order; \
        (void)other; \
        SEE(at, 1); \
        __atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
        return old; \
    } \
    FETCH(bits, exchange, __atomic_exchange_n) \
    FETCH(bits, fetch_add, __atomic_fetch_add) \
    FETCH(bits, fetch_sub, __atomic_fetch_sub) \
    FETCH(bits, fetch_and, __atomic_fetch_and) \
    FETCH(bits, fetch_or, __atomic_fetch_or) \
    FETCH(bits, fetch_xor, __atomic_fetch_xor) \
    FETCH(bits, fetch_nand, __atomic_fetch_nand)
ATOMIC(8)
ATOMIC(16)
ATOMIC(32)
ATOMIC(64)
void __tsan_atomic_thread_fence(int order) { (void)order; __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int order) { (void)order; }
