/* Stands for CUDA's driver in tests: a stream is a thread that runs commands in their order, and a
 * device's memory is the host's. It has the functions that crates/staging/src/cuda.rs calls, with the
 * types of cuda.h, and refuses what a real one would refuse: copies between host memory that is not
 * registered and a device, rows longer than their pitch, threads without a context. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 1, NO_CONTEXT = 201, REGISTERED = 712, NOT_REGISTERED = 713 };
enum { HOST = 1, DEVICE = 2 };
enum kind { WAIT, WRITE, COPY, ROWS, SET, RECORD, FOLLOW };

typedef struct {
    size_t srcXInBytes, srcY;
    unsigned srcMemoryType;
    const void *srcHost;
    uint64_t srcDevice;
    void *srcArray;
    size_t srcPitch, dstXInBytes, dstY;
    unsigned dstMemoryType;
    void *dstHost;
    uint64_t dstDevice;
    void *dstArray;
    size_t dstPitch, WidthInBytes, Height;
} CUDA_MEMCPY2D;

typedef struct {
    _Atomic uint64_t issued, reached;
} event;

typedef struct command {
    enum kind kind;
    uint64_t to, from;
    size_t size, to_pitch, from_pitch, rows;
    uint32_t value;
    event *event;
    uint64_t ticket;
    struct command *next;
} command;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t bell;
    command *first, **last;
    int busy, over;
} stream;

static _Thread_local void *current;
static _Atomic int held;
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    uintptr_t start;
    size_t length;
} ranges[16];

static void run(command *one) {
    switch (one->kind) {
    case WAIT: {
        _Atomic uint32_t *word = (_Atomic uint32_t *)one->to;
        while ((int32_t)(atomic_load(word) - one->value) < 0)
            sched_yield();
        break;
    }
    case WRITE:
        atomic_store((_Atomic uint32_t *)one->to, one->value);
        break;
    case COPY:
        memcpy((void *)one->to, (void *)one->from, one->size);
        break;
    case ROWS:
        while (one->value && atomic_load(&held))
            sched_yield();
        for (size_t at = 0; at < one->rows; at++)
            memcpy((char *)one->to + at * one->to_pitch, (char *)one->from + at * one->from_pitch,
                   one->size);
        break;
    case SET:
        memset((void *)one->to, (int)one->value, one->size);
        break;
    case RECORD:
        if (atomic_load(&one->event->reached) < one->ticket)
            atomic_store(&one->event->reached, one->ticket);
        break;
    case FOLLOW:
        while (atomic_load(&one->event->reached) < one->ticket)
            sched_yield();
        break;
    }
}

static void *body(void *at) {
    stream *mine = at;
    pthread_mutex_lock(&mine->lock);
    while (mine->first || !mine->over) {
        command *one = mine->first;
        if (!one) {
            pthread_cond_wait(&mine->bell, &mine->lock);
            continue;
        }
        mine->first = one->next;
        if (!mine->first)
            mine->last = &mine->first;
        mine->busy = 1;
        pthread_mutex_unlock(&mine->lock);
        run(one);
        free(one);
        pthread_mutex_lock(&mine->lock);
        mine->busy = 0;
        pthread_cond_broadcast(&mine->bell);
    }
    pthread_mutex_unlock(&mine->lock);
    return NULL;
}

static int put(void *to, command one) {
    stream *into = to;
    command *kept = malloc(sizeof one);
    if (!current)
        return NO_CONTEXT;
    if (!into || !kept)
        return INVALID;
    *kept = one;
    kept->next = NULL;
    pthread_mutex_lock(&into->lock);
    *into->last = kept;
    into->last = &kept->next;
    pthread_cond_broadcast(&into->bell);
    pthread_mutex_unlock(&into->lock);
    return OK;
}

static int is_registered(uintptr_t start, size_t length) {
    int found = 0;
    pthread_mutex_lock(&ranges_lock);
    for (int at = 0; at < 16; at++)
        found |= ranges[at].length && start >= ranges[at].start &&
                 start + length <= ranges[at].start + ranges[at].length;
    pthread_mutex_unlock(&ranges_lock);
    return found;
}

int cuCtxGetCurrent(void **to) {
    *to = current;
    return OK;
}

int cuCtxSetCurrent(void *to) {
    current = to;
    return OK;
}

int cuMemHostRegister_v2(void *at, size_t length, unsigned flags) {
    (void)flags;
    int result = INVALID;
    if (!current)
        return NO_CONTEXT;
    if (is_registered((uintptr_t)at, 1))
        return REGISTERED;
    pthread_mutex_lock(&ranges_lock);
    for (int place = 0; place < 16 && result; place++)
        if (!ranges[place].length) {
            ranges[place].start = (uintptr_t)at;
            ranges[place].length = length;
            result = OK;
        }
    pthread_mutex_unlock(&ranges_lock);
    return result;
}

int cuMemHostUnregister(void *at) {
    int result = NOT_REGISTERED;
    pthread_mutex_lock(&ranges_lock);
    for (int place = 0; place < 16; place++)
        if (ranges[place].length && ranges[place].start == (uintptr_t)at) {
            ranges[place].length = 0;
            result = OK;
        }
    pthread_mutex_unlock(&ranges_lock);
    return result;
}

/* Of this test alone: strided copies to a device do not begin while this is set. */
void hold_copies(int yes) {
    atomic_store(&held, yes);
}

/* And how many ranges are registered. */
int registered_ranges(void) {
    int count = 0;
    pthread_mutex_lock(&ranges_lock);
    for (int place = 0; place < 16; place++)
        count += ranges[place].length > 0;
    pthread_mutex_unlock(&ranges_lock);
    return count;
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return current ? OK : NO_CONTEXT;
}

int cuStreamCreateWithPriority(void **to, unsigned flags, int priority) {
    (void)flags;
    (void)priority;
    pthread_t thread;
    stream *new = calloc(1, sizeof *new);
    if (!current)
        return NO_CONTEXT;
    if (!new)
        return INVALID;
    pthread_mutex_init(&new->lock, NULL);
    pthread_cond_init(&new->bell, NULL);
    new->last = &new->first;
    if (pthread_create(&thread, NULL, body, new))
        return INVALID;
    pthread_detach(thread);
    *to = new;
    return OK;
}

int cuStreamDestroy_v2(void *at) {
    stream *old = at; /* its thread ends with its last command; the little memory stays */
    pthread_mutex_lock(&old->lock);
    old->over = 1;
    pthread_cond_broadcast(&old->bell);
    pthread_mutex_unlock(&old->lock);
    return OK;
}

int cuStreamSynchronize(void *at) {
    stream *one = at;
    pthread_mutex_lock(&one->lock);
    while (one->first || one->busy)
        pthread_cond_wait(&one->bell, &one->lock);
    pthread_mutex_unlock(&one->lock);
    return OK;
}

int cuStreamWaitValue32_v2(void *at, uint64_t word, uint32_t value, unsigned flags) {
    (void)flags;
    return put(at, (command){.kind = WAIT, .to = word, .value = value});
}

int cuStreamWriteValue32_v2(void *at, uint64_t word, uint32_t value, unsigned flags) {
    (void)flags;
    return put(at, (command){.kind = WRITE, .to = word, .value = value});
}

int cuMemcpyAsync(uint64_t to, uint64_t from, size_t size, void *at) {
    return put(at, (command){.kind = COPY, .to = to, .from = from, .size = size});
}

int cuMemsetD8Async(uint64_t to, unsigned char value, size_t size, void *at) {
    return put(at, (command){.kind = SET, .to = to, .value = value, .size = size});
}

int cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, void *at) {
    int in = copy->srcMemoryType == HOST && copy->dstMemoryType == DEVICE;
    int out = copy->srcMemoryType == DEVICE && copy->dstMemoryType == HOST;
    uint64_t from = in ? (uintptr_t)copy->srcHost : copy->srcDevice;
    uint64_t to = in ? copy->dstDevice : (uintptr_t)copy->dstHost;
    size_t pitch = in ? copy->srcPitch : copy->dstPitch;
    size_t end = (copy->Height - 1) * pitch + copy->WidthInBytes;
    if (!in && !out)
        return INVALID;
    if (copy->WidthInBytes > copy->srcPitch || copy->WidthInBytes > copy->dstPitch ||
        copy->srcXInBytes || copy->srcY || copy->dstXInBytes || copy->dstY || !copy->Height)
        return INVALID;
    if (!is_registered(in ? from : to, end))
        return NOT_REGISTERED;
    return put(at, (command){.kind = ROWS,
                             .to = to,
                             .from = from,
                             .size = copy->WidthInBytes,
                             .to_pitch = copy->dstPitch,
                             .from_pitch = copy->srcPitch,
                             .rows = copy->Height,
                             .value = in});
}

int cuEventCreate(void **to, unsigned flags) {
    (void)flags;
    *to = calloc(1, sizeof(event));
    return *to ? OK : INVALID;
}

int cuEventDestroy_v2(void *at) {
    (void)at; /* streams may still name it */
    return OK;
}

int cuEventRecord(void *at, void *on) {
    event *one = at;
    uint64_t ticket = atomic_fetch_add(&one->issued, 1) + 1;
    return put(on, (command){.kind = RECORD, .event = one, .ticket = ticket});
}

int cuStreamWaitEvent(void *on, void *at, unsigned flags) {
    event *one = at;
    (void)flags;
    return put(on, (command){.kind = FOLLOW, .event = one, .ticket = atomic_load(&one->issued)});
}
