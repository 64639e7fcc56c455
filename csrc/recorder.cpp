#include "recorder.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "cpu/reduce.h"
#include "layout.h"

#ifdef OVERFLOWSTAT_WITH_CUDA
#include "cuda/recorder.h"
#endif

namespace overflowstat {
namespace {

Layout layout_of(const at::Tensor& tensor) {
  return make_layout(tensor.sizes().data(), tensor.strides().data(), tensor.dim());
}

// Everything that could make reading the memory wrong, since a hook meets tensors in any state.
void check_readable(const at::Tensor& tensor, const Layout& layout) {
  if (!tensor.defined()) throw std::invalid_argument("the tensor is undefined");
  if (!format_of(tensor.scalar_type())) {
    throw std::invalid_argument(std::string("no number format for dtype ") + c10::toString(tensor.scalar_type()));
  }
  if (layout.count == 0) return;
  const auto needed = static_cast<uint64_t>(tensor.storage_offset() + layout.extent() + 1) *
                      static_cast<uint64_t>(tensor.element_size());
  if (tensor.const_data_ptr() == nullptr || tensor.storage().nbytes() < needed) {
    throw std::invalid_argument("the tensor's storage has been freed");
  }
}

}  // namespace

std::optional<Format> format_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return Format::kFloat64;
    case at::kFloat: return Format::kFloat32;
    case at::kHalf: return Format::kFloat16;
    case at::kBFloat16: return Format::kBfloat16;
    case at::kFloat8_e4m3fn: return Format::kFloat8E4m3fn;
    case at::kFloat8_e5m2: return Format::kFloat8E5m2;
    case at::kFloat8_e4m3fnuz: return Format::kFloat8E4m3fnuz;
    case at::kFloat8_e5m2fnuz: return Format::kFloat8E5m2fnuz;
    case at::kFloat8_e8m0fnu: return Format::kFloat8E8m0fnu;
    case at::kComplexDouble: return Format::kComplex128;
    case at::kComplexFloat: return Format::kComplex64;
    case at::kComplexHalf: return Format::kComplex32;
    case at::kLong: return Format::kInt64;
    case at::kInt: return Format::kInt32;
    case at::kShort: return Format::kInt16;
    case at::kChar: return Format::kInt8;
    case at::kUInt64: return Format::kUint64;
    case at::kUInt32: return Format::kUint32;
    case at::kUInt16: return Format::kUint16;
    case at::kByte: return Format::kUint8;
    case at::kBool: return Format::kBool;
    default: return std::nullopt;
  }
}

std::shared_ptr<Reading> record(const std::vector<at::Tensor>& tensors) {
  std::vector<Layout> layouts;
  layouts.reserve(tensors.size());
  std::vector<size_t> on_cpu, on_cuda;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!tensor.defined() || tensor.layout() != at::kStrided) {
      throw std::invalid_argument("the tensor has no strided layout");
    }
    layouts.push_back(layout_of(tensor));
    check_readable(tensor, layouts.back());
    if (tensor.is_cpu()) {
      on_cpu.push_back(i);
    } else if (tensor.is_cuda()) {
      on_cuda.push_back(i);
    } else {
      throw std::invalid_argument("no native pass for device " + tensor.device().str());
    }
  }

  std::vector<cpu::Tensor> list;
  list.reserve(on_cpu.size());
  for (const size_t i : on_cpu) {
    const void* data = layouts[i].count > 0 ? tensors[i].const_data_ptr() : nullptr;
    list.push_back({data, *format_of(tensors[i].scalar_type()), layouts[i]});
  }
  std::vector<StatsRow> rows(list.size());
  cpu::reduce(list.data(), list.size(), rows.data());

  std::vector<Reading::Entry> entries(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    entries[i] = {*format_of(tensors[i].scalar_type()), layouts[i].repeat, tensors[i].is_neg(), StatsRow{}, ""};
  }
  for (size_t k = 0; k < on_cpu.size(); ++k) entries[on_cpu[k]].row = rows[k];
  const auto reading = std::make_shared<Reading>(std::move(entries));

  if (!on_cuda.empty()) {
#ifdef OVERFLOWSTAT_WITH_CUDA
    std::vector<cuda::Source> sources;
    for (const size_t i : on_cuda) {
      const void* data = layouts[i].count > 0 ? tensors[i].const_data_ptr() : nullptr;
      sources.push_back({data, tensors[i].device().index(), *format_of(tensors[i].scalar_type()), &layouts[i], i});
    }
    cuda::launch(sources, *reading);
#else
    throw std::invalid_argument("overflowstat was built without CUDA");
#endif
  }
  return reading;
}

}  // namespace overflowstat
