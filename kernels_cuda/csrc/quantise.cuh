// Casts to 8 bits that also transpose: both operands of an 8-bit matmul lie along its contraction.
#pragma once

#include <cuda_fp8.h>

#include "common.cuh"

namespace ats {

constexpr int kBlockColumns = 64, kBlockRows = 128;
constexpr int kRowsOfThread = 4;  // a thread packs as many rows of a column into a word
constexpr int kQuantiseThreads = kBlockColumns / kPack * (kBlockRows / kRowsOfThread);
constexpr int kWordsOfColumn = kBlockRows / kRowsOfThread;  // in shared memory
constexpr int kWordsOfStore = 4;                            // 16 bytes of a column
static_assert(kBlockColumns / kPack * kWordsOfStore == kWordsOfColumn, "places stay in a column");

// To the nearest, ties to even; saturates what is finite, and makes NaN of what is not.
template <__nv_fp8_interpretation_t kFormat>
__device__ inline uint32_t two_of_8_bits(float a, float b) {
  const float2 pair = {fmaf(0.0f, a, a), fmaf(0.0f, b, b)};  // an infinity becomes NaN
  return __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, kFormat);
}

// A tile of x [rows, columns] over a scale. Words of a tile's column: four rows each, those of the
// columns of pack p at places xor 4 p, so that neither writing nor reading meets itself in a bank.
template <__nv_fp8_interpretation_t kFormat, bool kBoth>
__global__ void __launch_bounds__(kQuantiseThreads)
    quantise_transposed(const bf16* __restrict__ x, const float* __restrict__ scale,
                        uint8_t* __restrict__ transposed, uint8_t* __restrict__ straight,
                        int64_t rows, int64_t columns, int64_t tiles_of_row) {
  __shared__ uint4 stores[kBlockColumns * kWordsOfColumn / kWordsOfStore];
  auto* tile = reinterpret_cast<uint32_t*>(stores);
  const int64_t first_row = int64_t(blockIdx.x) / tiles_of_row * kBlockRows;
  const int64_t first_column = int64_t(blockIdx.x) % tiles_of_row * kBlockColumns;
  const float factor = 1.0f / *scale;  // exact: a power of two

  constexpr int kPacks = kBlockColumns / kPack;
  const int pack = threadIdx.x % kPacks, word = threadIdx.x / kPacks;
  const int64_t row = first_row + word * kRowsOfThread, column = first_column + pack * kPack;
  if (row < rows && column < columns) {
    uint32_t halves[kRowsOfThread][kPack / 2];  // two neighbours of a row in the low 16 bits
#pragma unroll
    for (int r = 0; r < kRowsOfThread; ++r) {
      const Pack<bf16> of_row = load(x, ((row + r) * columns + column) / kPack);
#pragma unroll
      for (int j = 0; j < kPack; j += 2)
        halves[r][j / 2] = two_of_8_bits<kFormat>(to_float(of_row.at[j]) * factor,
                                                  to_float(of_row.at[j + 1]) * factor);
      if (kBoth) {
        const uint2 eight = {halves[r][0] | halves[r][1] << 16, halves[r][2] | halves[r][3] << 16};
        *reinterpret_cast<uint2*>(straight + (row + r) * columns + column) = eight;
      }
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      uint32_t four = 0;
#pragma unroll
      for (int r = 0; r < kRowsOfThread; ++r)
        four |= (halves[r][j / 2] >> (j % 2 * 8) & 0xffu) << (8 * r);
      tile[(pack * kPack + j) * kWordsOfColumn + (word ^ pack * kWordsOfStore)] = four;
    }
  }
  __syncthreads();

  constexpr int kStores = kWordsOfColumn / kWordsOfStore;  // of a column
  for (int i = threadIdx.x; i < kBlockColumns * kStores; i += kQuantiseThreads) {
    const int of_tile = i / kStores, part = i % kStores;
    const int64_t from = first_row + part * kWordsOfStore * kRowsOfThread;
    if (first_column + of_tile >= columns || from >= rows) continue;
    *reinterpret_cast<uint4*>(transposed + (first_column + of_tile) * rows + from) =
        stores[of_tile * kStores + (part ^ of_tile / kPack)];
  }
}

template <bool kBoth>
inline ffi::Error quantise(cudaStream_t stream, ffi::Buffer<ffi::BF16> x,
                           ffi::Buffer<ffi::F32> scale, ffi::AnyBuffer transposed,
                           uint8_t* straight) {
  const int64_t rows = x.dimensions()[0], columns = x.dimensions()[1];
  const auto* from = data<const bf16>(x);
  auto* to = data<uint8_t>(transposed);
  if (!aligned(from, to, straight)) return misaligned();
  const bool wide_range = transposed.element_type() == ffi::F8E5M2;
  if (!wide_range && transposed.element_type() != ffi::F8E4M3FN)
    return ffi::Error::InvalidArgument("the kernel casts to F8E4M3FN or F8E5M2");
  const int64_t tiles_of_row = divide_up(columns, kBlockColumns);
  const auto kernel = wide_range ? quantise_transposed<__NV_E5M2, kBoth>
                                 : quantise_transposed<__NV_E4M3, kBoth>;
  return launch(stream, kernel, divide_up(rows, kBlockRows) * tiles_of_row, kQuantiseThreads, from,
                data<const float>(scale), to, straight, rows, columns, tiles_of_row);
}

inline ffi::Error QuantiseTransposed(cudaStream_t stream, ffi::Buffer<ffi::BF16> x,
                                     ffi::Buffer<ffi::F32> scale,
                                     ffi::Result<ffi::AnyBuffer> transposed) {
  return quantise<false>(stream, x, scale, *transposed, nullptr);
}

inline ffi::Error QuantiseBoth(cudaStream_t stream, ffi::Buffer<ffi::BF16> x,
                               ffi::Buffer<ffi::F32> scale, ffi::Result<ffi::AnyBuffer> straight,
                               ffi::Result<ffi::AnyBuffer> transposed) {
  return quantise<true>(stream, x, scale, *transposed, data<uint8_t>(*straight));
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_quantise_transposed, QuantiseTransposed,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_quantise_both, QuantiseBoth,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace ats
