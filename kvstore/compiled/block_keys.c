/* Hashes the blocks of a prompt, each after the one before, and the names of values or an engine's
 * hashes, each for itself: the keys of `Namespace.block_keys`, `value_keys` and `engine_keys`, and
 * `chained_hashes` (kvstore/keys.py), for CPUs that have instructions for SHA-256. Where they are
 * missing, FAST is 0, and Python's hashlib is as fast.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#ifndef SOURCE_CRC32
#define SOURCE_CRC32 0 /* of this file: the build says it (hatch_build.py) */
#endif
enum { DIGEST_BYTES = 32, PART_BYTES = 64, KEPT_BYTES = 24, TAG_BYTES = 8 };

static int fast; /* as `is_fast` said once: a virtual machine takes 30 us to answer CPUID */

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

static int is_fast(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1)) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && b & 1u << 29; /* SHA */
}

static const uint32_t rounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

/* FIPS 180-4's compression of `parts` parts into the state, which is kept as the instructions want
 * it: (ABEF, CDGH). */
__attribute__((target("sha,sse4.1,ssse3")))
static void compress(__m128i state[2], const unsigned char *bytes, size_t parts) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i abef = state[0], cdgh = state[1];
    for (; parts > 0; parts--, bytes += PART_BYTES) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
        for (int i = 0; i < 4; i++)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(bytes + 16 * i)), swap);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i now = w[i & 3];
            __m128i sum = _mm_add_epi32(now, _mm_loadu_si128((const __m128i *)&rounds[4 * i]));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
            if (i < 12) { /* the words of four rounds, 16 rounds ahead */
                __m128i last = w[(i + 3) & 3];
                __m128i ahead = _mm_sha256msg1_epu32(now, w[(i + 1) & 3]);
                ahead = _mm_add_epi32(ahead, _mm_alignr_epi8(last, w[(i + 2) & 3], 4));
                w[i & 3] = _mm_sha256msg2_epu32(ahead, last);
            }
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    state[0] = abef;
    state[1] = cdgh;
}

/* The digest of `before`, 32 bytes, and `size` bytes after it. */
__attribute__((target("sha,sse4.1,ssse3")))
static void sha256(unsigned char digest[DIGEST_BYTES], const unsigned char before[DIGEST_BYTES],
                   const unsigned char *bytes, size_t size) {
    __m128i state[2] = {
        _mm_set_epi32(0x6a09e667, (int)0xbb67ae85, 0x510e527f, (int)0x9b05688c),
        _mm_set_epi32(0x3c6ef372, (int)0xa54ff53a, 0x1f83d9ab, 0x5be0cd19),
    };
    unsigned char part[2 * PART_BYTES];
    size_t first = size < PART_BYTES - DIGEST_BYTES ? size : PART_BYTES - DIGEST_BYTES;
    memcpy(part, before, DIGEST_BYTES);
    memcpy(part + DIGEST_BYTES, bytes, first);
    size_t held = DIGEST_BYTES + first;
    if (held == PART_BYTES) {
        compress(state, part, 1);
        size_t whole = (size - first) / PART_BYTES;
        compress(state, bytes + first, whole);
        held = size - first - whole * PART_BYTES;
        memcpy(part, bytes + size - held, held);
    }
    size_t padded = held < PART_BYTES - 8 ? PART_BYTES : 2 * PART_BYTES;
    uint64_t bits = __builtin_bswap64((DIGEST_BYTES + (uint64_t)size) * 8);
    memset(part + held, 0, padded - held);
    part[held] = 0x80;
    memcpy(part + padded - 8, &bits, 8);
    compress(state, part, padded / PART_BYTES);
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i feba = _mm_shuffle_epi32(state[0], 0x1B), dchg = _mm_shuffle_epi32(state[1], 0xB1);
    __m128i dcba = _mm_blend_epi16(feba, dchg, 0xF0), hgfe = _mm_alignr_epi8(dchg, feba, 8);
    _mm_storeu_si128((__m128i *)digest, _mm_shuffle_epi8(dcba, swap));
    _mm_storeu_si128((__m128i *)(digest + 16), _mm_shuffle_epi8(hgfe, swap));
}
#else
static int is_fast(void) { return 0; }
static void sha256(unsigned char *digest, const unsigned char *before, const unsigned char *bytes,
                   size_t size) {
    (void)digest, (void)before, (void)bytes, (void)size;
}
#endif

/* Makes `bytes` the item `i` of a list, which is let go where it cannot. */
static int keep(PyObject *list, Py_ssize_t i, const unsigned char *bytes, size_t size) {
    PyObject *made = PyBytes_FromStringAndSize((const char *)bytes, (Py_ssize_t)size);
    if (made == NULL) {
        Py_DECREF(list);
        return -1;
    }
    return PyList_SetItem(list, i, made);
}

/* The key of block `i`, whose digest it is: `run` of them share a tag, that of the digest before. */
static const unsigned char *key_of(unsigned char *key, Py_ssize_t i, Py_ssize_t run,
                                   const unsigned char *before, const unsigned char *digest) {
    if (i % run == 0) memcpy(key, i == 0 ? digest : before, TAG_BYTES);
    memcpy(key + TAG_BYTES, digest, KEPT_BYTES);
    return key;
}

static PyObject *hash_blocks(const Py_buffer *root, const Py_buffer *tokens, Py_ssize_t step,
                             Py_ssize_t run) {
    if (root->len != DIGEST_BYTES || step < 1 || run < 1) {
        PyErr_SetString(PyExc_ValueError, "a root has 32 bytes, a block and a run at least 1");
        return NULL;
    }
    Py_ssize_t all = tokens->len / step;
    PyObject *keys = PyList_New(all);
    if (keys == NULL) return NULL;
    unsigned char digest[DIGEST_BYTES], key[TAG_BYTES + KEPT_BYTES], before[TAG_BYTES];
    memcpy(digest, root->buf, DIGEST_BYTES);
    for (Py_ssize_t i = 0; i < all; i++) {
        memcpy(before, digest, TAG_BYTES);
        sha256(digest, digest, (const unsigned char *)tokens->buf + i * step, (size_t)step);
        if (keep(keys, i, key_of(key, i, run, before, digest), sizeof key) < 0) return NULL;
    }
    return keys;
}

static PyObject *block_keys(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer root, tokens;
    Py_ssize_t step, run;
    if (!PyArg_ParseTuple(args, "y*y*nn", &root, &tokens, &step, &run)) return NULL;
    PyObject *keys = NULL;
    if (fast) {
        keys = hash_blocks(&root, &tokens, step, run);
    } else {
        PyErr_SetString(PyExc_RuntimeError, "this CPU has no instructions for SHA-256");
    }
    PyBuffer_Release(&tokens);
    PyBuffer_Release(&root);
    return keys;
}

/* The bytes of a name, and how many; NULL for what is none, which its caller says in words. */
static const char *name_of(PyObject *given, Py_ssize_t *size) {
    char *raw = NULL;
    if (PyUnicode_Check(given)) {
        const char *text = PyUnicode_AsUTF8AndSize(given, size);
        if (text == NULL) PyErr_Clear(); /* a lone surrogate */
        return text;
    }
    if (!PyBytes_Check(given) || PyBytes_AsStringAndSize(given, &raw, size) < 0) return NULL;
    return raw;
}

static PyObject *value_keys(PyObject *self, PyObject *args) {
    (void)self;
    const char *root;
    Py_ssize_t root_size, longest;
    PyObject *names;
    if (!PyArg_ParseTuple(args, "y#O!n", &root, &root_size, &PyList_Type, &names, &longest)) return NULL;
    if (root_size != DIGEST_BYTES || !fast) {
        PyErr_SetString(PyExc_ValueError, "a root has 32 bytes, and this CPU instructions for SHA-256");
        return NULL;
    }
    Py_ssize_t all = PyList_Size(names);
    PyObject *keys = PyList_New(all);
    if (keys == NULL) return NULL;
    for (Py_ssize_t i = 0; i < all; i++) {
        unsigned char digest[DIGEST_BYTES], key[TAG_BYTES + KEPT_BYTES];
        Py_ssize_t size = 0;
        const char *name = name_of(PyList_GetItem(names, i), &size);
        PyObject *made = Py_None;
        if (name != NULL && size >= 1 && size <= longest) {
            sha256(digest, (const unsigned char *)root, (const unsigned char *)name, (size_t)size);
            memcpy(key, digest, TAG_BYTES);
            memcpy(key + TAG_BYTES, digest, KEPT_BYTES);
            made = PyBytes_FromStringAndSize((const char *)key, sizeof key);
            if (made == NULL) {
                Py_DECREF(keys);
                return NULL;
            }
        } else {
            Py_INCREF(made);
        }
        PyList_SetItem(keys, i, made);
    }
    return keys;
}

/* The bytes of item `i` of a list; NULL, and an error, for what is none. */
static unsigned char *bytes_of(PyObject *list, Py_ssize_t i, Py_ssize_t *size) {
    char *raw = NULL;
    return PyBytes_AsStringAndSize(PyList_GetItem(list, i), &raw, size) < 0 ? NULL
                                                                           : (unsigned char *)raw;
}

static PyObject *engine_keys(PyObject *self, PyObject *args) {
    (void)self;
    const unsigned char *root;
    Py_ssize_t root_size, run;
    PyObject *hashes;
    if (!PyArg_ParseTuple(args, "y#O!n", &root, &root_size, &PyList_Type, &hashes, &run)) return NULL;
    if (root_size != DIGEST_BYTES || run < 1 || !fast) {
        PyErr_SetString(PyExc_ValueError, "a root has 32 bytes, a run at least 1 block, and this CPU instructions for SHA-256");
        return NULL;
    }
    Py_ssize_t all = PyList_Size(hashes);
    PyObject *keys = PyList_New(all);
    if (keys == NULL) return NULL;
    unsigned char digest[DIGEST_BYTES] = {0}, key[TAG_BYTES + KEPT_BYTES], before[TAG_BYTES];
    for (Py_ssize_t i = 0; i < all; i++) {
        Py_ssize_t size;
        const unsigned char *hash = bytes_of(hashes, i, &size);
        if (hash == NULL) {
            Py_DECREF(keys);
            return NULL;
        }
        memcpy(before, digest, TAG_BYTES);
        sha256(digest, root, hash, (size_t)size);
        if (keep(keys, i, key_of(key, i, run, before, digest), sizeof key) < 0) return NULL;
    }
    return keys;
}

/* Each of `others` ends what is hashed of the block of its number. */
static PyObject *chain(const unsigned char *last, const Py_buffer *blocks, Py_ssize_t step,
                       PyObject *others) {
    Py_ssize_t all = PyList_Size(others), room = 0;
    PyObject *hashes = PyList_New(all);
    if (hashes == NULL) return NULL;
    unsigned char digest[DIGEST_BYTES], *part = NULL;
    memcpy(digest, last, DIGEST_BYTES);
    for (Py_ssize_t i = 0; i < all; i++) {
        Py_ssize_t size;
        const unsigned char *other = bytes_of(others, i, &size);
        if (other != NULL && (part == NULL || size > room)) {
            unsigned char *more = PyMem_Realloc(part, (size_t)step + (size_t)size);
            if (more == NULL) {
                PyErr_NoMemory();
                other = NULL;
            } else {
                part = more, room = size;
            }
        }
        if (other == NULL) {
            PyMem_Free(part);
            Py_DECREF(hashes);
            return NULL;
        }
        memcpy(part, (const unsigned char *)blocks->buf + i * step, (size_t)step);
        memcpy(part + step, other, (size_t)size);
        sha256(digest, digest, part, (size_t)(step + size));
        if (keep(hashes, i, digest, sizeof digest) < 0) {
            PyMem_Free(part);
            return NULL;
        }
    }
    PyMem_Free(part);
    return hashes;
}

static PyObject *chained_hashes(PyObject *self, PyObject *args) {
    (void)self;
    const unsigned char *last;
    Py_ssize_t last_size, step;
    Py_buffer blocks;
    PyObject *others, *hashes = NULL;
    if (!PyArg_ParseTuple(args, "y#y*nO!", &last, &last_size, &blocks, &step, &PyList_Type, &others)) return NULL;
    if (last_size != DIGEST_BYTES || step < 1 || blocks.len / step < PyList_Size(others) || !fast) {
        PyErr_SetString(PyExc_ValueError, "a hash has 32 bytes, each block at least 1, and this CPU instructions for SHA-256");
    } else {
        hashes = chain(last, &blocks, step, others);
    }
    PyBuffer_Release(&blocks);
    return hashes;
}

static PyMethodDef methods[] = {{"block_keys", block_keys, METH_VARARGS, NULL},
                                {"value_keys", value_keys, METH_VARARGS, NULL},
                                {"engine_keys", engine_keys, METH_VARARGS, NULL},
                                {"chained_hashes", chained_hashes, METH_VARARGS, NULL},
                                {NULL, NULL, 0, NULL}};

/* PyModule_Add is not in the limited interface of 3.11. */
static int add(PyObject *module, const char *name, PyObject *value) {
    int failed = value == NULL ? -1 : PyModule_AddObjectRef(module, name, value);
    Py_XDECREF(value);
    return failed;
}

static int prepare(PyObject *module) {
    fast = is_fast();
    if (add(module, "FAST", PyBool_FromLong(fast)) < 0) return -1;
    return add(module, "SOURCE_CRC32", PyLong_FromUnsignedLong(SOURCE_CRC32));
}
static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_block_keys", NULL, 0, methods, slots, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__block_keys(void) { return PyModuleDef_Init(&definition); }
