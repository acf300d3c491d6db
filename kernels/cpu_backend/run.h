/* What a launch tells a kernel: shared by the kernels' prelude.h and launcher.c. */
#pragma once
#include <stdint.h>

/* The bytes of an argument's tensor. */
typedef struct {
    const char *low, *high;
} tc_range;

/* The first fault of a launch: an access outside of its tensor, or a message of an assertion. */
typedef struct {
    int32_t found, pid[3], argument, place;
    const char *address, *message;
} tc_fault;

typedef struct {
    const uint64_t *slots; /* the arguments */
    int32_t grid[3];
    const tc_range *ranges; /* of every argument, where bounds are checked */
    tc_fault *fault;
} tc_run;

typedef void (*tc_entry)(const tc_run *run, int64_t begin, int64_t end);
