"""Model families: one file per Hugging Face model_type, which maps config.json and weight names onto a decoder."""

from llm.base.conflict import check

check()  # our first file to run if the unrelated package has replaced llm/__init__.py
