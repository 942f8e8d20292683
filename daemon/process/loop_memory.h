/* loop_memory.h: gives libuv an allocator with a reserve for when the heap has no memory: libuv
 * aborts the process when some of its allocations fail. */
#ifndef ATTND_DAEMON_PROCESS_LOOP_MEMORY_H
#define ATTND_DAEMON_PROCESS_LOOP_MEMORY_H

/* Installs the allocator. Before any other call of libuv. */
void loop_memory_use(void);

#endif
