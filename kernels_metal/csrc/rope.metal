// A thread a pair (i, i + pairs) of one head. `sign` is -1 in the backward pass: the transpose of a
// rotation turns back.
kernel void rope(device Element* y, const device Element* x, const device float* cosine,
                 const device float* sine, constant long& heads, constant long& pairs,
                 constant float& sign, uint at [[thread_position_in_grid]]) {
  const long pair = at % pairs;
  const long head = at / pairs;  // of all tokens
  const long angle = head / heads * pairs + pair;
  const long first = head * 2 * pairs + pair;
  const long second = first + pairs;
  const float c = cosine[angle], s = sign * sine[angle];
  const float a = float(x[first]), b = float(x[second]);
  y[first] = Element(a * c - b * s);
  y[second] = Element(b * c + a * s);
}
