"""`lora` and `lora_embedding` in C++: the sum of `linear` products bit for bit, the definition in PyTorch to rounding,
and a token's bits against its company, its adapter's place and the number of threads."""

from __future__ import annotations

import pytest
import torch
from kernel_sets import needs_compiler

from llm.kernels.cpu import library, linear, packed, program
from llm.kernels.reference import linear as definition
from llm.kernels.reference.linear import pack as plain_pack
from llm.kernels.weight import LoraTerm, LoraTerms

pytestmark = [needs_compiler, pytest.mark.usefixtures("seeded")]
INPUTS, WIDTH, VOCABULARY = 40, 75, 19
# (slot, first channel, channels, rank): a fused layer's parts, an adapter of one of them, and a wide one.
PLACES = ((1, 0, 37, 4), (1, 37, 16, 4), (1, 53, 22, 3), (2, 37, 16, 17), (4, 0, 75, 8))


def make_terms(pack, is_lookup: bool = False, dtype: torch.dtype = torch.float32) -> LoraTerms:
    made = []
    generator = torch.Generator().manual_seed(1)
    for number, (slot, first, channels, rank) in enumerate(PLACES):
        shape = (VOCABULARY, rank) if is_lookup else (rank, INPUTS)
        down = torch.randn(shape, generator=generator).to(dtype)
        up = torch.randn(channels, rank, generator=generator).to(dtype)
        made.append(LoraTerm(slot, first, pack(down), pack(up), 0.3 + number))
    return LoraTerms(tuple(made), WIDTH, is_lookup)


def inputs_of(tokens: int, is_lookup: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randint(VOCABULARY, (tokens,)) if is_lookup else torch.randn(tokens, INPUTS)
    return torch.randn(tokens, WIDTH), x, torch.randint(0, 6, (tokens,))


def of_linear(lib: library.Library, y, x, slots, terms: LoraTerms) -> torch.Tensor:
    """A loop over tokens: one GEMM of a row each, a multiplication and a sum."""
    out = y.clone()
    lookup = linear.embedding if terms.is_lookup else linear.linear
    for token, slot in enumerate(slots.tolist()):
        for term in (term for term in terms.terms if term.slot == slot):
            inner = lookup(lib, x[token : token + 1], term.down)
            span = slice(term.first, term.first + term.up.n)
            out[token, span] = out[token, span] + linear.linear(lib, inner, term.up)[0] * term.scale
    return out


OPERATIONS = {False: (linear.lora, definition.lora), True: (linear.lora_embedding, definition.lora_embedding)}


@pytest.mark.parametrize("is_lookup", [False, True], ids=["linear", "embedding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_token_has_the_bits_of_its_own_products(lib: library.Library, is_lookup: bool, dtype: torch.dtype) -> None:
    kernel, twin = OPERATIONS[is_lookup]
    terms = make_terms(lambda values: packed.pack(lib, values), is_lookup, dtype)
    plain = make_terms(plain_pack, is_lookup, dtype)
    for tokens in (0, 1, 2, 7, 300):
        y, x, slots = inputs_of(tokens, is_lookup)
        expected = of_linear(lib, y, x, slots, terms)
        own = kernel(lib, y.clone(), x, slots, terms)
        assert torch.equal(own, expected)
        twins = twin(y.clone(), x, slots, plain)
        assert torch.allclose(own, twins, rtol=0, atol=2e-5 * max(1.0, float(twins.abs().max() if tokens else 0)))
        assert torch.equal(own[slots == 0], y[slots == 0])


def test_the_definition_is_the_formula_in_float64() -> None:
    terms = make_terms(plain_pack)
    y, x, slots = inputs_of(9, False)
    expected = y.double()
    for term in terms.terms:
        product = x.double() @ term.down.data.double().t() @ term.up.data.double().t() * term.scale
        expected[:, term.first : term.first + term.up.n] += product * (slots == term.slot)[:, None]
    own = definition.lora(y.clone(), x, slots, terms)
    assert torch.allclose(own.double(), expected, rtol=0, atol=1e-4)
    # Negative control: what the tolerance must not pass.
    wrong = definition.lora(y.clone(), x, slots.roll(1), terms)
    assert not torch.allclose(wrong.double(), expected, rtol=0, atol=1e-2)


def test_bits_do_not_depend_on_threads_or_order(lib: library.Library) -> None:
    terms = make_terms(lambda values: packed.pack(lib, values))
    y, x, slots = inputs_of(150, False)
    expected = linear.lora(lib, y.clone(), x, slots, terms)
    order = torch.randperm(len(x))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear.lora(lib, y[order].clone(), x[order], slots[order], terms), expected[order])
    finally:
        torch.set_num_threads(before)


def test_a_bias_is_scaled_too(lib: library.Library) -> None:
    bias = torch.randn(WIDTH)
    for pack, run in ((plain_pack, definition.lora), (lambda v: packed.pack(lib, v), lambda *a: linear.lora(lib, *a))):
        up = pack(torch.zeros(WIDTH, 2))
        object.__setattr__(up, "bias", bias)
        terms = LoraTerms((LoraTerm(1, 0, pack(torch.randn(2, INPUTS)), up, 0.5),), WIDTH)
        y = run(torch.zeros(1, WIDTH), torch.randn(1, INPUTS), torch.tensor([1]), terms)
        assert torch.equal(y[0], bias * 0.5)


def test_a_recorded_call_reads_its_inputs_again(lib: library.Library) -> None:
    terms = make_terms(lambda values: packed.pack(lib, values))
    y, x, slots = inputs_of(3, False)
    base = y.clone()
    with program.record(lib) as recorded:
        linear.lora(lib, y, x, slots, terms)
    y.copy_(base)
    x.copy_(torch.randn(3, INPUTS))
    slots.copy_(torch.tensor([2, 0, 4]))
    assert recorded.run()
    assert torch.equal(y, linear.lora(lib, base.clone(), x, slots, terms))


def test_what_does_not_fit_is_refused(lib: library.Library) -> None:
    terms = make_terms(lambda values: packed.pack(lib, values))
    lookup = make_terms(lambda values: packed.pack(lib, values), is_lookup=True)
    y, x, slots = inputs_of(3, False)
    for wrong in ((y, x[:2], slots), (y, x, slots[:2]), (y[:, :-1], x, slots), (y, x[:, :-1], slots)):
        with pytest.raises(ValueError):
            linear.lora(lib, *wrong, terms)
    with pytest.raises(IndexError, match="19 to 19"):
        linear.lora_embedding(lib, y[:1], torch.tensor([VOCABULARY]), slots[:1], lookup)
    with pytest.raises(IndexError, match="19 to 19"):
        definition.lora_embedding(y[:1], torch.tensor([VOCABULARY]), slots[:1], make_terms(plain_pack, is_lookup=True))
    one = make_terms(plain_pack).terms[0]
    for parts in ((one, one), (LoraTerm(0, 0, one.down, one.up, 1.0),), (LoraTerm(1, 70, one.down, one.up, 1.0),), ()):
        with pytest.raises(ValueError):
            LoraTerms(parts, WIDTH)
