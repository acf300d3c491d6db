/* Launches: `launch` is what Triton calls; a `Launch` is `kernel[grid]`, which finds the compiled
   kernel by one key of all arguments. */
#include <time.h>

#include "execute.h"

/* A thread must have so many seconds to do: waking it takes some microseconds. */
#define LEAST_SHARE 50e-6

static int pool_threads = 1;
static PyObject *raise_fault; /* of launcher.py */
static PyObject *run_name, *calls_name, *dtype_name, *grid_name, *warmup_name;
static PyTypeObject *tensor_type, *parameter_type;
static PyObject *runtime_knobs, *hook_names[2], *hooks[2];

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

/* On as many threads as have enough to do, by what a program took last time. */
static void execute_served(tc_entry entry, const tc_run *run, double *seconds) {
    int64_t count = (int64_t)run->grid[0] * run->grid[1] * run->grid[2];
    double threads = *seconds * count / LEAST_SHARE, began = now();
    if (threads > count) threads = count;
    if (threads > pool_threads) threads = pool_threads;
    if (threads >= 2) execute_in_pool(entry, run, (int)threads);
    else execute(entry, run, NULL, threads = 1);
    *seconds = (now() - began) * (int)threads / count;
}

/* `seconds` of a program, where the launch may take several threads of the pool. */
static int launch_slots(tc_entry entry, const uint64_t *slots, const int32_t *grid, const char *ranges,
                        const int64_t *order, int threads, double *seconds) {
    tc_fault fault = {0};
    tc_run run = {slots, {grid[0], grid[1], grid[2]}, (const tc_range *)ranges, &fault};
    if (grid[0] <= 0 || grid[1] <= 0 || grid[2] <= 0) return 0;
    Py_BEGIN_ALLOW_THREADS
    if (seconds && pool_threads > 1) execute_served(entry, &run, seconds);
    else execute(entry, &run, order, threads);
    Py_END_ALLOW_THREADS
    if (!fault.found) return 0;
    PyObject *done = PyObject_CallFunction(
        raise_fault, "Kiiz(iii)KK", (unsigned long long)(uintptr_t)entry, fault.argument, fault.place,
        fault.message, fault.pid[0], fault.pid[1], fault.pid[2],
        (unsigned long long)(uintptr_t)fault.address,
        (unsigned long long)(fault.argument < 0 ? 0 : slots[fault.argument]));
    Py_XDECREF(done);
    return -1;
}

/* launch(entry, codes, x, y, z, arguments, ranges or None, order or None, threads) */
static PyObject *launch(PyObject *self, PyObject *const *a, Py_ssize_t count) {
    uint64_t slots[MOST_ARGUMENTS];
    int n = 0;
    if (count != 9) return PyErr_Format(PyExc_TypeError, "nine arguments");
    const char *codes = PyBytes_AsString(a[1]);
    int32_t grid[3];
    for (int k = 0; k < 3; k++) grid[k] = (int32_t)PyLong_AsLong(a[2 + k]);
    if (PyErr_Occurred()) return NULL;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(a[5]); k++)
        if (pack(&codes, PyTuple_GET_ITEM(a[5], k), slots, &n)) return NULL;
    const char *ranges = a[6] == Py_None ? NULL : PyBytes_AsString(a[6]);
    const char *order = a[7] == Py_None ? NULL : PyBytes_AsString(a[7]);
    tc_entry entry = (tc_entry)(uintptr_t)PyLong_AsUnsignedLongLongMask(a[0]);
    int threads = (int)PyLong_AsLong(a[8]);
    if (PyErr_Occurred()) return NULL;
    if (launch_slots(entry, slots, grid, ranges, (const int64_t *)order, threads, NULL)) return NULL;
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------ kernels by the key of a call */
typedef struct known_kernel {
    struct known_kernel *next;
    uint64_t hash;
    int count;
    uint64_t *words;
    tc_entry entry;
    double seconds; /* of a program in the last launch */
    char *codes; /* of every parameter */
    PyObject *kernel, *held;
} known_kernel;

#define BUCKETS 64

typedef struct {
    PyObject_HEAD
    PyObject *jit, *run, *names, *ignored, *defaults; /* defaults: a tuple, NULL objects are `jit` */
    PyObject *hooks, *globals; /* pre-run hooks; tuple of (name, value, dict) */
    char *kinds; /* of every parameter: 'c' constexpr, 's' specialized if it is 1, 'n' not */
    Py_ssize_t count;
    known_kernel *buckets[BUCKETS];
} Cache;

static int cache_init(Cache *self, PyObject *args, PyObject *kwargs) {
    const char *kinds;
    if (!PyArg_ParseTuple(args, "OOOOOOs#", &self->jit, &self->run, &self->names, &self->ignored,
                          &self->defaults, &self->hooks, &kinds, &self->count))
        return -1;
    Py_INCREF(self->jit), Py_INCREF(self->run), Py_INCREF(self->names), Py_INCREF(self->ignored);
    Py_INCREF(self->defaults), Py_INCREF(self->hooks);
    self->kinds = strdup(kinds);
    self->globals = PyTuple_New(0);
    return self->count > MOST_ARGUMENTS ? -1 : 0;
}

static PyTypeObject CacheType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "launcher.Cache",
    .tp_basicsize = sizeof(Cache),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)cache_init,
};

/* Words that tell apart all arguments that may need another kernel; -1 where that is not known. */
static int key_of(Cache *cache, PyObject *const *values, uint64_t *words) {
    int n = 0;
    for (Py_ssize_t k = 0; k < cache->count; k++) {
        PyObject *value = values[k];
        PyTypeObject *type = Py_TYPE(value);
        if (cache->kinds[k] == 'c') {
            uint64_t payload = (uintptr_t)value;
            if (type == &PyLong_Type) {
                int overflow;
                payload = (uint64_t)PyLong_AsLongLongAndOverflow(value, &overflow);
                if (overflow) return -1;
            } else if (type == &PyFloat_Type) {
                double number = PyFloat_AS_DOUBLE(value);
                memcpy(&payload, &number, 8);
            }
            words[n++] = (uintptr_t)type;
            words[n++] = payload;
        } else if (type == tensor_type || type == parameter_type) {
            PyObject *dtype = PyObject_GetAttr(value, dtype_name);
            if (!dtype) return -1;
            words[n++] = (uintptr_t)dtype;
            Py_DECREF(dtype);
        } else if (type == &PyLong_Type) {
            int overflow;
            long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
            if (overflow) return -1;
            words[n++] = number == 1 && cache->kinds[k] == 's' ? 3 : number == (int32_t)number ? 4 : 5;
        } else if (value == Py_None) {
            words[n++] = 1;
        } else if (type == &PyBool_Type) {
            words[n++] = 2;
        } else if (type == &PyFloat_Type) {
            words[n++] = 7;
        } else {
            return -1;
        }
    }
    return n;
}

static uint64_t hash_of(const uint64_t *words, int n) {
    uint64_t hash = 1469598103934665603ull;
    for (int k = 0; k < n; k++) hash = (hash ^ words[k]) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29;
    return hash;
}

static known_kernel *find(Cache *cache, uint64_t hash, const uint64_t *words, int n) {
    known_kernel *each = cache->buckets[hash % BUCKETS];
    while (each && (each->hash != hash || each->count != n || memcmp(each->words, words, 8 * n)))
        each = each->next;
    return each;
}

/* Every parameter's value into `values`; 0 if Triton must see to the call. */
static int bind(Cache *cache, PyObject *const *args, Py_ssize_t count, PyObject *kwnames, PyObject **values) {
    if (count > cache->count) return 0;
    memcpy(values, args, count * sizeof *values);
    memset(values + count, 0, (cache->count - count) * sizeof *values);
    for (Py_ssize_t k = 0; kwnames && k < PyTuple_GET_SIZE(kwnames); k++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, k);
        PyObject *place = PyDict_GetItemWithError(cache->names, name);
        if (place) {
            Py_ssize_t at = PyLong_AsSsize_t(place);
            if (values[at]) return 0;
            values[at] = args[count + k];
        } else if (PySet_Contains(cache->ignored, name) != 1) {
            return 0;
        }
    }
    for (Py_ssize_t k = count; k < cache->count; k++)
        if (!values[k] && (values[k] = PyTuple_GET_ITEM(cache->defaults, k)) == cache->jit) return 0;
    return 1;
}

/* Nothing is installed that wants to see launches, and no global has changed. */
static int is_plain(Cache *cache) {
    PyObject *run = PyObject_GetAttr(cache->jit, run_name);
    int plain = run && PyMethod_Check(run) && PyMethod_GET_FUNCTION(run) == cache->run;
    Py_XDECREF(run);
    plain = plain && PyList_GET_SIZE(cache->hooks) == 0;
    for (int k = 0; k < 2 && plain; k++) {
        PyObject *hook = PyObject_GetAttr(runtime_knobs, hook_names[k]);
        PyObject *calls = hook == hooks[k] ? PyObject_GetAttr(hook, calls_name) : NULL;
        plain = calls && PyList_Check(calls) && PyList_GET_SIZE(calls) == 0;
        Py_XDECREF(hook), Py_XDECREF(calls);
    }
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(cache->globals) && plain; k++) {
        PyObject *each = PyTuple_GET_ITEM(cache->globals, k);
        plain = PyDict_GetItem(PyTuple_GET_ITEM(each, 2), PyTuple_GET_ITEM(each, 0)) == PyTuple_GET_ITEM(each, 1);
    }
    if (PyErr_Occurred()) PyErr_Clear();
    return plain;
}

/* ------------------------------------------------------------------ kernel[grid] */
typedef struct {
    PyObject_HEAD
    Cache *cache;
    PyObject *grid;
    vectorcallfunc call;
} Launch;

static PyObject *register_kernel; /* of launcher.py: (cache, compiled kernel) -> (entry, codes, globals) */

/* Triton's own way, which compiles the kernel where it must. */
static PyObject *by_triton(Launch *self, PyObject *const *args, Py_ssize_t count, PyObject *kwnames) {
    PyObject *kwargs = PyDict_New(), *given = PyTuple_New(count), *run = NULL, *kernel = NULL;
    if (!kwargs || !given) goto done;
    for (Py_ssize_t k = 0; k < count; k++) PyTuple_SET_ITEM(given, k, Py_NewRef(args[k]));
    for (Py_ssize_t k = 0; kwnames && k < PyTuple_GET_SIZE(kwnames); k++)
        if (PyDict_SetItem(kwargs, PyTuple_GET_ITEM(kwnames, k), args[count + k])) goto done;
    if (PyDict_SetItem(kwargs, grid_name, self->grid) || PyDict_SetItem(kwargs, warmup_name, Py_False)) goto done;
    if ((run = PyObject_GetAttr(self->cache->jit, run_name))) kernel = PyObject_Call(run, given, kwargs);
done:
    Py_XDECREF(kwargs), Py_XDECREF(given), Py_XDECREF(run);
    return kernel;
}

static int remember(Cache *cache, PyObject *kernel, uint64_t hash, const uint64_t *words, int n, PyObject *const *values) {
    PyObject *found = PyObject_CallFunctionObjArgs(register_kernel, cache->jit, kernel, NULL);
    if (!found) return -1;
    if (found == Py_None || find(cache, hash, words, n)) {
        Py_DECREF(found);
        return 0;
    }
    known_kernel *new = calloc(1, sizeof *new);
    new->hash = hash, new->count = n;
    new->words = memcpy(malloc(8 * n + 8), words, 8 * n);
    new->entry = (tc_entry)(uintptr_t)PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(found, 0));
    new->codes = strdup(PyBytes_AS_STRING(PyTuple_GET_ITEM(found, 1)));
    Py_SETREF(cache->globals, Py_NewRef(PyTuple_GET_ITEM(found, 2)));
    new->kernel = Py_NewRef(kernel);
    /* What the key compares by identity must stay. */
    new->held = PyTuple_New(0);
    for (Py_ssize_t k = 0; k < cache->count; k++)
        if (cache->kinds[k] == 'c') {
            PyObject *more = PyTuple_Pack(2, new->held, values[k]);
            Py_SETREF(new->held, more);
        }
    new->next = cache->buckets[hash % BUCKETS];
    cache->buckets[hash % BUCKETS] = new;
    Py_DECREF(found);
    return 0;
}

/* Grid of a launch; functions are called with all arguments by name. */
static int grid_of(Launch *self, PyObject *const *values, int32_t *grid) {
    Cache *cache = self->cache;
    PyObject *sizes = Py_NewRef(self->grid);
    if (PyCallable_Check(sizes)) {
        PyObject *bound = PyDict_New(), *name, *place;
        Py_ssize_t at = 0;
        while (PyDict_Next(cache->names, &at, &name, &place))
            PyDict_SetItem(bound, name, values[PyLong_AsSsize_t(place)]);
        Py_SETREF(sizes, PyObject_CallOneArg(self->grid, bound));
        Py_DECREF(bound);
        if (!sizes) return -1;
    }
    PyObject *fast = PySequence_Fast(sizes, "a grid is a tuple of one to three sizes");
    Py_DECREF(sizes);
    if (!fast) return -1;
    for (Py_ssize_t k = 0; k < 3; k++) {
        PyObject *size = k < PySequence_Fast_GET_SIZE(fast) ? PySequence_Fast_GET_ITEM(fast, k) : NULL;
        grid[k] = size ? (int32_t)PyLong_AsLong(size) : 1;
    }
    Py_DECREF(fast);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *launch_call(PyObject *given, PyObject *const *args, size_t nargs, PyObject *kwnames) {
    Launch *self = (Launch *)given;
    Cache *cache = self->cache;
    Py_ssize_t count = PyVectorcall_NARGS(nargs);
    PyObject *values[MOST_ARGUMENTS];
    uint64_t words[2 * MOST_ARGUMENTS], slots[MOST_ARGUMENTS];
    int n;
    if (!is_plain(cache) || !bind(cache, args, count, kwnames, values) || (n = key_of(cache, values, words)) < 0) {
        if (PyErr_Occurred()) return NULL;
        return by_triton(self, args, count, kwnames);
    }
    uint64_t hash = hash_of(words, n);
    known_kernel *known = find(cache, hash, words, n);
    if (!known) {
        PyObject *kernel = by_triton(self, args, count, kwnames);
        if (kernel && remember(cache, kernel, hash, words, n, values)) Py_CLEAR(kernel);
        return kernel;
    }
    int32_t grid[3];
    int packed = 0;
    if (grid_of(self, values, grid)) return NULL;
    for (Py_ssize_t k = 0; k < cache->count; k++)
        if (known->codes[k] != '-' && pack_one(known->codes[k], values[k], slots, &packed)) return NULL;
    if (launch_slots(known->entry, slots, grid, NULL, NULL, 1, &known->seconds)) return NULL;
    return Py_NewRef(known->kernel);
}

static void launch_dealloc(Launch *self) {
    Py_XDECREF(self->cache), Py_XDECREF(self->grid);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "launcher.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Launch, call),
    .tp_call = PyVectorcall_Call,
    .tp_dealloc = (destructor)launch_dealloc,
};

/* of_grid(cache, grid): a Launch */
static PyObject *of_grid(PyObject *self, PyObject *const *a, Py_ssize_t count) {
    if (count != 2 || !Py_IS_TYPE(a[0], &CacheType)) return PyErr_Format(PyExc_TypeError, "a cache and a grid");
    Launch *found = PyObject_New(Launch, &LaunchType);
    if (!found) return NULL;
    found->cache = (Cache *)Py_NewRef(a[0]);
    found->grid = Py_NewRef(a[1]);
    found->call = launch_call;
    return (PyObject *)found;
}

/* set_up(raise_fault, register_kernel, Tensor, Parameter, knobs.runtime) */
static PyObject *set_up(PyObject *self, PyObject *args) {
    if (!PyArg_ParseTuple(args, "OOOOO", &raise_fault, &register_kernel, (PyObject **)&tensor_type,
                          (PyObject **)&parameter_type, &runtime_knobs))
        return NULL;
    Py_INCREF(args); /* and so all of them */
    for (int k = 0; k < 2; k++)
        if (!(hooks[k] = PyObject_GetAttr(runtime_knobs, hook_names[k]))) return NULL;
    Py_RETURN_NONE;
}

/* set_pool(address of GOMP_parallel, threads) */
static PyObject *set_pool(PyObject *self, PyObject *args) {
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "Ki", &address, &pool_threads)) return NULL;
    pool = (void (*)(void (*)(void *), void *, unsigned, unsigned))(uintptr_t)address;
    if (!pool) pool_threads = 1;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"set_pool", set_pool, METH_VARARGS, NULL},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL},
    {"of_grid", (PyCFunction)(void (*)(void))of_grid, METH_FASTCALL, NULL},
    {"set_up", set_up, METH_VARARGS, NULL},
    {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods};

PyMODINIT_FUNC PyInit_launcher(void) {
    data_ptr_name = PyUnicode_InternFromString("data_ptr");
    run_name = PyUnicode_InternFromString("run");
    calls_name = PyUnicode_InternFromString("calls");
    dtype_name = PyUnicode_InternFromString("dtype");
    grid_name = PyUnicode_InternFromString("grid");
    warmup_name = PyUnicode_InternFromString("warmup");
    hook_names[0] = PyUnicode_InternFromString("launch_enter_hook");
    hook_names[1] = PyUnicode_InternFromString("launch_exit_hook");
    if (PyType_Ready(&CacheType) || PyType_Ready(&LaunchType)) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddObjectRef(made, "Cache", (PyObject *)&CacheType)) Py_CLEAR(made);
    return made;
}
