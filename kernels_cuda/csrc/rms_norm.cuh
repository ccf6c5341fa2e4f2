// RMSNorm, and its gradients in one pass over the rows.
//
// Where a row fits into the registers of one warp, or of some lanes of one, those alone work on it:
// sums are shuffles, and no warp waits for another. That is every row in the forward pass. In the
// backward pass, whose threads also keep their columns' scale and their part of dscale, it is the
// narrow rows; a wide one takes a block. The gradient needs no saved statistics: mean(x^2) is summed
// again beside mean(dy * scale * x), from the same read.
#pragma once

#include "common.cuh"

namespace ats {

constexpr int kForwardThreads = 128;
constexpr int kMaxLanePacks = 32;  // of a lane, forward: rows of up to 32 * 32 * 8 elements
constexpr int kNormThreads = 256;  // backward; a block has fewer if a wide row needs fewer
constexpr int kNarrowRows = 2;     // that a lane has under way
constexpr int kMaxNormPacks = 4;   // of a thread, wide rows: up to 256 * 4 * 8 elements
constexpr int kSumThreads = 1024;
static_assert(kWarp * kPack <= kNormThreads, "a thread for each column of a narrow row");

// Rows at a time, forward, for P packs of a lane: with less under way the latency would show.
template <int P>
constexpr int kForwardRows = P < 4 ? 4 / P : 1;

// Blocks of a multiprocessor that the registers of a thread leave room for.
constexpr int kNarrowBlocks = 4;
constexpr int forward_blocks(int packs) { return packs <= 8 ? 8 : packs == 16 ? 5 : 3; }
constexpr int wide_blocks(int packs) { return packs == 1 ? 4 : packs == 2 ? 2 : 1; }

// Pack `i` of a row; zero past the end of the row or of the array.
__device__ inline Words words_of_row(const bf16* from, int64_t row, int64_t rows, int64_t width,
                                     int i) {
  return row < rows && i < width ? load_words(from, row * width + i) : Words{};
}

// y = x / rms(x) * scale. G lanes share a row, with P packs each; a group has several rows if P is
// small.
template <int G, int P>
__global__ void __launch_bounds__(kForwardThreads, forward_blocks(P))
    rms_norm_forward(const bf16* __restrict__ x, const float* __restrict__ scale,
                     bf16* __restrict__ y, int64_t rows, int64_t width, float eps) {
  constexpr int kRows = kForwardRows<P>, kGroups = kForwardThreads / G;
  const int64_t first = int64_t(blockIdx.x) * (kRows * kGroups) + threadIdx.x / G;
  const float inverse_dim = 1.0f / float(width * kPack);
  Words in[kRows][P];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int p = 0; p < P; ++p) {
      in[r][p] = words_of_row(x, first + r * kGroups, rows, width, threadIdx.x % G + p * G);
    }
  }
  float inverse_rms[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float total = 0.0f;
#pragma unroll
    for (int p = 0; p < P; ++p) {
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float value = element(in[r][p], j);
        total += value * value;
      }
    }
    inverse_rms[r] = rsqrtf(warp_sum<G>(total) * inverse_dim + eps);
  }
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const int i = threadIdx.x % G + p * G;
    if (i >= width) continue;
    const Pack<float> factors = load(scale, i);  // by all rows, so from the first-level cache
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r * kGroups;
      if (row >= rows) continue;
      float out[kPack];
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        out[j] = element(in[r][p], j) * inverse_rms[r] * factors.at[j];
      }
      store(y, row * width + i, words_of(out));
    }
  }
}

// dx = r * (dy * scale - x * r^2 * mean(dy * scale * x)) with r = 1 / rms(x); row b of `partial`
// [gridDim, dim] becomes the sum of dy * x * r over the rows of block b. G lanes share a row, with a
// pack each.
template <int G>
__global__ void __launch_bounds__(kNormThreads, kNarrowBlocks)
    rms_norm_backward_narrow(const bf16* __restrict__ x, const float* __restrict__ scale,
                             const bf16* __restrict__ dy, bf16* __restrict__ dx,
                             float* __restrict__ partial, int64_t rows, int64_t width, float eps) {
  constexpr int kGroups = kNormThreads / G, kRowsOfBlock = kNarrowRows * kGroups;
  __shared__ float sums[kNormThreads / kWarp][G * kPack];
  const int lane = threadIdx.x % G, warp = threadIdx.x / kWarp;
  const float inverse_dim = 1.0f / float(width * kPack);
  const Pack<float> factors = lane < width ? load(scale, lane) : zeros<float>();
  float dscale[kPack] = {};
  // All lanes of a warp go round together: they meet in the sums.
  for (int64_t start = int64_t(blockIdx.x) * kRowsOfBlock; start < rows;
       start += int64_t(gridDim.x) * kRowsOfBlock) {
    const int64_t first = start + threadIdx.x / G;
    Words in[kNarrowRows], grad[kNarrowRows];
#pragma unroll
    for (int n = 0; n < kNarrowRows; ++n) {
      in[n] = words_of_row(x, first + n * kGroups, rows, width, lane);
      grad[n] = words_of_row(dy, first + n * kGroups, rows, width, lane);
    }
#pragma unroll
    for (int n = 0; n < kNarrowRows; ++n) {
      float square = 0.0f, product = 0.0f;
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float value = element(in[n], j);
        square += value * value;
        product += element(grad[n], j) * factors.at[j] * value;
      }
      const float r = rsqrtf(warp_sum<G>(square) * inverse_dim + eps);
      const float slope = r * warp_sum<G>(product) * inverse_dim;
      const int64_t row = first + n * kGroups;
      if (row >= rows) continue;  // r is infinite there without eps, and 0 * r would be NaN
      float out[kPack];
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const float normal = element(in[n], j) * r, d = element(grad[n], j);
        out[j] = r * (d * factors.at[j] - normal * slope);
        dscale[j] += d * normal;
      }
      if (lane < width) store(dx, row * width + lane, words_of(out));
    }
  }
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
#pragma unroll
    for (int step = G; step < kWarp; step *= 2) {
      dscale[j] += __shfl_xor_sync(kAllLanes, dscale[j], step);
    }
    if (threadIdx.x % kWarp < G) sums[warp][lane * kPack + j] = dscale[j];
  }
  __syncthreads();
  const int column = threadIdx.x;
  if (column >= width * kPack) return;
  float sum = sums[0][column];
  for (int w = 1; w < kNormThreads / kWarp; ++w) sum += sums[w][column];
  partial[blockIdx.x * width * kPack + column] = sum;
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

// The same of wide rows: a block walks over them, and fetches the next row before it works on this
// one.
template <int P>
__global__ void __launch_bounds__(kNormThreads, wide_blocks(P))
    rms_norm_backward_wide(const bf16* __restrict__ x, const float* __restrict__ scale,
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

// dscale[d] = sum_b partial[b, d]: a warp takes 32 columns and every 32nd row.
__global__ void __launch_bounds__(kSumThreads)
    sum_partials(const float* __restrict__ partial, float* __restrict__ dscale, int64_t num_partials,
                 int64_t dim) {
  __shared__ float sums[kSumThreads / kWarp][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t column = int64_t(blockIdx.x) * kWarp + lane;
  float sum = 0.0f;
  if (column < dim) {
#pragma unroll 8
    for (int64_t b = warp; b < num_partials; b += kSumThreads / kWarp) {
      sum += partial[b * dim + column];
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= dim) return;
  for (int w = 1; w < kSumThreads / kWarp; ++w) sum += sums[w][lane];
  dscale[column] = sum;
}

// The least G, and then the least P, that hold rows of `width` packs.
template <int G = 1, int P = 1>
inline ffi::Error launch_forward(cudaStream_t stream, const bf16* x, const float* scale, bf16* y,
                                 int64_t rows, int64_t width, float eps) {
  if (width > G * P) {
    if constexpr (G < kWarp) {
      return launch_forward<2 * G, P>(stream, x, scale, y, rows, width, eps);
    } else if constexpr (P < kMaxLanePacks) {
      return launch_forward<G, 2 * P>(stream, x, scale, y, rows, width, eps);
    } else {
      return ffi::Error::InvalidArgument("rows of at most 8192 elements");
    }
  }
  constexpr int kRowsOfBlock = kForwardRows<P> * (kForwardThreads / G);
  return launch(stream, rms_norm_forward<G, P>, divide_up(rows, kRowsOfBlock), kForwardThreads, x,
                scale, y, rows, width, eps);
}

template <int P = 1>
inline ffi::Error launch_wide(cudaStream_t stream, const bf16* x, const float* scale,
                              const bf16* dy, bf16* dx, float* partial, int64_t num_partials,
                              int64_t rows, int64_t width, float eps) {
  if (width > P * kNormThreads) {
    if constexpr (P < kMaxNormPacks) {
      return launch_wide<2 * P>(stream, x, scale, dy, dx, partial, num_partials, rows, width, eps);
    } else {
      return ffi::Error::InvalidArgument("rows of at most 8192 elements");
    }
  }
  const int threads = int(divide_up(divide_up(width, P), kWarp) * kWarp);
  return launch(stream, rms_norm_backward_wide<P>, num_partials, threads, x, scale, dy, dx, partial,
                rows, width, eps);
}

template <int G = 1>
inline ffi::Error launch_backward(cudaStream_t stream, const bf16* x, const float* scale,
                                  const bf16* dy, bf16* dx, float* partial, int64_t num_partials,
                                  int64_t rows, int64_t width, float eps) {
  if (width > G) {
    if constexpr (G < kWarp) {
      return launch_backward<2 * G>(stream, x, scale, dy, dx, partial, num_partials, rows, width,
                                    eps);
    } else {
      return launch_wide(stream, x, scale, dy, dx, partial, num_partials, rows, width, eps);
    }
  }
  return launch(stream, rms_norm_backward_narrow<G>, num_partials, kNormThreads, x, scale, dy, dx,
                partial, rows, width, eps);
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
  if (!aligned(in, scale.typed_data(), grad, out, partial->typed_data())) return misaligned();
  const auto first = launch_backward(stream, in, scale.typed_data(), grad, out,
                                     partial->typed_data(), num_partials, size[0], size[1] / kPack,
                                     eps);
  if (first.failure()) return first;
  return launch(stream, sum_partials, divide_up(size[1], kWarp), kSumThreads,
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
