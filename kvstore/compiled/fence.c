/* A full fence: what this thread loaded and stored before the call comes before what it loads and
 * stores after it, for every other processor. `kvstore/compiled/fence.py` says who needs it.
 */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#ifndef SOURCE_CRC32
#define SOURCE_CRC32 0 /* of this file: the build says it (hatch_build.py) */
#endif

static PyObject *fence(PyObject *self, PyObject *none) {
    (void)self, (void)none;
#ifdef __aarch64__
    __asm__ volatile("dmb osh" ::: "memory"); /* for network cards and GPUs too */
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"fence", fence, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};

static int prepare(PyObject *module) {
    PyObject *crc = PyLong_FromUnsignedLong(SOURCE_CRC32);
    int failed = crc == NULL ? -1 : PyModule_AddObjectRef(module, "SOURCE_CRC32", crc);
    Py_XDECREF(crc);
    return failed;
}
static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_fence", NULL, 0, methods, slots, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__fence(void) { return PyModuleDef_Init(&definition); }
