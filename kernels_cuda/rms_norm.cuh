// RMSNorm with an optional residual sum in front, and its gradients in one pass over the rows.
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
constexpr int norm_blocks(int packs, bool add, bool backward) {
  if (backward) return packs == 1 ? (add ? 3 : 4) : packs == 2 ? 2 : 1;
  return packs == 1 ? 4 : packs == 2 ? (add ? 2 : 4) : (add ? 1 : 2);
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

// y = x / rms(x) * scale; with kAdd first x += residual, which is rounded and written to `sum`.
template <int P, bool kAdd>
__global__ void __launch_bounds__(kNormThreads, norm_blocks(P, kAdd, false))
    rms_norm_forward(const bf16* __restrict__ x, const bf16* __restrict__ residual,
                     const float* __restrict__ scale, bf16* __restrict__ sum,
                     bf16* __restrict__ y, int64_t rows, int64_t width, float eps) {
  __shared__ float scratch[2][kNormThreads / kWarp];
  const float inverse_dim = 1.0f / float(width * kPack);
  float scales[P][kPack];
  load_scale(scale, width, scales);
  Pack<bf16> next_x[P], next_r[P];
  if (blockIdx.x < rows) {
    load_row(x, blockIdx.x, width, next_x);
    if (kAdd) load_row(residual, blockIdx.x, width, next_r);
  }
  int turn = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    Pack<bf16> in[P];
    float total[1] = {0.0f};
#pragma unroll
    for (int p = 0; p < P; ++p) {
      in[p] = next_x[p];
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        if (kAdd) {
          in[p].at[j] = from_float<bf16>(to_float(in[p].at[j]) + to_float(next_r[p].at[j]));
        }
        const float value = to_float(in[p].at[j]);
        total[0] += value * value;
      }
    }
    if (row + gridDim.x < rows) {
      load_row(x, row + gridDim.x, width, next_x);
      if (kAdd) load_row(residual, row + gridDim.x, width, next_r);
    }
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
      if (kAdd) store(sum, row * width + i, in[p]);
    }
  }
}

// dx = r * (dy * scale - x * r^2 * mean(dy * scale * x)) with r = 1 / rms(x), plus `dsum` with kAdd;
// row b of `partial` [gridDim, dim] becomes the sum of dy * x * r over the rows of block b.
template <int P, bool kAdd>
__global__ void __launch_bounds__(kNormThreads, norm_blocks(P, kAdd, true))
    rms_norm_backward(const bf16* __restrict__ x, const float* __restrict__ scale,
                      const bf16* __restrict__ dy, const bf16* __restrict__ dsum,
                      bf16* __restrict__ dx, float* __restrict__ partial, int64_t rows,
                      int64_t width, float eps) {
  __shared__ float scratch[2][2 * kNormThreads / kWarp];
  const float inverse_dim = 1.0f / float(width * kPack);
  float scales[P][kPack], dscale[P][kPack] = {};
  load_scale(scale, width, scales);
  Pack<bf16> next_x[P], next_dy[P], next_dsum[P];
  if (blockIdx.x < rows) {
    load_row(x, blockIdx.x, width, next_x);
    load_row(dy, blockIdx.x, width, next_dy);
    if (kAdd) load_row(dsum, blockIdx.x, width, next_dsum);
  }
  int turn = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    Pack<bf16> in[P], grad[P], direct[P];
    float totals[2] = {0.0f, 0.0f};
#pragma unroll
    for (int p = 0; p < P; ++p) {
      in[p] = next_x[p];
      grad[p] = next_dy[p];
      if (kAdd) direct[p] = next_dsum[p];
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
      if (kAdd) load_row(dsum, row + gridDim.x, width, next_dsum);
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
        float result = r * (d * scales[p][j] - value * slope);
        if (kAdd) result += to_float(direct[p].at[j]);
        out.at[j] = from_float<bf16>(result);
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

template <bool kAdd, int P = 1>
inline ffi::Error launch_forward(cudaStream_t stream, const bf16* x, const bf16* residual,
                                 const float* scale, bf16* sum, bf16* y, int64_t rows,
                                 int64_t width, float eps) {
  if constexpr (P < kMaxNormPacks) {
    if (norm_packs(width) > P) {
      return launch_forward<kAdd, 2 * P>(stream, x, residual, scale, sum, y, rows, width, eps);
    }
  } else if (norm_packs(width) > P) {
    return ffi::Error::InvalidArgument("rows of at most 8192 elements");
  }
  const int threads = norm_threads(width, P);
  const int64_t resident =
      int64_t(num_multiprocessors()) * norm_blocks(P, kAdd, false) * (kNormThreads / threads);
  return launch(stream, rms_norm_forward<P, kAdd>, rows < resident ? rows : resident, threads, x,
                residual, scale, sum, y, rows, width, eps);
}

template <bool kAdd, int P = 1>
inline ffi::Error launch_backward(cudaStream_t stream, const bf16* x, const float* scale,
                                  const bf16* dy, const bf16* dsum, bf16* dx, float* partial,
                                  int64_t num_partials, int64_t rows, int64_t width, float eps) {
  if constexpr (P < kMaxNormPacks) {
    if (norm_packs(width) > P) {
      return launch_backward<kAdd, 2 * P>(stream, x, scale, dy, dsum, dx, partial, num_partials,
                                          rows, width, eps);
    }
  } else if (norm_packs(width) > P) {
    return ffi::Error::InvalidArgument("rows of at most 8192 elements");
  }
  return launch(stream, rms_norm_backward<P, kAdd>, num_partials, norm_threads(width, P), x, scale,
                dy, dsum, dx, partial, rows, width, eps);
}

template <bool kAdd>
inline ffi::Error forward_of(cudaStream_t stream, const ffi::BufferR2<ffi::BF16>& x,
                             const bf16* residual, const ffi::BufferR1<ffi::F32>& scale, bf16* sum,
                             ffi::ResultBufferR2<ffi::BF16>& y, float eps) {
  const auto size = x.dimensions();
  const auto* in = data<const bf16>(x);
  auto* out = data<bf16>(*y);
  if (!aligned(in, residual, scale.typed_data(), sum, out)) return misaligned();
  return launch_forward<kAdd>(stream, in, residual, scale.typed_data(), sum, out, size[0],
                              size[1] / kPack, eps);
}

template <bool kAdd>
inline ffi::Error backward_of(cudaStream_t stream, const ffi::BufferR2<ffi::BF16>& x,
                              const ffi::BufferR1<ffi::F32>& scale,
                              const ffi::BufferR2<ffi::BF16>& dy, const bf16* dsum,
                              ffi::ResultBufferR2<ffi::BF16>& dx,
                              ffi::ResultBufferR1<ffi::F32>& dscale,
                              ffi::ResultBufferR2<ffi::F32>& partial, float eps) {
  const auto size = x.dimensions();
  const int64_t num_partials = partial->dimensions()[0];
  const auto *in = data<const bf16>(x), *grad = data<const bf16>(dy);
  auto* out = data<bf16>(*dx);
  if (!aligned(in, grad, dsum, out, partial->typed_data())) return misaligned();
  const auto first =
      launch_backward<kAdd>(stream, in, scale.typed_data(), grad, dsum, out, partial->typed_data(),
                            num_partials, size[0], size[1] / kPack, eps);
  if (first.failure()) return first;
  return launch(stream, sum_partials, divide_up(size[1], kWarp), kNormThreads,
                partial->typed_data(), dscale->typed_data(), num_partials, size[1]);
}

inline ffi::Error RmsNormForward(cudaStream_t stream, ffi::BufferR2<ffi::BF16> x,
                                 ffi::BufferR1<ffi::F32> scale, ffi::ResultBufferR2<ffi::BF16> y,
                                 float eps) {
  return forward_of<false>(stream, x, nullptr, scale, nullptr, y, eps);
}

inline ffi::Error AddRmsNormForward(cudaStream_t stream, ffi::BufferR2<ffi::BF16> x,
                                    ffi::BufferR2<ffi::BF16> residual,
                                    ffi::BufferR1<ffi::F32> scale,
                                    ffi::ResultBufferR2<ffi::BF16> sum,
                                    ffi::ResultBufferR2<ffi::BF16> y, float eps) {
  return forward_of<true>(stream, x, data<const bf16>(residual), scale, data<bf16>(*sum), y, eps);
}

inline ffi::Error RmsNormBackward(cudaStream_t stream, ffi::BufferR2<ffi::BF16> x,
                                  ffi::BufferR1<ffi::F32> scale, ffi::BufferR2<ffi::BF16> dy,
                                  ffi::ResultBufferR2<ffi::BF16> dx,
                                  ffi::ResultBufferR1<ffi::F32> dscale,
                                  ffi::ResultBufferR2<ffi::F32> partial, float eps) {
  return backward_of<false>(stream, x, scale, dy, nullptr, dx, dscale, partial, eps);
}

inline ffi::Error AddRmsNormBackward(cudaStream_t stream, ffi::BufferR2<ffi::BF16> sum,
                                     ffi::BufferR1<ffi::F32> scale, ffi::BufferR2<ffi::BF16> dy,
                                     ffi::BufferR2<ffi::BF16> dsum,
                                     ffi::ResultBufferR2<ffi::BF16> dx,
                                     ffi::ResultBufferR1<ffi::F32> dscale,
                                     ffi::ResultBufferR2<ffi::F32> partial, float eps) {
  return backward_of<true>(stream, sum, scale, dy, data<const bf16>(dsum), dx, dscale, partial,
                           eps);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_rms_norm_forward, RmsNormForward,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::BF16>>()
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_add_rms_norm_forward, AddRmsNormForward,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::BF16>>()
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_add_rms_norm_backward, AddRmsNormBackward,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Ret<ffi::BufferR2<ffi::BF16>>()
                                  .Ret<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace ats
