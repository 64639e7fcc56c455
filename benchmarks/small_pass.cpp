// What csrc/cpu/reduce.h takes for one small tensor, called from C++ as hooks do it.

#include <torch/extension.h>

#include <chrono>
#include <vector>

#include "cpu/reduce.h"

// Seconds for each of `count` float32 tensors of `elements`, in a call of its own; the fastest of `rounds`.
double seconds_each(int64_t count, int64_t elements, int64_t rounds) {
  using namespace overflowstat;
  const at::Tensor memory = at::ones({count, elements});
  std::vector<cpu::Tensor> tensors;
  for (int64_t i = 0; i < count; ++i) {
    tensors.push_back({memory.const_data_ptr<float>() + i * elements, Format::kFloat32, Layout{{}, elements, 1}});
  }
  std::vector<StatsRow> rows(count);
  double fastest = 1e9;
  for (int64_t round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < count; ++i) cpu::reduce(&tensors[i], 1, &rows[i]);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    fastest = std::min(fastest, took.count() / count);
  }
  for (const StatsRow& row : rows) TORCH_CHECK(row.finite_abs_max == 0x3f800000, "ones have the magnitude of one");
  return fastest;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("seconds_each", &seconds_each); }
