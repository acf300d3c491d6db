/* Arguments of Python into 64-bit slots, and the programs of a grid on one thread or several. */
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>

#include "run.h"

#define MOST_ARGUMENTS 256
#define MOST_THREADS 256

static PyObject *data_ptr_name;

/* One argument by its code: '-' constexpr, 'p' pointer, 'i' integer, 'f' float. */
static inline int pack_one(char code, PyObject *arg, uint64_t *slots, int *n) {
    uint64_t *slot = &slots[(*n)++];
    if (*n > MOST_ARGUMENTS) {
        PyErr_SetString(PyExc_TypeError, "a kernel has too many arguments");
        return -1;
    }
    if (code == 'f') {
        double value = PyFloat_AsDouble(arg);
        memcpy(slot, &value, 8);
    } else if (PyLong_Check(arg)) {
        *slot = PyLong_AsUnsignedLongLongMask(arg);
    } else if (arg == Py_None) {
        *slot = 0;
    } else {
        PyObject *number = code == 'p' ? PyObject_CallMethodNoArgs(arg, data_ptr_name) : PyNumber_Index(arg);
        if (!number) return -1;
        *slot = PyLong_AsUnsignedLongLongMask(number);
        Py_DECREF(number);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Tuples have codes in parentheses. */
static int pack(const char **codes, PyObject *arg, uint64_t *slots, int *n) {
    char code = *(*codes)++;
    if (code == '-') return 0;
    if (code != '(') return pack_one(code, arg, slots, n);
    PyObject *items = PySequence_Fast(arg, "a tuple is expected");
    if (!items) return -1;
    int failed = 0;
    for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(items) && !failed; k++)
        failed = pack(codes, PySequence_Fast_GET_ITEM(items, k), slots, n);
    Py_DECREF(items);
    (*codes)++; /* ) */
    return failed;
}

/* What the threads of a launch share. */
typedef struct {
    tc_entry entry;
    const tc_run *run;
    const int64_t *order; /* of programs; none: ascending */
    int64_t next, count;
} shared_work;

static void *work_on(void *given) {
    shared_work *work = given;
    int64_t i;
    while ((i = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->count) {
        int64_t program = work->order ? work->order[i] : i;
        work->entry(work->run, program, program + 1);
    }
    return NULL;
}

static void work_in_pool(void *given) { work_on(given); }

/* OpenMP's `GOMP_parallel`, of the library whose threads torch computes with; none: one thread. */
static void (*pool)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

static void execute_in_pool(tc_entry entry, const tc_run *run, int threads) {
    int64_t count = (int64_t)run->grid[0] * run->grid[1] * run->grid[2];
    shared_work work = {entry, run, NULL, 0, count};
    pool(work_in_pool, &work, threads, 0);
}

static void execute(tc_entry entry, const tc_run *run, const int64_t *order, int threads) {
    int64_t count = (int64_t)run->grid[0] * run->grid[1] * run->grid[2];
    if (threads <= 1 && !order) {
        entry(run, 0, count);
        return;
    }
    shared_work work = {entry, run, order, 0, count};
    pthread_t others[MOST_THREADS];
    int started = 0;
    while (started < threads - 1 && started < MOST_THREADS)
        if (pthread_create(&others[started], NULL, work_on, &work)) break;
        else started++;
    work_on(&work);
    while (started > 0) pthread_join(others[--started], NULL);
}
