// Cross-entropy of rows of logits and its gradient by them, from one read of the logits.
//
// A row is too long for one thread block to hold, so a cluster takes it: each thread keeps its
// elements in registers from the load to the gradient, and the blocks tell each other their sums
// through shared memory.
#pragma once

#include <cluster.cuh>

#include "common.cuh"

namespace ats {

constexpr int kLossThreads = 512;
constexpr int kLossWarps = kLossThreads / kWarp;
constexpr int kQuad = 4;  // elements that a thread loads at once: 16 bytes of float32
constexpr int kMaxCluster = 8;  // that every GPU with clusters can run

template <class T>
struct alignas(kQuad * sizeof(T)) Quad {
  T at[kQuad];
};

// What the row is reduced to, or a block's part of it.
struct RowSums {
  float top;     // the largest logit
  float total;   // sum of exp(logit - top)
  float label;   // the target's logit
  float logits;  // sum of the logits
};

struct LossMemory {
  float tops[kLossWarps];
  float sums[3 * kLossWarps];
  RowSums block;
};

// Of row `blockIdx.x / cluster`: `statistics` becomes log-sum-exp, the target's logit, the largest
// logit and the sum of the logits; with kGradient, `gradient` becomes that of mask * objective,
// (1 + 2 z_loss lse) softmax - (1 - smoothing) onehot - smoothing / V, times the mask. A target
// outside of the vocabulary has logit 0.
template <int Q, bool kGradient>
__global__ void __launch_bounds__(kLossThreads, Q <= 8 ? 2 : 1)
    cross_entropy(const float* __restrict__ logits, const int* __restrict__ targets,
                  const float* __restrict__ mask, bf16* __restrict__ gradient,
                  float* __restrict__ statistics, int quads, int cluster, float z_loss,
                  float smoothing) {
  const int64_t row = blockIdx.x / cluster;
  const int rank = blockIdx.x % cluster;
  const auto* from = reinterpret_cast<const Quad<float>*>(logits) + row * quads;
  const int target = targets[row];
  auto* memory = cluster_memory<LossMemory>();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  Quad<float> x[Q];
  const auto place = [&](int q) { return (q * cluster + rank) * kLossThreads + int(threadIdx.x); };
  float top = -INFINITY;
#pragma unroll
  for (int q = 0; q < Q; ++q) {
    if (place(q) < quads) x[q] = from[place(q)];
  }
#pragma unroll
  for (int q = 0; q < Q; ++q) {
    if (place(q) >= quads) continue;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) top = fmaxf(top, x[q].at[j]);
  }
  top = warp_max(top);
  if (lane == 0) memory->tops[warp] = top;
  __syncthreads();
  for (int w = 0; w < kLossWarps; ++w) top = fmaxf(top, memory->tops[w]);

  // A block without elements has top -inf, and sums that count for nothing.
  const float base = top == -INFINITY ? 0.0f : top;
  float sums[3] = {0.0f, 0.0f, 0.0f};  // total, label, logits
#pragma unroll
  for (int q = 0; q < Q; ++q) {
    if (place(q) >= quads) continue;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      float& value = x[q].at[j];
      sums[2] += value;
      if (place(q) * kQuad + j == target) sums[1] = value;
      value = __expf(value - base);
      sums[0] += value;
    }
  }
  block_sum(sums, memory->sums);
  if (threadIdx.x == 0) memory->block = {top, sums[0], sums[1], sums[2]};
  cluster_barrier();
  RowSums of_row = {-INFINITY, 0.0f, 0.0f, 0.0f};
  for (int r = 0; r < cluster; ++r) {
    const RowSums part = *of_block(&memory->block, r);
    const float higher = fmaxf(of_row.top, part.top);
    of_row.total = of_row.total * __expf(of_row.top - higher) + part.total * __expf(part.top - higher);
    of_row.top = higher;
    of_row.label += part.label;
    of_row.logits += part.logits;
  }
  cluster_barrier();  // A block that has ended has no shared memory to read.
  const float lse = of_row.top + logf(of_row.total);
  if (rank == 0 && threadIdx.x == 0) {
    reinterpret_cast<Quad<float>*>(statistics)[row] = {lse, of_row.label, of_row.top, of_row.logits};
  }
  if constexpr (kGradient) {
    const float counted = mask[row];
    const float weight =
        counted * (1.0f + 2.0f * z_loss * lse) * __expf(top - of_row.top) / of_row.total;
    const float everywhere = counted * smoothing / (float(quads) * kQuad);
    const float at_target = counted * (1.0f - smoothing);
    auto* to = reinterpret_cast<Quad<bf16>*>(gradient) + row * quads;
#pragma unroll
    for (int q = 0; q < Q; ++q) {
      if (place(q) >= quads) continue;
      Quad<bf16> out;
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        float value = x[q].at[j] * weight - everywhere;
        if (place(q) * kQuad + j == target) value -= at_target;
        out.at[j] = from_float<bf16>(value);
      }
      to[place(q)] = out;
    }
  }
}

template <int Q, bool kGradient>
inline ffi::Error start_cross_entropy(cudaStream_t stream, const float* logits, const int* targets,
                                      const float* mask, bf16* gradient, float* statistics,
                                      int64_t rows, int64_t quads, float z_loss, float smoothing) {
  int cluster = 1;
  while (cluster < kMaxCluster && quads > int64_t(cluster) * kLossThreads * Q) cluster *= 2;
  if (quads > int64_t(cluster) * kLossThreads * Q) {
    if constexpr (Q < 16) {
      return start_cross_entropy<2 * Q, kGradient>(stream, logits, targets, mask, gradient,
                                                   statistics, rows, quads, z_loss, smoothing);
    }
    return ffi::Error::InvalidArgument("rows of at most 262144 logits");
  }
  return launch_clusters(stream, cross_entropy<Q, kGradient>, rows, cluster, kLossThreads,
                         sizeof(LossMemory), logits, targets, mask, gradient, statistics, quads,
                         cluster, z_loss, smoothing);
}

inline ffi::Error CrossEntropy(cudaStream_t stream, ffi::BufferR2<ffi::F32> logits,
                               ffi::BufferR1<ffi::S32> targets,
                               ffi::ResultBufferR2<ffi::F32> statistics) {
  const auto size = logits.dimensions();
  const float* from = logits.typed_data();
  if (!aligned(from, statistics->typed_data())) return misaligned();
  return start_cross_entropy<8, false>(stream, from, targets.typed_data(), nullptr, nullptr,
                                       statistics->typed_data(), size[0], size[1] / kQuad, 0.0f,
                                       0.0f);
}

inline ffi::Error CrossEntropyGradient(cudaStream_t stream, ffi::BufferR2<ffi::F32> logits,
                                       ffi::BufferR1<ffi::S32> targets,
                                       ffi::BufferR1<ffi::F32> mask,
                                       ffi::ResultBufferR2<ffi::BF16> gradient,
                                       ffi::ResultBufferR2<ffi::F32> statistics, float z_loss,
                                       float smoothing) {
  const auto size = logits.dimensions();
  const float* from = logits.typed_data();
  auto* to = data<bf16>(*gradient);
  if (!aligned(from, to, statistics->typed_data())) return misaligned();
  return start_cross_entropy<8, true>(stream, from, targets.typed_data(), mask.typed_data(), to,
                                      statistics->typed_data(), size[0], size[1] / kQuad, z_loss,
                                      smoothing);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_cross_entropy, CrossEntropy,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_cross_entropy_gradient, CrossEntropyGradient,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::BF16>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<float>("z_loss")
                                  .Attr<float>("label_smoothing"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace ats
