// CUDA on one host thread: kernels compiled by a C++ compiler run block after block, the threads of
// a block, or of a cluster of blocks, as coroutines that change places at barriers and warp
// collectives. What this checks is the arithmetic, the indices and the synchronisation: the order in
// which blocks and threads run can be turned round or shuffled, or one warp or block run far ahead,
// so a result that needs a missing barrier changes.
//
// Not modelled: speed, registers, fused multiply-add, memory ordering, writes of two blocks at once.
#pragma once

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include <ucontext.h>

#include "xla/ffi/api/ffi.h"

#define __global__
#define __device__
#define __host__
#define __shared__ static  // blocks run one after the other; the next one finds the old values
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

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

namespace host {

constexpr int kLanes = 32;
constexpr size_t kStack = 128 * 1024;

// An asynchronous copy of 16 bytes, or of zeros.
struct Copy {
  void* to;
  const void* from;
  void make() const {
    if (from) std::memcpy(to, from, 16);
    else std::memset(to, 0, 16);
  }
};

struct Thread {
  std::unique_ptr<char[]> stack{new char[kStack]};
  ucontext_t start;
  std::jmp_buf place;
  bool started = false, done = false;
  uint64_t barriers = 0, cluster_barriers = 0, collectives = 0;
  std::vector<Copy> open_copies;
  std::vector<std::vector<Copy>> copies;  // in groups, those not made yet
};

// What the lanes of a warp show each other; two sets, for a lane may be one collective ahead.
struct Warp {
  uint64_t value[2][kLanes];
};

// kGreedy: a warp runs as far as it can before the next one gets a turn; kGreedyBlock: a block of a
// cluster does.
enum Order { kForward, kReverse, kShuffled, kGreedy, kGreedyBlock };

inline Order order = kForward;
inline std::mutex one_launch;
inline std::vector<Thread> threads;
inline std::vector<Warp> warps;
inline std::vector<char> shared;  // dynamic, of each block of a cluster, with room to align it
inline size_t shared_bytes;       // of a block
inline unsigned cluster = 1;      // blocks that run together
inline std::function<void()> body;
inline ucontext_t scheduler;
inline std::jmp_buf scheduler_place;
inline unsigned current;  // thread of the cluster
inline std::vector<uint64_t> arrivals;  // of each block
inline uint64_t cluster_arrivals, progress;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "cuda_on_host: %s (block %u, thread %u)\n", what, blockIdx.x, current);
  std::abort();
}

inline unsigned rank() { return current / blockDim.x; }

inline size_t shared_stride() { return (shared_bytes + 127) / 128 * 128; }

inline char* dynamic_shared(unsigned rank) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(shared.data());
  return reinterpret_cast<char*>((at + 127) / 128 * 128 + rank * shared_stride());
}

inline char* dynamic_shared() { return dynamic_shared(rank()); }

inline void check_shared(uintptr_t at, size_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(dynamic_shared());
  if (at < begin || at + bytes > begin + shared_bytes) fail("outside of shared memory");
}

// Thread `t` of the cluster whose first block is `first_block` has its turn.
inline unsigned first_block;

inline void take_turn(unsigned t) {
  current = t;
  threadIdx = dim3(t % blockDim.x);
  blockIdx = dim3(first_block + t / blockDim.x);
}

inline void yield() {
  const unsigned self = current;
  if (!_setjmp(threads[self].place)) _longjmp(scheduler_place, 1);
  take_turn(self);
}

inline void run_thread() {
  body();
  for (const auto& group : threads[current].copies) {
    if (!group.empty()) fail("a thread ends before its copies");
  }
  threads[current].copies.clear();
  threads[current].done = true;
  ++progress;
  _longjmp(scheduler_place, 1);
}

inline void resume(unsigned t) {
  take_turn(t);
  if (_setjmp(scheduler_place)) return;
  Thread& thread = threads[t];
  if (thread.started) _longjmp(thread.place, 1);
  thread.started = true;
  getcontext(&thread.start);
  thread.start.uc_stack.ss_sp = thread.stack.get();
  thread.start.uc_stack.ss_size = kStack;
  thread.start.uc_link = nullptr;
  makecontext(&thread.start, run_thread, 0);
  setcontext(&thread.start);
}

inline std::vector<unsigned> sequence(unsigned n) {
  static std::mt19937 random(0);
  std::vector<unsigned> result(n);
  std::iota(result.begin(), result.end(), 0u);
  if (order == kReverse) std::reverse(result.begin(), result.end());
  if (order == kShuffled) std::shuffle(result.begin(), result.end(), random);
  return result;
}

inline void run_cluster(unsigned block) {
  const unsigned num_threads = blockDim.x * cluster;
  first_block = block;
  arrivals.assign(cluster, 0);
  cluster_arrivals = 0;
  std::fill(shared.begin(), shared.end(), char(0xff));  // NaN in every format
  for (unsigned t = 0; t < num_threads; ++t) {
    threads[t].started = threads[t].done = false;
    threads[t].barriers = threads[t].cluster_barriers = threads[t].collectives = 0;
  }
  const bool greedy = order == kGreedy || order == kGreedyBlock;
  const unsigned group = order == kGreedy ? kLanes : order == kGreedyBlock ? blockDim.x : num_threads;
  for (bool live = true; live;) {
    live = false;
    const uint64_t before_all = progress;
    for (unsigned first = 0; first < num_threads; first += group) {
      uint64_t before;
      do {
        before = progress;
        for (unsigned t : sequence(group)) {
          if (!threads[first + t].done) resume(first + t);
        }
      } while (greedy && progress != before);
    }
    for (unsigned t = 0; t < num_threads; ++t) live |= !threads[t].done;
    if (live && progress == before_all) fail("threads wait for each other");
  }
  for (unsigned t = 1; t < num_threads; ++t) {
    const Thread& first_of_block = threads[t / blockDim.x * blockDim.x];
    if (threads[t].barriers != first_of_block.barriers ||
        threads[t].cluster_barriers != threads[0].cluster_barriers) {
      fail("a barrier that not all threads reach");
    }
  }
}

inline void barrier() {
  const uint64_t all = ++threads[current].barriers * blockDim.x;
  uint64_t& arrived = arrivals[rank()];
  ++arrived;
  ++progress;
  while (arrived < all) yield();
}

inline void cluster_barrier() {
  const uint64_t all = ++threads[current].cluster_barriers * blockDim.x * cluster;
  ++cluster_arrivals;
  ++progress;
  while (cluster_arrivals < all) yield();
}

inline bool has_left(unsigned rank) {
  const auto first = threads.begin() + rank * blockDim.x;
  return std::all_of(first, first + blockDim.x, [](const Thread& thread) { return thread.done; });
}

// Shows a value to the lanes of `mask`, waits for theirs, returns all.
inline const uint64_t* exchange(unsigned mask, uint64_t value) {
  const unsigned first = current / kLanes * kLanes, lane = current % kLanes;
  if (!(mask >> lane & 1u)) fail("a lane that its own mask leaves out");
  const uint64_t turn = threads[current].collectives++;
  uint64_t* values = warps[current / kLanes].value[turn % 2];
  values[lane] = value;
  ++progress;
  for (unsigned other = 0; other < kLanes; ++other) {
    if (!(mask >> other & 1u)) continue;
    while (threads[first + other].collectives <= turn) {
      if (threads[first + other].done) fail("a lane has left that others wait for");
      yield();
    }
  }
  return values;
}

template <class T>
uint64_t to_bits(T x) {
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof x);
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace host

extern "C" inline void __attribute__((used, visibility("default"))) set_order(int order) {
  host::order = static_cast<host::Order>(order);
}

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
  std::lock_guard<std::mutex> lock(host::one_launch);
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  host::cluster = config->numAttrs ? config->attrs->val.clusterDim.x : 1;
  host::shared_bytes = config->dynamicSmemBytes;
  host::shared.resize(host::shared_stride() * host::cluster + 128);
  const unsigned together = blockDim.x * host::cluster;
  if (blockDim.x % host::kLanes) host::fail("a block of incomplete warps");
  if (host::threads.size() < together) {
    host::threads.resize(together);
    host::warps.resize(together / host::kLanes);
  }
  host::body = [&] { kernel(arguments...); };
  for (unsigned i : host::sequence(gridDim.x / host::cluster)) host::run_cluster(i * host::cluster);
  return cudaSuccess;
}
