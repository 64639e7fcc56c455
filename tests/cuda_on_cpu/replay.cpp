// replay CASES ROWS: runs the launches of one file, without and with detail, and writes their rows to another. A
// program of its own, because the sanitizers want to be in a process from its start. Each tensor is a heap block of
// exactly its size.
//
// CASES holds 64-bit words: device, lane order, workers; then launches: their number of tensors and, for each tensor,
// format, rank, offset in bytes from an address that is a multiple of 16, bytes, sizes, strides (in elements), and the
// bytes, filled up to a whole word. Rank -1 is a dense tensor, with its number of elements as the only size. A launch
// of one tensor that has a rank is a strided one.

#include <fstream>
#include <iterator>
#include <memory>

#include "driver.cpp"

namespace {

class Reader {
 public:
  explicit Reader(const char* path) {
    std::ifstream file(path, std::ios::binary);
    content_.assign(std::istreambuf_iterator<char>(file), {});
  }
  bool at_end() const { return position_ >= content_.size(); }
  int64_t word() {
    int64_t value = 0;
    memcpy(&value, bytes(sizeof(value)), sizeof(value));
    return value;
  }
  std::vector<int64_t> words(int64_t count) {
    std::vector<int64_t> values;
    for (int64_t i = 0; i < count; ++i) values.push_back(word());
    return values;
  }
  const char* bytes(size_t count) {
    if (position_ + count > content_.size()) {
      fprintf(stderr, "replay: the file of cases ends early\n");
      exit(2);
    }
    position_ += count;
    return content_.data() + position_ - count;
  }

 private:
  std::vector<char> content_;
  size_t position_ = 0;
};

struct Tensor {
  uint32_t format = 0;
  int64_t rank = 0;
  std::vector<int64_t> sizes, strides;
  std::unique_ptr<char[]> memory;
  const void* data = nullptr;
};

Tensor read_tensor(Reader& reader) {
  Tensor tensor;
  tensor.format = static_cast<uint32_t>(reader.word());
  tensor.rank = reader.word();
  const int64_t offset = reader.word(), size = reader.word();
  tensor.sizes = reader.words(tensor.rank < 0 ? 1 : tensor.rank);
  tensor.strides = reader.words(tensor.rank < 0 ? 0 : tensor.rank);
  tensor.memory.reset(new char[offset + size]);  // operator new aligns to 16
  if (size > 0) memcpy(tensor.memory.get() + offset, reader.bytes(size), size);
  reader.bytes((8 - size % 8) % 8);
  tensor.data = tensor.memory.get() + offset;
  return tensor;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: replay CASES ROWS\n");
    return 2;
  }
  Reader reader(argv[1]);
  std::ofstream output(argv[2], std::ios::binary);
  const std::vector<int64_t> machine = reader.words(3);
  set_machine(static_cast<int>(machine[0]), static_cast<unsigned>(machine[1]), static_cast<unsigned>(machine[2]));
  while (!reader.at_end()) {
    std::vector<Tensor> tensors(reader.word());
    for (Tensor& tensor : tensors) tensor = read_tensor(reader);
    std::vector<StatsRow> rows(tensors.size()), detailed_rows(tensors.size());
    std::vector<Detail> details(tensors.size());
    int error = 0;
    if (tensors.size() == 1 && tensors[0].rank >= 0) {
      int64_t repeat = 0;
      const auto run = [&](StatsRow* row, Detail* detail) {
        return run_strided(tensors[0].data, tensors[0].format, tensors[0].rank, tensors[0].sizes.data(),
                           tensors[0].strides.data(), row, detail, &repeat);
      };
      error = run(rows.data(), nullptr);
      if (error == 0) error = run(detailed_rows.data(), details.data());
    } else {
      std::vector<const void*> data;
      std::vector<uint32_t> formats;
      std::vector<uint64_t> numels;
      for (const Tensor& tensor : tensors) {
        data.push_back(tensor.data);
        formats.push_back(tensor.format);
        numels.push_back(static_cast<uint64_t>(tensor.sizes[0]));
      }
      const auto run = [&](StatsRow* to, Detail* to_details) {
        return run_dense(tensors.size(), data.data(), formats.data(), numels.data(), to, to_details);
      };
      error = run(rows.data(), nullptr);
      if (error == 0) error = run(detailed_rows.data(), details.data());
    }
    if (error != 0) {
      fprintf(stderr, "replay: error %d\n", error);
      return 3;
    }
    if (!rows.empty() && memcmp(rows.data(), detailed_rows.data(), rows.size() * sizeof(StatsRow)) != 0) {
      fprintf(stderr, "replay: with detail the rows are others\n");
      return 4;
    }
    output.write(reinterpret_cast<const char*>(rows.data()), static_cast<int64_t>(rows.size() * sizeof(StatsRow)));
  }
  return 0;
}
