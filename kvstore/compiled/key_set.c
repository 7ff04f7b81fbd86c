/* A set of keys in one table of memory, which says how many leading ones of a prompt's are in it
 * (kvstore/compiled/key_set.py says what each method promises, and has the same in Python).
 *
 * A key lies in the table itself, at the place that its hash names or the next free one after it, so
 * a look-up is one line of memory, and those of the keys that follow are on their way meanwhile. A
 * place without a key is all zeros; the key that is all zeros is told apart beside the table. What is
 * removed leaves no mark: keys behind it move up.
 *
 * Who may do what: no call lets the GIL go, nor runs code of Python's between its first look at the
 * table and its last, so a set may be changed by one thread and looked at by others. For a Python
 * without a GIL this is not built, and says nothing of being fit for one.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#ifndef SOURCE_CRC32
#define SOURCE_CRC32 0 /* of this file: the build says it (hatch_build.py) */
#endif
enum {
    WORDS = 4,
    SECRET_WORDS = 2 * WORDS + 2,
    LINE_BYTES = 64,
    ROOM_MIN = 64,
    AHEAD = 16, /* keys whose lines are on their way */
};
typedef unsigned __int128 Wide;

typedef struct {
    uint64_t words[WORDS];
} Key;
enum { KEY_BYTES = sizeof(Key) };

typedef struct {
    PyObject_HEAD
    uint64_t secret[SECRET_WORDS];
    void *memory;
    Key *table; /* in `memory`, from a line's begin on; `nothing` before the first key */
    size_t room; /* places: a power of two */
    size_t used;
    int has_zeros; /* the key that is all zeros, which is not in the table */
} KeySet;

static Key nothing;

static int is_zeros(const Key *key) { return !(key->words[0] | key->words[1] | key->words[2] | key->words[3]); }

static int is_same(const Key *one, const Key *other) {
    return !((one->words[0] ^ other->words[0]) | (one->words[1] ^ other->words[1]) |
             (one->words[2] ^ other->words[2]) | (one->words[3] ^ other->words[3]));
}

/* Of all 32 bytes: those of a run share their first 8 (docs/decisions/0010), and who stores blocks
 * chooses the rest. Upper half of a sum of products with factors of 128 random bits: for any two keys
 * its bits are as good as drawn by chance (Dietzfelbinger's multiply-shift), for whoever does not
 * know the secret. */
static size_t home_of(const KeySet *set, const Key *key) {
    Wide sum = (Wide)set->secret[1] << 64 | set->secret[0];
    for (int i = 0; i < WORDS; i++) {
        const uint64_t *factor = &set->secret[2 + 2 * i];
        sum += (Wide)factor[0] * key->words[i] + ((Wide)(factor[1] * key->words[i]) << 64);
    }
    return (size_t)(sum >> 64) & (set->room - 1);
}

/* The first place from `at` on that has this key, or none. There is always one without. */
static size_t find(const KeySet *set, const Key *key, size_t at) {
    while (!is_zeros(&set->table[at]) && !is_same(&set->table[at], key)) at = (at + 1) & (set->room - 1);
    return at;
}

static int has(const KeySet *set, const Key *key, size_t home) {
    return is_zeros(key) ? set->has_zeros : !is_zeros(&set->table[find(set, key, home)]);
}

static void add(KeySet *set, const Key *key) {
    if (is_zeros(key)) {
        set->has_zeros = 1;
        return;
    }
    size_t at = find(set, key, home_of(set, key));
    set->used += (size_t)is_zeros(&set->table[at]);
    set->table[at] = *key;
}

/* What stands behind a key that goes, up to the next free place, moves up where its home allows it. */
static void discard(KeySet *set, const Key *key) {
    size_t last = set->room - 1, hole = find(set, key, home_of(set, key));
    if (is_zeros(key)) set->has_zeros = 0;
    if (is_zeros(&set->table[hole])) return;
    for (size_t at = (hole + 1) & last; !is_zeros(&set->table[at]); at = (at + 1) & last) {
        if (((at - home_of(set, &set->table[at])) & last) < ((at - hole) & last)) continue;
        set->table[hole] = set->table[at];
        hole = at;
    }
    set->table[hole] = nothing;
    set->used--;
}

static void forget(KeySet *set) {
    PyMem_Free(set->memory);
    set->memory = NULL;
    set->table = &nothing;
    set->room = 1;
    set->used = 0;
    set->has_zeros = 0;
}

/* Has room for that many more keys, a quarter of it free; -1, and nothing has changed, where there is
 * no memory. */
static int make_room(KeySet *set, size_t more) {
    size_t room = set->room < ROOM_MIN ? ROOM_MIN : set->room;
    while (room / 4 * 3 < set->used + more) room *= 2;
    if (room == set->room) return 0;
    KeySet before = *set;
    char *memory = PyMem_Calloc(room * KEY_BYTES + LINE_BYTES, 1);
    if (memory == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    set->memory = memory;
    set->table = (Key *)(memory + (LINE_BYTES - (uintptr_t)memory % LINE_BYTES));
    set->room = room;
    set->used = 0;
    for (size_t i = 0; i < before.room; i++)
        if (!is_zeros(&before.table[i])) add(set, &before.table[i]);
    PyMem_Free(before.memory);
    return 0;
}

/* Reads a key's bytes; -1 with an exception for what is none. */
static int read_key(PyObject *given, Key *key) {
    char *raw;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(given, &raw, &size) < 0) return -1;
    if (size != KEY_BYTES) {
        PyErr_Format(PyExc_ValueError, "a key has 32 bytes, not %zd", size);
        return -1;
    }
    memcpy(key, raw, KEY_BYTES);
    return 0;
}

/* Item `i` of what `PySequence_Fast` made, borrowed. */
static PyObject *item(PyObject *keys, Py_ssize_t i) {
    return PyList_Check(keys) ? PyList_GetItem(keys, i) : PyTuple_GetItem(keys, i);
}

/* Keys one after the other: objects, or bytes of all. */
typedef struct {
    PyObject *each; /* NULL where `raw` has them */
    const char *raw;
    Py_ssize_t count;
} Keys;

static int open_keys(Keys *keys, PyObject *given) {
    *keys = (Keys){NULL, NULL, 0};
    if (PyBytes_Check(given)) {
        keys->raw = PyBytes_AsString(given);
        keys->count = PyBytes_Size(given) / KEY_BYTES;
        if (PyBytes_Size(given) % KEY_BYTES == 0) return 0;
        PyErr_Format(PyExc_ValueError, "keys have 32 bytes each, and %zd are given", PyBytes_Size(given));
        return -1;
    }
    keys->each = PySequence_Fast(given, "keys must be a sequence, or bytes");
    if (keys->each == NULL) return -1;
    keys->count = PySequence_Size(keys->each);
    return 0;
}

static int key_at(const Keys *keys, Py_ssize_t i, Key *key) {
    if (keys->raw == NULL) return read_key(item(keys->each, i), key);
    memcpy(key, keys->raw + i * KEY_BYTES, KEY_BYTES);
    return 0;
}

static PyObject *leading(PyObject *self, PyObject *args) {
    const KeySet *set = (KeySet *)self;
    PyObject *given;
    Py_ssize_t start;
    Keys keys;
    if (!PyArg_ParseTuple(args, "On", &given, &start)) return NULL;
    if (start < 0) {
        PyErr_SetString(PyExc_ValueError, "the first key has number 0");
        return NULL;
    }
    if (open_keys(&keys, given) < 0) return NULL;
    Key waiting[AHEAD];
    size_t homes[AHEAD];
    Py_ssize_t at = start, next = start;
    int failed = 0;
    for (; at < keys.count; at++) {
        for (; next < keys.count && next < at + AHEAD && !failed; next++) {
            Key *key = &waiting[next % AHEAD];
            if ((failed = key_at(&keys, next, key)) < 0) break;
            homes[next % AHEAD] = home_of(set, key);
            __builtin_prefetch(&set->table[homes[next % AHEAD]]);
        }
        if (failed || !has(set, &waiting[at % AHEAD], homes[at % AHEAD])) break;
    }
    Py_XDECREF(keys.each);
    return failed ? NULL : PyLong_FromSsize_t(at - start);
}

/* Calls `change` with each key, once all are known to be keys and there is room. */
static PyObject *change_each(KeySet *set, PyObject *given, void (*change)(KeySet *, const Key *), int adds) {
    PyObject *keys = PySequence_Fast(given, "keys must be iterable");
    if (keys == NULL) return NULL;
    Py_ssize_t count = PySequence_Size(keys);
    Key key;
    int failed = 0;
    for (Py_ssize_t i = 0; i < count && !failed; i++) failed = read_key(item(keys, i), &key);
    if (!failed && adds) failed = make_room(set, (size_t)count);
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        read_key(item(keys, i), &key);
        change(set, &key);
    }
    Py_DECREF(keys);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *update(PyObject *self, PyObject *keys) { return change_each((KeySet *)self, keys, add, 1); }

static PyObject *difference_update(PyObject *self, PyObject *keys) {
    return change_each((KeySet *)self, keys, discard, 0);
}

static PyObject *clear(PyObject *self, PyObject *none) {
    (void)none;
    forget((KeySet *)self);
    Py_RETURN_NONE;
}

static int append(PyObject *list, const Key *key) {
    PyObject *made = PyBytes_FromStringAndSize((const char *)key, KEY_BYTES);
    int failed = made == NULL ? -1 : PyList_Append(list, made);
    Py_XDECREF(made);
    return failed;
}

/* The list grows as it is filled: making one may run the garbage collection, so code of others, and
 * making bytes does not. */
static PyObject *tolist(PyObject *self, PyObject *none) {
    (void)none;
    const KeySet *set = (KeySet *)self;
    PyObject *keys = PyList_New(0);
    int failed = keys == NULL || (set->has_zeros && append(keys, &nothing) < 0);
    for (size_t i = 0; i < set->room && !failed; i++)
        if (!is_zeros(&set->table[i])) failed = append(keys, &set->table[i]) < 0;
    if (failed) Py_CLEAR(keys);
    return keys;
}

static Py_ssize_t length(PyObject *self) {
    const KeySet *set = (KeySet *)self;
    return (Py_ssize_t)set->used + set->has_zeros;
}

static int contains(PyObject *self, PyObject *given) {
    const KeySet *set = (KeySet *)self;
    Key key;
    return read_key(given, &key) < 0 ? -1 : has(set, &key, home_of(set, &key));
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *named) {
    const char *secret;
    Py_ssize_t size;
    static char *names[] = {"secret", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, named, "y#", names, &secret, &size)) return NULL;
    if (size != SECRET_WORDS * 8) {
        PyErr_Format(PyExc_ValueError, "a secret has %d bytes, not %zd", SECRET_WORDS * 8, size);
        return NULL;
    }
    KeySet *set = (KeySet *)PyType_GenericAlloc(type, 0);
    if (set == NULL) return NULL;
    memcpy(set->secret, secret, sizeof set->secret);
    forget(set);
    return (PyObject *)set;
}

static void end(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(((KeySet *)self)->memory);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {{"update", update, METH_O, NULL},
                                {"difference_update", difference_update, METH_O, NULL},
                                {"clear", clear, METH_NOARGS, NULL},
                                {"leading", leading, METH_VARARGS, NULL},
                                {"tolist", tolist, METH_NOARGS, NULL},
                                {NULL, NULL, 0, NULL}};
static PyType_Slot parts[] = {{Py_tp_new, make},         {Py_tp_dealloc, end},           {Py_tp_methods, methods},
                              {Py_sq_length, length},    {Py_sq_contains, contains},     {0, NULL}};
static PyType_Spec spec = {"kvstore.compiled._key_set.KeySet", sizeof(KeySet), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, parts};

/* PyModule_Add is not in the limited interface of 3.11. */
static int put(PyObject *module, const char *name, PyObject *value) {
    int failed = value == NULL ? -1 : PyModule_AddObjectRef(module, name, value);
    Py_XDECREF(value);
    return failed;
}

static int prepare(PyObject *module) {
    if (put(module, "KeySet", PyType_FromModuleAndSpec(module, &spec, NULL)) < 0) return -1;
    return put(module, "SOURCE_CRC32", PyLong_FromUnsignedLong(SOURCE_CRC32));
}
static PyModuleDef_Slot slots[] = {{Py_mod_exec, prepare}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_key_set", NULL, 0, NULL, slots, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__key_set(void) { return PyModuleDef_Init(&definition); }
