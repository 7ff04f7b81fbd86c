/* Makes images of the blocks of a region, as a table has them, from its entries, and enters them in
 * the table. `kvstore/segment/disk/images.py` and `table.py` have the same in Python, and say what an
 * image is; `format.py` what an entry is.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include "../../compiled/crc32.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "entries and images are read in place: they are little-endian"
#endif
#ifndef SOURCE_CRC32
#define SOURCE_CRC32 0 /* of this file: the build says it (hatch_build.py) */
#endif
enum { DISK_PAGE = 4096, KEY_BYTES = 32, WINDOW_ENTRIES = 16 };
typedef unsigned __int128 Wide;

typedef struct { /* on disk */
    char key[KEY_BYTES];
    uint64_t checksum, room[2];
    uint32_t page, length, stored_length, lap, number, namespace_id, more_room;
    uint16_t meta_length;
    uint8_t codec, kind;
    uint64_t tag[4], whole;
} Entry;
typedef struct { /* in the table */
    char key[KEY_BYTES];
    uint64_t checksum;
    uint32_t page, length, lap, namespace_id;
    uint16_t meta_length;
    uint8_t kind_and_device, used;
    uint32_t crc;
} Image;
typedef Image Window[WINDOW_ENTRIES];
_Static_assert(sizeof(Entry) == 128 && sizeof(Image) == 64, "as format.py and images.py have them");

/* The first 128 bytes of the secret that XXH3 is defined with, as numbers. */
static const uint64_t secret[16] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
};

/* XXH3-64, seeded, of what `whole` is the checksum of: 15 words. */
static uint64_t checksum_of(const Entry *entry, uint64_t seed) {
    uint64_t words[15], sum = sizeof words * 0x9E3779B185EBCA87u;
    memcpy(words, entry, sizeof words);
    for (int i = 0; i < 4; i++)
        for (int end = 0; end < 2; end++) { /* from both ends to the middle */
            const uint64_t *two = words + (end ? 13 - 2 * i : 2 * i), *mask = secret + 4 * i + 2 * end;
            Wide product = (Wide)(two[0] ^ (mask[0] + seed)) * (two[1] ^ (mask[1] - seed));
            sum += (uint64_t)product ^ (uint64_t)(product >> 64);
        }
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9u;
    return sum ^ sum >> 32;
}

static uint32_t crc_of(const Image *image) {
    const unsigned char *bytes = (const unsigned char *)image;
    uint32_t crc = ~crc32_of(0, bytes, 7);
    for (int i = 56; i < 59; i++) crc = crc_tables[0][(crc ^ bytes[i]) & 0xFF] ^ crc >> 8;
    return ~crc;
}

/* Makes the images of `count` entries, the last one's first; returns how many, -1 where one is
 * damaged. */
static Py_ssize_t make_images(Image *to, const char *area, uint32_t first_number, uint32_t count, unsigned device,
                              uint32_t lap, uint32_t first, uint32_t end, uint64_t seed) {
    static const Entry nothing;
    Py_ssize_t made = 0;
    for (uint32_t i = count; i-- > 0;) {
        Entry entry;
        memcpy(&entry, area + (size_t)i * sizeof entry, sizeof entry);
        if (!entry.whole && memcmp(&entry, &nothing, sizeof entry) == 0) continue;
        if (checksum_of(&entry, seed) != entry.whole) return -1;
        uint64_t pages = ((uint64_t)entry.length + DISK_PAGE - 1) / DISK_PAGE;
        int is_own = entry.lap == lap && entry.number == first_number + i && !entry.codec &&
                     entry.stored_length == entry.length && entry.kind < 16;
        if (!is_own || !entry.length || entry.page < first || entry.page + pages > end) continue;
        Image *image = &to[made++];
        memcpy(image->key, entry.key, KEY_BYTES + sizeof entry.checksum);
        image->page = entry.page, image->length = entry.length, image->lap = lap;
        image->namespace_id = entry.namespace_id, image->meta_length = entry.meta_length;
        image->kind_and_device = (uint8_t)(entry.kind << 4 | device), image->used = 0;
        image->crc = crc_of(image);
    }
    return made;
}

static PyObject *images_of(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer area;
    unsigned device, number, lap, first, end;
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "y*IIIIIK", &area, &number, &device, &lap, &first, &end, &seed)) return NULL;
    PyObject *made = NULL;
    uint32_t count = (uint32_t)(area.len / (Py_ssize_t)sizeof(Entry));
    Image *images = PyMem_Malloc((count + 1) * sizeof(Image));
    if (images == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    PyThreadState *free = PyEval_SaveThread();
    Py_ssize_t found = make_images(images, area.buf, number, count, device, lap, first, end, seed);
    PyEval_RestoreThread(free);
    made = found < 0 ? Py_NewRef(Py_None)
                     : PyBytes_FromStringAndSize((char *)images, found * (Py_ssize_t)sizeof(Image));
    PyMem_Free(images);
done:
    PyBuffer_Release(&area);
    return made;
}

/* A table as its node has it mapped; `filled` counts what is not free, by window. */
typedef struct {
    Window *windows;
    uint8_t *filled;
    uint64_t count;
} Table;

static void windows_of(const Table *table, const Image *image, uint64_t at[2]) {
    memcpy(at, image->key + 8, 16);
    at[0] %= table->count, at[1] %= table->count;
}

static Image *with_key(const Table *table, const uint64_t at[2], const char *key) {
    for (int w = 0; w < 2; w++)
        for (int i = 0, left = table->filled[at[w]]; i < WINDOW_ENTRIES && left; i++) {
            Image *image = &table->windows[at[w]][i];
            left -= image->length != 0;
            if (memcmp(image->key, key, KEY_BYTES) == 0 && image->length) return image;
        }
    return NULL;
}

/* Where a block goes: a free place of the emptier window, else that of the oldest lap in both. */
static Image *room_in(const Table *table, uint64_t at[2]) {
    if (table->filled[at[1]] < table->filled[at[0]]) {
        uint64_t emptier = at[1];
        at[1] = at[0], at[0] = emptier;
    }
    for (int i = 0; i < WINDOW_ENTRIES; i++)
        if (!table->windows[at[0]][i].length) return &table->windows[at[0]][i];
    Image *oldest = table->windows[at[0]];
    for (int i = 1; i < 2 * WINDOW_ENTRIES; i++) {
        Image *other = &table->windows[at[i / WINDOW_ENTRIES]][i % WINDOW_ENTRIES];
        if (other->lap < oldest->lap) oldest = other;
    }
    return oldest;
}

static int same_device(const Image *one, const Image *other) {
    return !((one->kind_and_device ^ other->kind_and_device) & 15);
}

static int is_later(const Image *one, const Image *other) {
    int later = one->lap != other->lap ? one->lap > other->lap : one->page > other->page;
    return same_device(one, other) && later;
}

/* Enters images as `adopt_each` does (core/disk/base.py), and returns what had to go, what was left
 * out, and by how many blocks and bytes the table grew. */
static PyObject *adopt(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer map, filled, raw;
    PyObject *answer = NULL;
    if (!PyArg_ParseTuple(args, "w*w*y*", &map, &filled, &raw)) return NULL;
    Table table = {map.buf, filled.buf, (uint64_t)filled.len};
    const Image *images = raw.buf;
    Py_ssize_t count = raw.len / (Py_ssize_t)sizeof(Image), gone = 0, left_out = 0;
    long long blocks = 0, bytes = 0;
    Image *others = PyMem_Malloc((size_t)(2 * count + 1) * sizeof(Image));
    if (!filled.len || map.len != filled.len * (Py_ssize_t)sizeof(Window)) {
        PyErr_SetString(PyExc_ValueError, "these are no windows of one table");
        goto done;
    }
    if (others == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const Image *image = &images[i];
        uint64_t at[2];
        windows_of(&table, image, at);
        Image *there = with_key(&table, at, image->key);
        if (there != NULL && !is_later(image, there)) {
            if (!same_device(image, there)) others[count + left_out++] = *image;
            continue;
        }
        Image *former = there != NULL ? there : room_in(&table, at);
        if (former->length) {
            others[gone++] = *former;
            bytes -= former->length;
        } else {
            table.filled[(Window *)former - table.windows]++;
            blocks++;
        }
        *former = *image;
        bytes += image->length;
    }
    answer = Py_BuildValue("y#y#LL", (char *)others, gone * (Py_ssize_t)sizeof(Image), (char *)(others + count),
                           left_out * (Py_ssize_t)sizeof(Image), blocks, bytes);
done:
    PyMem_Free(others);
    PyBuffer_Release(&raw);
    PyBuffer_Release(&filled);
    PyBuffer_Release(&map);
    return answer;
}

static PyMethodDef methods[] = {
    {"images", images_of, METH_VARARGS, NULL}, {"adopt", adopt, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static int prepare(PyObject *module) {
    fill_crc_tables();
    PyObject *crc = PyLong_FromUnsignedLong(SOURCE_CRC32); /* PyModule_Add is not in 3.11 */
    int failed = crc == NULL ? -1 : PyModule_AddObjectRef(module, "SOURCE_CRC32", crc);
    Py_XDECREF(crc);
    return failed;
}
static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_images", NULL, 0, methods, slots, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__images(void) { return PyModuleDef_Init(&definition); }
