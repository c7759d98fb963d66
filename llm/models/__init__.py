"""Model families: each file is wiring and parameters, named by Hugging Face's model_type."""

from llm.base.conflict import check

check()  # the first of our files that runs when the unrelated package has replaced llm/__init__.py
