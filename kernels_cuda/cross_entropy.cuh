// Cross-entropy of rows of logits and its gradient by them, from one read of the logits.
//
// A row is too long for one thread block to hold, so a cluster takes it: each thread keeps its
// elements in registers from the load to the gradient, and the blocks tell each other their sums
// through shared memory. While a row is worked on, the next one is copied to where it will be read.
#pragma once

#include <cluster.cuh>
#include <tensor_core.cuh>

#include "common.cuh"

namespace ats {

constexpr int kLossThreads = 512;
constexpr int kLossWarps = kLossThreads / kWarp;
constexpr int kQuad = 4;        // elements that a thread loads at once: 16 bytes of float32
constexpr int kMaxCluster = 8;  // that every GPU with clusters can run
constexpr int kRowsOfCluster = 8;

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

template <int Q>
struct LossMemory {
  Quad<float> next[Q * kLossThreads];  // each thread copies and reads its own
  float tops[kLossWarps];
  float sums[3 * kLossWarps];
  RowSums block[2];  // in turn, so that the other blocks have time to read
};

// What a row's blocks have found, put together in the same order in every thread: of eight lanes,
// each reads one block's.
__device__ inline RowSums of_all_blocks(RowSums* mine, int cluster) {
  const int rank = threadIdx.x % kMaxCluster;
  RowSums part = {-INFINITY, 0.0f, 0.0f, 0.0f};
  if (rank < cluster) part = *of_block(mine, rank);
  const float top = warp_max(part.top);
  return {top, warp_sum<kMaxCluster>(part.total * __expf(part.top - top)),
          warp_sum<kMaxCluster>(part.label), warp_sum<kMaxCluster>(part.logits)};
}

// Of each row: `statistics` becomes log-sum-exp, the target's logit, the largest logit and the sum of
// the logits; with kGradient, `gradient` becomes that of mask * objective, (1 + 2 z_loss lse) softmax
// - (1 - smoothing) onehot - smoothing / V, times the mask. A target outside of the vocabulary has
// logit 0.
template <int Q, bool kGradient>
__global__ void __launch_bounds__(kLossThreads, Q <= 8 ? 2 : 1)
    cross_entropy(const float* __restrict__ logits, const int* __restrict__ targets,
                  const float* __restrict__ mask, bf16* __restrict__ gradient,
                  float* __restrict__ statistics, int64_t rows, int quads, int cluster,
                  float z_loss, float smoothing) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const int rank = blockIdx.x % cluster, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t first_row = blockIdx.x / cluster * int64_t(kRowsOfCluster);
  const int64_t end_row = first_row + kRowsOfCluster < rows ? first_row + kRowsOfCluster : rows;
  auto* memory = cluster_memory<LossMemory<Q>>();
  const auto place = [&](int q) { return (q * cluster + rank) * kLossThreads + int(threadIdx.x); };
  const auto prefetch = [&](int64_t row) {
    const auto* from = reinterpret_cast<const Quad<float>*>(logits) + row * quads;
#pragma unroll
    for (int q = 0; q < Q; ++q) {
      const SharedAddress to =
          dynamic_shared() + (q * kLossThreads + threadIdx.x) * sizeof(Quad<float>);
      if (place(q) < quads) copy_async(to, from + place(q), true);
    }
    commit_copies();
  };

  prefetch(first_row);
  for (int64_t row = first_row; row < end_row; ++row) {
    const int target = targets[row];
    Quad<float> x[Q];
    float top = -INFINITY;
    wait_for_copies<0>();
#pragma unroll
    for (int q = 0; q < Q; ++q) {
      if (place(q) >= quads) continue;
      x[q] = memory->next[q * kLossThreads + threadIdx.x];
#pragma unroll
      for (int j = 0; j < kQuad; ++j) top = fmaxf(top, x[q].at[j]);
    }
    top = warp_max(top);
    if (lane == 0) memory->tops[warp] = top;
    __syncthreads();
    if (row + 1 < end_row) prefetch(row + 1);
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
    RowSums* found = &memory->block[row % 2];
    if (threadIdx.x == 0) *found = {top, sums[0], sums[1], sums[2]};
    cluster_barrier();
    const RowSums of_row = of_all_blocks(found, cluster);
    const float lse = of_row.top + logf(of_row.total);
    if (rank == 0 && threadIdx.x == 0) {
      reinterpret_cast<Quad<float>*>(statistics)[row] = {lse, of_row.label, of_row.top,
                                                         of_row.logits};
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
  cluster_barrier();  // A block that has ended has no shared memory to read.
#endif
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
  const auto kernel = cross_entropy<Q, kGradient>;
  const int bytes = sizeof(LossMemory<Q>);
  const auto ready = prepare(kernel, 90, bytes);
  if (ready.failure()) return ready;
  return launch_clusters(stream, kernel, divide_up(rows, kRowsOfCluster), cluster, kLossThreads,
                         bytes, logits, targets, mask, gradient, statistics, rows, quads, cluster,
                         z_loss, smoothing);
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
