"""From a specification to a compiled grammar: once for each vocabulary and specification, then from a bounded cache."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from outrider.core.errors import SamplingParamsError
from outrider.grammar import source
from outrider.grammar.vocabulary import Vocabulary, xgrammar

if TYPE_CHECKING:
    from outrider.core.structured import StructuredOutputs
    from outrider.models.loader import Model
    from outrider.models.tokenizer import Tokenizer

MOST_ENTRIES = 256
MOST_BYTES = 256 << 20
"""Bounds of one vocabulary's cache."""

_WHERE = re.compile(r"^\[[\d:]+\] \S+?:\d+: (Check failed: .*? is false: )?")
"""How xgrammar's messages begin: time, source line, failed condition."""
_LONGEST_REASON = 300


class Compiler:
    """Compiles for one vocabulary. Any thread may call it; two that ask for the same thing compile it once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._compiler = xgrammar().GrammarCompiler(vocabulary.info, cache_enabled=False)
        self._known: OrderedDict[StructuredOutputs, Future[Any]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def compile(self, spec: StructuredOutputs) -> Any:
        """The compiled grammar. Raises SamplingParamsError, in one line, for a specification that cannot be used."""
        with self._lock:
            future = self._known.get(spec)
            mine = future is None
            if future is None:
                future = self._known[spec] = Future()
            self._known.move_to_end(spec)
        if mine:
            self._fill(spec, future)
        return future.result()

    def _fill(self, spec: StructuredOutputs, future: Future[Any]) -> None:
        try:
            compiled = self._compile(spec)
        except BaseException as error:
            with self._lock:
                self._known.pop(spec, None)
            future.set_exception(error)
            return
        future.set_result(compiled)
        with self._lock:
            self._bytes += compiled.memory_size_bytes
            while len(self._known) > 1 and (len(self._known) > MOST_ENTRIES or self._bytes > MOST_BYTES):
                if not self._drop_oldest():
                    break

    def _drop_oldest(self) -> bool:
        """Forget the entry used least recently, unless it is still being compiled. The lock is held."""
        spec, future = next(iter(self._known.items()))
        if not future.done():
            return False
        del self._known[spec]
        self._bytes -= future.result().memory_size_bytes
        return True

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
