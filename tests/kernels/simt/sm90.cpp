/* sm90.cpp: see sm90.h. */
#include "tests/kernels/simt/sm90.h"
#include "tests/kernels/simt/gpu_simt.h"

#include <cstring>
#include <deque>

namespace simt
{

namespace
{

/* ---- barriers */

struct mbarrier {
    int32_t bytes : 24; /* still to come */
    uint32_t phase : 8;
    uint32_t arrivals : 12, count : 12; /* still to come, of each phase */
    uint32_t state : 8;
};
static_assert(sizeof(mbarrier) == 8, "as on the device");
constexpr uint8_t made = 0x5a, fenced = 0x5b;

mbarrier *barrier_at(uint32_t bar, block **out_home = nullptr)
{
    mbarrier *b = (mbarrier *)shared_pointer(bar, 8, out_home);
    if (b->state != made && b->state != fenced)
        die("no barrier is there");
    return b;
}

void count_down(mbarrier *b, uint32_t arrivals, int32_t bytes)
{
    if (b->arrivals < arrivals)
        die("more arrivals than the barrier counts");
    b->arrivals -= arrivals;
    b->bytes -= bytes;
    if (b->bytes > 0xfffff || b->bytes < -0xfffff)
        die("more bytes than a barrier can count");
    if (b->arrivals == 0 && b->bytes == 0) {
        b->phase ^= 1;
        b->arrivals = b->count;
        wake(b);
    }
}

/* ---- copies */

struct arrival {
    block *home;
    mbarrier *bar;
    char *dst;
    const char *src;
    uint32_t bytes;
    const tensor_map *map;
    uint64_t at[5];
    char data[16];
};
std::deque<arrival> under_way;

uint32_t address_of(const block *b, const char *p)
{
    return (uint32_t)(p - b->shared) + shared_base();
}

void check_stores(const block *b, const char *dst, uint32_t n)
{
    for (uint32_t i = 0; b->n_stores && i < block_dim.x; i++) {
        const thread &t = threads[b->rank * block_dim.x + i];
        for (const thread::store &s : t.stores)
            if (s.at < dst + n && dst < s.at + s.bytes)
                die("a copy over a store that no proxy fence has ordered", t);
    }
}

void write(const block *b, char *dst, const char *src, uint32_t n)
{
    if (src)
        memcpy(dst, src, n);
    else
        memset(dst, 0, n);
    memcpy(b->shared_async + (dst - b->shared), dst, n);
}

/* A box row by row, 128 bytes each: in 16-byte pieces, swizzled by the address. */
void write_box(const arrival &a)
{
    const tensor_map &m = *a.map;
    uint32_t row = 0;
    for (uint64_t l = 0; l < m.box[4]; l++)
        for (uint64_t k = 0; k < m.box[3]; k++)
            for (uint64_t j = 0; j < m.box[2]; j++)
                for (uint64_t i = 0; i < m.box[1]; i++, row++) {
                    uint64_t c[4] = {a.at[1] + i, a.at[2] + j, a.at[3] + k, a.at[4] + l};
                    uint64_t from = a.at[0] * 2;
                    bool is_inside = true;
                    for (int d = 0; d < 4; d++) {
                        is_inside &= c[d] < m.dims[d + 1];
                        from += c[d] * m.strides[d];
                    }
                    for (uint32_t piece = 0; piece < 8; piece++) {
                        char *dst = a.dst + row * 128;
                        uint32_t turned = piece ^ (address_of(a.home, dst) / 128 % 8);
                        const bool has = is_inside && a.at[0] + piece * 8 < m.dims[0];
                        write(a.home, dst + turned * 16, has ? m.base + from + piece * 16 : nullptr,
                              16);
                    }
                }
}

void ask(arrival a, uint32_t bar, uint32_t dst)
{
    block *other;
    a.bar = barrier_at(bar, &a.home);
    a.dst = shared_pointer(dst, a.bytes, &other);
    if (dst % 16 && !(a.bytes == 8 && dst % 8 == 0))
        die("a copy that is not aligned");
    if (a.home != other)
        die("a copy and its barrier in different blocks");
    if (a.home != current->home && !current->has_met_cluster)
        die("a copy to a block that may not have begun");
    if (a.bar->state != fenced)
        die("a copy that reports to a barrier without a fence after its making");
    under_way.push_back(a);
    if (order == 1)
        deliver_copy();
}

} // namespace

void barrier_init(uint32_t bar, uint32_t count)
{
    mbarrier *b = (mbarrier *)shared_pointer(bar, 8);
    if (count >= 1u << 12)
        die("a barrier counts more than the executor does");
    *b = {0, 0, count, count, made};
    current->barriers.push_back((char *)b);
}

void barrier_init_fence()
{
    for (char *b : current->barriers)
        ((mbarrier *)b)->state = fenced;
    current->barriers.clear();
}

void barrier_arrive(uint32_t bar, uint32_t expected_bytes)
{
    mbarrier *b = barrier_at(bar);
    b->bytes += (int32_t)expected_bytes;
    count_down(b, 1, 0);
}

void barrier_wait(uint32_t bar, uint32_t phase)
{
    mbarrier *b = barrier_at(bar);
    while (b->phase == phase)
        wait_for(b, "a transaction barrier");
}

bool barrier_test(uint32_t bar, uint32_t phase)
{
    return barrier_at(bar)->phase != phase;
}

void shared_store(uint32_t at, const void *bytes, uint32_t n)
{
    char *p = shared_pointer(at, n);
    memcpy(p, bytes, n);
    note_store(p, n);
}

void proxy_fence()
{
    block *b = current->home;
    for (const thread::store &s : current->stores)
        memcpy(b->shared_async + (s.at - b->shared), s.at, s.bytes);
    b->n_stores -= (uint32_t)current->stores.size();
    current->stores.clear();
}

void proxy_fence_all()
{
    proxy_fence();
    current->may_copy_bulk = true;
}

void async_copy(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar, const void *data)
{
    arrival a = {};
    a.src = (const char *)src;
    a.bytes = bytes;
    if (data) {
        memcpy(a.data, data, bytes);
    } else {
        if (!current->may_copy_bulk)
            die("a bulk copy of what others wrote, without a proxy fence");
        if (bytes % 16 || (uintptr_t)src % 16)
            die("a copy that is not aligned");
    }
    ask(a, bar, dst);
}

void map_copy(uint32_t dst, const CUtensorMap *map, uint32_t bar, const uint64_t (&at)[5])
{
    arrival a = {};
    a.map = (const tensor_map *)map;
    if ((uintptr_t)map % 64 || a.map->magic != tensor_map_magic)
        die("no tensor map is there");
    memcpy(a.at, at, sizeof at);
    a.bytes = 128;
    for (int d = 1; d < 5; d++)
        a.bytes *= a.map->box[d];
    if (dst % 128)
        die("a copy that is not aligned");
    ask(a, bar, dst);
}

bool deliver_copy()
{
    if (under_way.empty())
        return false;
    arrival a = order == 2 ? under_way.back() : under_way.front();
    if (order == 2)
        under_way.pop_back();
    else
        under_way.pop_front();
    if (a.home->n_done == (int)block_dim.x)
        die("a copy to a block that has left", threads[a.home->rank * block_dim.x]);
    check_stores(a.home, a.dst, a.bytes);
    if (a.map)
        write_box(a);
    else
        write(a.home, a.dst, a.src ? a.src : a.data, a.bytes);
    count_down(a.bar, 0, (int32_t)a.bytes);
    return true;
}

void cluster_sync()
{
    current->may_copy_bulk = false;
    cluster_arrive();
    cluster_wait();
}

/* ---- wgmma */

namespace
{

/* Element (i, k) of a matrix whose rows lie along k or, if it is turned, along i. */
float matrix_element(const block *b, const product &p, uint64_t matrix, bool is_turned, uint32_t i,
                     uint32_t k)
{
    uint32_t at = matrix << 4 & 0x3fff0, lbo = matrix >> 12 & 0x3fff0, sbo = matrix >> 28 & 0x3fff0;
    if (matrix >> 62 == 3) {
        at += i / 8 * sbo + i % 8 * 32 + k * 2;
        at ^= at >> 3 & 0x10;
    } else if (is_turned)
        at += i / 64 * lbo + i % 64 * 2 + k / 8 * sbo + k % 8 * 128;
    else
        at += i / 8 * sbo + i % 8 * 128 + k * 2;
    if (matrix >> 62 == 1)
        at ^= at >> 3 & 0x70;
    uint16_t bits;
    memcpy(&bits, b->shared_async + (shared_pointer(at, 2) - b->shared), 2);
    return p.is_bf16 ? gpu::bf16_decode(bits) : gpu::f16_decode(bits);
}

/* The same of a matrix in registers: lane 4g + t of warp w has rows 16w + g and 16w + g + 8,
 * elements 2t, 2t + 1 and eight further on. */
float word_element(uint32_t first, size_t which, uint32_t i, uint32_t k)
{
    const thread &t = threads[first + i / 16 * 32 + i % 8 * 4 + k % 8 / 2];
    const product &p = t.products[which];
    uint32_t bits = p.a_words[i / 8 % 2 + k / 8 * 2] >> (k % 2 * 16) & 0xffff;
    return p.is_bf16 ? gpu::bf16_decode(bits) : gpu::f16_decode(bits);
}

/* D of the 128 threads from `first` on; product number `which` of each. */
void make_product(uint32_t first, size_t which)
{
    const product &p = threads[first].products[which];
    const block *home = threads[first].home;
    if ((p.a && p.a >> 62 != 1 && p.a >> 62 != 3) || p.b >> 62 != 1)
        die("a matrix without 128-byte swizzle, or A without that of 32");
    static float a[64][16], b[16][256], d[64][256];
    for (uint32_t k = 0; k < 16; k++) {
        for (uint32_t i = 0; i < 64; i++)
            a[i][k] =
                p.a ? matrix_element(home, p, p.a, false, i, k) : word_element(first, which, i, k);
        for (uint32_t i = 0; i < (uint32_t)p.n; i++)
            b[k][i] = matrix_element(home, p, p.b, p.is_turned, i, k);
    }
    memset(d, 0, sizeof d);
    for (int i = 0; i < 64; i++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < p.n; j++)
                d[i][j] += a[i][k] * b[k][j];
    for (uint32_t t = 0; t < 128; t++) {
        const product &mine = threads[first + t].products[which];
        if (mine.a != p.a || mine.b != p.b || mine.is_added != p.is_added || mine.n != p.n)
            die("threads ask for different products", threads[first + t]);
        if (mine.a_registers && memcmp(mine.a_registers, mine.a_words, sizeof mine.a_words) != 0)
            die("registers of a product changed before it was made", threads[first + t]);
        if (!mine.sums.empty() && memcmp(mine.d, mine.sums.data(), mine.sums.size() * 4) != 0)
            die("sums changed before they were made", threads[first + t]);
        for (int e = 0; e < p.n / 2; e++) {
            float x = d[t / 32 * 16 + t % 32 / 4 + e / 2 % 2 * 8][e / 4 * 8 + t % 4 * 2 + e % 2];
            mine.d[e] = p.is_added ? mine.d[e] + x : x;
        }
    }
}

} // namespace

void multiply_fence()
{
    current->may_multiply = true;
}

void multiply(product p)
{
    if (!current->may_multiply)
        die("a product without a fence before it");
    bool is_first = true;
    for (const product &other : current->products)
        is_first &= other.d != p.d;
    if (is_first && p.is_added)
        p.sums.assign(p.d, p.d + p.n / 2);
    p.group = current->n_commits;
    current->products.push_back(p);
}

void multiply_commit()
{
    current->n_commits++;
}

void multiply_wait(uint32_t pending)
{
    thread *me = current;
    uint32_t group = me->index.x / 128, first = (uint32_t)(me - threads.data()) - me->index.x % 128;
    gate *g = &me->home->groups[group];
    auto n_to_make = [pending](const thread &t) {
        size_t n = 0;
        while (n < t.products.size() && t.products[n].group + pending < t.n_commits)
            n++;
        return n;
    };
    const size_t n = n_to_make(*me);
    if (g->n_here == 127) {
        for (uint32_t t = 0; t < 128; t++)
            if (n_to_make(threads[first + t]) != n)
                die("threads ask for different products", threads[first + t]);
        for (size_t i = 0; i < n; i++)
            make_product(first, i);
    }
    wait_at(g, 128, "the end of products", 0, false);
    me->products.erase(me->products.begin(), me->products.begin() + (ptrdiff_t)n);
    me->may_multiply = false;
}

} // namespace simt
