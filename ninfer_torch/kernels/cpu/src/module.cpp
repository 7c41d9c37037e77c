// The Python module: integers and addresses in, nothing of torch. The caller owns every address and has checked the shapes.

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <new>

#include "driver.h"
#include "matrix_units.h"
#include "parallel.h"

namespace {

using namespace ninfer;

// Reads a call's arguments one after another; `ok` falls at the first that is missing or no integer.
class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t count) : values_(values), left_(count) {}

  int64_t integer() {
    if (!ok_) return 0;
    if (left_ == 0) {
      PyErr_SetString(PyExc_TypeError, "too few arguments");
      ok_ = false;
      return 0;
    }
    left_--;
    const long long value = PyLong_AsLongLong(*values_++);
    if (value == -1 && PyErr_Occurred()) ok_ = false;
    return value;
  }
  template <class T> T* address() { return reinterpret_cast<T*>(static_cast<uintptr_t>(integer())); }

  bool done() {
    if (ok_ && left_ != 0) {
      PyErr_SetString(PyExc_TypeError, "too many arguments");
      ok_ = false;
    }
    return ok_;
  }

 private:
  PyObject* const* values_;
  Py_ssize_t left_;
  bool ok_ = true;
};

struct Weight {
  int instruction_set, format;
  Matrix matrix;

  explicit Weight(Arguments& arguments) {
    instruction_set = int(arguments.integer());
    format = int(arguments.integer());
    for (const uint8_t*& plane : matrix.planes) plane = arguments.address<const uint8_t>();
    for (int64_t* field : {&matrix.rows, &matrix.columns, &matrix.row_begin, &matrix.parent_rows, &matrix.divisors})
      *field = arguments.integer();
  }
  bool valid() const {
    if (format >= 0 && format < kFormats && instruction_set >= 0 && instruction_set < kInstructionSets && supported(instruction_set))
      return true;
    PyErr_SetString(PyExc_ValueError, "unknown format or unsupported instruction set");
    return false;
  }
  const Kernels& kernels() const { return kernels_for(instruction_set, format); }
};

// Runs `work` without the interpreter lock and returns its result, or None.
template <class Work> PyObject* unlocked(const Work& work) {
  bool result = false, failed = false;
  PyThreadState* state = PyEval_SaveThread();
  try {
    result = work();
  } catch (...) {
    failed = true;
  }
  PyEval_RestoreThread(state);
  return failed ? PyErr_NoMemory() : PyBool_FromLong(result);
}

PyObject* py_set_grids(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments arguments(values, count);
  Grids read;
  for (const int8_t** table : {&read.iq4_nl, &read.even_signs, &read.signs, &read.iq2_xxs, &read.iq2_xs, &read.iq2_s, &read.iq3_xxs,
                               &read.iq3_s, &read.iq1_s})
    *table = arguments.address<const int8_t>();
  if (!arguments.done()) return nullptr;
  grids = read;
  Py_RETURN_NONE;
}

PyObject* py_supported(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments arguments(values, count);
  const int instruction_set = int(arguments.integer());
  if (!arguments.done()) return nullptr;
  return PyBool_FromLong(instruction_set >= 0 && instruction_set < kInstructionSets && supported(instruction_set));
}

PyObject* py_matrix_units(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!Arguments(values, count).done()) return nullptr;
  return PyBool_FromLong(has_matrix_units());
}

PyObject* py_dequantize(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments arguments(values, count);
  const Weight w(arguments);
  void* out = arguments.address<void>();
  const int dtype = int(arguments.integer()), threads = int(arguments.integer());
  if (!arguments.done() || !w.valid()) return nullptr;
  return unlocked([&] { return dequantize(w.kernels(), w.matrix, out, dtype, threads), true; });
}

PyObject* py_embedding(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments arguments(values, count);
  const Weight w(arguments);
  const int64_t* ids = arguments.address<const int64_t>();
  const int64_t n = arguments.integer();
  void* out = arguments.address<void>();
  const int dtype = int(arguments.integer()), threads = int(arguments.integer());
  if (!arguments.done() || !w.valid()) return nullptr;
  return unlocked([&] { return embedding(w.kernels(), w.matrix, ids, n, out, dtype, threads); });
}

PyObject* py_linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments arguments(values, count);
  const Weight w(arguments);
  const void* x = arguments.address<const void>();
  const int64_t m = arguments.integer();
  Output y{};
  y.data = arguments.address<void>();
  y.dtype = int(arguments.integer());
  y.bias = arguments.address<const void>();
  y.bias_dtype = int(arguments.integer());
  y.row_stride = w.matrix.rows;
  const bool int8 = arguments.integer() != 0, tiles = arguments.integer() != 0;
  const int threads = int(arguments.integer());
  if (!arguments.done() || !w.valid()) return nullptr;
  if (!tiles) return unlocked([&] { return linear(w.kernels(), w.matrix, x, m, y, int8, threads), true; });
  if (y.dtype != kBfloat16 || !has_matrix_units()) return PyErr_SetString(PyExc_ValueError, "no matrix units for these"), nullptr;
  return unlocked([&] { return linear_in_tiles(w.kernels(), w.matrix, x, m, y, threads), true; });
}

PyObject* py_expert_linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments arguments(values, count);
  const Weight w(arguments);
  const void* x = arguments.address<const void>();
  const int64_t tokens = arguments.integer();
  const int32_t* offsets = arguments.address<const int32_t>();
  const int64_t experts = arguments.integer();
  Output y{};
  y.data = arguments.address<void>();
  y.dtype = int(arguments.integer());
  const bool int8 = arguments.integer() != 0;
  const int threads = int(arguments.integer());
  if (!arguments.done() || !w.valid()) return nullptr;
  if (experts < 1) return PyErr_SetString(PyExc_ValueError, "no experts"), nullptr;
  y.row_stride = w.matrix.rows / experts;
  return unlocked([&] { return expert_linear(w.kernels(), w.matrix, x, tokens, offsets, experts, y, int8, threads); });
}

using Function = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef method(const char* name, Function function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

PyMethodDef methods[] = {
    method("set_grids", py_set_grids), method("supported", py_supported), method("matrix_units", py_matrix_units), method("dequantize", py_dequantize),
    method("embedding", py_embedding), method("linear", py_linear),       method("expert_linear", py_expert_linear),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  watch_forks();
  return PyModule_Create(&definition);
}
