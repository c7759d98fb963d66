"""transformers' activations by our names of sites, from hooks on its own modules, and the comparison with ours.

`python tests/models/sites.py` compares every row of `tiny_models.TINY_MODELS`; `test_sites.py` a row of each kind.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_models import TINY_MODELS, make_prompts, one_thread, reference_model, write_checkpoint

from llm import LLM, Capture, SamplingParams

TOLERANCE = 1e-4
# What differs by design: transformers multiplies by a constant inside of what is called.
BY_DESIGN = ("mixer.input",)
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
# Of the parts of a layer in transformers, by what the part is here.
PARTS = {
    "attention": ("self_attn", "attn", "attention", "self_attention"),
    "mixer": ("linear_attn", "mamba", "conv"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe", "ffn", "moe"),
}
LAST = {
    "attention": ("heads", ("o_proj", "out_proj", "c_proj", "dense", "wo")),
    "mlp": ("activation", ("down_proj", "c_proj", "fc2", "dense_4h_to_h", "fc_out", "wo", "w2")),
}
# transformers' modules that return the stream too, with the site at which they read it.
WITH_STREAM = {"bloom": {"attention.output": "input", "mlp.output": "middle"}, "mpt": {"mlp.output": "middle"}}
# Of the norm that reads the stream between attention and MLP.
MIDDLE = (
    "pre_feedforward_layernorm",
    "pre_mlp_layernorm",
    "pre_ff_layernorm",
    "ffn_norm",
    "ln_2",
    "norm_2",
    "post_attention_layernorm",
)


class TheirActivations:
    """What transformers' model computes at our sites, float32 [tokens, ...]; the comparison flattens them.

    Args:
        with_stream: leave it in the outputs of modules that return it too.
    """

    def __init__(self, model: nn.Module, with_stream: bool = False) -> None:
        self._with_stream = {} if with_stream else WITH_STREAM.get(model.config.model_type, {})
        self.found: dict[str, torch.Tensor] = {}
        self._handles: list[Any] = []
        self.model = model
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
        (layers,) = [one for one in lists if not any(one is not other and one in other.modules() for other in lists)][
            :1
        ]
        for index, layer in enumerate(layers):
            self._layer(layer, f"layers.{index}")
        self._handles.append(
            getattr(model, "model", model.base_model).register_forward_hook(self._keep_output("norm.output"))
        )

    def of(self, ids: Sequence[int], length: int = 0) -> dict[str, torch.Tensor]:
        """`length`: of the sequence, in which other tokens follow."""
        self.found.clear()
        filled = [*ids, *[3] * (length - len(ids))]
        with torch.no_grad():
            self.found["logits"] = self.model(input_ids=torch.tensor([filled]), use_cache=False).logits[0]
        found = dict(self.found)
        if len(filled) > len(ids):
            found = {name: _first_tokens(values, len(filled), len(ids)) for name, values in found.items()}
        for name in [name for name in found if name.endswith("mlp.shared")]:  # added to what its experts return
            whole = name.replace("shared", "output")
            found[whole] = found[whole] + found.pop(name).reshape(found[whole].shape)
        for part, stream in self._with_stream.items():
            for name in [name for name in found if name.endswith(part)]:
                found[name] = found[name] - found[name.replace(part, stream)]
        return found

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _layer(self, layer: nn.Module, name: str) -> None:
        self._around(layer, name)
        children = dict(layer.named_children())
        norm = next((children[key] for key in MIDDLE if key in children), None)
        if norm is not None:
            self._input(norm, f"{name}.middle")
        for kind, names in PARTS.items():
            for key in names:
                if key in children:
                    self._around(children[key], f"{name}.{kind}")
                    self._last(children[key], f"{name}.{kind}", kind)
        if "shared_mlp" in children:
            self._handles.append(children["shared_mlp"].register_forward_hook(self._keep_output(f"{name}.mlp.shared")))
        if "mixer" in children and "mlp" in children:
            self._around(children["mixer"], f"{name}.attention")
            self._around(children["mixer"], f"{name}.mixer")
        elif "mixer" in children:  # NemotronH's name of any part
            for kind in PARTS:
                self._around(children["mixer"], f"{name}.{kind}")
                self._last(children["mixer"], f"{name}.{kind}", kind)
        for part, module in layer.named_modules():
            if (
                part.endswith("experts")
                and not part.endswith("shared_experts")
                and not isinstance(module, nn.ModuleList)
            ):
                self._experts(module, f"{name}.experts")

    def _around(self, module: nn.Module, name: str) -> None:
        self._input(module, f"{name}.input")
        self._handles.append(module.register_forward_hook(self._keep_output(f"{name}.output")))

    def _last(self, part: nn.Module, name: str, kind: str) -> None:
        if kind not in LAST:
            return
        site, names = LAST[kind]
        inner = dict(part.named_children()).get("attention", part)  # GPT-Neo's is inside of another
        children = dict(inner.named_children())
        last = next((children[key] for key in names if key in children), None)
        if last is not None:
            self._input(last, f"{name}.{site}")

    def _input(self, module: nn.Module, name: str) -> None:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = args[0] if args else kwargs.get("hidden_states", kwargs.get("x"))
            if isinstance(given, torch.Tensor):
                self.found.setdefault(name, given.detach().clone())

        self._handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))

    def _keep_output(self, name: str) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            first = output if isinstance(output, torch.Tensor) else output[0]
            self.found.setdefault(name, first.detach().clone())

        return keep

    def _experts(self, module: nn.Module, name: str) -> None:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [*args, *kwargs.values()]
            if len(given) == 3:
                self.found.setdefault(f"{name}.chosen", given[1].detach().clone())
                self.found.setdefault(f"{name}.weights", given[2].detach().clone())

        self._handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
        self._handles.append(module.register_forward_hook(self._keep_output(f"{name}.output")))


def _first_tokens(values: torch.Tensor, length: int, count: int) -> torch.Tensor:
    along = list(values.shape).index(length)
    return values.narrow(along, 0, count)


def by_token(values: torch.Tensor, ours: np.ndarray) -> np.ndarray:
    """Their activations in the shape of ours: without the batch; streams of a token side by side."""
    found = values.float() if values.is_floating_point() else values
    if found.dim() == 4 and found.shape[1] == 1 and found.shape[2] == len(ours):  # [streams, 1, tokens, channels]
        found = found[:, 0].transpose(0, 1)
    return found.reshape(ours.shape).numpy()


def difference(name: str, ours: np.ndarray, theirs: torch.Tensor) -> float:
    """The largest, as a share of the largest activation where that is above 1; infinite for other experts."""
    expected = by_token(theirs, ours)
    if not len(ours) or not np.isfinite(ours).all():
        return float("inf")
    return float(np.abs(ours - expected).max()) / max(1.0, float(np.abs(expected).max()))


def compare(llm: LLM, theirs: TheirActivations, prompts: Sequence[list[int]]) -> Iterator[tuple[str, float | None]]:
    """(site, the largest difference over the prompts; None: transformers has no such place)."""
    # Here the angles of dynamic scaling are those of the longest sequence, in transformers of the sequence so far.
    scaling = (getattr(theirs.model.config, "rope_parameters", None) or {}).get("rope_type")
    length = llm.model_config.max_model_len if scaling == "dynamic" else 0
    capture = Capture([name for name in llm.sites() if not name.endswith(".pattern")], positions="all")
    outputs = llm.generate(prompts, PARAMS, capture=capture, use_tqdm=False)
    worst: dict[str, float | None] = {}
    for output in outputs:
        expected = theirs.of([*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]], length)
        found = dict(output.activations)
        for chosen in [name for name in found if name.endswith("experts.chosen")]:
            if chosen in expected:
                in_order(found, expected, chosen)
        for name, ours in found.items():
            # Llama 4 gives its experts every token once for each of them.
            is_repeated = name.endswith("experts.output") and name in expected and expected[name].numel() > ours.size
            if name not in expected or is_repeated:
                worst.setdefault(name, None)
                continue
            worst[name] = max(worst.get(name) or 0.0, difference(name, ours, expected[name]))
    yield from worst.items()


def in_order(found: dict[str, np.ndarray], expected: dict[str, torch.Tensor], chosen: str) -> None:
    """A token's experts by their numbers, and its weights likewise: their order says nothing."""
    weights = chosen.replace("chosen", "weights")
    order = found[chosen].argsort(axis=-1)
    found[chosen], found[weights] = (np.take_along_axis(found[name], order, -1) for name in (chosen, weights))
    theirs = expected[chosen].reshape(order.shape).argsort(dim=-1)
    for name in (chosen, weights):
        expected[name] = expected[name].reshape(order.shape).gather(-1, theirs)


def main() -> None:
    names = sys.argv[1:] or list(TINY_MODELS)
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        for name in names:
            row, path = TINY_MODELS[name], Path(folder, name)
            write_checkpoint(row, path)
            theirs = TheirActivations(reference_model(path))
            with LLM(path, skip_tokenizer_init=True, kv_cache_dtype="float32", **row.engine) as llm:
                found = dict(compare(llm, theirs, make_prompts(row)))
            theirs.close()
            compared = {site: value for site, value in found.items() if value is not None}
            compared = {site: value for site, value in compared.items() if not site.endswith(BY_DESIGN)}
            far = {site: value for site, value in compared.items() if value > TOLERANCE}
            kinds = sorted({site.split(".", 2)[-1] for site, value in found.items() if value is None})
            print(f"{name:28} {len(compared)} of {len(found)} sites, worst {max(compared.values()):.1e}", end="")
            print(f"; not compared {', '.join(kinds)}" if kinds else "", f"; FAR {far}" if far else "", flush=True)


if __name__ == "__main__":
    main()
