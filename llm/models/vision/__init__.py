"""Models that read images: transformers' own towers beside our language models.

`processor.py` and `video.py` make a model's inputs of a picture or a video, on the side of the engine; `tower.py` makes
features of these, on the side of the runner; `language.py` finds the language model in a checkpoint of a family that
has no class of its own.
"""
