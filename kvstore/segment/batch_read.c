/* Reads a batch of blocks out of one mapped segment: finds them by the table of hints, checks their
 * headers, copies, and looks at the headers again (rule 4). Or finds them only, and makes their
 * records. `kvstore/segment/batch_read.py` has the contract, and the same in Python;
 * `kvstore/segment/header.py` says what a header looks like, `kvstore/record.py` what a record does.
 *
 * Whatever is not plainly a hit is left to the caller: no key is a miss here.
 *
 * It also copies the many values of a put into their slots in one call. All in one file, which is
 * one module: reading and making records find headers by the same code.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include "../compiled/crc32.h"
#ifdef __SSE2__
#include <cpuid.h>
#include <emmintrin.h>
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "headers are read in place: they are little-endian"
#endif

enum {
    SUPERBLOCK_BYTES = 4096,
    SLOT_BYTES = 4096,
    GRANULE_BYTES = 1024,
    GRANULES = 4,
    HEADER_BYTES = 64,
    WORDS = HEADER_BYTES / 8,
    KEY_BYTES = 32,
    HINT_BYTES = 4,
    HINTS_PER_SLOT = 4,
    SEALED = 2,
    RECORD_VERSION = 2,
    RECORD_BYTES = 44,
    START_BYTES = 12, /* of the node's epoch and id, as a record has them */
};
#ifndef SOURCE_CRC32
#define SOURCE_CRC32 0 /* of this file: the build says it (hatch_build.py) */
#endif
#define GIL_FREE_BYTES (1 << 20)
#define STREAMED_BYTES (8 << 20) /* of a batch: its reader's caches have no room for it */
#define STREAMED_PIECE_BYTES 4096
#define PAGES 4 /* that are streamed side by side, where that is how it is fast */
#define PAGE_BYTES 4096
#define AHEAD_BYTES 256
#define LINES_AHEAD_BYTES 1024
#define WHOLE 0x2144DF1Cu

/* How to stream depends on who made the processor (0077): Intel's want pages side by side, where
 * line after line takes 2.3 times as long; AMD's line after line, where pages take 6 times as long. */
static int pages_side_by_side;

#ifdef __SSE2__
static int made_by_intel(void) {
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx;
}

static void stream_line(char *to, const char *from) {
    for (int i = 0; i < 4; i++)
        _mm_stream_si128((__m128i *)to + i, _mm_loadu_si128((const __m128i *)from + i));
}
#endif

/* `streamed` goes past the caches: what is written is not read first, and nothing leaves them. */
static void copy_bytes(char *to, const char *from, uint64_t size_bytes, int streamed) {
#ifdef __SSE2__
    if (streamed && size_bytes >= STREAMED_PIECE_BYTES) {
        uint64_t ahead = -(uintptr_t)to & 63; /* up to a line of the cache, and whole lines then */
        memcpy(to, from, ahead);
        to += ahead, from += ahead, size_bytes -= ahead;
        uint64_t piece = pages_side_by_side ? PAGES * PAGE_BYTES : UINT64_MAX;
        for (; size_bytes >= piece; to += piece, from += piece, size_bytes -= piece)
            for (int at = 0; at < PAGE_BYTES; at += 64)
                for (int place = at; place < at + PAGES * PAGE_BYTES; place += PAGE_BYTES) {
                    _mm_prefetch(from + place + AHEAD_BYTES, _MM_HINT_T0); /* never faults */
                    stream_line(to + place, from + place);
                }
        for (; size_bytes >= 64; to += 64, from += 64, size_bytes -= 64) {
            _mm_prefetch(from + LINES_AHEAD_BYTES, _MM_HINT_NTA);
            stream_line(to, from);
        }
        _mm_sfence(); /* in its place before anybody is told */
    }
#endif
    (void)streamed;
    memcpy(to, from, size_bytes);
}

/* A segment as it is mapped here. */
typedef struct {
    const char *head, *data;
    uint64_t size_bytes, slots, hint_mask;
    const uint32_t *hints;
} Segment;

/* A block that was found, on its way to its target. */
typedef struct {
    const uint64_t *header;
    uint64_t image[WORDS]; /* when it was found */
    const char *from;
    char *to;
    uint64_t size_bytes;
    Py_ssize_t number;
    const char *described; /* what must follow the payload: a part of `describer` */
    uint64_t described_bytes;
    PyObject *describer;
    Py_buffer target; /* obj is NULL where the value is a new `bytes` */
    PyObject *value;
    int gone; /* its pages are: nobody may touch them */
    int whole;
} Block;

static void look(const uint64_t *header, uint64_t image[WORDS]) {
    image[0] = __atomic_load_n(&header[0], __ATOMIC_ACQUIRE);
    for (int i = 1; i < WORDS; i++) image[i] = __atomic_load_n(&header[i], __ATOMIC_RELAXED);
}

static int unchanged(const uint64_t *header, const uint64_t image[WORDS]) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* what was copied was read before this */
    for (int i = 0; i < WORDS; i++)
        if (__atomic_load_n(&header[i], __ATOMIC_RELAXED) != image[i]) return 0;
    return 1;
}

static uint64_t hinted(const Segment *segment, uint64_t place) {
    return __atomic_load_n(&segment->hints[place], __ATOMIC_RELAXED);
}

/* Whether the slot's header says that it has the block of that key; then `block` has its place. */
static int slot_has(const Segment *segment, uint64_t slot, const char *key, Block *block) {
    if (slot >= segment->slots) return 0;
    block->header = (const uint64_t *)(segment->head + SUPERBLOCK_BYTES + slot * HEADER_BYTES);
    look(block->header, block->image);
    return memcmp((const char *)block->image + 8, key, KEY_BYTES) == 0;
}

static uint64_t meta_length_of(const Block *block) { return block->image[5] >> 48; }

/* Whether a SEALED, whole header of that key is there, of a block that lies in the segment. */
static int find(const Segment *segment, const char *key, Block *block) {
    uint32_t bits;
    memcpy(&bits, key + 8, sizeof bits);
    uint64_t place = bits & segment->hint_mask;
    uint64_t slot = hinted(segment, place);
    if (!slot_has(segment, slot, key, block)) {
        slot = hinted(segment, place ^ 1);
        if (!slot_has(segment, slot, key, block)) return 0;
    }
    const uint64_t *image = block->image;
    if ((image[0] & 0xFF) != SEALED || crc32_of(0, image, WORDS) != WHOLE) return 0;
    uint64_t length = image[5] & 0xFFFFFFFFu, granule = image[5] >> 32 & 0xFF;
    uint64_t meta_length = meta_length_of(block);
    uint64_t offset = slot * SLOT_BYTES + granule * GRANULE_BYTES;
    if (granule >= GRANULES || meta_length > length) return 0;
    if (offset + length > segment->size_bytes) return 0;
    block->from = segment->data + offset;
    block->size_bytes = length - meta_length;
    return 1;
}

static unsigned kind_of(const Block *block) { return block->image[5] >> 40 & 0xFF; }

/* Whether one of the descriptions behind the room in `out` may be the block's: of its length. */
static int may_be_described(Block *block, PyObject *out) {
    for (Py_ssize_t i = 1; i < PyTuple_Size(out); i++) {
        char *raw;
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(out, i), &raw, &length) < 0) {
            PyErr_Clear();
            return 0;
        }
        if ((uint64_t)length == meta_length_of(block)) {
            block->described = raw;
            block->described_bytes = (uint64_t)length;
            return 1;
        }
    }
    return 0;
}

/* 1 when the block has a target; 0 when it is the caller's; -1 with an exception. */
static int aim(Block *block, PyObject *out, unsigned kinds) {
    block->target.obj = NULL;
    block->value = NULL;
    block->describer = NULL;
    block->described = "";
    block->described_bytes = 0;
    if (out == Py_None) {
        if (kind_of(block) > 31 || !(kinds >> kind_of(block) & 1)) return 0;
        block->value = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)block->size_bytes);
        if (block->value == NULL) return -1;
        block->to = PyBytes_AsString(block->value);
        return 1;
    }
    int exactly = PyTuple_Check(out) && PyTuple_Size(out) > 0;
    PyObject *room = exactly ? PyTuple_GetItem(out, 0) : out;
    if (!PyMemoryView_Check(room) || (exactly && !may_be_described(block, out))) return 0;
    if (PyObject_GetBuffer(room, &block->target, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_ND) < 0) {
        PyErr_Clear(); /* read-only, or released: the caller says so */
        block->target.obj = NULL;
        return 0;
    }
    const Py_buffer *target = &block->target;
    uint64_t bytes = (uint64_t)target->len;
    if (target->ndim == 1 && target->format != NULL && strcmp(target->format, "B") == 0 &&
        (exactly ? bytes == block->size_bytes : bytes >= block->size_bytes)) {
        block->to = target->buf;
        block->describer = exactly ? Py_NewRef(out) : NULL;
        return 1;
    }
    PyBuffer_Release(&block->target);
    return 0;
}

/* Nothing is written for a block whose description is another. */
static int copied_as_described(const Block *block, int streamed) {
    if (block->gone) return 0;
    if (memcmp(block->from + block->size_bytes, block->described, block->described_bytes)) return 0;
    copy_bytes(block->to, block->from, block->size_bytes, streamed);
    return 1;
}

static void copy(Block *blocks, Py_ssize_t count, int streamed) {
    for (Py_ssize_t i = 0; i < count; i++) {
        Block *block = &blocks[i];
        if (!copied_as_described(block, streamed)) continue;
        block->whole = unchanged(block->header, block->image);
    }
}

static int copy_watched(Block *blocks, Py_ssize_t count, int streamed, PyObject *copied) {
    for (Py_ssize_t i = 0; i < count; i++) {
        Block *block = &blocks[i];
        if (!copied_as_described(block, streamed)) continue;
        PyObject *said = PyObject_CallFunctionObjArgs(copied, NULL);
        if (said == NULL) return -1;
        Py_DECREF(said);
        block->whole = unchanged(block->header, block->image);
    }
    return 0;
}

static int tell_found(const Segment *segment, Block *blocks, Py_ssize_t count, PyObject *found) {
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *said = PyObject_CallFunction(found, "LL", (long long)(blocks[i].from - segment->data),
                                               (long long)(blocks[i].size_bytes + blocks[i].described_bytes));
        if (said == NULL) return -1;
        blocks[i].gone = said == Py_False;
        Py_DECREF(said);
    }
    return 0;
}

static int attach(Segment *segment, const Py_buffer *head, const Py_buffer *data) {
    uint64_t size_bytes = (uint64_t)data->len, slots = size_bytes / SLOT_BYTES, hints = HINTS_PER_SLOT;
    while (hints < HINTS_PER_SLOT * slots) hints <<= 1;
    uint64_t needed = SUPERBLOCK_BYTES + slots * HEADER_BYTES + hints * HINT_BYTES;
    if (slots == 0 || (uint64_t)head->len < needed || (uintptr_t)head->buf % 8) {
        PyErr_SetString(PyExc_ValueError, "the header file is not of that segment");
        return -1;
    }
    segment->head = head->buf;
    segment->data = data->buf;
    segment->size_bytes = size_bytes;
    segment->slots = slots;
    segment->hint_mask = hints - 1;
    segment->hints = (const uint32_t *)(segment->head + SUPERBLOCK_BYTES + slots * HEADER_BYTES);
    return 0;
}

/* Fills `values`; the bytes of the hits among them, or -1 with an exception. */
static long long read_blocks(const Segment *segment, PyObject *keys, PyObject *outs, unsigned kinds,
                             PyObject *found, PyObject *copied, Block *blocks, PyObject *values) {
    Py_ssize_t count = 0, all = PyList_Size(values); /* `keys` may have grown: `blocks` has not */
    long long bytes = -1, total = 0;
    for (Py_ssize_t i = 0; i < all; i++) {
        PyObject *key = PyList_GetItem(keys, i), *out = PyList_GetItem(outs, i);
        char *raw;
        Py_ssize_t length;
        if (key == NULL || out == NULL || PyBytes_AsStringAndSize(key, &raw, &length) < 0) goto done;
        if (length != KEY_BYTES) {
            PyErr_SetString(PyExc_ValueError, "a key has 32 bytes");
            goto done;
        }
        Block *block = &blocks[count];
        if (!find(segment, raw, block) || block->size_bytes == 0) continue;
        int aimed = aim(block, out, kinds);
        if (aimed < 0) goto done;
        if (!aimed) continue;
        block->number = i;
        block->whole = 0;
        block->gone = 0;
        total += (long long)block->size_bytes;
        count++;
    }
    if (found != Py_None && tell_found(segment, blocks, count, found) < 0) goto done;
    int streamed = total >= STREAMED_BYTES;
    if (copied != Py_None) {
        if (copy_watched(blocks, count, streamed, copied) < 0) goto done;
    } else {
        PyThreadState *free = total < GIL_FREE_BYTES ? NULL : PyEval_SaveThread();
        copy(blocks, count, streamed);
        if (free != NULL) PyEval_RestoreThread(free);
    }
    bytes = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        Block *block = &blocks[i];
        if (!block->whole) continue;
        PyObject *value = block->value;
        if (value != NULL) {
            block->value = NULL;
        } else {
            /* of the view that was written to, whatever is in `outs` by now */
            value = PySequence_GetSlice(block->target.obj, 0, (Py_ssize_t)block->size_bytes);
            if (value == NULL) {
                bytes = -1;
                goto done;
            }
        }
        bytes += (long long)block->size_bytes;
        if (PyList_SetItem(values, block->number, value) < 0) {
            bytes = -1;
            goto done;
        }
    }
done:
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_XDECREF(blocks[i].value);
        Py_XDECREF(blocks[i].describer);
        if (blocks[i].target.obj != NULL) PyBuffer_Release(&blocks[i].target);
    }
    return bytes;
}

/* The record that the node of that start publishes for a block that was found (kvstore/record.py). */
static PyObject *record_of(const Segment *segment, const Block *block, const char *start) {
    const uint64_t *image = block->image;
    char record[RECORD_BYTES] = {RECORD_VERSION, (char)(image[5] >> 32)}; /* and segment 0 */
    uint64_t generation = image[0] >> 16;
    uint32_t slot = (uint32_t)(((const char *)block->header - segment->head - SUPERBLOCK_BYTES) / HEADER_BYTES);
    uint32_t length = (uint32_t)image[5];
    memcpy(record + 4, start, START_BYTES);
    memcpy(record + 16, &generation, 8);
    memcpy(record + 24, &slot, 4);
    memcpy(record + 28, &length, 4);
    memcpy(record + 32, &image[6], 8);
    uint32_t crc = crc32_of(crc32_of(0, &image[1], KEY_BYTES / 8), record, 5);
    memcpy(record + 40, &crc, 4);
    return PyBytes_FromStringAndSize(record, sizeof record);
}

static PyObject *records_of(const Segment *segment, PyObject *keys, const char *start) {
    Py_ssize_t all = PyList_Size(keys);
    PyObject *records = PyList_New(all);
    if (records == NULL) return NULL;
    for (Py_ssize_t i = 0; i < all; i++) {
        PyObject *key = PyList_GetItem(keys, i), *record = Py_None;
        char *raw;
        Py_ssize_t length;
        Block block;
        if (key == NULL || PyBytes_AsStringAndSize(key, &raw, &length) < 0) goto failed;
        if (length != KEY_BYTES) {
            PyErr_SetString(PyExc_ValueError, "a key has 32 bytes");
            goto failed;
        }
        if (find(segment, raw, &block)) {
            record = record_of(segment, &block, start);
            if (record == NULL) goto failed;
        } else {
            Py_INCREF(record);
        }
        PyList_SetItem(records, i, record);
    }
    return records;
failed:
    Py_DECREF(records);
    return NULL;
}

static PyObject *make_records(PyObject *self, PyObject *args) {
    PyObject *head_of, *data_of, *keys, *records = NULL;
    const char *start;
    Py_ssize_t start_bytes;
    Py_buffer head, data;
    Segment segment;
    if (!PyArg_ParseTuple(args, "OOO!y#", &head_of, &data_of, &PyList_Type, &keys, &start, &start_bytes))
        return NULL;
    if (start_bytes != START_BYTES) {
        PyErr_SetString(PyExc_ValueError, "the start of a node has 12 bytes");
        return NULL;
    }
    if (PyObject_GetBuffer(head_of, &head, PyBUF_SIMPLE) < 0) return NULL;
    if (PyObject_GetBuffer(data_of, &data, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&head);
        return NULL;
    }
    if (attach(&segment, &head, &data) == 0) records = records_of(&segment, keys, start);
    PyBuffer_Release(&data);
    PyBuffer_Release(&head);
    return records;
}

static PyObject *read_batch(PyObject *self, PyObject *args) {
    PyObject *head_of, *data_of, *keys, *outs, *found, *copied, *values = NULL, *answer = NULL;
    unsigned kinds;
    Py_buffer head, data;
    Segment segment;
    if (!PyArg_ParseTuple(args, "OOO!O!IOO", &head_of, &data_of, &PyList_Type, &keys, &PyList_Type,
                          &outs, &kinds, &found, &copied))
        return NULL;
    if (PyList_Size(keys) != PyList_Size(outs)) {
        PyErr_SetString(PyExc_ValueError, "there must be an out, or None, for each key");
        return NULL;
    }
    if (PyObject_GetBuffer(head_of, &head, PyBUF_SIMPLE) < 0) return NULL;
    if (PyObject_GetBuffer(data_of, &data, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&head);
        return NULL;
    }
    Py_ssize_t all = PyList_Size(keys);
    Block few[32], *blocks = few;
    if (attach(&segment, &head, &data) < 0) goto done;
    if (all > 32) {
        blocks = PyMem_Malloc((size_t)all * sizeof(Block));
        if (blocks == NULL) {
            PyErr_NoMemory();
            goto done;
        }
    }
    values = PyList_New(all);
    if (values == NULL) goto done;
    for (Py_ssize_t i = 0; i < all; i++) {
        Py_INCREF(Py_None);
        PyList_SetItem(values, i, Py_None);
    }
    long long bytes = read_blocks(&segment, keys, outs, kinds, found, copied, blocks, values);
    if (bytes >= 0) answer = Py_BuildValue("OL", values, bytes);
done:
    Py_XDECREF(values);
    if (blocks != few) PyMem_Free(blocks);
    PyBuffer_Release(&data);
    PyBuffer_Release(&head);
    return answer;
}

/* The two buffers of one copy, the target first; -1 with an exception, and none is held. */
static int take_pair(PyObject *target, PyObject *source, Py_buffer pair[2]) {
    if (PyObject_GetBuffer(target, &pair[0], PyBUF_WRITABLE) < 0) return -1;
    if (PyObject_GetBuffer(source, &pair[1], PyBUF_SIMPLE) == 0) {
        if (pair[0].len == pair[1].len) return 0;
        PyErr_Format(PyExc_ValueError, "cannot copy %zd bytes into %zd", pair[1].len, pair[0].len);
        PyBuffer_Release(&pair[1]);
    }
    PyBuffer_Release(&pair[0]);
    return -1;
}

static PyObject *copy_each(PyObject *self, PyObject *args) {
    PyObject *targets, *sources, *answer = NULL;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &targets, &PyList_Type, &sources)) return NULL;
    Py_ssize_t taken = 0, all = PyList_Size(targets);
    if (PyList_Size(sources) != all) {
        PyErr_SetString(PyExc_ValueError, "there must be a source for each target");
        return NULL;
    }
    Py_buffer(*pairs)[2] = PyMem_Malloc((size_t)(all ? all : 1) * sizeof *pairs);
    if (pairs == NULL) return PyErr_NoMemory();
    long long total = 0;
    for (; taken < all; taken++) {
        PyObject *target = PyList_GetItem(targets, taken), *source = PyList_GetItem(sources, taken);
        if (target == NULL || source == NULL || take_pair(target, source, pairs[taken]) < 0) goto done;
        total += pairs[taken][0].len;
    }
    int streamed = total >= GIL_FREE_BYTES; /* who saves does not look at it again */
    PyThreadState *free = streamed ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t i = 0; i < all; i++)
        copy_bytes(pairs[i][0].buf, pairs[i][1].buf, (uint64_t)pairs[i][0].len, streamed);
    if (free != NULL) PyEval_RestoreThread(free);
    Py_INCREF(Py_None);
    answer = Py_None;
done:
    while (taken-- > 0) {
        PyBuffer_Release(&pairs[taken][1]);
        PyBuffer_Release(&pairs[taken][0]);
    }
    PyMem_Free(pairs);
    return answer;
}

/* For the tests, which must see both ways on any machine. */
static PyObject *stream_pages(PyObject *self, PyObject *wanted) {
    int is_wanted = PyObject_IsTrue(wanted);
    if (is_wanted < 0) return NULL;
    pages_side_by_side = is_wanted;
    Py_INCREF(Py_None);
    return Py_None;
}

static PyMethodDef methods[] = {{"read", read_batch, METH_VARARGS, NULL},
                                {"copy_each", copy_each, METH_VARARGS, NULL},
                                {"records", make_records, METH_VARARGS, NULL},
                                {"stream_pages", stream_pages, METH_O, NULL},
                                {NULL, NULL, 0, NULL}};
/* PyModule_Add is not in the limited interface of 3.11. */
static int add(PyObject *module, const char *name, PyObject *value) {
    int failed = value == NULL ? -1 : PyModule_AddObjectRef(module, name, value);
    Py_XDECREF(value);
    return failed;
}

static int prepare(PyObject *module) {
    fill_crc_tables();
#ifdef __SSE2__
    pages_side_by_side = made_by_intel();
#endif
    return add(module, "SOURCE_CRC32", PyLong_FromUnsignedLong(SOURCE_CRC32));
}
static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_batch_read", NULL, 0, methods, slots, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__batch_read(void) { return PyModuleDef_Init(&definition); }
