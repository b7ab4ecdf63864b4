"""What Millrace adds to vLLM's own workers: a weight reload that also renews what was derived from the weights.

In: a policy folder. Out: new weights in every worker. vLLM mixes this class into its worker (`worker_extension_cls`).
"""

from __future__ import annotations

from typing import Any


class ReloadExtension:
    """Methods callable by `collective_rpc`; `self` is a vLLM worker."""

    model_runner: Any

    def reload_policy(self, folder: str) -> None:
        """vLLM's in-place reload, and then the output matrices that share their weight with the embeddings.

        On the CPU an output matrix is multiplied from a packed copy. vLLM 0.32 packs anew what the checkpoint names,
        but a tied `lm_head` is not named there, so it would go on with the old copy.
        """
        from vllm.platforms import current_platform

        self.model_runner.reload_weights(weights_path=folder)
        if current_platform.is_cpu():
            for module in self.model_runner.get_model().modules():
                if type(module).__name__ == "ParallelLMHead":
                    module.quant_method.process_weights_after_loading(module)
