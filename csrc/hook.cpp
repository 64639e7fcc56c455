#include "hook.h"

#include <structmember.h>

#include <exception>

namespace py = pybind11;

namespace overflowstat {
namespace {

// A type of CPython's own making and not pybind11's, since it is called at every module call: looking up __call__ and
// an overload takes half a microsecond, which is a percent of a small module's forward.
struct Hook {
  PyObject_HEAD;
  vectorcallfunc vectorcall;
  FrameLog* log;  // in log_object
  size_t number;
  PyObject *log_object, *module, *look, *other, *copied, *not_scripted;
};

template <class Visit>
void for_each_object(Hook* hook, Visit visit) {
  for (PyObject** object :
       {&hook->log_object, &hook->module, &hook->look, &hook->other, &hook->copied, &hook->not_scripted}) {
    visit(*object);
  }
}

PyObject* call(PyObject* self, PyObject* const* args, size_t count, PyObject* names) {
  auto* hook = reinterpret_cast<Hook*>(self);
  const Py_ssize_t given = PyVectorcall_NARGS(count);
  if ((given != 3 && given != 4) || names != nullptr) {
    PyErr_SetString(PyExc_TypeError,
                    "a forward hook takes a module, its arguments, perhaps those by name, and its output");
    return nullptr;
  }
  try {
    if (hook->module == nullptr) Py_RETURN_NONE;  // the garbage collector has been here
    if (args[0] != hook->module) {
      py::handle(hook->other)(py::handle(args[0]));
    } else if (hook->log->call(hook->number, args[0], args[1], given == 4 ? args[2] : nullptr, args[given - 1])) {
      py::handle(hook->look)();
    }
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  int stop = 0;
  for_each_object(reinterpret_cast<Hook*>(self), [&](PyObject* object) {
    if (stop == 0 && object != nullptr) stop = visit(object, arg);
  });
  return stop;
}

int clear(PyObject* self) {
  for_each_object(reinterpret_cast<Hook*>(self), [](PyObject*& object) { Py_CLEAR(object); });
  return 0;
}

void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* reduce(PyObject* self, PyObject*) { return Py_NewRef(reinterpret_cast<Hook*>(self)->copied); }

PyObject* name(PyObject* self, void*) {
  PyErr_SetObject(PyExc_AttributeError, reinterpret_cast<Hook*>(self)->not_scripted);
  return nullptr;
}

PyObject* make_type() {
  static PyMethodDef methods[] = {{"__reduce__", reduce, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
  static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Hook, vectorcall), READONLY, nullptr},
                                  {nullptr, 0, 0, 0, nullptr}};
  static PyGetSetDef attributes[] = {{"__name__", name, nullptr, nullptr, nullptr},
                                     {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                                {Py_tp_methods, methods},
                                {Py_tp_members, members},
                                {Py_tp_getset, attributes},
                                {0, nullptr}};
  static PyType_Spec spec{"overflowstat._C.OverflowstatHook", sizeof(Hook), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return type;
}

}  // namespace

py::object make_hook(py::object log, size_t number, py::object module, py::object look, py::object other,
                     py::object copied, py::object not_scripted) {
  static PyObject* const type = make_type();
  auto* hook = PyObject_GC_New(Hook, reinterpret_cast<PyTypeObject*>(type));
  if (hook == nullptr) throw py::error_already_set();
  hook->vectorcall = call;
  hook->log = &log.cast<FrameLog&>();
  hook->number = number;
  hook->log_object = log.release().ptr();
  hook->module = module.release().ptr();
  hook->look = look.release().ptr();
  hook->other = other.release().ptr();
  hook->copied = copied.release().ptr();
  hook->not_scripted = not_scripted.release().ptr();
  PyObject_GC_Track(hook);
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(hook));
}

}  // namespace overflowstat
