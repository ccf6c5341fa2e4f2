// The instructions of kernels_cuda/tensor_core.cuh on the host, a function over a warp's lanes each.
//
// Asynchronous copies are made when they are waited for, the latest that is allowed, or, in the
// orders kReverse and kGreedy, at once: one finds a missing wait, the other a tile that is
// overwritten before all have read it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace ats {

using SharedAddress = uintptr_t;

inline SharedAddress dynamic_shared() {
  return reinterpret_cast<SharedAddress>(host::dynamic_shared());
}

inline void copy_async(SharedAddress to, const void* from, bool wanted) {
  if (to % 16 || (wanted && reinterpret_cast<uintptr_t>(from) % 16)) host::fail("misaligned copy");
  host::check_shared(to, 16);
  host::Copy copy{reinterpret_cast<void*>(to), wanted ? from : nullptr};
  if (host::order == host::kReverse || host::order == host::kGreedy) copy.make();
  else host::threads[host::current].open_copies.push_back(copy);
}

inline void commit_copies() {
  auto& thread = host::threads[host::current];
  thread.copies.push_back(std::move(thread.open_copies));
  thread.open_copies.clear();
}

template <int kPending>
void wait_for_copies() {
  auto& groups = host::threads[host::current].copies;
  while (groups.size() > kPending) {
    for (const host::Copy& copy : groups.front()) copy.make();
    groups.erase(groups.begin());
  }
}

template <bool kTransposed>
void load_matrices(uint32_t (&to)[4], SharedAddress from) {
  if (from % 16) host::fail("misaligned matrix row");
  host::check_shared(from, 16);
  uint64_t rows[host::kLanes];
  std::memcpy(rows, host::exchange(~0u, from), sizeof rows);
  const int lane = threadIdx.x % host::kLanes;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int k = 0; k < 2; ++k) {
      const int row = kTransposed ? lane % 4 * 2 + k : lane / 4;
      const int col = kTransposed ? lane / 4 : lane % 4 * 2 + k;
      pair[k] = reinterpret_cast<const uint16_t*>(rows[8 * i + row])[col];
    }
    to[i] = pair[0] | uint32_t(pair[1]) << 16;
  }
}

template <class T>
float value_of(uint16_t bits);
template <>
inline float value_of<__nv_bfloat16>(uint16_t bits) { return __bfloat162float({bits}); }
template <>
inline float value_of<__half>(uint16_t bits) { return float(host::from_bits<_Float16>(bits)); }

template <class T>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  // Of lane 4 i + j: the elements (i, 2 j), (i, 2 j + 1) of each 8x8 part of a, and of b transposed.
  uint32_t left[4][host::kLanes], right[2][host::kLanes];
  const uint64_t values[3] = {a[0] | uint64_t(a[1]) << 32, a[2] | uint64_t(a[3]) << 32,
                              b0 | uint64_t(b1) << 32};
  for (int i = 0; i < 3; ++i) {
    const uint64_t* shown = host::exchange(~0u, values[i]);
    uint32_t(*to)[host::kLanes] = i < 2 ? left + 2 * i : right;
    for (int lane = 0; lane < host::kLanes; ++lane) {
      to[0][lane] = uint32_t(shown[lane]);
      to[1][lane] = uint32_t(shown[lane] >> 32);
    }
  }
  const int lane = threadIdx.x % host::kLanes;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, upper_row = i / 2, col = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int at = k % 8 / 2, shift = k % 2 * 16;
      const uint32_t x = left[upper_row + k / 8 * 2][4 * row + at];
      const uint32_t y = right[k / 8][4 * col + at];
      c[i] += value_of<T>(uint16_t(x >> shift)) * value_of<T>(uint16_t(y >> shift));
    }
  }
}

template <class T>
uint32_t round_two(float low, float high);
template <>
inline uint32_t round_two<__nv_bfloat16>(float low, float high) {
  return __float2bfloat16_rn(low).bits | uint32_t(__float2bfloat16_rn(high).bits) << 16;
}
template <>
inline uint32_t round_two<__half>(float low, float high) {
  const auto bits = [](float x) { return uint32_t(host::to_bits(_Float16(x))); };
  return bits(low) | bits(high) << 16;
}

}  // namespace ats
