// kernels_cuda/cluster.cuh on the host. Kernels in clusters keep nothing in static shared memory, of
// which there is one for all blocks here.
#pragma once

#include <cuda_runtime.h>

namespace ats {

template <class T>
inline T* cluster_memory() {
  if (sizeof(T) > host::shared_bytes) host::fail("more shared memory than was asked for");
  return reinterpret_cast<T*>(host::dynamic_shared());
}

template <class T>
inline T* of_block(T* mine, int rank) {
  if (rank < 0 || unsigned(rank) >= host::cluster) host::fail("no such block in the cluster");
  if (host::has_left(rank)) host::fail("shared memory of a block that has ended");
  const char* theirs = host::dynamic_shared(rank);
  return reinterpret_cast<T*>(const_cast<char*>(theirs) +
                              (reinterpret_cast<char*>(mine) - host::dynamic_shared()));
}

inline void cluster_barrier(bool) { host::cluster_barrier(); }

}  // namespace ats
