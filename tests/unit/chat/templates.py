"""Chat templates that stand for the families': what they say of tools, written anew and shorter."""

from __future__ import annotations

from outrider.models.chat import ChatTemplate
from outrider.models.loader import Model
from tests.support.fakes import fake_model
from tests.support.grammars import BytesTokenizer

HERMES = """\
{%- if tools %}
    {{- "<|im_start|>system\\n# Tools\\n" }}
    {%- for tool in tools %}{{- tool | tojson }}{{- "\\n" }}{%- endfor %}
    {{- '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for tool_call in message.tool_calls %}
        {%- set tool_call = tool_call.function %}
        {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' + (tool_call.arguments | tojson) }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
"""

LLAMA = """\
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
    {%- elif message.role == "tool" %}
        {{- "ipython\\n" }}{{- message.content }}
    {%- else %}
        {{- message.role + "\\n" + message.content }}
    {%- endif %}
    {{- "<|eot_id|>" }}
{%- endfor %}
"""

PLAIN = "{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}"
XML = "{{ tools }}<tool_call>\\n<function=name>\\n</tool_call>"


def with_template(source: str | None) -> Model:
    """A fake model with this chat template."""
    model = fake_model("talker")
    tokenizer = BytesTokenizer()
    tokenizer.chat_template = ChatTemplate(source, {}) if source is not None else None  # type: ignore[attr-defined]
    return Model(model.name, model.config, model.weights, tokenizer)  # type: ignore[arg-type]
