"""vLLM's CPU build, scheduling and sampling as on a GPU: its second model runner, and asynchronous scheduling.

In: `GPU_RUNNER=1`, and this folder on PYTHONPATH, from which Python imports this file by itself in every process. The
second runner's kernels are Triton's, and run in Triton's interpreter, slowly. Attention and matrix products stay those
of the CPU build. So what is tested this way are scheduling, sampling, log-probabilities and changes of weights.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

_PLATFORM = "vllm.platforms.cpu"
_SYNCHRONOUS = "scheduler_config.async_scheduling = False"
"""What the platform of the CPU build decides, once."""


class _Asynchronous(SourceFileLoader):
    """The platform of the CPU build without that decision."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        assert source.count(_SYNCHRONOUS) == 1, f"{self.path} is of another vLLM than this was written for"
        return self.source_to_code(source.replace(_SYNCHRONOUS, "pass").encode(), self.path)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PLATFORM or not path:
            return None
        file = str(Path(path[0]) / "cpu.py")
        return importlib.util.spec_from_file_location(fullname, file, loader=_Asynchronous(fullname, file))


if os.environ.get("GPU_RUNNER"):
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton import backends
    from triton.runtime.interpreter import InterpreterBuilder

    store = InterpreterBuilder.create_masked_store

    def masked_store(builder: Any, pointers: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        """The interpreter takes a mask that `&` has made of booleans and integers for one of integers."""
        mask.data = mask.data.astype(bool)
        return store(builder, pointers, value, mask, cache_policy)

    InterpreterBuilder.create_masked_store = masked_store
    backends.backends["cpu"] = backends.Backend(compiler=None, driver=SimpleNamespace(is_active=lambda: True))
    sys.meta_path.insert(0, _Finder())
