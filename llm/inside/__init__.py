"""Inside the model: what a request reads of the activations and changes in them.

`names.py` names the places, `capture.py` and `intervention.py` are what a user passes, `request.py` has those of one
request, resolved against a model. `sites.py` finds the places in a model and runs a step there; `llm/runner/inside.py`
is the runner's side. `control_vector.py` and `experiments.py` stand on `LLM.generate` alone.
"""
