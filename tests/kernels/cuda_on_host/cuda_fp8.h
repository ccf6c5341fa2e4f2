// Casts to 8 bits on the host.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda_runtime.h"

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

// To the nearest, ties to even; what is too large, infinity too, becomes the largest number.
inline uint8_t host_8_bits(float value, __nv_fp8_interpretation_t format) {
  const int mantissa = format == __NV_E4M3 ? 3 : 2, bias = format == __NV_E4M3 ? 7 : 15;
  const float largest = format == __NV_E4M3 ? 448.0f : 57344.0f;
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return 0x7f;
  const float size = std::fmin(std::fabs(value), largest);
  int exponent = 0;
  std::frexp(size, &exponent);                                         // size < 2^exponent
  exponent = exponent - 1 < 1 - bias ? 1 - bias : exponent - 1;        // of subnormal numbers too
  const float units = std::nearbyint(std::ldexp(size, mantissa - exponent));
  if (units == 0) return sign;
  // A unit more in the field of the exponent is what a full mantissa carries over to.
  return sign | uint8_t(int(units) + ((exponent + bias - 1) << mantissa));
}

inline uint16_t __nv_cvt_float2_to_fp8x2(float2 pair, __nv_saturation_t,
                                         __nv_fp8_interpretation_t format) {
  return uint16_t(host_8_bits(pair.x, format) | host_8_bits(pair.y, format) << 8);
}
