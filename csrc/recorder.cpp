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

#ifdef OVERFLOWSTAT_WITH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;
#endif

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

std::string describe(const at::Tensor& tensor, Readable& readable) {
  // A hook meets tensors in any state: everything that would make reading the memory wrong.
  if (!tensor.defined()) return "the tensor is undefined";
  if (tensor.layout() != at::kStrided || tensor.is_nested()) return "the tensor has no strided layout";
  const std::optional<Format> format = format_of(tensor.scalar_type());
  if (!format) return std::string("no number format for dtype ") + c10::toString(tensor.scalar_type());
  if (!tensor.is_cpu() && !(tensor.is_cuda() && kWithCuda)) {
    return "no native pass for device " + tensor.device().str();
  }
  if (!tensor.has_storage()) return "the tensor has no memory of its own";

  Layout& layout = readable.memory.layout;
  layout = tensor.is_contiguous() ? Layout{{}, tensor.numel(), 1}
                                  : make_layout(tensor.sizes().data(), tensor.strides().data(), tensor.dim());
  readable.memory.data = layout.count > 0 ? tensor.const_data_ptr() : nullptr;
  readable.memory.format = *format;
  readable.device = tensor.device();
  readable.negated = tensor.is_neg();
  if (layout.count == 0) return "";
  const int64_t extent = layout.dimensions.empty() ? layout.count - 1 : layout.extent();
  const auto needed = static_cast<uint64_t>(tensor.storage_offset() + extent + 1) * tensor.element_size();
  if (readable.memory.data == nullptr || tensor.storage().nbytes() < needed) {
    return "the tensor's storage has been freed";
  }
  return "";
}

std::shared_ptr<Reading> record(std::vector<Readable> tensors, bool detail) {
  std::vector<Reading::Entry> entries(tensors.size());
  std::vector<size_t> on_cpu, on_cuda;
  for (size_t i = 0; i < tensors.size(); ++i) {
    entries[i] = {
        tensors[i].memory.format, tensors[i].memory.layout.repeat, tensors[i].negated, StatsRow{}, "", std::nullopt};
    (tensors[i].device.is_cpu() ? on_cpu : on_cuda).push_back(i);
  }

  std::vector<cpu::Tensor> list;
  list.reserve(on_cpu.size());
  for (const size_t i : on_cpu) list.push_back(std::move(tensors[i].memory));
  std::vector<StatsRow> rows(list.size());
  std::vector<Detail> details(detail ? list.size() : 0);
  cpu::reduce(list.data(), list.size(), rows.data(), detail ? details.data() : nullptr);
  for (size_t k = 0; k < on_cpu.size(); ++k) {
    entries[on_cpu[k]].row = rows[k];
    if (detail) entries[on_cpu[k]].detail = details[k];
  }
  const auto reading = std::make_shared<Reading>(std::move(entries));

#ifdef OVERFLOWSTAT_WITH_CUDA
  if (!on_cuda.empty()) {
    std::vector<cuda::Source> sources;
    for (const size_t i : on_cuda) {
      const auto& [memory, device, negated] = tensors[i];
      sources.push_back({memory.data, device.index(), memory.format, &memory.layout, i});
    }
    cuda::recorder().launch(sources, *reading, detail);
  }
#endif
  return reading;
}

uint64_t current_capture() {
#ifdef OVERFLOWSTAT_WITH_CUDA
  return cuda::current_capture();
#else
  return 0;
#endif
}

}  // namespace overflowstat
