// RMSNorm, and its gradients in one pass over the rows.
//
// A block walks over rows; each thread keeps its columns' scale, and in the backward pass its part
// of dscale, in registers, and fetches the next row before it works on this one. The gradient needs
// no saved statistics: mean(x^2) is summed again beside mean(dy * scale * x), from the same read.
#pragma once

#include "common.cuh"

namespace ats {

constexpr int kNormThreads = 256;  // at most; fewer for narrow rows
constexpr int kMaxNormPacks = 4;   // of a thread: rows of up to 256 * 4 * 8 elements

// Blocks of a multiprocessor that the registers of a thread leave room for.
constexpr int norm_blocks(int packs, bool backward) {
  if (backward) return packs == 1 ? 4 : packs == 2 ? 2 : 1;
  return packs <= 2 ? 4 : 2;
}

// The packs of row `row` that belong to this thread; zero past the end of the row.
template <int P>
__device__ inline void load_row(const bf16* from, int64_t row, int64_t width, Pack<bf16> (&to)[P]) {
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const int i = threadIdx.x + p * blockDim.x;
    to[p] = i < width ? load(from, row * width + i) : zeros<bf16>();
  }
}

template <int P>
__device__ inline void load_scale(const float* scale, int64_t width, float (&to)[P][kPack]) {
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const int i = threadIdx.x + p * blockDim.x;
#pragma unroll
    for (int j = 0; j < kPack; ++j) to[p][j] = i < width ? scale[int64_t(i) * kPack + j] : 0.0f;
  }
}

// y = x / rms(x) * scale.
template <int P>
__global__ void __launch_bounds__(kNormThreads, norm_blocks(P, false))
    rms_norm_forward(const bf16* __restrict__ x, const float* __restrict__ scale,
                     bf16* __restrict__ y, int64_t rows, int64_t width, float eps) {
  __shared__ float scratch[2][kNormThreads / kWarp];
  const float inverse_dim = 1.0f / float(width * kPack);
  float scales[P][kPack];
  load_scale(scale, width, scales);
  Pack<bf16> next_x[P];
  if (blockIdx.x < rows) load_row(x, blockIdx.x, width, next_x);
  int turn = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    Pack<bf16> in[P];
    float total[1] = {0.0f};
#pragma unroll
    for (int p = 0; p < P; ++p) {
      in[p] = next_x[p];
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float value = to_float(in[p].at[j]);
        total[0] += value * value;
      }
    }
    if (row + gridDim.x < rows) load_row(x, row + gridDim.x, width, next_x);
    block_sum(total, scratch[turn]);
    const float inverse_rms = rsqrtf(total[0] * inverse_dim + eps);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int i = threadIdx.x + p * blockDim.x;
      if (i >= width) continue;
      Pack<bf16> out;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        out.at[j] = from_float<bf16>(to_float(in[p].at[j]) * inverse_rms * scales[p][j]);
      }
      store(y, row * width + i, out);
    }
  }
}

// dx = r * (dy * scale - x * r^2 * mean(dy * scale * x)) with r = 1 / rms(x); row b of `partial`
// [gridDim, dim] becomes the sum of dy * x * r over the rows of block b.
template <int P>
__global__ void __launch_bounds__(kNormThreads, norm_blocks(P, true))
    rms_norm_backward(const bf16* __restrict__ x, const float* __restrict__ scale,
                      const bf16* __restrict__ dy, bf16* __restrict__ dx,
                      float* __restrict__ partial, int64_t rows, int64_t width, float eps) {
  __shared__ float scratch[2][2 * kNormThreads / kWarp];
  const float inverse_dim = 1.0f / float(width * kPack);
  float scales[P][kPack], dscale[P][kPack] = {};
  load_scale(scale, width, scales);
  Pack<bf16> next_x[P], next_dy[P];
  if (blockIdx.x < rows) {
    load_row(x, blockIdx.x, width, next_x);
    load_row(dy, blockIdx.x, width, next_dy);
  }
  int turn = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    Pack<bf16> in[P], grad[P];
    float totals[2] = {0.0f, 0.0f};
#pragma unroll
    for (int p = 0; p < P; ++p) {
      in[p] = next_x[p];
      grad[p] = next_dy[p];
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float value = to_float(in[p].at[j]);
        totals[0] += value * value;
        totals[1] += to_float(grad[p].at[j]) * scales[p][j] * value;
      }
    }
    if (row + gridDim.x < rows) {
      load_row(x, row + gridDim.x, width, next_x);
      load_row(dy, row + gridDim.x, width, next_dy);
    }
    block_sum(totals, scratch[turn]);
    const float r = rsqrtf(totals[0] * inverse_dim + eps);
    const float slope = r * r * totals[1] * inverse_dim;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int i = threadIdx.x + p * blockDim.x;
      if (i >= width) continue;
      Pack<bf16> out;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float value = to_float(in[p].at[j]), d = to_float(grad[p].at[j]);
        out.at[j] = from_float<bf16>(r * (d * scales[p][j] - value * slope));
        dscale[p][j] += d * value * r;
      }
      store(dx, row * width + i, out);
    }
  }
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const int i = threadIdx.x + p * blockDim.x;
    if (i >= width) continue;
    Pack<float> out;
#pragma unroll
    for (int j = 0; j < kPack; ++j) out.at[j] = dscale[p][j];
    store(partial, blockIdx.x * width + i, out);
  }
}

// dscale[d] = sum_b partial[b, d]: a warp takes 32 columns and every eighth row.
__global__ void __launch_bounds__(kNormThreads)
    sum_partials(const float* __restrict__ partial, float* __restrict__ dscale, int64_t num_partials,
                 int64_t dim) {
  __shared__ float sums[kNormThreads / kWarp][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t column = int64_t(blockIdx.x) * kWarp + lane;
  float sum = 0.0f;
  if (column < dim) {
#pragma unroll 8
    for (int64_t b = warp; b < num_partials; b += kNormThreads / kWarp) {
      sum += partial[b * dim + column];
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= dim) return;
  for (int w = 1; w < kNormThreads / kWarp; ++w) sum += sums[w][lane];
  dscale[column] = sum;
}

// Packs of a thread and threads of a block for rows of `width` packs.
inline int norm_packs(int64_t width) {
  int packs = 1;
  while (packs * kNormThreads < width) packs *= 2;
  return packs;
}

inline int norm_threads(int64_t width, int packs) {
  return int(divide_up(divide_up(width, packs), kWarp) * kWarp);
}

template <int P = 1>
inline ffi::Error launch_forward(cudaStream_t stream, const bf16* x, const float* scale, bf16* y,
                                 int64_t rows, int64_t width, float eps) {
  if constexpr (P < kMaxNormPacks) {
    if (norm_packs(width) > P) {
      return launch_forward<2 * P>(stream, x, scale, y, rows, width, eps);
    }
  } else if (norm_packs(width) > P) {
    return ffi::Error::InvalidArgument("rows of at most 8192 elements");
  }
  const int threads = norm_threads(width, P);
  const int64_t resident =
      int64_t(num_multiprocessors()) * norm_blocks(P, false) * (kNormThreads / threads);
  return launch(stream, rms_norm_forward<P>, rows < resident ? rows : resident, threads, x, scale,
                y, rows, width, eps);
}

template <int P = 1>
inline ffi::Error launch_backward(cudaStream_t stream, const bf16* x, const float* scale,
                                  const bf16* dy, bf16* dx, float* partial, int64_t num_partials,
                                  int64_t rows, int64_t width, float eps) {
  if constexpr (P < kMaxNormPacks) {
    if (norm_packs(width) > P) {
      return launch_backward<2 * P>(stream, x, scale, dy, dx, partial, num_partials, rows, width,
                                    eps);
    }
  } else if (norm_packs(width) > P) {
    return ffi::Error::InvalidArgument("rows of at most 8192 elements");
  }
  return launch(stream, rms_norm_backward<P>, num_partials, norm_threads(width, P), x, scale, dy,
                dx, partial, rows, width, eps);
}

inline ffi::Error RmsNormForward(cudaStream_t stream, ffi::BufferR2<ffi::BF16> x,
                                 ffi::BufferR1<ffi::F32> scale, ffi::ResultBufferR2<ffi::BF16> y,
                                 float eps) {
  const auto size = x.dimensions();
  const auto* in = data<const bf16>(x);
  auto* out = data<bf16>(*y);
  if (!aligned(in, scale.typed_data(), out)) return misaligned();
  return launch_forward(stream, in, scale.typed_data(), out, size[0], size[1] / kPack, eps);
}

inline ffi::Error RmsNormBackward(cudaStream_t stream, ffi::BufferR2<ffi::BF16> x,
                                  ffi::BufferR1<ffi::F32> scale, ffi::BufferR2<ffi::BF16> dy,
                                  ffi::ResultBufferR2<ffi::BF16> dx,
                                  ffi::ResultBufferR1<ffi::F32> dscale,
                                  ffi::ResultBufferR2<ffi::F32> partial, float eps) {
  const auto size = x.dimensions();
  const int64_t num_partials = partial->dimensions()[0];
  const auto *in = data<const bf16>(x), *grad = data<const bf16>(dy);
  auto* out = data<bf16>(*dx);
  if (!aligned(in, grad, out, partial->typed_data())) return misaligned();
  const auto first = launch_backward(stream, in, scale.typed_data(), grad, out,
                                     partial->typed_data(), num_partials, size[0], size[1] / kPack,
                                     eps);
  if (first.failure()) return first;
  return launch(stream, sum_partials, divide_up(size[1], kWarp), kNormThreads,
                partial->typed_data(), dscale->typed_data(), num_partials, size[1]);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_rms_norm_forward, RmsNormForward,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::BF16>>()
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_rms_norm_backward, RmsNormBackward,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Ret<ffi::BufferR2<ffi::BF16>>()
                                  .Ret<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace ats
