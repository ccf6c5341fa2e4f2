// One translation unit: the FFI headers take most of the compile time.
#include "adamw.cuh"
#include "grouped_matmul.cuh"
#include "quantise.cuh"
#include "rms_norm.cuh"
#include "rope.cuh"
#include "routing.cuh"
#include "rows.cuh"
#include "swiglu.cuh"
