"""2,000 bodies with something wrong in them: none is answered with a 5xx. `python tests/serve/malformed.py`"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from bodies import CHAT, anything, body  # noqa: E402
from embedded import assert_idle, open_llm  # noqa: E402
from test_serve import opened, posted  # noqa: E402

OWN = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "And", "max_tokens": 2},
    "/tokenize": {"prompt": "And"},
}

if __name__ == "__main__":
    draw, statuses = random.Random(2026), Counter[int]()
    with open_llm(max_model_len=96, max_num_seqs=8) as llm:
        with opened(llm) as client:
            for _ in range(2000):
                path = draw.choice(list(OWN))
                sent = body(draw, OWN[path]) if draw.random() < 0.8 else anything(draw, OWN[path])
                statuses[posted(client, path, sent)] += 1
        assert_idle(llm)
    print(dict(statuses))
