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

constexpr int kLossThreads = 256;
constexpr int kLossWarps = kLossThreads / kWarp;
constexpr int kQuad = 4;        // elements that a thread loads at once: 16 bytes of float32
constexpr int kMaxCluster = 8;  // the portable limit
constexpr int kRowsOfCluster = 8;

template <class T>
struct alignas(kQuad * sizeof(T)) Quad {
  T at[kQuad];
};

// What some logits are reduced to.
struct alignas(16) Part {
  float top;     // the largest
  float total;   // sum of exp(logit - top)
  float logits;  // their sum, where labels are smoothed
};

template <int Q>
struct LossMemory {
  Quad<float> next[Q * kLossThreads];  // each thread copies and reads its own
  Part of_warp[kLossWarps];
  Part of_block[2];  // in turn, so that the other blocks have time to read
};

constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;

__device__ inline float exp2_fast(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// What is taken off in the exponent, to base 2; nothing where there are no logits, or only -inf.
__device__ inline float offset(float top) { return top == -INFINITY ? 0.0f : top * kLog2E; }

// The parts of every kLanes neighbours put together, in each of them the same.
template <int kLanes>
__device__ inline Part combined(const Part& part) {
  const float top = warp_max<kLanes>(part.top);
  const float share = exp2_fast(part.top * kLog2E - offset(top));
  return {top, warp_sum<kLanes>(part.total * share), warp_sum<kLanes>(part.logits)};
}

// Of each row: `statistics` becomes log-sum-exp, the target's logit, the largest logit and the sum of
// the logits (0 without smoothing); with kGradient, `gradient` becomes that of mask * objective,
// (1 + 2 z_loss lse) softmax - (1 - smoothing) onehot - smoothing / V, times the mask. A target
// outside of the vocabulary has logit 0.
template <int Q, bool kGradient>
__global__ void __launch_bounds__(kLossThreads, Q <= 16 ? 2 : 1)
    cross_entropy(const float* __restrict__ logits, const int* __restrict__ targets,
                  const float* __restrict__ mask, bf16* __restrict__ gradient,
                  float* __restrict__ statistics, int64_t rows, int quads, int cluster,
                  float z_loss, float smoothing) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const int rank = blockIdx.x % cluster, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t first_row = blockIdx.x / cluster * int64_t(kRowsOfCluster);
  const int64_t end_row = first_row + kRowsOfCluster < rows ? first_row + kRowsOfCluster : rows;
  static_assert(offsetof(LossMemory<Q>, next) == 0, "copies go to where dynamic memory begins");
  auto* memory = cluster_memory<LossMemory<Q>>();
  const auto place = [&](int q) { return (q * cluster + rank) * kLossThreads + int(threadIdx.x); };
  const auto prefetch = [&](int64_t row) {
    const auto* from = reinterpret_cast<const Quad<float>*>(logits) + row * quads;
    const SharedAddress to = dynamic_shared() + threadIdx.x * sizeof(Quad<float>);
#pragma unroll
    for (int q = 0; q < Q; ++q) {
      if (place(q) < quads) {
        copy_async(to + q * kLossThreads * sizeof(Quad<float>), from + place(q), true);
      }
    }
    commit_copies();
  };

#pragma unroll
  for (int q = 0; q < Q; ++q) {  // past the end of a row, for good
    if (place(q) < quads) continue;
    memory->next[q * kLossThreads + threadIdx.x] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  }
  prefetch(first_row);
  for (int64_t row = first_row; row < end_row; ++row) {
    const int target = targets[row], quad = target / kQuad;
    const bool exists = 0 <= target && target < quads * kQuad;
    const bool has_target = exists && quad % kLossThreads == int(threadIdx.x) &&
                            quad / kLossThreads % cluster == rank;
    const bool reports = rank == 0 && threadIdx.x == 0;
    const float label =
        exists && (has_target || reports) ? logits[row * quads * kQuad + target] : 0.0f;

    Quad<float> x[Q];
    Part part = {-INFINITY, 0.0f, 0.0f};
    wait_for_copies<0>();
#pragma unroll
    for (int q = 0; q < Q; ++q) {
      x[q] = memory->next[q * kLossThreads + threadIdx.x];
#pragma unroll
      for (int j = 0; j < kQuad; ++j) part.top = fmaxf(part.top, x[q].at[j]);
    }
    part.top = warp_max(part.top);
    __syncwarp();  // What is there has been read for the maximum, and is not read again.
    if (row + 1 < end_row) prefetch(row + 1);
    if (smoothing != 0.0f) {
#pragma unroll
      for (int q = 0; q < Q; ++q) {
        if (place(q) >= quads) continue;
        part.logits += (x[q].at[0] + x[q].at[1]) + (x[q].at[2] + x[q].at[3]);
      }
      part.logits = warp_sum(part.logits);
    }
    const float taken_off = offset(part.top);
#pragma unroll
    for (int q = 0; q < Q; ++q) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        x[q].at[j] = exp2_fast(fmaf(x[q].at[j], kLog2E, -taken_off));
        part.total += x[q].at[j];
      }
    }
    part.total = warp_sum(part.total);

    // Warps, then blocks.
    if (lane == 0) memory->of_warp[warp] = part;
    __syncthreads();
    Part* of_block_here = &memory->of_block[row % 2];
    if (warp == 0) {
      const Part of_all = combined<kLossWarps>(memory->of_warp[lane % kLossWarps]);
      if (lane == 0) *of_block_here = of_all;
    }
    cluster_barrier(threadIdx.x == 0);
    const int other = lane % kMaxCluster;
    Part of_other = {-INFINITY, 0.0f, 0.0f};
    if (other < cluster) of_other = *of_block(of_block_here, other);
    const Part of_row = combined<kMaxCluster>(of_other);

    const float lse = (offset(of_row.top) + log2f(of_row.total)) * kLn2;
    if (reports) {
      reinterpret_cast<Quad<float>*>(statistics)[row] = {lse, label, of_row.top, of_row.logits};
    }
    if constexpr (kGradient) {
      const float counted = mask[row], share = exp2_fast(part.top * kLog2E - offset(of_row.top));
      const float weight = counted * (1.0f + 2.0f * z_loss * lse) * share / of_row.total;
      const float everywhere = counted * smoothing / (float(quads) * kQuad);
      const float at_target = counted * (1.0f - smoothing);
      auto* to = reinterpret_cast<Quad<bf16>*>(gradient) + row * quads;
#pragma unroll
      for (int q = 0; q < Q; ++q) {
        if (place(q) >= quads) continue;
        Quad<bf16> out;
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
          out.at[j] = from_float<bf16>(fmaf(x[q].at[j], weight, -everywhere));
        }
        to[place(q)] = out;
      }
      if (has_target) {  // once more, after the quad that it is in
        const float exp = exp2_fast(fmaf(label, kLog2E, -taken_off));
        gradient[row * quads * kQuad + target] =
            from_float<bf16>(fmaf(exp, weight, -everywhere) - at_target);
      }
    }
  }
  cluster_barrier(false);  // A block that has ended has no shared memory to read.
#endif
}

template <int Q, bool kGradient>
inline ffi::Error start_cross_entropy(cudaStream_t stream, const float* logits, const int* targets,
                                      const float* mask, bf16* gradient, float* statistics,
                                      int64_t rows, int64_t quads, float z_loss, float smoothing) {
  int cluster = 1;
  while (cluster < kMaxCluster && quads > int64_t(cluster) * kLossThreads * Q) cluster *= 2;
  if (quads > int64_t(cluster) * kLossThreads * Q) {
    if constexpr (Q < 32) {
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
                               ffi::ResultBufferR2<ffi::F32> statistics, float smoothing) {
  const auto size = logits.dimensions();
  const float* from = logits.typed_data();
  if (!aligned(from, statistics->typed_data())) return misaligned();
  return start_cross_entropy<16, false>(stream, from, targets.typed_data(), nullptr, nullptr,
                                       statistics->typed_data(), size[0], size[1] / kQuad, 0.0f,
                                       smoothing);
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
  return start_cross_entropy<16, true>(stream, from, targets.typed_data(), mask.typed_data(), to,
                                      statistics->typed_data(), size[0], size[1] / kQuad, z_loss,
                                      smoothing);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_cross_entropy, CrossEntropy,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<float>("label_smoothing"),
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
