/* faults.h -- what a test learns of each call that changes the disk, if it is linked with faults.c */
#pragma once

#include <stddef.h>

struct IoCall {
    const char* name;           /* open (to write, or a directory), write, truncate, fsync, close, rename, unlink,
                                   rmdir, mkdir */
    const char* path;
    const char* to;             /* of a rename, otherwise "" */
    const void* data;           /* of a write */
    size_t bytes;               /* of a write; the hook may shorten it */
};

#if defined(__cplusplus)
extern "C"
#else
extern
#endif
int (*io_hook)(struct IoCall*);     /* called before each call: 0, or the errno with which it fails */
