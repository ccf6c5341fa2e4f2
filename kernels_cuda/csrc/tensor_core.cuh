// Instructions of sm_80: asynchronous copies to shared memory, loads of 8x8 matrices from there,
// products of small matrices. The layouts are those of the PTX ISA, section "Warp-level matrix
// instructions". Included by <...>, so that a host can put its own version in front.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ats {

using SharedAddress = uint32_t;

// What a kernel was given at its launch; 128-byte aligned.
__device__ inline SharedAddress dynamic_shared() {
  extern __shared__ __align__(128) unsigned char memory[];
  return static_cast<SharedAddress>(__cvta_generic_to_shared(memory));
}

// Start to copy 16 bytes, or to write 16 zero bytes where `wanted` is false.
__device__ inline void copy_async(SharedAddress to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(wanted ? 16 : 0));
}

// Close a group of this thread's copies, empty or not.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;"); }

// Wait for this thread's copies, but not for the last `kPending` groups.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements: lane 8 i + r has the address of row r of matrix i. Of each,
// a lane gets elements 2 (lane % 4) and the next of row lane / 4; of its transpose if kTransposed.
template <bool kTransposed>
__device__ inline void load_matrices(uint32_t (&to)[4], SharedAddress from) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
  }
}

// c += a b, of 16 x 16 and 16 x 8.
template <class T>
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ inline void multiply_add<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void multiply_add<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded to T, the first in the low half.
template <class T>
__device__ inline uint32_t round_two(float low, float high);

template <>
__device__ inline uint32_t round_two<__nv_bfloat16>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

template <>
__device__ inline uint32_t round_two<__half>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

}  // namespace ats
