"""`vllm.beam_search`: a re-export. The search is `llm.engine.beams`."""

from llm.outputs import BeamSearchOutput, BeamSearchSequence
from llm.sampling_params import BeamSearchParams

__all__ = ["BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"]
