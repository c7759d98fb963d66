"""`vllm.beam_search`: a re-export. The search is `llm.engine.beams`."""

from llm.beam_params import BeamSearchParams
from llm.outputs import BeamSearchOutput, BeamSearchSequence

__all__ = ["BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"]
