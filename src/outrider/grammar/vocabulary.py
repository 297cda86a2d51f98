"""The vocabulary as xgrammar sees it: the bytes that each token writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.core.errors import ConfigError, SamplingParamsError

if TYPE_CHECKING:
    from outrider.models.loader import Model


def xgrammar() -> Any:
    """The module. Raises ConfigError, in one line, where it is not installed."""
    try:
        import xgrammar as module
    except ImportError as error:
        raise ConfigError(
            f"structured_outputs needs xgrammar ({error}); install it with: pip install 'outrider[grammar]'"
        ) from None
    return module


class Vocabulary:
    """One model's tokens.

    size: columns of its logits, which may be more than there are tokens. end_ids: its end-of-sequence tokens.
    control: tokens that write no text (control tokens and unused ids); no grammar can ask for them.
    starts_with_space: the text of an answer begins without the space that its first token carries (SentencePiece), so
    that the tokens write one space more than the text holds.
    """

    def __init__(self, model: Model) -> None:
        """Raises SamplingParamsError if the model has no tokenizer, or no token that could end an answer."""
        tokenizer = model.tokenizer
        if tokenizer is None:
            raise SamplingParamsError("structured_outputs needs a tokenizer, and this model has none")
        if not model.config.eos_token_ids:
            raise SamplingParamsError("structured_outputs needs an end-of-sequence token, and this model has none")
        self.size = model.config.vocab_size
        self.end_ids = frozenset(model.config.eos_token_ids)
        texts = [
            b"" if token in tokenizer.special_ids else tokenizer.token_bytes(token)
            for token in range(min(tokenizer.vocab_size, self.size))
        ]
        self.control = frozenset(i for i in range(self.size) if i >= len(texts) or not texts[i])
        self.starts_with_space = tokenizer.token_bytes.strips_space
        module = xgrammar()
        self.info = module.TokenizerInfo(
            texts, module.VocabType.RAW, vocab_size=self.size, stop_token_ids=sorted(self.end_ids)
        )
        """xgrammar's own form of it."""
