"""Simulate a disk that becomes full at a given write: a shared library that overrides the C library's write calls.

It is compiled with `cc` and loaded by LD_PRELOAD, because Rust and torch write files too, without Python. It does
nothing until a forked command arms it. Deleting files always works, as on a full disk.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PRELOAD = "TINYLM_FAULTS_DISK"  # set when the library has been loaded
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long armed = 0, count = 0, first = 0, every = 0;

void faults_arm(const char *path, long number, int lasting) {
    strncpy(folder, path, sizeof folder - 1);
    first = number; every = lasting; count = 0; armed = 1;
}
long faults_count(void) { return count; }

static int below(const char *path) {
    char here[PATH_MAX];
    if (path[0] == '/') return strncmp(path, folder, strlen(folder)) == 0;
    return getcwd(here, sizeof here) && strncmp(here, folder, strlen(folder)) == 0;
}
static int below_fd(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return below(path);
}
static int full(int there) {
    if (!there) return 0;
    long number = __sync_add_and_fetch(&count, 1);
    if (!first || number < first || (!every && number > first)) return 0;
    errno = ENOSPC;
    return 1;
}
#define NEXT(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))
#define STOP_FD(fd) if (armed && full(below_fd(fd))) return -1
#define STOP(path) if (armed && full(below(path))) return -1
#define WRITING (O_CREAT | O_TRUNC)

ssize_t write(int fd, const void *data, size_t size) { STOP_FD(fd); return NEXT(write)(fd, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    STOP_FD(fd); return NEXT(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    STOP_FD(fd); return NEXT(pwrite64)(fd, data, size, at);
}
ssize_t writev(int fd, const struct iovec *parts, int number) { STOP_FD(fd); return NEXT(writev)(fd, parts, number); }
int fsync(int fd) { STOP_FD(fd); return NEXT(fsync)(fd); }
int fdatasync(int fd) { STOP_FD(fd); return NEXT(fdatasync)(fd); }
int ftruncate(int fd, off_t size) { STOP_FD(fd); return NEXT(ftruncate)(fd, size); }
int ftruncate64(int fd, off64_t size) { STOP_FD(fd); return NEXT(ftruncate64)(fd, size); }
int rename(const char *from, const char *to) { STOP(to); return NEXT(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) { STOP(to); return NEXT(renameat)(a, from, b, to); }
int mkdir(const char *path, mode_t mode) { STOP(path); return NEXT(mkdir)(path, mode); }
int link(const char *from, const char *to) { STOP(to); return NEXT(link)(from, to); }
int symlink(const char *from, const char *to) { STOP(to); return NEXT(symlink)(from, to); }

#define MODE mode_t mode = 0; \
    va_list rest; va_start(rest, flags); \
    if (flags & (O_CREAT | __O_TMPFILE)) mode = va_arg(rest, mode_t); \
    va_end(rest)
#define STOP_OPEN(path) if (armed && (flags & WRITING) && full(below(path))) return -1
int open(const char *path, int flags, ...) { MODE; STOP_OPEN(path); return NEXT(open)(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE; STOP_OPEN(path); return NEXT(open64)(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) {
    MODE; STOP_OPEN(path); return NEXT(openat)(at, path, flags, mode);
}
int openat64(int at, const char *path, int flags, ...) {
    MODE; STOP_OPEN(path); return NEXT(openat64)(at, path, flags, mode);
}
"""


def load(folder: Path) -> None:
    """Restart this program with the library preloaded, unless it is loaded already.

    Does nothing without Linux and a C compiler; `is_loaded` returns whether it worked.
    """
    if is_loaded():
        return
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not sys.platform.startswith("linux") or compiler is None:
        return
    source, library = folder / "disk.c", folder / "disk.so"
    source.write_text(SOURCE)
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    if subprocess.run(command, timeout=60, check=False).returncode:
        return
    environment = {**os.environ, "LD_PRELOAD": str(library), PRELOAD: str(folder)}
    os.execve(sys.executable, sys.orig_argv, environment)


def is_loaded() -> bool:
    return PRELOAD in os.environ


def full_at(folder: Path, number: int, lasting: bool) -> Callable[[], None]:
    """A function for a forked command to call first: makes its write `number` below a folder fail, and all later ones
    if `lasting`.

    With number 0, writes are only counted.
    """
    library = ctypes.CDLL(None)
    library.faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
    return lambda: library.faults_arm(os.fsencode(folder), number, int(lasting))


def write_count(file: Path) -> Callable[[], None]:
    """A function for a forked command to call last: writes the number of its writes to a file."""
    library = ctypes.CDLL(None)
    library.faults_count.restype = ctypes.c_long
    return lambda: _write(file, str(library.faults_count()))


def _write(file: Path, text: str) -> None:
    file.write_text(text)
