"""Models that read images: transformers' own towers beside our language models.

`processor.py` makes a model's inputs of a picture, on the side of the engine; `tower.py` makes features of these, on
the side of the runner; `language.py` finds the language model in a checkpoint of a family that has no class of its own.
"""
