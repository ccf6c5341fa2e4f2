// silu(gate) * up and its gradients, elementwise.
#pragma once

#include "common.cuh"

namespace ats {

constexpr int kSwigluThreads = 256;

__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

__global__ void __launch_bounds__(kSwigluThreads)
    swiglu_forward(const bf16* __restrict__ gate, const bf16* __restrict__ up,
                   bf16* __restrict__ out, int64_t packs) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= packs) return;
  const Pack<bf16> g = load(gate, i), u = load(up, i);
  Pack<bf16> y;
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    const float a = to_float(g.at[j]);
    y.at[j] = from_float<bf16>(a * sigmoid(a) * to_float(u.at[j]));
  }
  store(out, i, y);
}

__global__ void __launch_bounds__(kSwigluThreads)
    swiglu_backward(const bf16* __restrict__ gate, const bf16* __restrict__ up,
                    const bf16* __restrict__ dout, bf16* __restrict__ dgate,
                    bf16* __restrict__ dup, int64_t packs) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= packs) return;
  const Pack<bf16> g = load(gate, i), u = load(up, i), dy = load(dout, i);
  Pack<bf16> dg, du;
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    const float a = to_float(g.at[j]), d = to_float(dy.at[j]), s = sigmoid(a);
    dg.at[j] = from_float<bf16>(d * to_float(u.at[j]) * s * (1.0f + a * (1.0f - s)));
    du.at[j] = from_float<bf16>(d * a * s);
  }
  store(dgate, i, dg);
  store(dup, i, du);
}

inline ffi::Error SwigluForward(cudaStream_t stream, ffi::Buffer<ffi::BF16> gate,
                                ffi::Buffer<ffi::BF16> up, ffi::ResultBuffer<ffi::BF16> out) {
  const int64_t packs = gate.element_count() / kPack;
  const auto *g = data<const bf16>(gate), *u = data<const bf16>(up);
  auto* y = data<bf16>(*out);
  if (!aligned(g, u, y)) return misaligned();
  return launch(stream, swiglu_forward, divide_up(packs, kSwigluThreads), kSwigluThreads, g, u, y,
                packs);
}

inline ffi::Error SwigluBackward(cudaStream_t stream, ffi::Buffer<ffi::BF16> gate,
                                 ffi::Buffer<ffi::BF16> up, ffi::Buffer<ffi::BF16> dout,
                                 ffi::ResultBuffer<ffi::BF16> dgate,
                                 ffi::ResultBuffer<ffi::BF16> dup) {
  const int64_t packs = gate.element_count() / kPack;
  const auto *g = data<const bf16>(gate), *u = data<const bf16>(up), *d = data<const bf16>(dout);
  auto *dg = data<bf16>(*dgate), *du = data<bf16>(*dup);
  if (!aligned(g, u, d, dg, du)) return misaligned();
  return launch(stream, swiglu_backward, divide_up(packs, kSwigluThreads), kSwigluThreads, g, u, d,
                dg, du, packs);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_swiglu_forward, SwigluForward,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::BF16>>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_swiglu_backward, SwigluBackward,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::BF16>>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace ats
