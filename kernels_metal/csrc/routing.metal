// A SIMD group a token; a lane holds every 32nd column. At most 32 choices: a lane keeps one.

kernel void route(device int* chosen, device float* weight, const device float* logits,
                  const device float* selection, constant long& columns, constant long& choices,
                  constant long& is_softmax, constant long& renormalize, constant float& scale,
                  uint token [[threadgroup_position_in_grid]],
                  uint lane [[thread_index_in_simdgroup]]) {
  logits += token * columns;
  selection += token * columns;
  float highest = -INFINITY;
  for (long e = lane; e < columns; e += kLanes) highest = max(highest, logits[e]);
  highest = simd_max(highest);
  float exponentials = 0.0f;
  for (long e = lane; e < columns; e += kLanes) exponentials += exp(logits[e] - highest);
  exponentials = simd_sum(exponentials);

  float last_value = INFINITY, own = 0.0f;
  int last_column = -1;
  for (int choice = 0; choice < choices; ++choice) {
    // The next one in falling order; the lower column goes first among equals.
    float best = -INFINITY;
    int column = INT_MAX;
    for (int e = lane; e < columns; e += kLanes) {
      const float value = selection[e];
      const bool is_left = value < last_value || (value == last_value && e > last_column);
      if (is_left && (column == INT_MAX || value > best)) {
        best = value;
        column = e;
      }
    }
    const bool found = column != INT_MAX;
    last_value = simd_max(found ? best : -INFINITY);
    last_column = simd_min(found && best == last_value ? column : INT_MAX);
    // NaN compares with nothing: no column is left, and the weight is NaN by its logits.
    const int taken = last_column == INT_MAX ? choice : last_column;
    const float score =
        is_softmax ? exp(logits[taken] - highest) / exponentials : 1.0f / (1.0f + exp(-logits[taken]));
    if (int(lane) == choice) {
      chosen[token * choices + choice] = taken;
      own = score;
    }
  }
  const float total = renormalize ? simd_sum(own) + 1e-20f : 1.0f;
  if (lane < choices) weight[token * choices + lane] = scale * own / total;
}
