// What all kernels share: 16-byte accesses, reductions whose order never changes, launches.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace ats {

namespace ffi = xla::ffi;

using bf16 = __nv_bfloat16;
using Stream = ffi::PlatformStream<cudaStream_t>;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kPack = 8;  // elements that a thread moves at once: 16 bytes of bfloat16

// Eight elements as they lie in memory; copying one is one or two 16-byte accesses.
template <class T>
struct alignas(16) Pack {
  T at[kPack];
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }

template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) { return x; }
template <>
__device__ inline bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }

// Pack number `index` of an array.
template <class T>
__device__ inline Pack<T> load(const T* from, int64_t index) {
  return reinterpret_cast<const Pack<T>*>(from)[index];
}

template <class T>
__device__ inline void store(T* to, int64_t index, const Pack<T>& pack) {
  reinterpret_cast<Pack<T>*>(to)[index] = pack;
}

template <class T>
__device__ inline Pack<T> zeros() {
  Pack<T> pack;
#pragma unroll
  for (int j = 0; j < kPack; ++j) pack.at[j] = from_float<T>(0.0f);
  return pack;
}

// A pack of bfloat16 in four registers: a compiler gives each element of a Pack one of its own, which
// is twice as many for threads that hold several packs.
struct alignas(16) Words {
  uint32_t at[kPack / 2];
};

__device__ inline Words load_words(const bf16* from, int64_t index) {
  return reinterpret_cast<const Words*>(from)[index];
}

__device__ inline void store(bf16* to, int64_t index, const Words& words) {
  reinterpret_cast<Words*>(to)[index] = words;
}

__device__ inline float element(const Words& words, int j) {
  const uint32_t word = words.at[j / 2];
  return __uint_as_float(j % 2 ? word & 0xffff0000u : word << 16);
}

__device__ inline Words words_of(const float (&elements)[kPack]) {
  Words words;
#pragma unroll
  for (int k = 0; k < kPack / 2; ++k) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(elements[2 * k], elements[2 * k + 1]);
    memcpy(&words.at[k], &two, sizeof two);
  }
  return words;
}

// Sum over every kLanes neighbours of a warp, in each of them, always added in the same order.
template <int kLanes = kWarp>
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = kLanes / 2; step; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

template <int kLanes = kWarp>
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int step = kLanes / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

__device__ inline unsigned warp_max(unsigned x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, x);
#else
#pragma unroll
  for (int step = kWarp / 2; step; step /= 2) {
    const unsigned other = __shfl_xor_sync(kAllLanes, x, step);
    x = other > x ? other : x;
  }
  return x;
#endif
}

__device__ inline unsigned warp_min(unsigned x) { return ~warp_max(~x); }

// Sums of N numbers over a block, in every thread. `scratch` holds N floats a warp; a barrier has
// to lie between reading the result and the next call with the same scratch.
template <int N>
__device__ inline void block_sum(float (&x)[N], float* scratch) {
  const int warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    x[n] = warp_sum(x[n]);
    if (threadIdx.x % kWarp == 0) scratch[warp * N + n] = x[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    x[n] = scratch[n];
    for (int w = 1; w < num_warps; ++w) x[n] += scratch[w * N + n];
  }
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline ffi::Error check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(what) + ": " + cudaGetErrorString(status));
}

// Start a kernel in `clusters` clusters of `cluster` blocks each, with `shared` bytes of dynamic shared
// memory a block; nothing to do for none. Only sm_90 and newer know clusters of more than one block.
template <class... Parameters, class... Arguments>
inline ffi::Error launch_clusters(cudaStream_t stream, void (*kernel)(Parameters...),
                                  int64_t clusters, int cluster, int threads, int shared,
                                  Arguments... arguments) {
  if (clusters == 0) return ffi::Error::Success();
  const int64_t blocks = clusters * cluster;
  if (blocks > INT32_MAX) return ffi::Error::InvalidArgument("array too large: over 2^31 blocks");
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  if (cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...),
               "kernel launch");
}

// Start a kernel with `shared` bytes of dynamic shared memory.
template <class... Parameters, class... Arguments>
inline ffi::Error launch_shared(cudaStream_t stream, void (*kernel)(Parameters...), int64_t blocks,
                                int threads, int shared, Arguments... arguments) {
  return launch_clusters(stream, kernel, blocks, 1, threads, shared, arguments...);
}

template <class... Parameters, class... Arguments>
inline ffi::Error launch(cudaStream_t stream, void (*kernel)(Parameters...), int64_t blocks,
                         int threads, Arguments... arguments) {
  return launch_shared(stream, kernel, blocks, threads, 0, arguments...);
}

// Let a kernel have `bytes` of dynamic shared memory, which may be more than a launch gives without
// this. An error where the library was compiled for less than `capability`: the kernel is empty then.
template <class Kernel>
inline ffi::Error prepare(Kernel kernel, int capability, int bytes) {
  cudaFuncAttributes compiled;
  const cudaError_t status = cudaFuncGetAttributes(&compiled, kernel);
  if (status != cudaSuccess) return check(status, "kernel attributes");
  if (compiled.ptxVersion < capability) {
    return ffi::Error::InvalidArgument(
        "the kernel needs compute capability " + std::to_string(capability / 10) + "." +
        std::to_string(capability % 10) + "; the library was compiled for " +
        std::to_string(compiled.ptxVersion) + ": check CUDA_TARGET_SM and TORCH_CUDA_ARCH_LIST");
  }
  return check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "shared memory");
}

inline int num_multiprocessors() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// The elements of a buffer as T.
template <class T, class Buffer>
inline T* data(Buffer&& buffer) {
  return reinterpret_cast<T*>(buffer.untyped_data());
}

// 16-byte accesses need 16-byte addresses.
template <class... Pointers>
inline bool aligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

inline ffi::Error misaligned() {
  return ffi::Error::InvalidArgument("the kernel needs arrays that start at 16-byte addresses");
}

}  // namespace ats
