"""`vllm.utils.import_utils`: a class by its path."""

from llm.plugins import resolve_obj_by_qualname

__all__ = ["resolve_obj_by_qualname"]
