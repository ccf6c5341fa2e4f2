// Put in front of the other files here, and of `using Element = float;`, `half` or `bfloat`.
#include <metal_stdlib>
using namespace metal;

constant constexpr uint kLanes = 32;     // of a SIMD group, on every Apple GPU
constant constexpr uint kMaxSimds = 32;  // a threadgroup has at most 1,024 threads

// The sum of `value` over a threadgroup, in every thread of it. `partial` holds one number for each
// SIMD group, and is this call's alone: a second sum needs another.
inline float group_sum(float value, threadgroup float* partial, uint lane, uint simd, uint simds) {
  const float sum = simd_sum(value);
  if (lane == 0) partial[simd] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0.0f;
  for (uint i = 0; i < simds; ++i) total += partial[i];
  return total;
}
