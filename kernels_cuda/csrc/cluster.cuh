// Blocks that run at the same time and see each other's shared memory: clusters, of sm_90 and newer.
// Included by <...>, so that a host can put its own version in front.
#pragma once

#include <cooperative_groups.h>

namespace ats {

// The shared memory that this block was given at its launch; on older GPUs there is none of this.
template <class T>
__device__ inline T* cluster_memory() {
  extern __shared__ __align__(128) unsigned char memory[];
  return reinterpret_cast<T*>(memory);
}

// Where block `rank` of this cluster has what lies at `mine` here.
template <class T>
__device__ inline T* of_block([[maybe_unused]] T* mine, [[maybe_unused]] int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return cooperative_groups::this_cluster().map_shared_rank(mine, rank);
#else
  return nullptr;
#endif
}

// All threads of all blocks of the cluster meet. What threads that say so `wrote` to shared memory
// before is seen after; the others are spared waiting for their stores to global memory. It does not
// wait for loads either: what was read before must have been used.
__device__ inline void cluster_barrier([[maybe_unused]] bool wrote) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (wrote) asm volatile("fence.acq_rel.cluster;" ::: "memory");
  __syncwarp();
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

}  // namespace ats
