// CUDA on one host thread; see coroutines.h.
//
// Not modelled: speed, registers, fused multiply-add, memory ordering, writes of two blocks at once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "coroutines.h"
#include "xla/ffi/api/ffi.h"

#define __global__
#define __device__
#define __host__
#define __shared__ static  // blocks run one after the other; the next one finds the old values
#define __launch_bounds__(...)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

typedef struct HostStream* cudaStream_t;
enum cudaError_t { cudaSuccess = 0 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension };

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }

// Two multiprocessors, so that persistent blocks walk over several rows of a small array.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = 2, cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
  return std::memset(at, value, bytes), cudaSuccess;
}

inline int compiled_for = 90;

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };

struct cudaFuncAttributes {
  int ptxVersion;
};

template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, Kernel*) {
  return of->ptxVersion = compiled_for, cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

// A host has no stream to decode from the call.
template <>
struct xla::ffi::CtxDecoding<xla::ffi::PlatformStream<cudaStream_t>> {
  using Type = cudaStream_t;
  template <class Api, class Context, class Diagnostic>
  static std::optional<Type> Decode(const Api*, Context*, Diagnostic&) {
    return std::optional<Type>(nullptr);
  }
};

extern "C" inline void __attribute__((used, visibility("default"))) set_compiled_for(int target) {
  compiled_for = target;
}

inline void __syncthreads() { host::barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { host::exchange(mask, 0); }

template <class T>
T __shfl_sync(unsigned mask, T x, int lane) {
  return host::from_bits<T>(host::exchange(mask, host::to_bits(x))[lane & 31]);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T x, int flip) {
  const unsigned lane = threadIdx.x % host::kLanes;
  return host::from_bits<T>(host::exchange(mask, host::to_bits(x))[(lane ^ flip) & 31]);
}

template <class T>
T __shfl_up_sync(unsigned mask, T x, int step) {
  const int lane = threadIdx.x % host::kLanes;
  return host::from_bits<T>(
      host::exchange(mask, host::to_bits(x))[lane >= step ? lane - step : lane]);
}

inline unsigned __match_any_sync(unsigned mask, int x) {
  const uint64_t* values = host::exchange(mask, host::to_bits(x));
  unsigned peers = 0;
  for (int lane = 0; lane < host::kLanes; ++lane) {
    if ((mask >> lane & 1u) && host::from_bits<int>(values[lane]) == x) peers |= 1u << lane;
  }
  return peers;
}

// One thread runs at a time.
template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at += value;
  return before;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __float_as_uint(float x) { return host::from_bits<unsigned>(host::to_bits(x)); }
inline float __uint_as_float(unsigned x) { return host::from_bits<float>(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const unsigned cluster = config->numAttrs ? config->attrs->val.clusterDim.x : 1;
  host::launch(config->gridDim, config->blockDim, cluster, config->dynamicSmemBytes,
               [&] { kernel(arguments...); });
  return cudaSuccess;
}
