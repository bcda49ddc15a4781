// Runs head_kernel.cu on a CPU, one thread for each CUDA thread and one block after another, with
// the eight functions written in C++ that are machine instructions on a GPU. The fragments' layout
// in `multiply` is the one that NVIDIA's PTX manual gives for mma.m16n8k16 with 16-bit operands.

#include <math.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

using std::max;
using std::min;

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(threads, blocks)
#define __restrict__
#define __shared__ static

struct uint4 { unsigned x, y, z, w; };
struct Index { int x; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static thread_local Index threadIdx;
static Index blockIdx;

static std::unique_ptr<std::barrier<>> block_barrier;
static std::vector<std::unique_ptr<std::barrier<>>> warp_barriers;
static void meet() { warp_barriers[threadIdx.x / 32]->arrive_and_wait(); }
static void __syncthreads() { block_barrier->arrive_and_wait(); }

template <class T> static T __ldg(const T* p) { return *p; }
static float as_float(unsigned bits) { float f; memcpy(&f, &bits, 4); return f; }
static unsigned as_bits(float value) { unsigned u; memcpy(&u, &value, 4); return u; }
static unsigned half_bits(float f) { _Float16 h = (_Float16)f; unsigned short u; memcpy(&u, &h, 2); return u; }
static float of_half(unsigned bits) { unsigned short u = bits; _Float16 h; memcpy(&h, &u, 2); return h; }

static float e4m3(unsigned code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 127) == 127) return NAN;
    const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
    return code & 128 ? -size : size;
}

static uint4 stream(const void* p) { uint4 v; memcpy(&v, p, 16); return v; }
static void prefetch(const void*) {}
static unsigned halves(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
static void widen(unsigned four, unsigned& low, unsigned& high) {
    low = halves(e4m3(four & 255), e4m3(four >> 8 & 255));
    high = halves(e4m3(four >> 16 & 255), e4m3(four >> 24));
}
static unsigned short to_bf16(float v) {
    if (std::isnan(v)) return 0x7fff;
    const unsigned u = as_bits(v);
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

static float shuffled[64][32];
static float __shfl_xor_sync(unsigned, float v, int mask) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    shuffled[warp][lane] = v;
    meet();
    const float got = shuffled[warp][lane ^ mask];
    meet();
    return got;
}

static unsigned left[64][32][4], right[64][32][2];
static void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    memcpy(left[warp][lane], a, 16);
    right[warp][lane][0] = b0;
    right[warp][lane][1] = b1;
    meet();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i / 2), token = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const unsigned w = left[warp][row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
            const unsigned x = right[warp][token * 4 + k % 8 / 2][k / 8];
            c[i] += of_half(w >> 16 * (k % 2) & 0xffff) * of_half(x >> 16 * (k % 2) & 0xffff);
        }
    }
    meet();
}

#include HEAD_KERNEL

extern "C" void run(const void* q, const float* scale, const void* x, void* out, int tokens,
                    int rows, int x_stride, int rows_per_block) {
    block_barrier = std::make_unique<std::barrier<>>(THREADS);
    warp_barriers.clear();
    for (int w = 0; w < WARPS; ++w) warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
    for (int block = 0; block * rows_per_block < rows; ++block) {
        blockIdx.x = block;
        std::vector<std::thread> threads;
        for (int i = 0; i < THREADS; ++i)
            threads.emplace_back([=] {
                threadIdx.x = i;
                fp8_head((const unsigned char*)q, scale, (const u16*)x, (u16*)out, tokens, rows,
                         x_stride, rows_per_block);
            });
        for (auto& thread : threads) thread.join();
    }
}
