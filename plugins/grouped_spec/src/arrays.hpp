// Arrays of Python as the binding reads them, through numpy's own C API: conversions by nanobind, a dozen per
// call, would cost more than a draft does.
#pragma once

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL seer_grouped_spec_numpy
#ifndef SEER_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <numpy/arrayobject.h>

#include <string>

#include "errors.hpp"

namespace seer {

namespace nb = nanobind;

[[noreturn]] inline void refuse(const char* name, const std::string& fact, const std::string& remedy) {
  throw IndexError(std::string(name) + " " + fact + "; pass " + remedy);
}

// `object` as a C-contiguous numpy array of that type and rank, or an error that names it.
inline PyArrayObject* array(nb::handle object, const char* name, int type, int rank, bool written = false) {
  auto* found = reinterpret_cast<PyArrayObject*>(object.ptr());
  const bool is_array = PyArray_Check(object.ptr());
  if (is_array && PyArray_TYPE(found) == type && PyArray_NDIM(found) == rank && PyArray_IS_C_CONTIGUOUS(found) &&
      PyArray_ISBEHAVED_RO(found) && (!written || PyArray_ISWRITEABLE(found))) {
    return found;
  }
  const std::string kind = type == NPY_FLOAT64 ? "float64" : type == NPY_FLOAT32 ? "float32" : "int32";
  const std::string wanted = "a C-contiguous numpy array of " + kind + " with " + std::to_string(rank) +
                             (rank == 1 ? " dimension" : " dimensions");
  if (!is_array) refuse(name, "is a " + nb::cast<std::string>(object.type().attr("__name__")), wanted);
  if (PyArray_TYPE(found) != type || PyArray_ISBYTESWAPPED(found)) {
    nb::object dtype = nb::borrow(reinterpret_cast<PyObject*>(PyArray_DESCR(found)));
    refuse(name, "holds " + nb::cast<std::string>(nb::str(dtype)), wanted);
  }
  if (PyArray_NDIM(found) != rank) {
    refuse(name, "has rank " + std::to_string(PyArray_NDIM(found)), wanted);
  }
  if (!PyArray_IS_C_CONTIGUOUS(found) || !PyArray_ISALIGNED(found)) refuse(name, "is not contiguous", wanted);
  refuse(name, "is read-only", "an array that can be written to");
}

template <class T>
T* data(PyArrayObject* of) {
  return static_cast<T*>(PyArray_DATA(of));
}

inline size_t dimension(PyArrayObject* of, int axis) { return size_t(PyArray_DIM(of, axis)); }

// A 1-d array with at least `size` items.
inline int32_t* vector(nb::handle object, const char* name, size_t size, bool written = false) {
  PyArrayObject* found = array(object, name, NPY_INT32, 1, written);
  if (dimension(found, 0) < size) {
    refuse(name, "has " + std::to_string(dimension(found, 0)) + " items for " + std::to_string(size) + " requests",
           "one item per request");
  }
  return data<int32_t>(found);
}

// A 2-d array with at least `rows` rows and exactly `columns` columns.
template <class T>
T* matrix(nb::handle object, const char* name, size_t rows, size_t columns) {
  PyArrayObject* found = array(object, name, std::is_same_v<T, float> ? NPY_FLOAT32 : NPY_INT32, 2, true);
  if (dimension(found, 0) < rows || dimension(found, 1) != columns) {
    refuse(name, "has shape (" + std::to_string(dimension(found, 0)) + ", " + std::to_string(dimension(found, 1)) + ")",
           "(" + std::to_string(rows) + ", " + std::to_string(columns) + "), as out is");
  }
  return data<T>(found);
}

// A parameter within its range, or an error that names it.
template <class T>
T within(const char* name, T value, T least, T most) {
  if (value >= least && value <= most) return value;  // false for NaN too
  nb::object shown = nb::cast(value), from = nb::cast(least), to = nb::cast(most);
  refuse(name, "is " + nb::cast<std::string>(nb::repr(shown)),
         nb::cast<std::string>(nb::repr(from)) + " to " + nb::cast<std::string>(nb::repr(to)));
}

}  // namespace seer
