// Rows to their slots and back: gathers only, a warp for each row that is written.
// Letters: N tokens, K choices of a token, M slots, width in packs of 8 elements.
#pragma once

#include "common.cuh"

namespace ats {

constexpr int kRowThreads = 256;
constexpr int kRowsPerBlock = kRowThreads / kWarp;
constexpr int kMaxChoices = 8;

__device__ inline int64_t row_of_warp() {
  return int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp;
}

// out[m] = x[source[m]]; zero where source[m] is no token.
__global__ void __launch_bounds__(kRowThreads)
    take_rows(const bf16* __restrict__ x, const int* __restrict__ source, bf16* __restrict__ out,
              int64_t slots, int tokens, int64_t width) {
  const int64_t m = row_of_warp();
  if (m >= slots) return;
  const unsigned n = source[m];
  const bool filled = n < unsigned(tokens);
#pragma unroll 4
  for (int64_t i = threadIdx.x % kWarp; i < width; i += kWarp) {
    store(out, m * width + i, filled ? load(x, n * width + i) : zeros<bf16>());
  }
}

// out[n] = sum_k weight[n, k] * y[slot[n, k]], added in float32; without weights they are 1.
template <int K, bool kWeighted>
__global__ void __launch_bounds__(kRowThreads)
    sum_rows(const bf16* __restrict__ y, const float* __restrict__ weight,
             const int* __restrict__ slot, bf16* __restrict__ out, int64_t tokens, int64_t slots,
             int64_t width) {
  const int64_t n = row_of_warp();
  if (n >= tokens) return;
  int64_t row[K];
  float w[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int m = slot[n * K + k];
    row[k] = m >= 0 && m < slots ? m : -1;
    w[k] = kWeighted ? weight[n * K + k] : 1.0f;
  }
#pragma unroll 2
  for (int64_t i = threadIdx.x % kWarp; i < width; i += kWarp) {
    Pack<bf16> in[K];
#pragma unroll
    for (int k = 0; k < K; ++k) in[k] = row[k] < 0 ? zeros<bf16>() : load(y, row[k] * width + i);
    float sum[kPack] = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (row[k] < 0) continue;
#pragma unroll
      for (int j = 0; j < kPack; ++j) sum[j] += w[k] * to_float(in[k].at[j]);
    }
    Pack<bf16> result;
#pragma unroll
    for (int j = 0; j < kPack; ++j) result.at[j] = from_float<bf16>(sum[j]);
    store(out, n * width + i, result);
  }
}

// dy[m] = weight[c] * dout[n] and dweight[c] = <dout[n], y[m]>, for the choice c = n * K + k in slot
// m; dy is zero in empty slots. The caller has zeroed dweight, for choices without a slot.
__global__ void __launch_bounds__(kRowThreads)
    sum_rows_backward(const bf16* __restrict__ dout, const bf16* __restrict__ y,
                      const float* __restrict__ weight, const int* __restrict__ choice,
                      bf16* __restrict__ dy, float* __restrict__ dweight, int64_t slots,
                      int choices, int choices_per_token, int64_t width) {
  const int64_t m = row_of_warp();
  if (m >= slots) return;
  const int lane = threadIdx.x % kWarp;
  const unsigned c = choice[m];
  if (c >= unsigned(choices)) {
    for (int64_t i = lane; i < width; i += kWarp) store(dy, m * width + i, zeros<bf16>());
    return;
  }
  const int64_t n = c / choices_per_token;
  const float w = weight[c];
  float dot = 0.0f;
#pragma unroll 4
  for (int64_t i = lane; i < width; i += kWarp) {
    const Pack<bf16> d = load(dout, n * width + i), v = load(y, m * width + i);
    Pack<bf16> result;
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const float x = to_float(d.at[j]);
      dot += x * to_float(v.at[j]);
      result.at[j] = from_float<bf16>(w * x);
    }
    store(dy, m * width + i, result);
  }
  dot = warp_sum(dot);
  if (lane == 0) dweight[c] = dot;
}

template <bool kWeighted, int K = 1>
inline ffi::Error launch_sum_rows(cudaStream_t stream, int64_t choices, const bf16* y,
                                  const float* weight, const int* slot, bf16* out, int64_t tokens,
                                  int64_t slots, int64_t width) {
  if constexpr (K < kMaxChoices) {
    if (choices != K) {
      return launch_sum_rows<kWeighted, K + 1>(stream, choices, y, weight, slot, out, tokens, slots,
                                               width);
    }
  } else if (choices != K) {
    return ffi::Error::InvalidArgument("a token has 1 to 8 choices");
  }
  return launch(stream, sum_rows<K, kWeighted>, divide_up(tokens, kRowsPerBlock), kRowThreads, y,
                weight, slot, out, tokens, slots, width);
}

inline ffi::Error TakeRows(cudaStream_t stream, ffi::BufferR2<ffi::BF16> x,
                           ffi::BufferR1<ffi::S32> source, ffi::ResultBufferR2<ffi::BF16> out) {
  const auto size = x.dimensions();
  const auto* from = data<const bf16>(x);
  auto* to = data<bf16>(*out);
  if (!aligned(from, to)) return misaligned();
  const int64_t slots = source.element_count();
  return launch(stream, take_rows, divide_up(slots, kRowsPerBlock), kRowThreads, from,
                source.typed_data(), to, slots, size[0], size[1] / kPack);
}

template <bool kWeighted>
inline ffi::Error sum_rows_of(cudaStream_t stream, const ffi::BufferR2<ffi::BF16>& y,
                              const float* weight, const ffi::BufferR2<ffi::S32>& slot,
                              ffi::ResultBufferR2<ffi::BF16>& out) {
  const auto size = y.dimensions(), choices = slot.dimensions();
  const auto* from = data<const bf16>(y);
  auto* to = data<bf16>(*out);
  if (!aligned(from, to)) return misaligned();
  return launch_sum_rows<kWeighted>(stream, choices[1], from, weight, slot.typed_data(), to,
                                    choices[0], size[0], size[1] / kPack);
}

inline ffi::Error SumRows(cudaStream_t stream, ffi::BufferR2<ffi::BF16> y,
                          ffi::BufferR2<ffi::F32> weight, ffi::BufferR2<ffi::S32> slot,
                          ffi::ResultBufferR2<ffi::BF16> out) {
  return sum_rows_of<true>(stream, y, weight.typed_data(), slot, out);
}

inline ffi::Error TakeRowsBackward(cudaStream_t stream, ffi::BufferR2<ffi::BF16> dout,
                                   ffi::BufferR2<ffi::S32> slot,
                                   ffi::ResultBufferR2<ffi::BF16> dx) {
  return sum_rows_of<false>(stream, dout, nullptr, slot, dx);
}

inline ffi::Error SumRowsBackward(cudaStream_t stream, ffi::BufferR2<ffi::BF16> dout,
                                  ffi::BufferR2<ffi::BF16> y, ffi::BufferR2<ffi::F32> weight,
                                  ffi::BufferR1<ffi::S32> choice,
                                  ffi::ResultBufferR2<ffi::BF16> dy,
                                  ffi::ResultBufferR2<ffi::F32> dweight) {
  const auto size = y.dimensions();
  const auto *d = data<const bf16>(dout), *v = data<const bf16>(y);
  auto* to = data<bf16>(*dy);
  if (!aligned(d, v, to)) return misaligned();
  const auto zeroed = check(
      cudaMemsetAsync(dweight->typed_data(), 0, dweight->size_bytes(), stream), "cudaMemsetAsync");
  if (zeroed.failure()) return zeroed;
  return launch(stream, sum_rows_backward, divide_up(size[0], kRowsPerBlock), kRowThreads, d, v,
                weight.typed_data(), choice.typed_data(), to, dweight->typed_data(), size[0],
                weight.element_count(), weight.dimensions()[1], size[1] / kPack);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_take_rows, TakeRows,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::BF16>>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_sum_rows, SumRows,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::BF16>>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_take_rows_backward, TakeRowsBackward,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::BF16>>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_sum_rows_backward, SumRowsBackward,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR2<ffi::BF16>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::BF16>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace ats
