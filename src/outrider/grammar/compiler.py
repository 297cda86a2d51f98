"""From a specification to a compiled grammar: once for each vocabulary, tenant and specification, then from a bounded
cache.

Tenants share nothing here either: how long a compilation takes would tell one what another has asked for.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from outrider.core.errors import SamplingParamsError
from outrider.core.tenants import DEFAULT_TENANT, FairOrder, owner_of
from outrider.grammar import source
from outrider.grammar.vocabulary import Vocabulary, xgrammar

if TYPE_CHECKING:
    from outrider.core.structured import StructuredOutputs
    from outrider.models.loader import Model
    from outrider.models.tokenizer import Tokenizer

MOST_ENTRIES = 256
MOST_BYTES = 256 << 20
"""Bounds of one vocabulary's cache, of all tenants together; the grammar compiled last may go beyond."""

_WHERE = re.compile(r"^\[[\d:]+\] \S+?:\d+: (Check failed: .*? is false: )?")
"""How xgrammar's messages begin: time, source line, failed condition."""
_LONGEST_REASON = 300


_Key: TypeAlias = "tuple[str, StructuredOutputs]"
"""Tenant and specification."""


class Compiler:
    """Compiles for one vocabulary. Any thread may call it; two that ask for the same thing compile it once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._compiler = xgrammar().GrammarCompiler(vocabulary.info, cache_enabled=False)
        self._known: dict[_Key, Future[Any]] = {}
        # Those of them that are compiled, by their bytes.
        self._order: FairOrder[_Key] = FairOrder()
        self._lock = threading.Lock()

    def compile(self, spec: StructuredOutputs, tenant: str = DEFAULT_TENANT) -> Any:
        """The compiled grammar. Raises SamplingParamsError, in one line, for a specification that cannot be used."""
        key = (tenant, spec)
        with self._lock:
            future = self._known.get(key)
            mine = future is None
            if future is None:
                future = self._known[key] = Future()
            elif key in self._order:
                self._keep(key, future.result())
        if mine:
            self._fill(key, future)
        return future.result()

    def _fill(self, key: _Key, future: Future[Any]) -> None:
        try:
            compiled = self._compile(key[1])
        except BaseException as error:
            with self._lock:
                del self._known[key]
            future.set_exception(error)
            return
        future.set_result(compiled)
        with self._lock:
            self._keep(key, compiled)
            while len(self._order) > MOST_ENTRIES or self._order.weight > MOST_BYTES:
                oldest = self._order.first()
                if oldest == key:
                    break
                self._order.discard(oldest)
                del self._known[oldest]

    def _keep(self, key: _Key, compiled: Any) -> None:
        """Make a compiled grammar the most recent one. The lock is held."""
        self._order.put(key, owner_of(key[0]), compiled.memory_size_bytes)

    def _compile(self, spec: StructuredOutputs) -> Any:
        try:
            grammar = source.grammar_of(spec)
            if self.vocabulary.starts_with_space:
                grammar = xgrammar().Grammar.concat(xgrammar().Grammar.from_ebnf('root ::= " "'), grammar)
            return self._compiler.compile_grammar(grammar)
        except SamplingParamsError:
            raise
        except Exception as error:  # xgrammar has no error type of its own for most of its refusals
            reason = _WHERE.sub("", " ".join(str(error).split()))[:_LONGEST_REASON]
            raise SamplingParamsError(f"structured_outputs: this {spec.kind} cannot be used: {reason}") from None


_compilers: WeakKeyDictionary[Tokenizer, Compiler] = WeakKeyDictionary()
_lock = threading.Lock()


def compiler_for(model: Model) -> Compiler:
    """The compiler of the model's vocabulary, made on first use and kept as long as its tokenizer.

    Raises SamplingParamsError for a model that cannot be constrained, ConfigError where xgrammar is not installed.
    """
    with _lock:
        compiler = None if model.tokenizer is None else _compilers.get(model.tokenizer)
        wanted = (model.config.vocab_size, frozenset(model.config.eos_token_ids))
        if compiler is None or (compiler.vocabulary.size, compiler.vocabulary.end_ids) != wanted:
            compiler = Compiler(Vocabulary(model))
            if model.tokenizer is not None:
                _compilers[model.tokenizer] = compiler
        return compiler
