/* loop_memory.h: memory for libuv, which ends the process where an allocation of its own
 * fails that cannot be reported: a reserve of this process's goes where the heap has none. */
#ifndef ATTND_DAEMON_PROCESS_LOOP_MEMORY_H
#define ATTND_DAEMON_PROCESS_LOOP_MEMORY_H

/* Before any other call of libuv. */
void loop_memory_use(void);

#endif
