"""Chat templates: rendered as transformers renders them, sandboxed, and clear when they refuse."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from outrider.core.errors import UsageError
from outrider.models.chat import ChatTemplate

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe helpful<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
INDENTED = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
  [INST] {{ message.content | trim }} [/INST]
    {%- else %}
        {%- generation %}
{{ message.content }}{{ eos_token }}
        {%- endgeneration %}
    {%- endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
{%- endfor %}
{% if tools %}tools: {{ tools | tojson }}{% endif %}
{{ messages | tojson(indent=2) }}
"""
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi <b> & 'you' ü"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": " u "}, {"role": "assistant", "content": "a"}],
    [{"role": "user", "content": str(i)} for i in range(6)],
]


@pytest.mark.parametrize("template", [CHATML, INDENTED])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_as_transformers_renders_it(template: str, conversation: list[dict[str, Any]], prompt: bool) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (theirs,), _ = render_jinja_template(
        [conversation], chat_template=template, add_generation_prompt=prompt, tools=None, **names
    )
    assert ChatTemplate(template, names).render(conversation, prompt) == theirs


def test_messages_are_not_changed() -> None:
    message = {"role": "user", "content": "x"}
    ChatTemplate("{% set m = messages[0] %}{{ m.content }}", {}).render([message])
    assert message == {"role": "user", "content": "x"}


def test_the_time_of_day() -> None:
    year = ChatTemplate("{{ strftime_now('%Y') }}", {}).render(CONVERSATIONS[0])
    assert abs(int(year) - datetime.now().year) <= 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "rejects these messages: roles must alternate"),
        ("{% if %}", r"not valid Jinja \(line 1\)"),
        ("{{ messages[0]['content'] + 1 }}", "rejects these messages"),
        ("{{ messages[9].content.x }}", "rejects these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe"),
    ],
)
def test_what_a_template_says_reaches_the_caller(template: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        ChatTemplate(template, {}).render(CONVERSATIONS[0])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("messages", [["hi"], [{"content": "x"}], [{"role": 3, "content": "x"}], [{"role": "user"}]])
def test_messages_that_are_none(messages: list[Any]) -> None:
    with pytest.raises(UsageError, match="chat message"):
        ChatTemplate(CHATML, {}).render(messages)


def test_a_message_may_be_tool_calls_alone() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].name }}", {})
    assert template.render([{"role": "assistant", "tool_calls": [{"name": "f"}]}]) == "f"
