/* shm_hostile.h: a client of shm:// that does what it should not; a role of test_shm_abuse. */
#ifndef SHM_HOSTILE_H
#define SHM_HOSTILE_H

/* Abuses the daemon at path until CLOCK_MONOTONIC is until_s, or it kills itself. Returns 0. */
int shm_be_hostile(const char *path, double until_s, unsigned with_seed);

#endif
