// A thread an element; exp() of a large number is infinity, and the quotient 0.

inline float logistic(float x) { return 1.0f / (1.0f + exp(-x)); }

kernel void swiglu(device Element* y, const device Element* gate, const device Element* up,
                   uint i [[thread_position_in_grid]]) {
  const float g = float(gate[i]);
  y[i] = Element(g * logistic(g) * float(up[i]));
}

kernel void swiglu_backward(device Element* dgate, device Element* dup, const device Element* gate,
                            const device Element* up, const device Element* dy,
                            uint i [[thread_position_in_grid]]) {
  const float g = float(gate[i]), d = float(dy[i]);
  const float s = logistic(g);
  dgate[i] = Element(d * float(up[i]) * s * (1.0f + g * (1.0f - s)));
  dup[i] = Element(d * g * s);
}
