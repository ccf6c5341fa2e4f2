// Rotary embedding: the pairs (i, i + H/2) of each head are turned by their token's angles.
#pragma once

#include "common.cuh"

namespace ats {

constexpr int kRopeThreads = 256;
constexpr int kRopeHeads = 4;  // of a thread, which reads its cosines and sines once for them

// A thread takes a pack of the first half of a head and that of the second half which turns with it,
// of several heads: each `strides` after the one before, so that neighbours' heads are adjacent.
// An item is what one thread does; the table has `packs` of them for a token.
__global__ void __launch_bounds__(kRopeThreads, 4)
    rotate(const bf16* __restrict__ x, const float* __restrict__ cosine,
           const float* __restrict__ sine, bf16* __restrict__ out, unsigned items, unsigned heads,
           unsigned strides, unsigned packs) {
  const unsigned item = blockIdx.x * kRopeThreads + threadIdx.x;
  if (item >= items) return;
  const unsigned i = item % packs, group = item / packs;  // 32 bits: wider division is slow
  const unsigned token = group / strides, first_head = group % strides;
  // In packs, of which a head has twice `packs`.
  const int64_t at = (int64_t(token) * heads + first_head) * 2 * packs + i;
  const int64_t stride = int64_t(strides) * 2 * packs;
  Words first[kRopeHeads], second[kRopeHeads];
#pragma unroll
  for (int n = 0; n < kRopeHeads; ++n) {
    if (first_head + n * strides >= heads) continue;
    first[n] = load_words(x, at + n * stride);
    second[n] = load_words(x, at + n * stride + packs);
  }
  const Pack<float> c = load(cosine, int64_t(token) * packs + i);
  const Pack<float> s = load(sine, int64_t(token) * packs + i);
#pragma unroll
  for (int n = 0; n < kRopeHeads; ++n) {
    if (first_head + n * strides >= heads) continue;
    float left[kPack], right[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const float a = element(first[n], j), b = element(second[n], j);
      left[j] = a * c.at[j] - b * s.at[j];
      right[j] = b * c.at[j] + a * s.at[j];
    }
    store(out, at + n * stride, words_of(left));
    store(out, at + n * stride + packs, words_of(right));
  }
}

inline ffi::Error Rope(cudaStream_t stream, ffi::BufferR4<ffi::BF16> x,
                       ffi::BufferR4<ffi::F32> cosine, ffi::BufferR4<ffi::F32> sine,
                       ffi::ResultBufferR4<ffi::BF16> out) {
  const auto size = x.dimensions();
  const int64_t heads = size[2], packs = size[3] / 2 / kPack;
  const int64_t strides = divide_up(heads, kRopeHeads), items = size[0] * size[1] * strides * packs;
  if (items > INT32_MAX) return ffi::Error::InvalidArgument("array too large: over 2^31 threads");
  const auto* from = data<const bf16>(x);
  auto* to = data<bf16>(*out);
  if (!aligned(from, cosine.typed_data(), sine.typed_data(), to)) return misaligned();
  return launch(stream, rotate, divide_up(items, kRopeThreads), kRopeThreads, from,
                cosine.typed_data(), sine.typed_data(), to, items, heads, strides, packs);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_rope, Rope,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::BufferR4<ffi::BF16>>()
                                  .Arg<ffi::BufferR4<ffi::F32>>()
                                  .Arg<ffi::BufferR4<ffi::F32>>()
                                  .Ret<ffi::BufferR4<ffi::BF16>>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace ats
