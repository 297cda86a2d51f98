"""Structured output: constraints on a request's text, compiled by xgrammar into masks over the vocabulary.

xgrammar is imported when the first request with ``structured_outputs`` comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.core.tenants import DEFAULT_TENANT

if TYPE_CHECKING:
    from outrider.core.mask import TokenMask
    from outrider.core.sampling import SamplingParams
    from outrider.models.loader import Model

__all__ = ["mask_for", "prepare"]


def mask_for(model: Model, params: SamplingParams, tenant: str = DEFAULT_TENANT) -> TokenMask | None:
    """The mask that keeps one request of ``model`` to ``params.structured_outputs``; None if it asks for nothing.

    tenant: whose request it is; what was compiled for others is not used.

    Raises SamplingParamsError for a constraint that cannot be used, ConfigError where xgrammar is not installed.
    """
    if params.structured_outputs is None:
        return None
    from outrider.grammar.compiler import compiler_for
    from outrider.grammar.matcher import GrammarMask

    compiler = compiler_for(model)
    compiled = compiler.compile(params.structured_outputs, tenant)
    return GrammarMask(compiled, compiler.vocabulary, params.stop_token_ids)


def prepare(model: Model, params: SamplingParams, tenant: str = DEFAULT_TENANT) -> None:
    """Compile what ``params`` asks for, so that `mask_for` finds it for the same tenant. May be called from any thread.

    A large schema takes time: a server calls this before it hands the request to the engine. Raises as `mask_for` does.
    """
    if params.structured_outputs is not None:
        from outrider.grammar.compiler import compiler_for

        compiler_for(model).compile(params.structured_outputs, tenant)
