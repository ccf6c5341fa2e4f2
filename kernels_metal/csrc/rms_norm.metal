// A threadgroup a row, in whole SIMD groups. Sums are in float.

kernel void rms_norm(device Element* y, const device Element* x, const device float* scale,
                     constant long& width, constant float& eps,
                     uint row [[threadgroup_position_in_grid]],
                     uint thread_of_row [[thread_position_in_threadgroup]],
                     uint threads [[threads_per_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]],
                     uint simd [[simdgroup_index_in_threadgroup]],
                     uint simds [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[kMaxSimds];
  x += row * width;
  y += row * width;
  float squares = 0.0f;
  for (long i = thread_of_row; i < width; i += threads) squares += float(x[i]) * float(x[i]);
  const float mean = group_sum(squares, partial, lane, simd, simds) / float(width);
  const float inverse_rms = rsqrt(mean + eps);
  for (long i = thread_of_row; i < width; i += threads) {
    y[i] = Element(float(x[i]) * inverse_rms * scale[i]);
  }
}

// `normal` is x * inverse_rms in float: the gradient of the scale is the sum of dy * normal.
kernel void rms_norm_backward(device Element* dx, device float* normal, const device Element* x,
                              const device float* scale, const device Element* dy, constant long& width,
                              constant float& eps, uint row [[threadgroup_position_in_grid]],
                              uint thread_of_row [[thread_position_in_threadgroup]],
                              uint threads [[threads_per_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]],
                              uint simd [[simdgroup_index_in_threadgroup]],
                              uint simds [[simdgroups_per_threadgroup]]) {
  threadgroup float partial_squares[kMaxSimds];
  threadgroup float partial_products[kMaxSimds];
  x += row * width;
  dy += row * width;
  dx += row * width;
  normal += row * width;
  float squares = 0.0f, products = 0.0f;
  for (long i = thread_of_row; i < width; i += threads) {
    squares += float(x[i]) * float(x[i]);
    products += float(dy[i]) * scale[i] * float(x[i]);
  }
  const float mean = group_sum(squares, partial_squares, lane, simd, simds) / float(width);
  const float product = group_sum(products, partial_products, lane, simd, simds) / float(width);
  const float inverse_rms = rsqrt(mean + eps);
  for (long i = thread_of_row; i < width; i += threads) {
    const float here = float(x[i]) * inverse_rms;
    normal[i] = here;
    dx[i] = Element(inverse_rms * (float(dy[i]) * scale[i] - here * (product * inverse_rms)));
  }
}
