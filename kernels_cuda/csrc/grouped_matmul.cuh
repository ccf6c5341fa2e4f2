// One matmul for each group of consecutive rows, on the tensor cores of sm_80 and later.
//
// A block computes one tile of a result, 128 rows by kCols columns, with a warp for every 64 x 64.
// Both operands come through shared memory, kDepth deep at a time, kStages of them in flight; a
// warp reads its next fragments while it multiplies. Blocks find their rows from the sizes of the
// groups, so the host need not know these. Every sum has one order: reruns give the same bits.
#pragma once

#include <tensor_core.cuh>

#include "common.cuh"

namespace ats {

constexpr int kTileRows = 128, kTileDepth = 32, kWarpTile = 64;
constexpr int kFragments = kWarpTile / 16;  // of 16 rows or columns
constexpr int kStrip = 16;  // tiles of rows that blocks running at once share

template <int kCols>
struct Shape {
  static constexpr int kThreads = kTileRows / kWarpTile * (kCols / kWarpTile) * kWarp;
  static constexpr int kPerMultiprocessor = 256 / kThreads;  // blocks: 255 registers a thread
  static constexpr int kStages = kCols == 128 ? 3 : 4;
  static constexpr int kBytes = kStages * (kTileRows + kCols) * kTileDepth * 2;
};

// One operand of a block: how its threads copy a tile of it, and its warps read that.
//
// A tile is kExtent rows (of a) or columns (of b) by kTileDepth. If kAlong, memory runs along the
// depth and so do the tile's rows in shared memory; if not, each of these rows is one step of the
// depth. Rows are of 16-byte chunks, in an order that changes from row to row, so that eight rows
// of one chunk lie in different banks.
template <class T, int kExtent, bool kAlong, int kThreads>
struct Operand {
  static constexpr int kRows = kAlong ? kExtent : kTileDepth;
  static constexpr int kChunks = (kAlong ? kTileDepth : kExtent) / kPack;
  static constexpr int kBytes = kRows * kChunks * 16;
  static constexpr int kRowsAtOnce = kThreads / kChunks;

  const T* from;  // this thread's first chunk of the next tile
  int64_t width;  // of a row in memory
  int extent_left, depth_left;  // from that chunk on
  int to;         // where this thread writes within a tile, in bytes
  int place;      // where this lane reads

  __device__ static int swizzle(int row) { return kAlong ? row >> 1 & 3 : row & 7; }

  // Args: the tile's first element; width of a row; valid elements of extent and depth from there;
  // first of the warp's rows or columns; is_a: the order of 8x8 matrices that the product wants.
  __device__ Operand(const T* tile, int64_t width, int extent, int depth, int first, bool is_a)
      : width(width) {
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    from = tile + row * width + chunk * kPack;
    extent_left = extent - (kAlong ? row : chunk * kPack);
    depth_left = depth - (kAlong ? chunk * kPack : row);
    to = (row * kChunks + (chunk ^ swizzle(row))) * 16;
    const int lane = threadIdx.x % kWarp, r = lane % 8;
    const int upper_extent = (is_a ? lane / 8 : lane / 16) % 2;
    const int upper_depth = (is_a ? lane / 16 : lane / 8) % 2;
    place = kAlong ? (first + 8 * upper_extent + r) * kChunks + (upper_depth ^ swizzle(r))
                   : (8 * upper_depth + r) * kChunks + first / kPack + (upper_extent ^ r);
    place *= 16;
  }

  // Start to copy the next tile; zeros past the valid part, whatever lies there.
  __device__ void copy(SharedAddress tile) {
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
      const int row = i * kRowsAtOnce;
      const bool wanted = kAlong ? row < extent_left && depth_left > 0
                                 : extent_left > 0 && row < depth_left;
      // A multiple of 8 rows apart: swizzled alike.
      copy_async(tile + to + row * kChunks * 16, from + row * width, wanted);
    }
    from += kAlong ? kTileDepth : kTileDepth * width;
    depth_left -= kTileDepth;
  }

  // The warp's fragments, 16 of the extent each, at one of the tile's two halves of depth.
  __device__ void load(uint32_t (&to)[kFragments][4], SharedAddress tile, int half) const {
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      const int at = kAlong ? (place ^ 32 * half) + i * 16 * kChunks * 16
                            : (place ^ 32 * i) + half * 16 * kChunks * 16;
      load_matrices<!kAlong>(to[i], tile + at);
    }
  }
};

using Accumulators = float[kFragments][2 * kFragments][4];

template <class T>
__device__ inline void multiply_fragments(Accumulators& sums, const uint32_t (&a)[kFragments][4],
                                          const uint32_t (&b)[kFragments][4]) {
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * kFragments; ++j) {
      multiply_add<T>(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
}

// Of four lanes, lane q gets word q of each: word[i] of lane q <-> word[q] of lane i.
__device__ inline void transpose_quad(uint32_t (&word)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int low = step == 1 ? 2 * i : i, high = low + step;
      const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? word[low] : word[high], step);
      if (upper) word[low] = got;
      else word[high] = got;
    }
  }
}

// Write the part of the warp's 64 x 64 that lies in `rows` x `cols`; `cols` a multiple of 8.
template <class T>
__device__ inline void store_sums(const Accumulators& sums, T* out, int64_t width, int rows,
                                  int cols) {
  struct alignas(16) Chunk {
    uint32_t word[4];
  };
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < 2 * kFragments; ++i) {  // 8 rows each
    const int row = 8 * i + lane / 4;
#pragma unroll
    for (int j = 0; j < 2 * kFragments; j += 4) {  // 8 columns each
      Chunk chunk;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float* pair = sums[i / 2][j + k] + i % 2 * 2;
        chunk.word[k] = round_two<T>(pair[0], pair[1]);
      }
      transpose_quad(chunk.word);
      const int col = (j + lane % 4) * kPack;
      if (row < rows && col < cols) *reinterpret_cast<Chunk*>(out + row * width + col) = chunk;
    }
  }
}

// One tile: out = a b, [rows, depth] by [depth, cols], of which at most kTileRows x kCols are taken.
// The pointers are those of the tile's first elements; `depth` may be 0.
template <class T, bool kAlongA, bool kAlongB, int kCols>
__device__ inline void multiply_tile(const T* a, int64_t a_width, const T* b, int64_t b_width, T* out,
                                     int64_t out_width, int rows, int depth, int cols) {
  constexpr int kThreads = Shape<kCols>::kThreads, kStages = Shape<kCols>::kStages;
  using A = Operand<T, kTileRows, kAlongA, kThreads>;
  using B = Operand<T, kCols, kAlongB, kThreads>;
  constexpr int kStage = A::kBytes + B::kBytes;
  const int warp = threadIdx.x / kWarp, warps_down = kTileRows / kWarpTile;
  const int first_row = warp % warps_down * kWarpTile, first_col = warp / warps_down * kWarpTile;
  A left(a, a_width, rows, depth, first_row, true);
  B right(b, b_width, cols, depth, first_col, false);
  const SharedAddress begin = dynamic_shared(), end = begin + kStages * kStage;
  const int steps = (depth + kTileDepth - 1) / kTileDepth;

  SharedAddress write = begin, read = begin;
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s, write += kStage) {
    if (s < steps) {
      left.copy(write);
      right.copy(write + A::kBytes);
    }
    commit_copies();
  }
  wait_for_copies<kStages - 2>();
  __syncthreads();
  uint32_t left_now[kFragments][4], left_next[kFragments][4];
  uint32_t right_now[kFragments][4], right_next[kFragments][4];
  left.load(left_now, read, 0);
  right.load(right_now, read + A::kBytes, 0);
  Accumulators sums = {};
  for (int step = 0; step < steps; ++step) {
    left.load(left_next, read, 1);
    right.load(right_next, read + A::kBytes, 1);
    // Into the stage of the step before, which all warps had read by the last barrier.
    if (step + kStages - 1 < steps) {
      left.copy(write);
      right.copy(write + A::kBytes);
    }
    commit_copies();
    write = read;
    read = read + kStage == end ? begin : read + kStage;
    multiply_fragments<T>(sums, left_now, right_now);
    wait_for_copies<kStages - 2>();  // the next step's copies have arrived
    __syncthreads();
    left.load(left_now, read, 0);  // after the last step: of no use, and no harm
    right.load(right_now, read + A::kBytes, 0);
    multiply_fragments<T>(sums, left_next, right_next);
  }
  store_sums(sums, out + first_row * out_width + first_col, out_width, rows - first_row,
             cols - first_col);
}

// Which tile a block computes: down a strip of kStrip tiles of rows, then the next column.
struct Position {
  int row, col;
};

__device__ inline Position position(int block, int row_tiles, int col_tiles) {
  const int first = block / (kStrip * col_tiles) * kStrip;
  const int height = row_tiles - first < kStrip ? row_tiles - first : kStrip;
  const int within = block - first * col_tiles;
  return {first + within % height, within / height};
}

__device__ inline int size_of(const int* sizes, int group) {
  return sizes[group] > 0 ? sizes[group] : 0;
}

__device__ inline int at_most(int x, int most) { return x < most ? x : most; }

// x [rows, depth], w [groups, depth, cols] or, kTransposed, [groups, cols, depth] -> [rows, cols].
template <class T, bool kTransposed, int kCols>
__global__ void __launch_bounds__(Shape<kCols>::kThreads, Shape<kCols>::kPerMultiprocessor)
    grouped_matmul(const T* __restrict__ x, const T* __restrict__ w,
                   const int* __restrict__ sizes, T* __restrict__ out, int groups, int rows,
                   int depth, int cols, int row_tiles, int col_tiles) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  const Position tile = position(blockIdx.x, row_tiles, col_tiles);
  // Every group has its own tiles of rows, and so has the rest after the last one.
  int group = 0, start = 0, tiles_before = 0, size, tiles;
  for (;; ++group) {
    size = group < groups ? size_of(sizes, group) : rows - start;
    tiles = (size + kTileRows - 1) / kTileRows;
    if (group == groups || tile.row < tiles_before + tiles) break;
    start += size;
    tiles_before += tiles;
  }
  const int64_t row = start + int64_t(tile.row - tiles_before) * kTileRows;
  const int end = at_most(start + size, rows), col = tile.col * kCols;
  if (row >= end) return;
  const bool rest = group == groups;
  const T* matrix = w + (rest ? 0 : int64_t(group) * depth * cols);
  multiply_tile<T, true, kTransposed, kCols>(
      x + row * depth, depth, matrix + col * (kTransposed ? int64_t(depth) : 1),
      kTransposed ? depth : cols, out + row * cols + col, cols, static_cast<int>(end - row),
      rest ? 0 : depth, cols - col);
#endif
}

// x [rows, height], dy [rows, cols] -> [groups, height, cols]: x^T dy over the rows of each group.
template <class T, int kCols>
__global__ void __launch_bounds__(Shape<kCols>::kThreads, Shape<kCols>::kPerMultiprocessor)
    grouped_matmul_dw(const T* __restrict__ x, const T* __restrict__ dy,
                      const int* __restrict__ sizes, T* __restrict__ out, int rows, int height,
                      int cols, int row_tiles, int col_tiles) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  const int group = blockIdx.x / (row_tiles * col_tiles);
  const Position tile =
      position(blockIdx.x - group * row_tiles * col_tiles, row_tiles, col_tiles);
  int start = 0;
  for (int g = 0; g < group; ++g) start += size_of(sizes, g);
  start = at_most(start, rows);
  const int size = at_most(size_of(sizes, group), rows - start);
  const int row = tile.row * kTileRows, col = tile.col * kCols;
  multiply_tile<T, false, false, kCols>(
      x + int64_t(start) * height + row, height, dy + int64_t(start) * cols + col, cols,
      out + (int64_t(group) * height + row) * cols + col, cols, height - row, size, cols - col);
#endif
}

template <class Kernel, class... Arguments>
inline ffi::Error launch_tiles(cudaStream_t stream, Kernel kernel, int64_t blocks, int threads,
                               int bytes, Arguments... arguments) {
  const auto ready = prepare(kernel, 80, bytes);
  if (ready.failure()) return ready;
  return launch_shared(stream, kernel, blocks, threads, bytes, arguments...);
}

struct MatmulCall {
  cudaStream_t stream;
  const void *a, *b;
  const int* sizes;
  void* out;
  int groups, rows, inner, cols;  // inner: depth of the products, or rows of a weight gradient
};

template <class T, bool kTransposed, int kCols>
inline ffi::Error start_matmul(const MatmulCall& c) {
  // No more tiles than this, however the rows fall into groups and the rest after them.
  const int64_t row_tiles = (c.rows + (c.groups + int64_t(1)) * (kTileRows - 1)) / kTileRows;
  const int64_t col_tiles = divide_up(c.cols, kCols);
  return launch_tiles(c.stream, grouped_matmul<T, kTransposed, kCols>, row_tiles * col_tiles,
                      Shape<kCols>::kThreads, Shape<kCols>::kBytes, static_cast<const T*>(c.a),
                      static_cast<const T*>(c.b), c.sizes, static_cast<T*>(c.out), c.groups, c.rows,
                      c.inner, c.cols, row_tiles, col_tiles);
}

template <class T, int kCols>
inline ffi::Error start_dw(const MatmulCall& c) {
  const int64_t row_tiles = divide_up(c.inner, kTileRows), col_tiles = divide_up(c.cols, kCols);
  return launch_tiles(c.stream, grouped_matmul_dw<T, kCols>, c.groups * row_tiles * col_tiles,
                      Shape<kCols>::kThreads, Shape<kCols>::kBytes, static_cast<const T*>(c.a),
                      static_cast<const T*>(c.b), c.sizes, static_cast<T*>(c.out), c.rows, c.inner,
                      c.cols, row_tiles, col_tiles);
}

template <class T>
inline ffi::Error start_matmul(const MatmulCall& call, bool transposed, bool wide) {
  if (transposed) {
    return wide ? start_matmul<T, true, 256>(call) : start_matmul<T, true, 128>(call);
  }
  return wide ? start_matmul<T, false, 256>(call) : start_matmul<T, false, 128>(call);
}

template <class T>
inline ffi::Error start_dw(const MatmulCall& call, bool wide) {
  return wide ? start_dw<T, 256>(call) : start_dw<T, 128>(call);
}

using Matrix = ffi::AnyBuffer;
using Sizes = ffi::Buffer<ffi::S32>;

inline MatmulCall matmul_call(cudaStream_t stream, Matrix& a, Matrix& b, Sizes& sizes, Matrix& out) {
  return {stream,
          a.untyped_data(),
          b.untyped_data(),
          data<const int>(sizes),
          out.untyped_data(),
          static_cast<int>(sizes.element_count()),
          static_cast<int>(a.dimensions()[0]),
          static_cast<int>(a.dimensions()[1]),
          static_cast<int>(out.dimensions().back())};
}

// The caller in Python has checked shapes and dtypes.
inline ffi::Error GroupedMatmul(cudaStream_t stream, Matrix x, Matrix w, Sizes sizes,
                                ffi::Result<Matrix> out, bool transpose_w, int64_t block_n) {
  const MatmulCall call = matmul_call(stream, x, w, sizes, *out);
  if (!aligned(call.a, call.b, call.out)) return misaligned();
  return x.element_type() == ffi::BF16 ? start_matmul<bf16>(call, transpose_w, block_n == 256)
                                       : start_matmul<__half>(call, transpose_w, block_n == 256);
}

inline ffi::Error GroupedMatmulDw(cudaStream_t stream, Matrix x, Matrix dy, Sizes sizes,
                                  ffi::Result<Matrix> out, int64_t block_n) {
  const MatmulCall call = matmul_call(stream, x, dy, sizes, *out);
  if (!aligned(call.a, call.b, call.out)) return misaligned();
  return x.element_type() == ffi::BF16 ? start_dw<bf16>(call, block_n == 256)
                                       : start_dw<__half>(call, block_n == 256);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_grouped_matmul, GroupedMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<Matrix>()
                                  .Arg<Matrix>()
                                  .Arg<Sizes>()
                                  .Ret<Matrix>()
                                  .Attr<bool>("transpose_w")
                                  .Attr<int64_t>("block_n"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_grouped_matmul_dw, GroupedMatmulDw,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<Matrix>()
                                  .Arg<Matrix>()
                                  .Arg<Sizes>()
                                  .Ret<Matrix>()
                                  .Attr<int64_t>("block_n"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace ats
