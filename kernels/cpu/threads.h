/* threads.h: the cpu backend's worker threads. One job at a time, started by the engine thread,
 * which works on it, too. A job hands its parts out by an atomic counter, so any number of threads
 * can finish it: workers that wake up too late are not waited for.
 */
#ifndef ATTND_KERNELS_CPU_THREADS_H
#define ATTND_KERNELS_CPU_THREADS_H

#include "proto/attn_types.h"

struct cpu_threads;

/* Does parts of a job until none is left. thread is 0 (the caller) to n_threads - 1. */
typedef void (*cpu_job_fn)(void *arg, uint32_t thread);

/* n_threads includes the caller; 0 means one a processor this process may run on.
 * ATTN_ENOMEM: memory or thread limit. */
attn_status cpu_threads_open(uint32_t n_threads, struct cpu_threads **out_t);
void cpu_threads_close(struct cpu_threads *t); /* NULL is fine */
uint32_t cpu_threads_count(const struct cpu_threads *t);

/* Runs fn on the caller and on the workers; returns when the caller's fn and every fn that a worker
 * began have returned. */
void cpu_threads_run(struct cpu_threads *t, cpu_job_fn fn, void *arg);

#endif
