"""Text to token ids and back.

Owns the fast path, `tokenizers` on the folder's tokenizer.json, which needs no transformers; chat templates and
tokenizers without that file are transformers' business and imported only then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as FastTokenizer

from llm.errors import CheckpointError, ValidationError
from llm.loading.checkpoint import read_json

# A decoded piece can depend on the tokens before it; so many tokens of the prompt give that context.
_CONTEXT_TOKENS = 6
_MAX_CONFIG_BYTES = 64 << 20


class Tokenizer:
    """The tokenizer of a model folder.

    Args:
        folder: holds tokenizer.json, tokenizer_config.json and, perhaps, chat_template.jinja.
        chat_template: replaces the folder's own; text of a template, or the path of a file that holds it.

    Raises:
        CheckpointError: the folder has no tokenizer, or one that cannot be read.
    """

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        self.folder = folder
        self._chat_template = chat_template
        self._hf: Any = None
        path = folder / "tokenizer_config.json"
        self.config = read_json(path, limit_bytes=_MAX_CONFIG_BYTES) if path.exists() else {}
        self._backend: Backend = self._open_backend()

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included."""
        return self._backend.vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, with the special tokens that the model's tokenizer adds (a BOS, for example)."""
        return self._backend.encode(list(texts), True)

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts a chat template rendered: the template has written the special tokens itself."""
        return self._backend.encode(list(texts), False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens)

    def decode_continuation(self, prompt: Sequence[int], output: Sequence[int], skip_special_tokens: bool) -> str:
        """Text that `output` adds after `prompt`: a leading space that only a continuation has is kept."""
        context = list(prompt[-_CONTEXT_TOKENS:])
        before = self.decode(context, skip_special_tokens)
        text = self.decode([*context, *output], skip_special_tokens)
        # A prompt cut inside a character decodes differently once the rest has come.
        return text[len(before) :] if text.startswith(before) else self.decode(output, skip_special_tokens)

    def stream(self, prompt: Sequence[int], skip_special_tokens: bool) -> TextStream:
        return TextStream(self, list(prompt), skip_special_tokens)

    def huggingface(self) -> Any:
        """The same tokenizer as transformers' class, for `apply_chat_template` and whatever else users know of it."""
        if self._hf is None:
            from transformers import AutoTokenizer, PreTrainedTokenizerFast

            fast = (self.folder / "tokenizer.json").exists()
            loader = PreTrainedTokenizerFast if fast else AutoTokenizer
            self._hf = loader.from_pretrained(str(self.folder), local_files_only=True)
            if self._chat_template is not None:
                self._hf.chat_template = _template_text(self._chat_template)
        return self._hf

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """One conversation as the prompt text of the model's chat template (rendered in an immutable sandbox)."""
        hf = self.huggingface()
        if not hf.chat_template:
            raise ValidationError(
                "this model's tokenizer has no chat template; pass chat_template= or use generate().",
                parameter="chat_template",
                value=None,
            )
        return hf.apply_chat_template(messages, tokenize=False, **options)

    def _open_backend(self) -> Backend:
        path = self.folder / "tokenizer.json"
        if not path.exists():
            return _HuggingFaceBackend(self)
        try:
            backend = _FastBackend(FastTokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(f"{path} is not a tokenizer that the tokenizers library can read: {error}") from error
        # Some classes of transformers add a BOS that their tokenizer.json does not: leave those to transformers.
        wants_bos = self.config.get("add_bos_token") is True
        return _HuggingFaceBackend(self) if wants_bos and not backend.encode([""], True)[0] else backend


class Backend(Protocol):
    def vocab_size(self) -> int: ...
    def encode(self, texts: list[str], special: bool) -> list[list[int]]: ...
    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str: ...


class _FastBackend:
    def __init__(self, tokenizer: FastTokenizer) -> None:
        # A saved tokenizer can carry training-time truncation and padding; a prompt is never cut or padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer

    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, texts: list[str], special: bool) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=special)]

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


class _HuggingFaceBackend:
    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            self.tokenizer = tokenizer.huggingface()
        except (OSError, ValueError, ImportError) as error:
            raise CheckpointError(
                f"{tokenizer.folder} has no tokenizer that can be loaded ({type(error).__name__}); put a "
                "tokenizer.json there, pass tokenizer=, or use skip_tokenizer_init=True with token ids."
            ) from error

    def vocab_size(self) -> int:
        return len(self.tokenizer)

    def encode(self, texts: list[str], special: bool) -> list[list[int]]:
        return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=special)["input_ids"]] if texts else []

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return self.tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


class TextStream:
    """Text of a growing sequence, token by token; what it has returned so far is a prefix of the final text."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._prompt = prompt
        self._output: list[int] = []
        self._read = 0  # output tokens whose text has been returned
        self.text = ""

    def push(self, token: int) -> str:
        """The text that `token` completes: "" while it ends inside a character."""
        self._output.append(token)
        window = [*self._prompt[-_CONTEXT_TOKENS:], *self._output[: self._read]][-_CONTEXT_TOKENS:]
        before = self._tokenizer.decode(window, self._skip)
        text = self._tokenizer.decode([*window, *self._output[self._read :]], self._skip)
        if text.endswith("\ufffd") or not text.startswith(before):
            return ""
        self._read = len(self._output)
        piece = text[len(before) :]
        self.text += piece
        return piece

    def finish(self) -> str:
        """What was held back: the final text is that of all tokens at once."""
        final = self._tokenizer.decode_continuation(self._prompt, self._output, self._skip)
        piece = final[len(self.text) :] if final.startswith(self.text) else ""
        self.text = final
        return piece


def _template_text(template: str) -> str:
    """A template given as text, or as the path of a file."""
    path = Path(template)
    is_file = "\n" not in template and "{" not in template and len(template) < 4096 and path.is_file()
    return path.read_text(encoding="utf-8") if is_file else template
