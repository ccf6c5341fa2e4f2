// A GPU on one host thread: kernels compiled by a C++ compiler run block after block, the threads of
// a block, or of a cluster of blocks, as coroutines that change places at barriers and warp
// collectives. What this checks is the arithmetic, the indices and the synchronisation: the order in
// which blocks and threads run can be turned round or shuffled, or one warp or block run far ahead,
// so a result that needs a missing barrier changes.
#pragma once

#include <algorithm>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include <ucontext.h>

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

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
  std::fprintf(stderr, "on_host: %s (block %u, thread %u)\n", what, blockIdx.x, current);
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

// Runs `what` for every thread of every block, `cluster` blocks at a time.
inline void launch(dim3 grid, dim3 block, unsigned of_cluster, size_t bytes,
                   std::function<void()> what) {
  std::lock_guard<std::mutex> lock(one_launch);
  gridDim = grid;
  blockDim = block;
  cluster = of_cluster;
  shared_bytes = bytes;
  shared.resize(shared_stride() * cluster + 128);
  const unsigned together = blockDim.x * cluster;
  if (blockDim.x % kLanes) fail("a block of incomplete warps");
  if (threads.size() < together) {
    threads.resize(together);
    warps.resize(together / kLanes);
  }
  body = std::move(what);
  for (unsigned i : sequence(gridDim.x / cluster)) run_cluster(i * cluster);
}

}  // namespace host

extern "C" inline void __attribute__((used, visibility("default"))) set_order(int order) {
  host::order = static_cast<host::Order>(order);
}
