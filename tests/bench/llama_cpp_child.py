"""llama.cpp as a contestant, in an interpreter that has llama-cpp-python.

`LlamaCpp` is for `rival_child.py`; `bench_experts.py` and `bench_gguf.py` start the command, whose argument is JSON.
Calls the C functions, because the package's `Llama` computes one sequence at a time. This file imports nothing
of offline-llm.
"""

import ctypes
import json
import os
import sys
from time import perf_counter

import llama_cpp as lib
import numpy as np


class LlamaCpp:
    """A model and a context of `tokens` tokens, which `rows` sequences share."""

    def __init__(self, file: str, rows: int, tokens: int) -> None:
        threads = len(os.sched_getaffinity(0))
        lib.llama_backend_init()
        self._quiet = lib.llama_log_callback(lambda level, text, data: None)  # lives as long as it may be called
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        model_params = lib.llama_model_default_params()
        model_params.use_mmap = False  # as the others: all weights are in memory before the first token
        self.model = lib.llama_model_load_from_file(file.encode(), model_params)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = tokens, 2048, 512, rows
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self._context = lib.llama_init_from_model(self.model, params)
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def generate(self, prompts, new):
        """The likeliest tokens, `new` of each prompt."""
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        tokens = [[] for _ in prompts]
        items = [
            (token, position, row, position == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for step in range(new):
            found = [token for start in range(0, len(items), 2048) for token in self._compute(items[start:][:2048])]
            for row, token in enumerate(found):
                tokens[row].append(token)
            items = [(found[-1], len(prompts[row]) + step, row, True) for row, found in enumerate(tokens)]
        return tokens

    def _compute(self, items):
        """[(token, position, sequence, whether its logits are wanted)] -> the likeliest next token of each that is."""
        made = lib.llama_batch_init(len(items), 0, 1)
        made.n_tokens = len(items)
        for index, (token, position, sequence, wanted) in enumerate(items):
            made.token[index], made.pos[index], made.n_seq_id[index] = token, position, 1
            made.seq_id[index][0], made.logits[index] = sequence, wanted
        if lib.llama_decode(self._context, made):
            raise RuntimeError("llama_decode failed")
        found = []
        for index, item in enumerate(items):
            if item[3]:
                logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(self._context, index), (self._vocabulary,))
                found.append(int(logits.argmax()))
        lib.llama_batch_free(made)
        return found


def main() -> None:
    task = json.loads(sys.argv[1])
    stream, batch = task["prompts"]
    new, rows = task["new"], len(batch)
    longest = max(map(len, [*stream, *batch])) + new
    started = perf_counter()
    rival = LlamaCpp(task["file"], rows, rows * longest)
    load = perf_counter() - started
    rival.generate([prompt[:8] for prompt in batch], 2)
    best = {"first": 1e9, "stream": 1e9, "batch": 1e9}
    for _ in range(task["runs"]):
        for name, prompts, new in (
            ("first", stream, 1),
            ("stream", stream, task["new"]),
            ("batch", batch, task["new"]),
        ):
            started = perf_counter()
            tokens = rival.generate(prompts, new)
            best[name] = min(best[name], perf_counter() - started)
    found = {
        "prefill": best["first"],
        "token": (best["stream"] - best["first"]) / (new - 1),
        "rate": rows * new / best["batch"],
        "tokens": tokens,
        "load": load,
        "bytes": lib.llama_model_size(rival.model),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
