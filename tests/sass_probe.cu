// The device code, and for each format a kernel of its own around the loop that the dense kernel has for it: in the
// machine code of the dense kernel nothing tells which loop is whose.

#include "cuda/reduce.cu"

namespace overflowstat::cuda {

template <Format kFormat>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    probe(const uint4* vectors, uint64_t count, Partial* partials) {
  partials[threadIdx.x] = with_format(kFormat, [&](auto format) {
    Accumulator<decltype(format)> acc;
    read(acc, Vectors<decltype(format)>{vectors, 0}, count);
    return acc.partial();
  });
}

#define OVERFLOWSTAT_PROBE(format) \
  template __global__ void probe<Format::format>(const uint4* vectors, uint64_t count, Partial* partials)
OVERFLOWSTAT_PROBE(kFloat64);
OVERFLOWSTAT_PROBE(kFloat32);
OVERFLOWSTAT_PROBE(kFloat16);
OVERFLOWSTAT_PROBE(kBfloat16);
OVERFLOWSTAT_PROBE(kFloat8E4m3fn);
OVERFLOWSTAT_PROBE(kFloat8E5m2);
OVERFLOWSTAT_PROBE(kFloat8E4m3fnuz);
OVERFLOWSTAT_PROBE(kFloat8E5m2fnuz);
OVERFLOWSTAT_PROBE(kFloat8E8m0fnu);
OVERFLOWSTAT_PROBE(kComplex128);
OVERFLOWSTAT_PROBE(kComplex64);
OVERFLOWSTAT_PROBE(kComplex32);
OVERFLOWSTAT_PROBE(kInt64);
OVERFLOWSTAT_PROBE(kInt32);
OVERFLOWSTAT_PROBE(kInt16);
OVERFLOWSTAT_PROBE(kInt8);
OVERFLOWSTAT_PROBE(kUint64);
OVERFLOWSTAT_PROBE(kUint32);
OVERFLOWSTAT_PROBE(kUint16);
OVERFLOWSTAT_PROBE(kUint8);
OVERFLOWSTAT_PROBE(kBool);

}  // namespace overflowstat::cuda
