"""Another engine's side of `bench_rivals.py`, in an interpreter that has it: `rival_child.py ENGINE < task`.

The task is JSON: `{"model": path, "options": {name: value}, "workloads": {name: {"prompts": [[token ids]], "first":
[[token ids]], "new": n}}}`. One line of JSON is printed: seconds of each workload, and of start-up. This file imports
nothing of offline-llm.
"""

import json
import os
import sys
from time import perf_counter

THREADS = len(os.sched_getaffinity(0))
ROWS, LONGEST = 256, 1024


def measure(generate, workloads):
    """Seconds of each workload: of one new token per prompt of `first`, where it has such prompts, and of the whole.

    `generate(prompts, new)` gives the new tokens of each prompt, as many as were asked for.
    """
    for _ in range(2):  # what an engine compiles or records at its first prompts is no part of the figures
        generate([[5] * 128], 2)
    found = {}
    for name, work in workloads.items():
        seconds = [0.0]
        if work["first"]:
            started = perf_counter()
            generate(work["first"], 1)
            seconds[0] = perf_counter() - started
        started = perf_counter()
        tokens = generate(work["prompts"], work["new"])
        seconds.append(perf_counter() - started)
        if any(len(row) != work["new"] for row in tokens):
            raise RuntimeError(f"{name}: rows have {sorted({len(row) for row in tokens})} tokens, not {work['new']}")
        found[name] = seconds
    return found


def vllm(model, dtype):
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}"}
    from vllm import LLM, SamplingParams

    options = {"max_model_len": LONGEST, "max_num_seqs": ROWS, "skip_tokenizer_init": True}
    llm = LLM(model, dtype=dtype, **options)

    def generate(prompts, new):
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(asked, params, use_tqdm=False)]

    return generate


def openvino(model, precision=""):
    """`precision`: of what is computed; "": OpenVINO's choice, bfloat16 where the processor has instructions for it."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching, scheduler.max_num_seqs = 2, True, ROWS
    properties = {"INFERENCE_NUM_THREADS": THREADS, **({"INFERENCE_PRECISION_HINT": precision} if precision else {})}
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def generate(prompts, new):
        config = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False, eos_token_id=0)
        asked = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [found.m_generation_ids[0] for found in pipeline.generate(asked, [config] * len(asked))]

    return generate


def llama_cpp(model):
    from llama_cpp_child import LlamaCpp

    return LlamaCpp(model, rows=ROWS, tokens=32 * LONGEST).generate


ENGINES = {function.__name__: function for function in (vllm, openvino, llama_cpp)}


def main() -> None:
    task = json.load(sys.stdin)
    started = perf_counter()
    generate = ENGINES[sys.argv[1]](task["model"], **task["options"])
    found = {"load": perf_counter() - started, **measure(generate, task["workloads"])}
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # some engines' worker processes do not end by themselves


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
