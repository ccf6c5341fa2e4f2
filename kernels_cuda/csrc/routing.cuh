// `choose`: scores and top-k. `sort_by_expert`: the slot of every choice, sorted by expert, without
// a sort. Letters: N tokens, E outputs of the router, K choices, S experts, M = N * K slots, B
// blocks of choices.
//
// 1. `count`: numbers the choices of its block within their expert, in order; counts[s, b] = how
//    many fell on expert s.
// 2. `scan_counts`: counts[s, b] becomes the number in blocks before b, sizes[s] the sum.
// 3. `place`: slot = start of the expert + counts[s, b] + number in the block.
// After the choice integers only, or sums of ones: the result never depends on timing.
#pragma once

#include <type_traits>

#include "common.cuh"

namespace ats {

constexpr int kRouteThreads = 512;
constexpr int kRouteWarps = kRouteThreads / kWarp;
constexpr int kRouteTokens = 64;  // of a block of `choose`
constexpr int kMaxExperts = 256;
constexpr int kPlaceThreads = 256;
constexpr int kScanWarps = 8;
constexpr int kNowhere = -1;

// Larger for larger floats, never 0: +0 and -0 alike, NaN at one of the ends.
__device__ inline unsigned order_key(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);
  const unsigned key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return key ? key : 1u;
}

// Number of this thread's choice among those of its block with the same expert, in the order of
// threads; counts[expert * blocks + blockIdx.x] = all of them. `expert` may be kNowhere.
__device__ inline int rank_in_block(int expert, int num_experts, int* counts, int64_t blocks) {
  __shared__ int before[kRouteWarps][kMaxExperts];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int s = lane; s < num_experts; s += kWarp) before[warp][s] = 0;
  __syncwarp();
  const unsigned peers = __match_any_sync(kAllLanes, expert);
  const int rank = __popc(peers & ((1u << lane) - 1u));
  if (expert != kNowhere && rank == 0) before[warp][expert] = __popc(peers);
  __syncthreads();
  for (int s = threadIdx.x; s < num_experts; s += kRouteThreads) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kRouteWarps; ++w) {
      const int here = before[w][s];
      before[w][s] = sum;
      sum += here;
    }
    counts[s * blocks + blockIdx.x] = sum;
  }
  __syncthreads();
  return expert == kNowhere ? kNowhere : before[warp][expert] + rank;
}

struct RouteSettings {
  int choices, outputs;
  bool sigmoid, renormalize;
  float route_scale;
};

// One warp's token: lane k returns its choice k, in descending order of `key`, and that one's weight.
// Output e lies in lane e % 32, register e / 32; those past the last have logit -inf and key 0.
template <int kRegisters>
__device__ inline void choose_of(const float (&x)[kRegisters], unsigned (&key)[kRegisters],
                                 const RouteSettings& set, int& mine, float& weight) {
  const int lane = threadIdx.x % kWarp;
  float top = -INFINITY, total = 0.0f;
  if (!set.sigmoid) {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) top = fmaxf(top, x[i]);
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) total += expf(x[i] - top);
    total = warp_sum(total);
  }
  mine = 0;
  float score = 0.0f;
  for (int k = 0; k < set.choices; ++k) {
    unsigned best = 0u, at = kMaxExperts;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      if (key[i] > best) best = key[i], at = lane + i * kWarp;
    }
    const unsigned highest = warp_max(best);
    const unsigned e = warp_min(best == highest ? at : unsigned(kMaxExperts));
    float logit = 0.0f;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      const bool taken = unsigned(lane + i * kWarp) == e && key[i] == highest;
      logit = taken ? x[i] : logit;
      key[i] = taken ? 0u : key[i];
    }
    logit = __shfl_sync(kAllLanes, logit, e % kWarp);
    if (lane == k) {
      mine = e;
      score = set.sigmoid ? 1.0f / (1.0f + expf(-logit)) : expf(logit - top) / total;
    }
  }
  if (set.renormalize) {
    // In the order of choices, so that the sum is that of the definition.
    float sum = 0.0f;
    for (int k = 0; k < set.choices; ++k) sum += __shfl_sync(kAllLanes, score, k);
    score /= sum + 1e-20f;
  }
  weight = set.route_scale * score;
}

// A warp for each token. `load` [rows, outputs], zeroed by the caller: choices of valid tokens. Block
// b is part b % parts of row b / parts. Sums of ones are exact in float32, in any order.
template <int kRegisters>
__global__ void __launch_bounds__(kRouteThreads)
    choose(const float* __restrict__ logits, const float* __restrict__ selection,
           const uint8_t* __restrict__ valid, int* __restrict__ chosen, float* __restrict__ weight,
           float* __restrict__ load, int64_t seq, int64_t parts, RouteSettings set) {
  __shared__ int counts[kMaxExperts];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t row = blockIdx.x / parts, first = blockIdx.x % parts * kRouteTokens;
  for (int e = threadIdx.x; e < set.outputs; e += kRouteThreads) counts[e] = 0;
  __syncthreads();
  for (int64_t t = first + warp; t < first + kRouteTokens && t < seq; t += kRouteWarps) {
    const int64_t n = row * seq + t;
    float x[kRegisters], my_weight;
    unsigned key[kRegisters];
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) {
      const int e = lane + i * kWarp;
      x[i] = e < set.outputs ? logits[n * set.outputs + e] : -INFINITY;
      key[i] = e < set.outputs ? order_key(selection[n * set.outputs + e]) : 0u;
    }
    int mine;
    choose_of(x, key, set, mine, my_weight);
    if (lane < set.choices) {
      weight[n * set.choices + lane] = my_weight;
      chosen[n * set.choices + lane] = mine;
      if (valid[n]) atomicAdd(&counts[mine], 1);
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < set.outputs; e += kRouteThreads) {
    if (counts[e]) atomicAdd(&load[row * set.outputs + e], float(counts[e]));
  }
}

// 512 choices a block; an expert outside [0, S) is nowhere.
__global__ void __launch_bounds__(kRouteThreads)
    count(const int* __restrict__ chosen, int* __restrict__ number, int* __restrict__ counts,
          int64_t entries, int num_experts) {
  const int64_t entry = int64_t(blockIdx.x) * kRouteThreads + threadIdx.x;
  int expert = kNowhere;
  if (entry < entries && unsigned(chosen[entry]) < unsigned(num_experts)) expert = chosen[entry];
  const int rank = rank_in_block(expert, num_experts, counts, gridDim.x);
  if (entry < entries) number[entry] = rank;
}

// A warp for each expert; four blocks' counts a lane at a time.
__global__ void __launch_bounds__(kScanWarps* kWarp)
    scan_counts(int* __restrict__ counts, int* __restrict__ sizes, int num_experts,
                int64_t blocks) {
  const int lane = threadIdx.x % kWarp;
  const int s = blockIdx.x * kScanWarps + threadIdx.x / kWarp;
  if (s >= num_experts) return;
  int* row = counts + s * blocks;
  int carry = 0;
  for (int64_t start = 0; start < blocks; start += 4 * kWarp) {
    const int64_t b = start + 4 * lane;
    int value[4], sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) value[j] = b + j < blocks ? row[b + j] : 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += value[j];
    int inclusive = sum;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(kAllLanes, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    int before = carry + inclusive - sum;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (b + j < blocks) row[b + j] = before;
      before += value[j];
    }
    carry += __shfl_sync(kAllLanes, inclusive, kWarp - 1);
  }
  if (lane == 0) sizes[s] = carry;
}

// `slot` holds the number in the block and becomes the slot; empty slots come last.
__global__ void __launch_bounds__(kPlaceThreads)
    place(const int* __restrict__ chosen, const int* __restrict__ counts,
          const int* __restrict__ sizes, int* __restrict__ slot, int* __restrict__ source,
          int* __restrict__ choice, int64_t entries, int choices, int num_experts, int64_t blocks) {
  __shared__ int starts[kMaxExperts];
  __shared__ int warp_totals[kPlaceThreads / kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int size = int(threadIdx.x) < num_experts ? sizes[threadIdx.x] : 0;
  int inclusive = size;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == kWarp - 1) warp_totals[warp] = inclusive;
  __syncthreads();
  int before = 0, used = 0;
#pragma unroll
  for (int w = 0; w < kPlaceThreads / kWarp; ++w) {
    if (w < warp) before += warp_totals[w];
    used += warp_totals[w];
  }
  starts[threadIdx.x] = before + inclusive - size;
  __syncthreads();
  const int64_t i = int64_t(blockIdx.x) * kPlaceThreads + threadIdx.x;
  if (i >= entries) return;
  const int rank = slot[i];
  if (rank == kNowhere) {
    slot[i] = int(entries);
  } else {
    const int s = chosen[i];
    const int m = starts[s] + counts[s * blocks + i / kRouteThreads] + rank;
    slot[i] = m;
    source[m] = int(i / choices);
    choice[m] = int(i);
  }
  if (i >= used) {
    source[i] = int(entries / choices);
    choice[i] = int(entries);
  }
}

static_assert(kPlaceThreads == kMaxExperts, "place() scans one expert a thread");

// Call `f` with the number of registers that hold a warp's share of the outputs.
template <int kRegisters = 1, class F>
inline ffi::Error with_registers(int64_t outputs, F f) {
  if constexpr (kRegisters * kWarp < kMaxExperts) {
    if (outputs > kRegisters * kWarp) return with_registers<2 * kRegisters>(outputs, f);
  } else if (outputs > kMaxExperts) {
    return ffi::Error::InvalidArgument("at most 256 outputs of the router");
  }
  return f(std::integral_constant<int, kRegisters>());
}

inline ffi::Error Choose(cudaStream_t stream, ffi::BufferR3<ffi::F32> logits,
                         ffi::BufferR3<ffi::F32> selection, ffi::BufferR2<ffi::PRED> valid,
                         ffi::ResultBufferR3<ffi::S32> chosen, ffi::ResultBufferR3<ffi::F32> weight,
                         ffi::ResultBufferR2<ffi::F32> load, bool sigmoid, bool renormalize,
                         float route_scale) {
  const auto size = logits.dimensions();
  const int choices = int(weight->dimensions()[2]);
  if (choices > 8 || choices > size[2] || selection.element_count() != logits.element_count()) {
    return ffi::Error::InvalidArgument("routing: sizes of the arrays do not fit together");
  }
  const auto zeroed =
      check(cudaMemsetAsync(load->typed_data(), 0, load->size_bytes(), stream), "cudaMemsetAsync");
  if (zeroed.failure()) return zeroed;
  const RouteSettings set = {choices, int(size[2]), sigmoid, renormalize, route_scale};
  const int64_t parts = divide_up(size[1], kRouteTokens);
  return with_registers(size[2], [&](auto registers) {
    return launch(stream, choose<decltype(registers)::value>, size[0] * parts, kRouteThreads,
                  logits.typed_data(), selection.typed_data(), data<const uint8_t>(valid),
                  chosen->typed_data(), weight->typed_data(), load->typed_data(), size[1], parts,
                  set);
  });
}

inline ffi::Error SortByExpert(cudaStream_t stream, ffi::BufferR2<ffi::S32> chosen,
                               ffi::ResultBufferR2<ffi::S32> slot,
                               ffi::ResultBufferR1<ffi::S32> source,
                               ffi::ResultBufferR1<ffi::S32> choice,
                               ffi::ResultBufferR1<ffi::S32> sizes,
                               ffi::ResultBufferR2<ffi::S32> counts) {
  const int choices = int(chosen.dimensions()[1]), num_experts = int(sizes->element_count());
  const int64_t entries = chosen.element_count();
  const int64_t blocks = divide_up(entries, kRouteThreads);
  if (num_experts > kMaxExperts || counts->dimensions()[0] != num_experts ||
      counts->dimensions()[1] != blocks) {
    return ffi::Error::InvalidArgument("sort by expert: sizes of the arrays do not fit together");
  }
  const auto counted = launch(stream, count, blocks, kRouteThreads, chosen.typed_data(),
                              slot->typed_data(), counts->typed_data(), entries, num_experts);
  if (counted.failure()) return counted;
  const auto scanned =
      launch(stream, scan_counts, divide_up(num_experts, kScanWarps), kScanWarps * kWarp,
             counts->typed_data(), sizes->typed_data(), num_experts, blocks);
  if (scanned.failure()) return scanned;
  return launch(stream, place, divide_up(entries, kPlaceThreads), kPlaceThreads,
                chosen.typed_data(), counts->typed_data(), sizes->typed_data(), slot->typed_data(),
                source->typed_data(), choice->typed_data(), entries, choices, num_experts, blocks);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_choose, Choose,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::PRED>>()
                                  .Ret<ffi::BufferR3<ffi::S32>>()
                                  .Ret<ffi::BufferR3<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<bool>("sigmoid")
                                  .Attr<bool>("renormalize")
                                  .Attr<float>("route_scale"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_sort_by_expert, SortByExpert,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::S32>>()
                                  .Ret<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::S32>>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace ats
