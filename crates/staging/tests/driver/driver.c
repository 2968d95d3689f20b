/* Stands for CUDA's driver in tests: a stream is a thread that runs commands in their order, and a
 * device's memory is the host's. It has the functions that crates/staging/src/cuda.rs calls, with the
 * types of cuda.h, and refuses threads without a context, as a real one does. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 1, NO_CONTEXT = 201 };
enum kind { WAIT, WRITE, COPY, RECORD, FOLLOW };

typedef struct {
    _Atomic uint64_t issued, reached;
} event;

typedef struct command {
    enum kind kind;
    uint64_t to, from;
    size_t size;
    uint32_t value;
    event *event;
    uint64_t ticket;
    struct command *next;
} command;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t bell;
    command *first, **last;
    int busy;
} stream;

static _Thread_local void *current;

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
    for (;;) {
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

int cuCtxSetCurrent(void *to) {
    current = to;
    return OK;
}

/* For the test. */
int new_stream(void **to) {
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
