"""AWQ (AutoAWQ, llm-awq): config.json's `quantization_config`, or quant_config.json -> groups per layer.

`storage/words.py` reads the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from llm.base.text import show
from llm.errors import UnsupportedModelError
from llm.quantization.configs.reader import Fields
from llm.quantization.configs.words import WordsConfig, group_size_of
from llm.quantization.storage.words import AWQStorage

_WHERE = "awq: quantization_config"


class AWQConfig(WordsConfig):
    """4 bits with zero points, packed for `gemm`. Raises `UnsupportedModelError` for anything else.

    Attributes:
        left_out: parts of the names of layers that are not quantized.
    """

    def __init__(self, group_size: int, left_out: tuple[str, ...] = ()) -> None:
        self.group_size = group_size
        self.left_out = left_out

    def get_name(self) -> str:
        return "awq"

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quant_config.json"]

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> AWQConfig:
        given = Fields(config, _WHERE)
        bits = given.integer("w_bit" if "w_bit" in given.given else "bits", 4)
        version = given.string("version", "gemm")
        if bits != 4:
            _refuse(f"weights of {bits} bits are not computed, only of 4")
        if version.lower() != "gemm":
            _refuse(f"the version {show(version)} is not read, only 'gemm'")
        if not given.boolean("zero_point", True):
            _refuse("weights without zero points (zero_point false) are not read")
        size = group_size_of(given, "q_group_size" if "q_group_size" in given.given else "group_size", 128)
        return cls(size, given.names("modules_to_not_convert"))

    def described(self, name: str) -> bool:
        return name != "lm_head" and not any(part in name for part in self.left_out)

    def bits_and_group(self, name: str) -> tuple[int, int]:
        return 4, self.group_size

    def storage(self, bits: int, group_size: int | None) -> AWQStorage:
        return AWQStorage(group_size)


def _refuse(what: str) -> None:
    raise UnsupportedModelError(f"awq: {what}; use the unquantized checkpoint with quantization='w4a16'.")
