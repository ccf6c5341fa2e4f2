// One AdamW update that clips on the way.
#pragma once

#include "common.cuh"

namespace ats {

constexpr int kAdamThreads = 256;

struct AdamSettings {
  float b1, b2, eps, decay;
};

// What changes from step to step.
struct AdamStep {
  float clip, learning_rate, inverse_bias1, inverse_bias2;
};

// Returns the square of the direction that the parameter moved in.
template <class P, class G, class M, class V>
__device__ inline float adamw_element(P& p, G g, M& m, V& v, const AdamSettings& set,
                                      const AdamStep& step) {
  const float grad = to_float(g) * step.clip, param = to_float(p);
  const float mu = set.b1 * to_float(m) + (1.0f - set.b1) * grad;
  const float nu = set.b2 * to_float(v) + (1.0f - set.b2) * grad * grad;
  const float direction =
      mu * step.inverse_bias1 / (sqrtf(nu * step.inverse_bias2) + set.eps) + set.decay * param;
  p = from_float<P>(param - step.learning_rate * direction);
  m = from_float<M>(mu);
  v = from_float<V>(nu);
  return direction * direction;
}

// p, m and v may be the same arrays before and after. `rates`: clip, learning rate, 1 - b1^t,
// 1 - b2^t. partial[b] = sum of the squared direction over block b.
template <class P, class G, class M, class V>
__global__ void __launch_bounds__(kAdamThreads)
    adamw(const P* p, const G* g, const M* m, const V* v, const float* rates, P* p_out, M* m_out,
          V* v_out, float* partial, int64_t n, AdamSettings set) {
  __shared__ float scratch[kAdamThreads / kWarp];
  const AdamStep step = {rates[0], rates[1], 1.0f / rates[2], 1.0f / rates[3]};
  float squares[1] = {0.0f};
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n / kPack) {
    Pack<P> params = load(p, i);
    const Pack<G> grads = load(g, i);
    Pack<M> mu = load(m, i);
    Pack<V> nu = load(v, i);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      squares[0] += adamw_element(params.at[j], grads.at[j], mu.at[j], nu.at[j], set, step);
    }
    store(p_out, i, params);
    store(m_out, i, mu);
    store(v_out, i, nu);
  } else if (i == n / kPack) {  // fewer than a pack are left
    for (int64_t at = i * kPack; at < n; ++at) {
      P param = p[at];
      M mu = m[at];
      V nu = v[at];
      squares[0] += adamw_element(param, g[at], mu, nu, set, step);
      p_out[at] = param;
      m_out[at] = mu;
      v_out[at] = nu;
    }
  }
  block_sum(squares, scratch);
  if (threadIdx.x == 0) partial[blockIdx.x] = squares[0];
}

// Call `f` with a null pointer of the element type.
template <class F>
inline ffi::Error with_type(ffi::DataType dtype, F f) {
  if (dtype == ffi::F32) return f(static_cast<float*>(nullptr));
  if (dtype == ffi::BF16) return f(static_cast<bf16*>(nullptr));
  return ffi::Error::InvalidArgument("float32 or bfloat16 only");
}

inline ffi::Error Adamw(cudaStream_t stream, ffi::AnyBuffer param, ffi::AnyBuffer grad,
                        ffi::AnyBuffer mu, ffi::AnyBuffer nu, ffi::BufferR1<ffi::F32> rates,
                        ffi::Result<ffi::AnyBuffer> param_out, ffi::Result<ffi::AnyBuffer> mu_out,
                        ffi::Result<ffi::AnyBuffer> nu_out,
                        ffi::ResultBufferR1<ffi::F32> partial, float b1, float b2, float eps,
                        float decay) {
  if (!aligned(param.untyped_data(), grad.untyped_data(), mu.untyped_data(), nu.untyped_data(),
               param_out->untyped_data(), mu_out->untyped_data(), nu_out->untyped_data())) {
    return misaligned();
  }
  const int64_t n = param.element_count(), blocks = divide_up(divide_up(n, kPack), kAdamThreads);
  if (int64_t(partial->element_count()) != blocks) {
    return ffi::Error::InvalidArgument("adamw: the partial sums are not one a block");
  }
  const AdamSettings set = {b1, b2, eps, decay};
  return with_type(param.element_type(), [&](auto* p) {
    return with_type(grad.element_type(), [&](auto* g) {
      return with_type(mu.element_type(), [&](auto* m) {
        return with_type(nu.element_type(), [&](auto* v) {
          using P = std::remove_pointer_t<decltype(p)>;
          using G = std::remove_pointer_t<decltype(g)>;
          using M = std::remove_pointer_t<decltype(m)>;
          using V = std::remove_pointer_t<decltype(v)>;
          return launch(stream, adamw<P, G, M, V>, blocks, kAdamThreads, data<const P>(param),
                        data<const G>(grad), data<const M>(mu), data<const V>(nu),
                        rates.typed_data(), data<P>(*param_out), data<M>(*mu_out),
                        data<V>(*nu_out), partial->typed_data(), n, set);
        });
      });
    });
  });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ats_adamw, Adamw,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::BufferR1<ffi::F32>>()
                                  .Attr<float>("b1")
                                  .Attr<float>("b2")
                                  .Attr<float>("eps")
                                  .Attr<float>("decay"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace ats
