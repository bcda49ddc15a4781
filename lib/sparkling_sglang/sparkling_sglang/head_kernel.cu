// logits[m, n] = scale[n] * sum_k x[m, k] * q[n, k] for a few tokens m, reading q once.
//
// Compiled at run time for one shape and configuration (see head_kernels.py), which defines:
//   K        columns of q and x, a multiple of 64 * WARPS
//   WARPS    warps of a block; they share a row's columns between them
//   NT       groups of 8 tokens (M <= 8 * NT)
//   FETCH    0: weights go to registers; 1: through shared memory by cp.async; 2: by bulk copies
//   STAGES   tiles in flight in shared memory (FETCH 1, 2)
//   XSHARED  keep the activations in shared memory instead of registers
//   PREFETCH bytes of the L2 prefetch hint (FETCH 0): 0, 128 or 256
//   BLOCKS   blocks for each multiprocessor
//
// A tile is 16 rows. Each warp multiplies its slice of the columns with mma.m16n8k16, the weights
// being the 16-row operand, so M = 1 costs as much as M = 8. The order of the columns within a
// product does not matter, so a lane takes 16 neighbouring bytes of a row as its share of four
// products, and the activations are laid out to match: no shuffle, no transposition.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define SEGMENTS (K / 64 / WARPS)  // segments of 64 columns for each warp
#define THREADS (WARPS * 32)
#define PITCH (K + 64)             // FETCH 2: bytes between rows; 64 extra keep the banks apart
#define TILE_BYTES (FETCH == 2 ? 16 * PITCH : 16 * K)

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ uint4 stream(const void* p) {
    uint4 v;
#if PREFETCH == 256
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
#elif PREFETCH == 128
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
#else
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
#endif
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Two e4m3 values to two halves: exact.
__device__ __forceinline__ void widen(u32 four, u32& low, u32& high) {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; "
        "cvt.rn.f16x2.e4m3x2 %1, b; }" : "=r"(low), "=r"(high) : "r"(four));
}

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float upper(u32 two) { return __uint_as_float(two & 0xffff0000u); }
__device__ __forceinline__ float lower(u32 two) { return __uint_as_float(two << 16); }

__device__ __forceinline__ u32 halves(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ u16 to_bf16(float v) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fp8_head(const unsigned char* __restrict__ q, const float* __restrict__ scale,
         const u16* __restrict__ x, u16* __restrict__ out, int tokens, int rows, int x_stride,
         int rows_per_block) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ float partial[2][WARPS][NT * 8][20];
    __shared__ float largest[WARPS][NT * 8];
#if FETCH == 2
    __shared__ __align__(8) u64 full[STAGES];
#endif

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int group = lane >> 2, quad = lane & 3;
    const int first = blockIdx.x * rows_per_block;
    const int end = min(first + rows_per_block, rows);
    if (first >= end) return;
    const int tiles = (end - first + 15) >> 4;
    const int column = warp * (SEGMENTS * 64) + quad * 16;

    // ---- the first weights are under way before anything else happens
#if FETCH == 0
    uint4 ring[SEGMENTS][2];
    const unsigned char* source0;
    const unsigned char* source1;
    for (int i = threadIdx.x; i < TILE_BYTES / 128; i += THREADS)
        asm volatile("prefetch.global.L2 [%0];" :: "l"(q + min((u64)first * K + i * 128ull, (u64)end * K - 1)));
#define LOCATE(tile)                                                              \
    source0 = q + (u64)min(first + (tile) * 16 + group, end - 1) * K + column;     \
    source1 = q + (u64)min(first + (tile) * 16 + group + 8, end - 1) * K + column;
#elif FETCH == 1
    // Each lane fetches just what it will use itself, so no barrier is needed.
    unsigned char* mine = dynamic + warp * (SEGMENTS * 1024) + lane * 16;
    auto fetch = [&](int tile) {
        if (tile < tiles) {
            const u32 to = shared_address(mine + (tile % STAGES) * TILE_BYTES);
            const unsigned char* from0 =
                q + (u64)min(first + tile * 16 + group, end - 1) * K + column;
            const unsigned char* from1 =
                q + (u64)min(first + tile * 16 + group + 8, end - 1) * K + column;
#pragma unroll
            for (int s = 0; s < SEGMENTS; ++s) {
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                             :: "r"(to + s * 1024), "l"(from0 + s * 64));
                asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                             :: "r"(to + s * 1024 + 512), "l"(from1 + s * 64));
            }
        }
        asm volatile("cp.async.commit_group;");
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch(s);
#else
    auto fetch = [&](int tile) {  // by warp 0: lane r copies row r
        const int valid = min(16, end - first - tile * 16);
        const int stage = tile % STAGES;
        const u32 bar = shared_address(&full[stage]);
        if (lane == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                         :: "r"(bar), "r"(valid * K) : "memory");
        __syncwarp();
        if (lane < valid)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                         "[%0], [%1], %2, [%3];"
                         :: "r"(shared_address(dynamic + stage * TILE_BYTES + lane * PITCH)),
                            "l"(q + (u64)(first + tile * 16 + lane) * K), "r"(K), "r"(bar)
                         : "memory");
    };
    if (warp == 0) {
        if (lane == 0) {
            for (int s = 0; s < STAGES; ++s)
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;"
                             :: "r"(shared_address(&full[s])) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
        for (int s = 0; s < STAGES && s < tiles; ++s) fetch(s);
    }
#endif

    // ---- activations: BF16 to halves, each token scaled by a power of two so that its largest
    // magnitude lies in [2**14, 2**15); 8 significant bits fit in 11, so this is exact down to
    // 2**-29 of that magnitude
    u32 act[NT][SEGMENTS][8];
    float peak[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int token = n * 8 + group;
        peak[n] = 0.0f;
#pragma unroll
        for (int s = 0; s < SEGMENTS; ++s) {
            uint4 a = make_uint4(0, 0, 0, 0), b = a;
            if (token < tokens) {
                const uint4* from = (const uint4*)(x + (u64)token * x_stride + column + s * 64);
                a = __ldg(from);
                b = __ldg(from + 1);
            }
            const u32 words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                act[n][s][j] = words[j];
                peak[n] = fmaxf(peak[n], fmaxf(fabsf(lower(words[j])), fabsf(upper(words[j]))));
            }
        }
        peak[n] = fmaxf(peak[n], __shfl_xor_sync(0xffffffffu, peak[n], 1));
        peak[n] = fmaxf(peak[n], __shfl_xor_sync(0xffffffffu, peak[n], 2));
        if (quad == 0) largest[warp][token] = peak[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int token = n * 8 + group;
        for (int w = 0; w < WARPS; ++w) peak[n] = fmaxf(peak[n], largest[w][token]);
        // 2**(14 - exponent), within what a float can hold
        const int raise = min(max(268 - (int)(__float_as_uint(peak[n]) >> 23), 1), 253);
        const float up = __uint_as_float((u32)raise << 23);
#pragma unroll
        for (int s = 0; s < SEGMENTS; ++s)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                act[n][s][j] = halves(lower(act[n][s][j]) * up, upper(act[n][s][j]) * up);
    }
    // What undoes that scaling for the (row, token) that this thread sums up below.
    const int my_row = threadIdx.x & 15;
    float undo[(NT * 128 + THREADS - 1) / THREADS];
#pragma unroll
    for (int i = 0; i < (NT * 128 + THREADS - 1) / THREADS; ++i) {
        const int token = (threadIdx.x + i * THREADS) >> 4;
        float all = 0.0f;
        if (token < tokens)
            for (int w = 0; w < WARPS; ++w) all = fmaxf(all, largest[w][token]);
        const int raise = min(max(268 - (int)(__float_as_uint(all) >> 23), 1), 253);
        undo[i] = __uint_as_float((u32)(254 - raise) << 23);
    }
#if XSHARED
    uint4* kept = (uint4*)(dynamic + (FETCH ? STAGES * TILE_BYTES : 0)) +
                  warp * (NT * SEGMENTS * 64) + lane;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int s = 0; s < SEGMENTS; ++s)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                kept[((n * SEGMENTS + s) * 2 + h) * 32] =
                    make_uint4(act[n][s][4 * h], act[n][s][4 * h + 1], act[n][s][4 * h + 2],
                               act[n][s][4 * h + 3]);
#endif

    // ---- the stream
#if FETCH == 0
    LOCATE(0)
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s) {
        ring[s][0] = stream(source0 + s * 64);
        ring[s][1] = stream(source1 + s * 64);
    }
#endif
    for (int tile = 0; tile < tiles; ++tile) {
        float sum[NT][2][4];  // two chains of products, which do not wait for each other
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[n][i >> 2][i & 3] = 0.0f;
        const int row = first + tile * 16 + my_row;
        const float row_scale = row < end ? __ldg(scale + row) : 0.0f;

#if FETCH == 0
        LOCATE(tile + 1)  // past the end: the last row again, which the cache has
#elif FETCH == 1
        fetch(tile + STAGES - 1);
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
        const unsigned char* here = mine + (tile % STAGES) * TILE_BYTES;
#else
        {
            const u32 bar = shared_address(&full[tile % STAGES]);
            const u32 parity = (tile / STAGES) & 1;
            asm volatile(
                "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; "
                "@!p bra again; }" :: "r"(bar), "r"(parity) : "memory");
        }
        const unsigned char* here =
            dynamic + (tile % STAGES) * TILE_BYTES + group * PITCH + column;
#endif
#pragma unroll
        for (int s = 0; s < SEGMENTS; ++s) {
#if FETCH == 0
            const uint4 top = ring[s][0], bottom = ring[s][1];
#elif FETCH == 1
            const uint4 top = *(const uint4*)(here + s * 1024);
            const uint4 bottom = *(const uint4*)(here + s * 1024 + 512);
#else
            const uint4 top = *(const uint4*)(here + s * 64);
            const uint4 bottom = *(const uint4*)(here + s * 64 + 8 * PITCH);
#endif
            const u32 tops[4] = {top.x, top.y, top.z, top.w};
            const u32 bottoms[4] = {bottom.x, bottom.y, bottom.z, bottom.w};
            u32 a[4][4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                widen(tops[j], a[j][0], a[j][2]);
                widen(bottoms[j], a[j][1], a[j][3]);
            }
#if FETCH == 0
            ring[s][0] = stream(source0 + s * 64);
            ring[s][1] = stream(source1 + s * 64);
#endif
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#if XSHARED
                const uint4 l = kept[((n * SEGMENTS + s) * 2) * 32];
                const uint4 r = kept[((n * SEGMENTS + s) * 2 + 1) * 32];
                const u32 b[8] = {l.x, l.y, l.z, l.w, r.x, r.y, r.z, r.w};
#else
                const u32 (&b)[8] = act[n][s];
#endif
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    multiply(sum[n][j & 1], a[j][0], a[j][1], a[j][2], a[j][3], b[2 * j],
                             b[2 * j + 1]);
            }
        }

        float (&mine_out)[NT * 8][20] = partial[tile & 1][warp];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            mine_out[n * 8 + 2 * quad][group] = sum[n][0][0] + sum[n][1][0];
            mine_out[n * 8 + 2 * quad + 1][group] = sum[n][0][1] + sum[n][1][1];
            mine_out[n * 8 + 2 * quad][group + 8] = sum[n][0][2] + sum[n][1][2];
            mine_out[n * 8 + 2 * quad + 1][group + 8] = sum[n][0][3] + sum[n][1][3];
        }
        __syncthreads();
#if FETCH == 2
        // every warp has read this stage: it may be filled again
        if (warp == 0 && tile + STAGES < tiles) fetch(tile + STAGES);
#endif
#pragma unroll
        for (int i = 0; i < (NT * 128 + THREADS - 1) / THREADS; ++i) {
            const int token = (threadIdx.x + i * THREADS) >> 4;
            if (token < tokens && row < end) {
                float total = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) total += partial[tile & 1][w][token][my_row];
                out[(u64)token * rows + row] = to_bf16(total * undo[i] * row_scale);
            }
        }
    }
}
