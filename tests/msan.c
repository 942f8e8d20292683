/* msan.c: libprotobuf-c, which is not instrumented, as the memory sanitizer is to see it. The
 * linker puts these before the library's functions (--wrap), in builds with ATTND_SANITIZE=memory
 * alone.
 *
 * Bytes to unpack must have been written, all of them. What the library allocates for a message and
 * what it packs counts as written: the sanitizer cannot see it doing so.
 */
#include <protobuf-c/protobuf-c.h>
#include <sanitizer/msan_interface.h>

ProtobufCMessage *__real_protobuf_c_message_unpack(const ProtobufCMessageDescriptor *desc,
                                                   ProtobufCAllocator *allocator, size_t n,
                                                   const uint8_t *bytes);
ProtobufCMessage *__wrap_protobuf_c_message_unpack(const ProtobufCMessageDescriptor *desc,
                                                   ProtobufCAllocator *allocator, size_t n,
                                                   const uint8_t *bytes);
size_t __real_protobuf_c_message_pack(const ProtobufCMessage *message, uint8_t *out);
size_t __wrap_protobuf_c_message_pack(const ProtobufCMessage *message, uint8_t *out);

/* Called by the library, so that nothing is known of their arguments: not instrumented either. */
#define CALLED_BACK __attribute__((no_sanitize("memory")))

CALLED_BACK static void *alloc(void *data, size_t n)
{
    ProtobufCAllocator *a = data;
    void *p = a->alloc(a->allocator_data, n);
    if (p != NULL)
        __msan_unpoison(p, n);
    return p;
}

CALLED_BACK static void release(void *data, void *p)
{
    ProtobufCAllocator *a = data;
    a->free(a->allocator_data, p);
}

ProtobufCMessage *__wrap_protobuf_c_message_unpack(const ProtobufCMessageDescriptor *desc,
                                                   ProtobufCAllocator *allocator, size_t n,
                                                   const uint8_t *bytes)
{
    ProtobufCAllocator seen = {.alloc = alloc, .free = release, .allocator_data = allocator};
    __msan_check_mem_is_initialized(bytes, n);
    return __real_protobuf_c_message_unpack(desc, &seen, n, bytes);
}

size_t __wrap_protobuf_c_message_pack(const ProtobufCMessage *message, uint8_t *out)
{
    size_t n = __real_protobuf_c_message_pack(message, out);
    __msan_unpoison(out, n);
    return n;
}
