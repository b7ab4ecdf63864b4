"""The rights that a process drops for good before it runs code of a policy; without privileges or namespaces.

In: the folder it may write to, and limits. Out: a list of the rights it could not drop; an empty list is a sandbox.

    rlimits      CPU seconds, address space, file size, open files, no core, no locked memory, no queues of the user
    capabilities dropped, if the process is root
    Landlock     files: write access in its own folder only, read access there, to /usr, Python and its packages
    seccomp      no sockets, no new processes, no signals to others, no ptrace, no changed owners or modes; of calls
                 that do many things (`fcntl`, `ioctl`, `prctl`, `open`) only those that are listed
    cgroup v2    all memory together, and threads, if a group for it was made (`usage.py`)

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
from collections.abc import Iterable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_HARMLESS_PRCTL = [3, 15, 16, 21, 23, 39, 0x53564D41]  # read flags, names of threads, names of memory
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_RULES_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION, and LANDLOCK_RULE_PATH_BENEATH

_LIMITS = {
    resource.RLIMIT_FSIZE: 16 * 2**20,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
    # These are counted for all processes of the user: a program that uses them up takes them from the others.
    **{resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0, resource.RLIMIT_SIGPENDING: 64},
}

# linux/landlock.h; later versions of the interface added rights: refer (2), truncate (3), ioctl on devices (5).
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_ALL_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_ALL_RIGHTS_NOW = (1 << 16) - 1
_TCP_BY_VERSION_4, _SCOPES_BY_VERSION_6 = 0b11, 0b11  # bind and connect; abstract sockets and signals
_FORBIDDEN_IN_THE_FOLDER = 1 << 0 | 1 << 6 | 1 << 9 | 1 << 11 | 1 << 15  # execute, devices, sockets, ioctl on devices

_Call = tuple[int | None, int | None]
# Numbers on x86_64 and aarch64 (asm/unistd_64.h, asm-generic/unistd.h); None if the machine lacks the call.
_DENIED: dict[str, _Call] = {
    # network, and sockets of other processes on this machine
    **{"socket": (41, 198), "connect": (42, 203), "sendmsg": (46, 211), "sendmmsg": (307, 269), "bind": (49, 200)},
    **{"listen": (50, 201), "accept": (43, 202), "accept4": (288, 242), "setsockopt": (54, 208)},
    # processes: none may be started, joined, watched, signalled or slowed down; nor may this one leave its group
    **{"fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281)},
    **{"setsid": (112, 157), "setpgid": (109, 154), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138)},
    **{"rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438)},
    **{"pidfd_open": (434, 434), "process_mrelease": (448, 448), "get_robust_list": (274, 100)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"process_madvise": (440, 440), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118)},
    **{"sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274)},
    **{"migrate_pages": (256, 238), "move_pages": (279, 239)},
    # files, as far as Landlock does not cover them: truncation (before Linux 6.2), modes, owners, times, attributes
    **{"truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)},
    **{"chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None)},
    **{"utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5)},
    **{"lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15)},
    **{"fremovexattr": (199, 16), "open_by_handle_at": (304, 265), "sync": (162, 81), "syncfs": (306, 267)},
    # memory outside of the limit of address space, and what is shared or counted by user id
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "io_setup": (206, 0), "timer_create": (222, 107)},
    **{"shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193)},
    **{"semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188)},
    **{"msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "add_key": (248, 217)},
    **{"request_key": (249, 218), "keyctl": (250, 219), "inotify_init": (253, None), "inotify_init1": (294, 26)},
    # large interfaces of the kernel that Python does not need
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{
        "unshare": (272, 97),
        "setns": (308, 268),
        "seccomp": (317, 277),
        "personality": (135, 92),
        "syslog": (103, 116),
    },
    **{"modify_ldt": (154, None), "open_tree": (428, 428), "fsopen": (430, 430), "fspick": (433, 433)},
    **{"mount_setattr": (442, 442), "quotactl_fd": (443, 443)},
}
_MISSING: list[_Call] = [(435, 435), (437, 437)]
"""`clone3` and `openat2`, whose flags are in memory, which a filter cannot read; libc and Python do without."""
_FIRST_UNKNOWN = 463
"""Calls from here on are refused as unknown: what they can do was not examined."""
_ALL_BITS, _CLONE_THREAD, _O_ACCMODE, _O_TRUNC, _AF_UNIX = 0xFFFFFFFF, 0x10000, 3, 0x200, 1
# Before Linux 6.2 Landlock lets a file be truncated that is opened for reading, and mode 3 passes it always.
_OPEN_MODES = _O_ACCMODE | _O_TRUNC, [0, 1, 2, 1 | _O_TRUNC, 2 | _O_TRUNC]
_LOW, _HIGH = 0, 4
"""Byte of the half of an argument."""


def _listed(own: int) -> list[tuple[_Call, int, int, tuple[int, list[int]]]]:
    """Calls of which some are allowed: number, argument, its half, and the values that it may have under a mask."""
    # descriptors and their flags, locks of files, size of a pipe; not owners, signals, leases or larger pipes
    fcntl = [0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032, 1034]
    # is it a terminal, and how wide; bytes to read; blocking; closed by exec
    ioctl = [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]
    return [
        ((56, 220), 0, _LOW, (_CLONE_THREAD, [_CLONE_THREAD])),  # clone
        ((62, 129), 0, _LOW, (_ALL_BITS, [own])),  # kill
        ((234, 131), 0, _LOW, (_ALL_BITS, [own])),  # tgkill
        ((302, 261), 0, _LOW, (_ALL_BITS, [0, own])),  # prlimit64
        ((157, 167), 0, _LOW, (_ALL_BITS, _HARMLESS_PRCTL)),
        ((72, 25), 1, _LOW, (_ALL_BITS, fcntl)),
        ((16, 29), 1, _LOW, (_ALL_BITS, ioctl)),
        # With any flag it takes space past the end of a file, which no limit of the size of a file counts.
        ((285, 47), 1, _LOW, (_ALL_BITS, [0])),  # fallocate
        ((2, None), 1, _LOW, _OPEN_MODES),
        ((257, 56), 2, _LOW, _OPEN_MODES),  # openat
        ((53, 199), 0, _LOW, (_ALL_BITS, [_AF_UNIX])),  # socketpair
        # asyncio wakes its loop with `send` on a socket pair, which is `sendto` without an address.
        ((44, 206), 4, _LOW, (_ALL_BITS, [0])),
        ((44, 206), 4, _HIGH, (_ALL_BITS, [0])),
    ]


_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables above, and AUDIT_ARCH."""
_EPERM, _ENOSYS = 1, 38


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def lock_down(folder: Path, *, seconds: float, memory_gb: float) -> list[str]:
    """Drop every right that code in `folder` does not need; returns those that could not be dropped, and why."""
    limit(resource.RLIMIT_CPU, int(seconds) + 2)
    limit(resource.RLIMIT_AS, int(memory_gb * 2**30))
    for which, most in _LIMITS.items():
        limit(which, most)
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


def landlock_version() -> int:
    """Version of the kernel's interface; below 1 if it has none."""
    return _LIBC.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _RULES_VERSION)


def _restrict_files(folder: Path) -> list[str]:
    version = landlock_version()
    if version < 1:
        return [f"files: this kernel has no Landlock ({_last_error()}), so all files of this user can be written"]
    rights = _ALL_RIGHTS.get(version, _ALL_RIGHTS_NOW)
    tcp, scopes = _TCP_BY_VERSION_4 * (version >= 4), _SCOPES_BY_VERSION_6 * (version >= 6)
    handled = struct.pack("QQQ", rights, tcp, scopes)  # an older kernel takes what is longer if the rest is zero
    rules = _LIBC.syscall(_LANDLOCK_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    # Of an environment its libraries alone: beside them may be a `pip.conf` with the password of an index.
    libraries = [f"{prefix}/{name}" for prefix in (sys.prefix, sys.base_prefix) for name in ("lib", "lib64")]
    readable = [*libraries, "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime"]
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
    load, mask, equal, at_least, leave = 0x20, 0x54, 0x15, 0x35, 0x06
    number, architecture, arguments = 0, 4, 16
    program: list[tuple[int, int, int, int]] = []  # operation, jumps if true and if false, value

    def verdicts(calls: Iterable[_Call], verdict: int) -> None:
        for call in calls:
            if (own := call[column]) is not None:
                program.extend([(equal, 0, 1, own), (leave, 0, 0, verdict)])

    program += [(load, 0, 0, architecture), (equal, 1, 0, machine), (leave, 0, 0, kill), (load, 0, 0, number)]
    program += [(at_least, 0, 1, 0x40000000), (leave, 0, 0, kill)]  # x32 has other numbers
    program += [(at_least, 0, 1, _FIRST_UNKNOWN), (leave, 0, 0, missing)]
    verdicts(_DENIED.values(), deny)
    verdicts(_MISSING, missing)
    for call, index, half, (bits, values) in _listed(os.getpid()):
        if (own := call[column]) is None:
            continue
        test = [(load, 0, 0, arguments + 8 * index + half), (mask, 0, 0, bits)]
        test += [(equal, len(values) - place, 0, value) for place, value in enumerate(values)]
        test += [(leave, 0, 0, deny), (load, 0, 0, number)]
        program += [(equal, 0, len(test), own), *test]
    program.append((leave, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _last_error() -> str:
    return os.strerror(ctypes.get_errno())
