"""Text to token ids and back, and conversations to prompts: from a tokenizer.json or from a GGUF alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.errors import ModelFileError, UnsupportedModelError, UsageError
from outrider.models.chat import ChatTemplate, Message
from outrider.models.config_hf import read_json
from outrider.models.detokenize import TokenBytes, TokenStream
from outrider.models.gguf import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_END_TEXTS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<end_of_turn>")
"""Control tokens that end a text or a turn. A GGUF names one or two ids; chat models were taught to end with either."""


class Tokenizer:
    """The tokenizer of one model.

    bos_id: the token that starts a text, if the model has one. end_ids: tokens that end a text, as far as the
    tokenizer's own files say. add_bos: whether `encode` starts with bos_id; None: as tokenizer.json itself says.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None = None,
        end_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        chat_template: ChatTemplate | None = None,
        where: str = "tokenizer",
    ) -> None:
        self._backend = backend
        self._where = where
        self.bos_id = bos_id
        self.end_ids = tuple(end_ids)
        self.add_bos = add_bos
        self.chat_template = chat_template
        self.token_bytes = TokenBytes(backend, where)
        """The raw bytes of a token by its id (none for ids that the vocabulary does not use)."""
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Control tokens: left out of decoded text."""

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id. The model's own `ModelConfig.vocab_size` may be larger, by padding."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all tokens with their ids: two models with the same one can draft for each other."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        entries = (f"{vocabulary[token]}\0{token}" for token in sorted(vocabulary, key=vocabulary.__getitem__))
        return hashlib.sha256("\0".join(entries).encode()).hexdigest()

    def token_id(self, text: str) -> int | None:
        """Id of the token that is written ``text`` in the vocabulary; None if there is none."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Control tokens that are spelled out in it become their ids.

        add_special_tokens: start with the model's BOS token if the model wants one and the text does not bring it. An
        EOS token is never added: what is encoded here is going to be continued.
        """
        try:
            ids: list[int] = self._backend.encode(
                text, add_special_tokens=add_special_tokens and self.add_bos is None
            ).ids
        except (TypeError, UnicodeEncodeError):
            raise UsageError("the text holds characters that are not valid Unicode (lone surrogates)") from None
        if not add_special_tokens or self.bos_id is None:
            return ids
        if self.add_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids[1:] if ids[:2] == [self.bos_id, self.bos_id] else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        stream = self.stream(skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, skip_special_tokens: bool = True) -> TokenStream:
        """A decoder for tokens that arrive one by one."""
        return TokenStream(self.token_bytes, self.special_ids if skip_special_tokens else ())

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """A conversation (dicts with role and content) as text. Raises UsageError if the model has no template.

        Messages and tools: as for `ChatTemplate.render`.
        """
        if self.chat_template is None:
            raise UsageError(f"{self._where}: this model has no chat template; give it plain text instead")
        return self.chat_template.render(messages, add_generation_prompt, tools)

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """A conversation as token ids; the template itself brings BOS where the model wants it."""
        return self.encode(self.render_chat(messages, add_generation_prompt, tools), add_special_tokens=False)


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer | None:
    """The tokenizer inside a GGUF file; None if the file has none.

    Raises UnsupportedModelError for a kind that is not supported, ModelFileError for a broken vocabulary.
    """
    if "tokenizer.ggml.model" not in file.fields:
        return None
    from outrider.models.tokenizer_gguf import build_backend, pre_tokenizer

    backend = build_backend(file)
    sentencepiece = file.string("tokenizer.ggml.model") == "llama"
    add_bos = file.boolean("tokenizer.ggml.add_bos_token", sentencepiece or pre_tokenizer(file).add_bos)
    ids = {
        name: file.integer(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"), ("eot", "eot"))
        if f"tokenizer.ggml.{key}_token_id" in file.fields
    }
    ends = [ids[name] for name in ("eos", "eot") if name in ids]
    special = backend.get_added_tokens_decoder()
    ends += [i for i in map(backend.token_to_id, _END_TEXTS) if i in special and special[i].special]
    names = {f"{name}_token": backend.id_to_token(token_id) or "" for name, token_id in ids.items()}
    template = file.string("tokenizer.chat_template", "")
    return Tokenizer(
        backend,
        bos_id=ids.get("bos"),
        end_ids=dict.fromkeys(ends),
        add_bos=add_bos and "bos" in ids,
        chat_template=ChatTemplate(template, names) if template else None,
        where=str(file.path),
    )


def tokenizer_from_folder(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder; None if the folder has none.

    Raises UnsupportedModelError for one that is not in tokenizer.json, ModelFileError for a broken one.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        for other in ("tokenizer.model", "vocab.json", "tekken.json"):
            if (folder / other).exists():
                raise UnsupportedModelError(
                    f"{folder}: {other} but no tokenizer.json; make one with transformers "
                    "(AutoTokenizer.from_pretrained, then save_pretrained)"
                )
        return None
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelFileError(f"{path}: not a valid tokenizer: {error}") from None
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.exists() else {}
    names = {key: _token_text(settings[key]) for key in settings if key.endswith("_token") and settings[key]}
    bos, eos = (
        backend.token_to_id(names[key]) if isinstance(names.get(key), str) else None
        for key in ("bos_token", "eos_token")
    )
    add_bos = settings.get("add_bos_token")
    source = _template_source(folder, settings)
    return Tokenizer(
        backend,
        bos_id=bos,
        end_ids=() if eos is None else (eos,),
        add_bos=add_bos if isinstance(add_bos, bool) and bos is not None else None,
        chat_template=ChatTemplate(source, names) if source else None,
        where=str(folder),
    )


def _token_text(value: Any) -> Any:
    """A special token is a string, or an object with its text as ``content``."""
    return value.get("content") if isinstance(value, dict) else value


def _template_source(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
