// Looks at a list of tensors as Python code would, in one pass: for the host side only.

#pragma once

#include <Python.h>

namespace smart_autocast {

// look_at_tensors(tensors, types): 0 if `tensors` is no list or tuple, or one of them not exactly
// of a type in the tuple `types`; else 2 if one of them requires grad, and 1 if none does.
inline PyObject* look_at_tensors(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyTuple_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError,
                    "look_at_tensors: expected tensors, and a tuple of their types");
    return nullptr;
  }
  PyObject* const tensors = args[0];
  PyObject* const types = args[1];
  if (!PyList_CheckExact(tensors) && !PyTuple_CheckExact(tensors)) {
    return PyLong_FromLong(0);
  }
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  bool trained = false;
  // The size is asked for anew: an attribute is Python code to whoever replaced it.
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(tensors); ++i) {
    PyObject* const tensor = PySequence_Fast_GET_ITEM(tensors, i);
    auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    Py_ssize_t place = 0;
    while (place < PyTuple_GET_SIZE(types) && PyTuple_GET_ITEM(types, place) != type) {
      ++place;
    }
    if (place == PyTuple_GET_SIZE(types)) {
      return PyLong_FromLong(0);
    }
    if (!trained) {
      Py_INCREF(tensor);
      PyObject* const requires_grad = PyObject_GetAttr(tensor, name);
      Py_DECREF(tensor);
      if (requires_grad == nullptr) {
        return nullptr;
      }
      trained = requires_grad == Py_True;
      Py_DECREF(requires_grad);
    }
  }
  return PyLong_FromLong(trained ? 2 : 1);
}

}  // namespace smart_autocast
