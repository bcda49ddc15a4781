// logits[m, n] = scale[n] * sum_k x[m, k] * q[n, k] for a few tokens m, reading q once.
//
// Compiled at run time for one shape and configuration by head_kernels.py, which defines
//   K        columns of q and x, a multiple of 64 * WARPS
//   WARPS    warps of a block; they divide a row's columns among themselves
//   GROUPS   groups of 8 tokens, 1 or 2
//   BLOCKS   blocks for each multiprocessor
//   PREFETCH bytes that a load asks the L2 cache to fetch: 0, 128 or 256
//
// A block owns a range of rows and takes them in tiles of 16. A lane keeps its share of the
// activations and of one whole tile of weights in registers: as soon as a piece has been widened,
// the same piece of the next tile is asked for, so that 40 KB (K = 2560) are under way for each
// block all the time. The products are mma.m16n8k16 with the weights as the 16-row operand, so 1
// token costs as much as 8. The order of the columns within a product does not matter: a lane
// takes 16 neighbouring bytes of a row as its share of four products, and the activations are laid
// out to match, without a shuffle or a transposition.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define SEGMENTS (K / 64 / WARPS)  // pieces of 64 columns for each warp
#define THREADS (WARPS * 32)
#define TOKENS (GROUPS * 8)
#define PITCH (GROUPS == 1 ? 20 : 18)              // floats between tokens: few bank conflicts
#define SUMS ((TOKENS * 16 + THREADS - 1) / THREADS)  // results that a thread adds up for a tile

#ifdef __CUDACC__  // the tests compile the rest for a CPU, with these eight written in C++

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

__device__ __forceinline__ void prefetch(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(p));
}

// Four e4m3 values to halves, exactly.
__device__ __forceinline__ void widen(u32 four, u32& low, u32& high) {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; "
        "cvt.rn.f16x2.e4m3x2 %1, b; }" : "=r"(low), "=r"(high) : "r"(four));
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

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

__device__ __forceinline__ float as_float(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 as_bits(float value) { return __float_as_uint(value); }

#endif

__device__ __forceinline__ float lower(u32 two) { return as_float(two << 16); }
__device__ __forceinline__ float upper(u32 two) { return as_float(two & 0xffff0000u); }

// The biased exponent of the power of two that brings `peak` into [2**14, 2**15), where a half is
// still finite, as far as a float can hold that power.
__device__ __forceinline__ int raise(float peak) {
    return min(max(268 - (int)(as_bits(peak) >> 23), 1), 253);
}

// q [rows, K] e4m3; scale [rows]; x [tokens, K] BF16 with x_stride elements between rows, aligned
// to 16 bytes; out [tokens, rows] BF16; tokens <= TOKENS.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fp8_head(const unsigned char* __restrict__ q, const float* __restrict__ scale,
         const u16* __restrict__ x, u16* __restrict__ out, int tokens, int rows, int x_stride,
         int rows_per_block) {
    __shared__ float partial[2][WARPS][TOKENS][PITCH];
    __shared__ float largest[WARPS][TOKENS];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int group = lane >> 2, quad = lane & 3;
    const int first = blockIdx.x * rows_per_block;
    const int end = min(first + rows_per_block, rows);
    if (first >= end) return;
    const int tiles = (end - first + 15) >> 4;
    const int column = warp * (SEGMENTS * 64) + quad * 16;

    // The first tile comes to the L2 cache while the activations are prepared.
    for (u64 i = threadIdx.x * 128; i < 16 * K; i += THREADS * 128)
        prefetch(q + min((u64)first * K + i, (u64)end * K - 1));

    // Activations to halves, each token scaled by a power of two. BF16's 8 significant bits fit in
    // a half's 11, so this is exact for all that is not 2**29 times smaller than the largest.
    u32 act[GROUPS][SEGMENTS][8];
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
        const int token = n * 8 + group;
        float peak = 0.0f;
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
                peak = fmaxf(peak, fmaxf(fabsf(lower(words[j])), fabsf(upper(words[j]))));
            }
        }
        peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2));
        if (quad == 0) largest[warp][token] = peak;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
        float peak = 0.0f;
        for (int w = 0; w < WARPS; ++w) peak = fmaxf(peak, largest[w][n * 8 + group]);
        const float up = as_float((u32)raise(peak) << 23);
#pragma unroll
        for (int s = 0; s < SEGMENTS; ++s)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                act[n][s][j] = halves(lower(act[n][s][j]) * up, upper(act[n][s][j]) * up);
    }
    // What undoes that for the (row, token) pairs that this thread adds up.
    const int my_row = threadIdx.x & 15;
    float undo[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        const int token = (threadIdx.x + i * THREADS) >> 4;
        float peak = 0.0f;
        if (token < tokens)
            for (int w = 0; w < WARPS; ++w) peak = fmaxf(peak, largest[w][token]);
        undo[i] = as_float((u32)(254 - raise(peak)) << 23);
    }

    uint4 ring[SEGMENTS][2];  // rows `group` and `group + 8` of a tile
    auto source = [&](int row) { return q + (u64)min(first + row, end - 1) * K + column; };
    const unsigned char* top = source(group);
    const unsigned char* bottom = source(group + 8);
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s) {
        ring[s][0] = stream(top + s * 64);
        ring[s][1] = stream(bottom + s * 64);
    }
    for (int tile = 0; tile < tiles; ++tile) {
        float sum[GROUPS][2][4];  // two chains of products, which do not wait for each other
#pragma unroll
        for (int n = 0; n < GROUPS; ++n)
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[n][i >> 2][i & 3] = 0.0f;
        const int row = first + tile * 16 + my_row;
        const float row_scale = row < end ? __ldg(scale + row) : 0.0f;
        // Past the end this is the last row again, which the cache has.
        top = source(tile * 16 + 16 + group);
        bottom = source(tile * 16 + 24 + group);
#pragma unroll
        for (int s = 0; s < SEGMENTS; ++s) {
            const u32 tops[4] = {ring[s][0].x, ring[s][0].y, ring[s][0].z, ring[s][0].w};
            const u32 bottoms[4] = {ring[s][1].x, ring[s][1].y, ring[s][1].z, ring[s][1].w};
            u32 a[4][4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                widen(tops[j], a[j][0], a[j][2]);
                widen(bottoms[j], a[j][1], a[j][3]);
            }
            ring[s][0] = stream(top + s * 64);
            ring[s][1] = stream(bottom + s * 64);
#pragma unroll
            for (int n = 0; n < GROUPS; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    multiply(sum[n][j & 1], a[j], act[n][s][2 * j], act[n][s][2 * j + 1]);
        }

        float(&mine)[TOKENS][PITCH] = partial[tile & 1][warp];
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
            const int token = n * 8 + 2 * quad;
            mine[token][group] = sum[n][0][0] + sum[n][1][0];
            mine[token + 1][group] = sum[n][0][1] + sum[n][1][1];
            mine[token][group + 8] = sum[n][0][2] + sum[n][1][2];
            mine[token + 1][group + 8] = sum[n][0][3] + sum[n][1][3];
        }
        // One barrier for each tile: the next tile goes to the other half of `partial`.
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
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
