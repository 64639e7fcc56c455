// Found before the header of this name in tests/cuda_on_cpu, all of which it has but for one thing: a launch is handed
// to whoever runs the kernel, with the arguments as the launcher made them and the memory that they say it may use.
#pragma once

#define cudaLaunchKernelEx cuda_on_cpu_launch
#include "../cuda_on_cpu/cuda_runtime.h"
#undef cudaLaunchKernelEx

#include <dlfcn.h>

#include <cstring>

#include "cuda/reduce.h"
#include "layout.h"

namespace overflowstat::cuda {
struct Workspace;
}

namespace ptx_on_cpu {

struct Region {
  uint64_t address, size, writable;
};
struct Argument {
  const void* address;
  uint64_t size;
};
struct Launch {
  const char* kernel;  // its mangled name, the same in PTX
  uint64_t blocks, threads;
  const Argument* arguments;
  uint64_t argument_count;
  const Region* regions;
  uint64_t region_count;
};
using Run = int (*)(const Launch*);
inline Run run = nullptr;

// What the arguments of one launch say of memory. Rows go to a copy: the host sees them once their launch is done, in
// the order that the device's fences (which have no effect where the kernel is run) give them: a tensor's last slot
// first.
class Memory {
 public:
  explicit Memory(bool detail) : slots_each_(overflowstat::slots_each(detail)) {}

  void add(const overflowstat::cuda::TensorList& list) {
    const bool in_table = list.count > overflowstat::cuda::kInlineTensors;
    if (in_table) add(list.table, list.count * sizeof(*list.table), false);
    for (uint32_t t = 0; t < list.count; ++t) {
      const overflowstat::cuda::DenseTensor& tensor = in_table ? list.table[t] : list.inlined[t];
      add(tensor.data, tensor.numel * overflowstat::element_size(tensor.format), false);
    }
    copy_.resize(list.count * slots_each_);
  }
  void add(const overflowstat::cuda::StridedTensor& tensor) {
    int64_t extent = tensor.numel > 0 ? 1 : 0;
    for (int32_t d = 0; d < tensor.rank; ++d) extent += (tensor.sizes[d] - 1) * tensor.strides[d];
    add(tensor.data, extent * overflowstat::element_size(tensor.format), false);
    copy_.resize(slots_each_);
  }
  void add(overflowstat::cuda::Workspace* workspace) {
    add(workspace, overflowstat::cuda::workspace_bytes(copy_.size()), true);
  }
  void add(overflowstat::StampedRow*& rows) {
    rows_ = std::exchange(rows, copy_.data());
    memcpy(static_cast<void*>(copy_.data()), rows_, copy_.size() * sizeof(*rows_));
    add(rows, copy_.size() * sizeof(*rows), true);
  }
  void add(uint64_t) {}  // a stamp

  const std::vector<Region>& regions() const { return regions_; }

  void publish() const {
    for (size_t n = 0; n < copy_.size(); ++n) {
      const size_t i = n - n % slots_each_ + (slots_each_ - 1 - n % slots_each_);
      rows_[i].row = copy_[i].row;
      if (cuda_on_cpu::on_system_fence) cuda_on_cpu::on_system_fence();
      rows_[i].stamp = copy_[i].stamp;
    }
  }

 private:
  void add(const void* address, uint64_t size, bool writable) {
    if (size > 0) regions_.push_back({reinterpret_cast<uint64_t>(address), size, writable});
  }
  const size_t slots_each_;
  std::vector<Region> regions_;
  std::vector<overflowstat::StampedRow> copy_;
  overflowstat::StampedRow* rows_ = nullptr;
};

}  // namespace ptx_on_cpu

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  Dl_info symbol{};
  if (dladdr(reinterpret_cast<const void*>(kernel), &symbol) == 0 || symbol.dli_sname == nullptr) {
    return cudaErrorInvalidValue;
  }
  return [&](std::decay_t<Parameters>... parameters) {
    ptx_on_cpu::Memory memory(strstr(symbol.dli_sname, "_detail") != nullptr);
    (memory.add(parameters), ...);
    const ptx_on_cpu::Argument list[] = {{&parameters, sizeof(parameters)}...};
    const ptx_on_cpu::Launch launch{symbol.dli_sname,      config->gridDim.x,       config->blockDim.x,     list,
                                    sizeof...(Parameters), memory.regions().data(), memory.regions().size()};
    const auto error = static_cast<cudaError_t>(ptx_on_cpu::run(&launch));
    if (error == cudaSuccess) memory.publish();
    cuda_on_cpu::last_grid = config->gridDim.x;
    return error;
  }(arguments...);
}

extern "C" inline __attribute__((used)) void set_run(ptx_on_cpu::Run run) { ptx_on_cpu::run = run; }
