"""Simulate a disk that becomes full at a given write: a shared library that overrides the C library's write calls.

It is compiled with `cc` and loaded by LD_PRELOAD, because Rust and torch write files too, without Python. It does
nothing until a forked command arms it. Deleting files always works, as on a full disk.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

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
    return path[0] == '/' && below(path);  /* not a pipe or a socket, whose links are no paths */
}
static int full(int there) {
    if (!there) return 0;
    long number = __sync_add_and_fetch(&count, 1);
    if (!first || number < first || (!every && number > first)) return 0;
    errno = ENOSPC;
    return 1;
}
#define UNLESS(there, type, name, parameters, ...) type name parameters { \
    if (armed && full(there)) return -1; \
    return ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))(__VA_ARGS__); }
UNLESS(below_fd(fd), ssize_t, write, (int fd, const void *data, size_t size), fd, data, size)
UNLESS(below_fd(fd), ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), fd, data, size, at)
UNLESS(below_fd(fd), ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), fd, data, size, at)
UNLESS(below_fd(fd), ssize_t, writev, (int fd, const struct iovec *parts, int number), fd, parts, number)
UNLESS(below_fd(fd), int, fsync, (int fd), fd)
UNLESS(below_fd(fd), int, fdatasync, (int fd), fd)
UNLESS(below_fd(fd), int, ftruncate, (int fd, off_t size), fd, size)
UNLESS(below_fd(fd), int, ftruncate64, (int fd, off64_t size), fd, size)
UNLESS(below(to), int, rename, (const char *from, const char *to), from, to)
UNLESS(below(to), int, renameat, (int a, const char *from, int b, const char *to), a, from, b, to)
UNLESS(below(path), int, mkdir, (const char *path, mode_t mode), path, mode)
UNLESS(below(to), int, link, (const char *from, const char *to), from, to)
UNLESS(below(to), int, symlink, (const char *from, const char *to), from, to)

#define OPENING(name, parameters, ...) int name parameters { \
    mode_t mode = 0; \
    va_list rest; va_start(rest, flags); \
    if (flags & (O_CREAT | __O_TMPFILE)) mode = va_arg(rest, mode_t); \
    va_end(rest); \
    if (armed && (flags & (O_CREAT | O_TRUNC)) && full(below(path))) return -1; \
    return ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))(__VA_ARGS__, mode); }
OPENING(open, (const char *path, int flags, ...), path, flags)
OPENING(open64, (const char *path, int flags, ...), path, flags)
OPENING(openat, (int at, const char *path, int flags, ...), at, path, flags)
OPENING(openat64, (int at, const char *path, int flags, ...), at, path, flags)
"""


def compile_library(folder: Path) -> Path | None:
    """The library in a folder; `None` without Linux and a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not sys.platform.startswith("linux") or compiler is None:
        return None
    source, library = folder / "disk.c", folder / "disk.so"
    source.write_text(SOURCE)
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    return None if subprocess.run(command, timeout=60, check=False).returncode else library


def arm(folder: Path, number: int, lasting: bool) -> None:
    """In a forked command, before it: its write `number` below a folder will fail, and all later ones if `lasting`.

    With number 0, writes are only counted.
    """
    ctypes.CDLL(None).faults_arm(ctypes.c_char_p(os.fsencode(folder)), ctypes.c_long(number), int(lasting))


def write_count(file: Path) -> None:
    """In a forked command, after it: writes the number of its writes to a file."""
    library = ctypes.CDLL(None)
    library.faults_count.restype = ctypes.c_long
    file.write_text(str(library.faults_count()))
