"""The rights that a process drops for good before it runs code of a policy; without privileges or namespaces.

In: the folder it may write to, and limits. Out: a list of the rights it could not drop; an empty list is a sandbox.

    rlimits      CPU seconds, address space, file size, open files, no core
    capabilities dropped, if the process is root
    Landlock     files: write access in its own folder only, read access there and to Python and its packages
    seccomp      no sockets, no new processes, no signals to others, no ptrace, no changed owners or modes

Landlock and seccomp also work in containers, where namespaces mostly do not: Docker's default profile allows both.
They keep a policy from cheating its reward and from doing harm by accident. Against attacks on the kernel itself, run
the whole worker in a virtual machine. Only the standard library is imported: the sandboxed interpreter starts with it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_RULES_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION, and LANDLOCK_RULE_PATH_BENEATH

_MOST_FILE_BYTES = 16 * 2**20
_MOST_OPEN_FILES = 64

# linux/landlock.h; later versions of the interface added rights: refer (2), truncate (3), ioctl on devices (5).
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_ALL_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_ALL_RIGHTS_NOW = (1 << 16) - 1
_FORBIDDEN_IN_THE_FOLDER = 1 << 0 | 1 << 6 | 1 << 9 | 1 << 11 | 1 << 15  # execute, devices, sockets, ioctl on devices

# Numbers on x86_64 and aarch64 (asm/unistd_64.h, asm-generic/unistd.h); None if the machine lacks the call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # network, and sockets of other processes on this machine
    **{"socket": (41, 198), "connect": (42, 203), "sendmsg": (46, 211), "sendmmsg": (307, 269), "bind": (49, 200)},
    **{"listen": (50, 201), "accept": (43, 202), "accept4": (288, 242), "io_uring_setup": (425, 425)},
    # processes: none may be started, joined, watched, signalled or slowed down; nor may this one leave its group
    **{"fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281)},
    **{"setsid": (112, 157), "setpgid": (109, 154), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138)},
    **{"rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"process_madvise": (440, 440), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118)},
    **{"sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274)},
    **{"migrate_pages": (256, 238), "move_pages": (279, 239)},
    # files, as far as Landlock does not cover them: truncation (before Linux 6.2), modes, owners, times, attributes
    **{"truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)},
    **{"chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None)},
    **{"utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5)},
    **{"lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15)},
    **{"fremovexattr": (199, 16), "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469)},
    # memory and queues shared by user id, and large interfaces of the kernel
    **{"shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "msgget": (68, 186)},
    **{"mq_open": (240, 180), "mq_unlink": (241, 181), "add_key": (248, 217), "request_key": (249, 218)},
    **{"keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
    **{"unshare": (272, 97), "setns": (308, 268)},
}
_CLONE, _CLONE3, _KILL, _TGKILL = (56, 220), (435, 435), (62, 129), (234, 131)
_SENDTO, _PRLIMIT, _PRCTL = (44, 206), (302, 261), (157, 167)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables above, and AUDIT_ARCH."""
_CLONE_THREAD = 0x10000
_EPERM, _ENOSYS = 1, 38


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def lock_down(folder: Path, *, seconds: float, memory_gb: float) -> list[str]:
    """Drop every right that code in `folder` does not need; returns those that could not be dropped, and why."""
    limit(resource.RLIMIT_CPU, int(seconds) + 2)
    limit(resource.RLIMIT_AS, int(memory_gb * 2**30))
    limit(resource.RLIMIT_FSIZE, _MOST_FILE_BYTES)
    limit(resource.RLIMIT_NOFILE, _MOST_OPEN_FILES)
    limit(resource.RLIMIT_CORE, 0)
    if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return [f"everything: no_new_privs was refused, {_last_error()}"]
    _drop_capabilities()
    return [*_restrict_files(folder), *_restrict_calls()]


def limit(which: int, most: int) -> None:
    """Lower a resource limit (`resource.RLIMIT_…`) of this process and those it starts, for good."""
    hard = resource.getrlimit(which)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))


def _drop_capabilities() -> None:
    for capability in range(64):
        if _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break  # past the last capability, or not root
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _LIBC.capset(header, bytes(24))


def _restrict_files(folder: Path) -> list[str]:
    version = _LIBC.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _RULES_VERSION)
    if version < 1:
        return [f"files: this kernel has no Landlock ({_last_error()}), so all files of this user can be written"]
    rights = _ALL_RIGHTS.get(version, _ALL_RIGHTS_NOW)
    rules = _LIBC.syscall(_LANDLOCK_CREATE_RULESET, struct.pack("Q", rights), ctypes.c_size_t(8), 0)
    readable = [sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime"]
    for path in [*readable, "/dev/zero", "/dev/urandom"]:
        _allow(rules, Path(path), _READ_FILE | _READ_DIR)
    _allow(rules, Path("/dev/null"), _READ_FILE | _WRITE_FILE)
    _allow(rules, folder, rights & ~_FORBIDDEN_IN_THE_FOLDER)
    failed = rules < 0 or _LIBC.syscall(_LANDLOCK_RESTRICT_SELF, rules, 0)
    return [f"files: Landlock was refused, {_last_error()}"] if failed else []


def _allow(rules: int, path: Path, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it does not exist, or this user may not open it
        return
    rule = struct.pack("=Qi", rights if path.is_dir() else rights & ~_READ_DIR, opened)
    _LIBC.syscall(_LANDLOCK_ADD_RULE, rules, _RULES_VERSION, rule, 0)
    os.close(opened)


def _restrict_calls() -> list[str]:
    machine = os.uname().machine
    if machine not in _MACHINES:
        return [f"network and processes: there are filters for {' and '.join(_MACHINES)}, not for {machine}"]
    program = _filter(*_MACHINES[machine])
    instructions = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: number of instructions, padding, their address
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    if _LIBC.prctl(_PR_SET_SECCOMP, 2, described, 0, 0):
        return [f"network and processes: seccomp was refused, {_last_error()}"]
    return []


def _filter(column: int, machine: int) -> bytes:
    """The seccomp program (linux/filter.h): call numbers are compared one by one, and the first match decides."""
    kill, allow, deny, missing = 0x80000000, 0x7FFF0000, 0x00050000 | _EPERM, 0x00050000 | _ENOSYS
    program: list[tuple[int, int, int, int]] = []

    def load(offset: int) -> None:
        program.append((0x20, 0, 0, offset))

    def jump(test: int, value: int, *, then: int = 0, otherwise: int = 0) -> None:
        program.append((test, then, otherwise, value))

    def leave(verdict: int) -> None:
        program.append((0x06, 0, 0, verdict))

    equal, at_least, has_bits = 0x15, 0x35, 0x45
    own, number, architecture = os.getpid(), 0, 4

    def argument(index: int, *, high: bool = False) -> int:
        return 16 + 8 * index + (4 if high else 0)

    def only_if(call: tuple[int, int], index: int, test: int, values: list[int], *, met: int, unmet: int) -> None:
        """Leave with `met` if the low half of an argument fits one of `values`, else with `unmet`."""
        jump(equal, call[column], otherwise=len(values) + 3)
        load(argument(index))
        for position, value in enumerate(values):
            jump(test, value, then=len(values) - position)
        leave(unmet)
        leave(met)

    load(architecture)
    jump(equal, machine, then=1)
    leave(kill)
    load(number)
    jump(at_least, 0x40000000, otherwise=1)  # x32 has other numbers
    leave(kill)
    for calls in _DENIED.values():
        if (call := calls[column]) is not None:
            jump(equal, call, otherwise=1)
            leave(deny)
    only_if(_CLONE, 0, has_bits, [_CLONE_THREAD], met=allow, unmet=deny)
    jump(equal, _CLONE3[column], otherwise=1)  # its flags are in memory; without this call libc uses `clone`
    leave(missing)
    for signalling in (_KILL, _TGKILL):
        only_if(signalling, 0, equal, [own], met=allow, unmet=deny)
    only_if(_PRLIMIT, 0, equal, [0, own], met=allow, unmet=deny)
    only_if(_PRCTL, 0, equal, [_PR_SET_PDEATHSIG], met=deny, unmet=allow)
    # asyncio wakes its loop with `send` on a socket pair, which is `sendto` without an address.
    jump(equal, _SENDTO[column], otherwise=5)
    load(argument(4))
    jump(equal, 0, otherwise=2)
    load(argument(4, high=True))
    jump(equal, 0, then=1)
    leave(deny)
    leave(allow)
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _last_error() -> str:
    return os.strerror(ctypes.get_errno())
