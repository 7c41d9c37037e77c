// The CPU kernels without Python, for processors that an emulator stands for: reads requests from a file and writes results to another.
//
// A request is a record of numbers, the tables, three planes and the input, each preceded by its length in bytes.
#include <cstdio>
#include <cstring>
#include <vector>

#include "driver.h"

namespace {

using Buffer = std::vector<uint8_t>;

struct Request {
  int64_t operation, instruction_set, format, dtype, int8, threads, rows, columns, row_begin, parent_rows, divisors, count, result_bytes;
};

bool read_buffer(FILE* file, Buffer& buffer) {
  int64_t length;
  if (std::fread(&length, 8, 1, file) != 1) return false;
  buffer.resize(size_t(length));
  return length == 0 || std::fread(buffer.data(), size_t(length), 1, file) == 1;
}

}  // namespace

int main(int, char** names) {
  using namespace ninfer;
  FILE *in = std::fopen(names[1], "rb"), *out = std::fopen(names[2], "wb");
  if (!in || !out) return 2;
  Buffer tables[9], planes[3], input;
  for (Buffer& table : tables)
    if (!read_buffer(in, table)) return 3;
  const auto at = [&](int i) { return reinterpret_cast<const int8_t*>(tables[i].data()); };
  grids = {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8)};
  for (Request r; std::fread(&r, sizeof r, 1, in) == 1;) {
    for (Buffer& plane : planes)
      if (!read_buffer(in, plane)) return 4;
    if (!read_buffer(in, input)) return 5;
    if (!supported(int(r.instruction_set))) return 6;
    const Kernels& kernels = kernels_for(int(r.instruction_set), int(r.format));
    const Matrix w{{planes[0].data(), planes[1].data(), planes[2].data()}, r.rows, r.columns, r.row_begin, r.parent_rows, r.divisors};
    Buffer result(static_cast<size_t>(r.result_bytes));
    const int dtype = int(r.dtype), threads = int(r.threads);
    if (r.operation == 0) {
      dequantize(kernels, w, result.data(), dtype, threads);
    } else if (r.operation == 1) {
      linear(kernels, w, input.data(), r.count, {result.data(), r.rows, dtype, nullptr, 0}, r.int8 != 0, threads);
    } else {
      std::vector<int64_t> ids(static_cast<size_t>(r.count));
      std::memcpy(ids.data(), input.data(), input.size());
      if (!embedding(kernels, w, ids.data(), r.count, result.data(), dtype, threads)) return 7;
    }
    if (!result.empty() && std::fwrite(result.data(), result.size(), 1, out) != 1) return 8;
  }
  return std::fclose(out) ? 9 : 0;
}
