"""The platform: what the device is, what it computes, and what it changes in a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm.config import LLMArgs
from llm.forward import KVCacheSpec
from llm.platforms.cpu import CpuPlatform
from llm.platforms.interface import PlatformEnum

BLOCK_SIZE = 8


@dataclass(frozen=True)
class AcmeKVCacheSpec(KVCacheSpec):
    """The Acme One stores each head in rows of 128 channels, whatever its size."""

    @property
    def padded(self) -> int:
        return -(-self.head_size // 128) * 128

    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.padded * self.dtype.itemsize


class AcmePlatform(CpuPlatform):
    """Memory and device types are inherited: the imaginary device lives in the CPU's memory."""

    kind = PlatformEnum.OOT
    dispatch_key = "oot"
    contract_version = 1
    simple_compile_backend = "eager"
    supported_quantization = ("acme_int8",)

    def get_device_name(self) -> str:
        return "Acme One"

    def pre_register_and_update(self) -> None:
        import acme.layers
        import acme.quantization  # noqa: F401

    def check_and_update_config(self, args: LLMArgs) -> LLMArgs:
        return args if args.block_size is not None else replace(args, block_size=BLOCK_SIZE)

    def update_kv_cache_specs(self, specs: Sequence[KVCacheSpec]) -> Sequence[KVCacheSpec]:
        return [AcmeKVCacheSpec(s.num_kv_heads, s.head_size, s.dtype, s.sliding_window) for s in specs]

    def get_backend_cls(self) -> str:
        return "acme.kernels.AcmeBackend"

    def get_attn_backend_cls(self, head_size: int) -> str:
        return "acme.attention.AcmeAttention"

    def get_model_runner_cls(self) -> str:
        return "acme.runner.AcmeModelRunner"
