"""The methods of `LLM` about the prefix cache: clearing it, and keeping it in a folder.

Owns the methods, and when a prompt cache is of this model; `llm.prefix_cache` owns the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from llm.api.jobs import JobsHost
from llm.base.checks import known_names
from llm.base.types import JsonObject
from llm.engine.engine import Engine
from llm.errors import ValidationError


class PrefixHost(JobsHost, Protocol):
    """Attributes:
    _may_have_changed: a callable got the model, and may have changed its weights.
    """

    _may_have_changed: bool

    def _prefix_identity(self) -> JsonObject: ...
    def close(self) -> None: ...


class PrefixCaching:
    _may_have_changed = False

    def reset_prefix_cache(self: PrefixHost) -> bool:
        """Clear the prefix cache. While a stream is suspended, does nothing and returns False."""
        with self._exclusive():
            engine = self._begin()
            if engine.scheduler.has_unfinished():
                return False
            engine.scheduler.blocks.reset_prefix_cache()
            return True

    @known_names("LLM.save_prefix_cache")
    def save_prefix_cache(self: PrefixHost, path: str | Path) -> Path:
        """Write what the prefix cache has into a new folder, for `LLM(model, prefix_cache=folder)` in another process.

        Prompts that begin with the same tokens are then not computed again; answers are the same to the bit. The folder
        is bound to the weights, the settings that change their results, the block size and each row's adapter and
        `cache_salt`. It has the tokens of the prompts. At most what fits the KV cache is in it.

        Args:
            path: of the folder, which must not exist; it appears only when it is complete.

        Raises:
            ValidationError: nothing is cached, caching is off, `path` exists, or the weights are not a checkpoint's.
            LLMError: the disk is full.
        """
        from llm.prefix_cache import check_new, save

        path = check_new(path)
        with self._exclusive():
            engine = self._begin()
            check_cacheable(engine, "path")
            if self._may_have_changed:
                raise ValidationError(
                    "a callable of apply_model may have changed the weights, so there is no telling which model the "
                    "prompt cache is of; save it before apply_model.",
                    parameter="path",
                )
            return save(engine, self._prefix_identity(), path)

    def _prefix_identity(self: PrefixHost) -> JsonObject:
        """What keys, values and states depend on besides the tokens and what is in their hashes."""
        from llm.jobs.identity import model_identity

        config = self._open_engine().config
        weights = self._fingerprint()
        if self._source is None:
            raise ValidationError("random weights have no prompt cache; load a checkpoint.", parameter="load_format")
        return {**model_identity(self._args, config, weights), "block_size": config.cache_config.block_size}

    def _fill_prefix_cache(self: PrefixHost) -> None:
        """From `LLM(prefix_cache=...)`; called once, at the end of start-up. Closes the LLM if it fails."""
        if self._args.prefix_cache is None:
            return
        from llm.prefix_cache import check_identity, load, read_manifest

        try:
            engine, manifest = self._open_engine(), read_manifest(self._args.prefix_cache)
            check_cacheable(engine, "prefix_cache")
            check_identity(manifest, self._prefix_identity())
            load(engine, manifest)
        except BaseException:
            self.close()
            raise


def check_prefix_cache(folder: object) -> None:
    """What is wrong with `LLM(prefix_cache=...)` already before the model is loaded."""
    if folder is not None:
        from llm.prefix_cache import read_manifest

        read_manifest(folder)


def check_cacheable(engine: Engine, parameter: str) -> None:
    """Raise `ValidationError` if prompts share nothing."""
    if not engine.config.cache_config.enable_prefix_caching:
        why = engine.config.reasons.get("enable_prefix_caching", "enable_prefix_caching=False")
        message = f"there is no prompt cache without prefix caching, which is off: {why}."
        raise ValidationError(message, parameter=parameter)
