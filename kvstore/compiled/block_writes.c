/* What a node writes for many blocks at once: their headers (kvstore/segment/header.py says what
 * one looks like, kvstore/segment/shm.py has the same in Python).
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "crc32.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "headers are written in place: they are little-endian"
#endif

enum {
    SUPERBLOCK_BYTES = 4096,
    HEADER_BYTES = 64,
    WORDS = HEADER_BYTES / 8,
    KEY_BYTES = 32,
    HINT_BYTES = 4,
    RESERVED = 1,
    SEALED = 2,
};
#ifndef SOURCE_CRC32
#define SOURCE_CRC32 0 /* of this file: the build says it (hatch_build.py) */
#endif
#define BITS(count) ((UINT64_C(1) << (count)) - 1)

typedef struct {
    char *head;
    uint64_t slots, hint_mask;
    uint32_t *hints;
} Headers;

/* A `Seal` of kvstore/core/events.py. */
typedef struct {
    uint64_t slot, generation, length, granule, kind, meta_length, checksum, namespace_id;
    const char *key;
} Block;

/* A whole number of a tuple, up to `most`; -1 with an exception. */
static int number(PyObject *row, Py_ssize_t at, uint64_t most, uint64_t *value) {
    PyObject *item = PyTuple_GetItem(row, at);
    if (item == NULL) return -1;
    *value = PyLong_AsUnsignedLongLong(item);
    if (*value == UINT64_MAX && PyErr_Occurred()) return -1;
    if (*value <= most) return 0;
    PyErr_Format(PyExc_ValueError, "item %zd of a write is %R: too large", at, item);
    return -1;
}

static int block_of(PyObject *row, Block *block) {
    char *key;
    Py_ssize_t key_bytes;
    PyObject *item = PyTuple_GetItem(row, 2);
    if (item == NULL || PyBytes_AsStringAndSize(item, &key, &key_bytes) < 0) return -1;
    if (key_bytes != KEY_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a key has 32 bytes");
        return -1;
    }
    block->key = key;
    if (number(row, 0, BITS(32), &block->slot) < 0) return -1;
    if (number(row, 1, BITS(48), &block->generation) < 0) return -1;
    if (number(row, 3, BITS(32), &block->length) < 0) return -1;
    if (number(row, 4, BITS(8), &block->granule) < 0) return -1;
    if (number(row, 5, BITS(8), &block->kind) < 0) return -1;
    if (number(row, 6, BITS(16), &block->meta_length) < 0) return -1;
    if (number(row, 7, UINT64_MAX, &block->checksum) < 0) return -1;
    return number(row, 8, BITS(32), &block->namespace_id);
}

static uint64_t *header_of(const Headers *headers, uint64_t slot) {
    if (slot < headers->slots) return (uint64_t *)(headers->head + SUPERBLOCK_BYTES + slot * HEADER_BYTES);
    PyErr_SetString(PyExc_IndexError, "no such slot");
    return NULL;
}

/* One header word, in a single store. */
static int mark(const Headers *headers, PyObject *write) {
    uint64_t slot, state, generation, granule, size;
    if (number(write, 0, BITS(32), &slot) < 0 || number(write, 1, BITS(8), &state) < 0) return -1;
    if (number(write, 2, BITS(48), &generation) < 0 || number(write, 3, BITS(8), &granule) < 0) return -1;
    if (number(write, 4, BITS(24), &size) < 0) return -1;
    uint64_t *header = header_of(headers, slot), word = generation << 16 | state;
    if (header == NULL) return -1;
    if (state == RESERVED) word = generation << 40 | size << 16 | granule << 8 | state;
    __atomic_store_n(&header[0], word, __ATOMIC_RELEASE);
    return 0;
}

static uint64_t place_of(const Headers *headers, const char *key) {
    uint32_t bits;
    memcpy(&bits, key + 8, sizeof bits);
    return bits & headers->hint_mask;
}

/* The hint that a key is in this slot: at its second place if a block whose hint is there too has
 * the first. */
static void hint(const Headers *headers, const Block *block) {
    uint64_t place = place_of(headers, block->key), there = headers->hints[place];
    const char *other = headers->head + SUPERBLOCK_BYTES + there * HEADER_BYTES;
    if (there < headers->slots && (other[0] & 0xFF) == SEALED && memcmp(other + 8, block->key, KEY_BYTES) &&
        (place_of(headers, other + 8) | 1) == (place | 1))
        place ^= 1;
    __atomic_store_n(&headers->hints[place], (uint32_t)block->slot, __ATOMIC_RELAXED);
}

/* A whole header: body first, the word that says SEALED last. */
static int seal(const Headers *headers, PyObject *write) {
    Block block;
    if (block_of(write, &block) < 0) return -1;
    uint64_t *header = header_of(headers, block.slot), image[WORDS];
    if (header == NULL) return -1;
    image[0] = block.generation << 16 | SEALED;
    memcpy(&image[1], block.key, KEY_BYTES);
    image[5] = block.length | block.granule << 32 | block.kind << 40 | block.meta_length << 48;
    image[6] = block.checksum;
    uint32_t crc = ~crc32_of(0, image, WORDS - 1) ^ (uint32_t)block.namespace_id;
    crc = crc_tables[3][crc & 0xFF] ^ crc_tables[2][crc >> 8 & 0xFF] ^ crc_tables[1][crc >> 16 & 0xFF] ^
          crc_tables[0][crc >> 24];
    image[7] = block.namespace_id | (uint64_t)~crc << 32;
    __atomic_thread_fence(__ATOMIC_RELEASE); /* the word said something else before this */
    for (int i = 1; i < WORDS; i++) __atomic_store_n(&header[i], image[i], __ATOMIC_RELAXED);
    __atomic_store_n(&header[0], image[0], __ATOMIC_RELEASE);
    hint(headers, &block);
    return 0;
}

static int carry_out(const Headers *headers, PyObject *writes, PyObject *mark_type, PyObject *seal_type,
                     PyObject *other) {
    for (Py_ssize_t i = 0; i < PyList_Size(writes); i++) { /* `other` may do anything to it */
        PyObject *write = PyList_GetItem(writes, i), *type = (PyObject *)Py_TYPE(write);
        if (type == mark_type) {
            if (mark(headers, write) < 0) return -1;
        } else if (type == seal_type) {
            if (seal(headers, write) < 0) return -1;
        } else {
            Py_INCREF(write);
            PyObject *done = PyObject_CallFunctionObjArgs(other, write, NULL);
            Py_DECREF(write);
            if (done == NULL) return -1;
            Py_DECREF(done);
        }
    }
    return 0;
}

static PyObject *write_headers(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *head_of, *writes, *mark_type, *seal_type, *other;
    Py_ssize_t slots, hints;
    Py_buffer head;
    if (!PyArg_ParseTuple(args, "OnnO!OOO", &head_of, &slots, &hints, &PyList_Type, &writes, &mark_type,
                          &seal_type, &other))
        return NULL;
    if (PyObject_GetBuffer(head_of, &head, PyBUF_WRITABLE) < 0) return NULL;
    Py_ssize_t table = SUPERBLOCK_BYTES + slots * HEADER_BYTES;
    int failed = -1;
    if (slots < 1 || hints < 1 || hints & (hints - 1) || (uintptr_t)head.buf % 8 ||
        head.len < table + hints * HINT_BYTES) {
        PyErr_SetString(PyExc_ValueError, "the header file is not of that segment");
    } else {
        Headers headers = {head.buf, (uint64_t)slots, (uint64_t)hints - 1, (uint32_t *)((char *)head.buf + table)};
        failed = carry_out(&headers, writes, mark_type, seal_type, other);
    }
    PyBuffer_Release(&head);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {{"write_headers", write_headers, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

/* PyModule_Add is not in the limited interface of 3.11. */
static int prepare(PyObject *module) {
    fill_crc_tables();
    PyObject *crc = PyLong_FromUnsignedLong(SOURCE_CRC32);
    int failed = crc == NULL ? -1 : PyModule_AddObjectRef(module, "SOURCE_CRC32", crc);
    Py_XDECREF(crc);
    return failed;
}
static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_block_writes", NULL, 0, methods, slots, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__block_writes(void) { return PyModuleDef_Init(&definition); }
