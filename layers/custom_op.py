"""`CustomOp` and `PluggableLayer` where the documentation has them: `from llm.layers.custom_op import CustomOp`.

A re-export: they are defined in `llm.base.custom_op` and `llm.base.custom_op`, from where this package imports them.
"""

from llm.base.construction import Construction, constructing_for, construction
from llm.base.custom_op import (
    Binding,
    CustomOp,
    PluggableLayer,
    Replaceable,
    check_registered,
    op_registry,
    op_registry_oot,
    replaced_class,
    replacement_reason,
)
from llm.base.watch import is_watched

__all__ = [
    "Binding",
    "Construction",
    "CustomOp",
    "PluggableLayer",
    "Replaceable",
    "check_registered",
    "constructing_for",
    "construction",
    "is_watched",
    "op_registry",
    "op_registry_oot",
    "replaced_class",
    "replacement_reason",
]
