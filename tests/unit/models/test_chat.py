"""Chat templates as `transformers` renders them, in a sandbox that holds."""

from __future__ import annotations

import resource
import sys
from typing import Any

import pytest
import transformers

from decodery.core.errors import CorruptFile, DecoderyError, PromptError
from decodery.models.tokenizers import chat
from decodery.models.tokenizers.chat import ChatTemplate
from tiny_models import make_tokenizer

TEMPLATES = {
    "chatml": """{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {{- '<|im_start|>' ~ message['role'] + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' -}}
{% endif %}
""",
    "headers": """{{- bos_token }}{% set ns = namespace(first=true, names=[]) %}
{%- set day = date_string | default('26 Jul 2024') %}
{%- if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set top = messages[0]['content'] %}
{%- else %}{% set rest = messages %}{% set top = '' %}{% endif %}
{{- '<|start|>system<|end|>\\n\\nToday: ' + day + '\\n\\n' + top.strip() + '<|eot|>' }}
{%- for message in rest if message.role != 'tool' %}
{%- if not loop.first and message.role == loop.previtem.role %}{{ raise_exception('Turns must alternate') }}{% endif %}
{%- set ns.first = false %}
{{- '<|start|>' ~ message.role ~ '<|end|>\\n\\n' ~ message.content ~ '<|eot|>' }}
{%- if loop.last %}{{- loop.index0 }}/{{ rest | length }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}""",
    "turns": """{{ bos_token }}{%- macro say(role, text) -%}
<turn>{{ role }}
{{ text }}<end>
{% endmacro %}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {%- if message['content'] is string -%}
        {{- say(role, message['content'] | trim) -}}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] != 'text' -%}{%- continue -%}{%- endif -%}
            {{- say(role, item['text'].replace('moon', 'Moon')) -}}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<turn>model
{% endif -%}""",
    "tools": """{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}
{% endfor %}{% endif %}{% for message in messages[::-1] %}
{% generation %}{{ message | tojson }}|{{ message.items() | list | length }}{% endgeneration %}

{% if loop.index >= 3 %}{% break %}{% endif %}
{% endfor %}
{% filter upper %}{{ messages | map(attribute='role') | join(', ') }}{% endfilter %}
{% for word in messages[0].content.split(' ') | unique | sort %}
[{{ '%-8s' % word }}]{{ "{:>4}".format(loop.index) }}{% endfor %}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ (3 + 4) * 2 - 1 }} {{ 7 // 2 }} {{ 'a' * 3 }}
{{ {'b': [1, (2, none)], 'a': 'é'} | tojson }}""",
}
CHATS = [
    [{"role": "user", "content": "Why is there a tide?"}],
    [
        {"role": "system", "content": " Answer as a sailor. "},
        {"role": "user", "content": "the moon <b> the moon\n"},
        {"role": "assistant", "content": "Aye: \"marée\" 潮 & 'tide' "},
        {"role": "user", "content": ""},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("chat", CHATS, ids=["one turn", "four turns"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_transformers_renders_them(name: str, chat: list[dict[str, Any]]) -> None:
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), bos_token="<s>", eos_token="</s>", chat_template=TEMPLATES[name]
    )
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    for prompt in (True, False):
        for tools in (None, TOOLS):
            expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt, tools=tools)
            assert ours.render(chat, add_generation_prompt=prompt, tools=tools) == expected


def test_lists_of_parts_and_further_variables() -> None:
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "the moon"}]}]
    assert ChatTemplate(TEMPLATES["turns"]).render(parts) == "<turn>user\nthe Moon<end>\n<turn>model\n"
    assert "Today: now" in ChatTemplate(TEMPLATES["headers"]).render(CHATS[0], date_string="now")
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render(CHATS[0])) == 10


def test_what_a_template_refuses_is_said() -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(PromptError, match="Turns must alternate"):
        ChatTemplate(TEMPLATES["headers"]).render(twice)
    with pytest.raises(PromptError, match="fails on these messages"):
        ChatTemplate("{{ messages[0].content + 1 }}").render(CHATS[0])
    with pytest.raises(PromptError, match="a chat message holds a"):
        ChatTemplate("x").render([{"role": "user", "content": object()}])
    with pytest.raises(CorruptFile, match="not valid Jinja"):
        ChatTemplate("{% if %}").render(CHATS[0])


HOSTILE = [
    # Without end, or as good as.
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(3) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "{% set a = range(99999) | list %}{% for i in a %}{{ a == a or '' }}{% set b = a | sort | sum %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 7 ** (10 ** 8) // 3 ** (10 ** 7) }}",
    "{{ 7 ** (10 ** 8) % 3 ** (10 ** 7) }}",
    "{{ 10 ** (10 ** 9) / 7 }}",
    "{{ 7 | round(-(10**9)) }}",
    "{{ ('{' ~ ':' * 10**6 ~ '}').format(1) }}",
    "{% for i in range(99999) %}{% set b = ('{:' ~ '>' * 10**6 ~ '}').format(i).x %}{% endfor %}",
    "{{ ('\\u00e9\\u0416' * 10**6).encode('punycode') }}",
    "{% set a = 'ab' * 10**6 %}{% for i in range(99999) %}{% set b = a.find('a' * 10**6 ~ 'c') %}{% endfor %}",
    "{{ lipsum(10**7) | length }}",
    "{% for i in range(99999) %}{% set b = ('<!' * 10**6) | striptags | urlize | wordwrap(1) %}{% endfor %}",
    # More memory than there is.
    "{{ 'a' * 10**10 }}",
    "{{ ('a' * 10**6) * 10**6 }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{{ 'a' | center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (2**31 - 1, 1) }}",
    "{{ '{:{w}}'.format(1, w=10**10) }}",
    "{% set a = 'x' * 10**6 %}{{ a.replace('x', a) }}",
    "{% set a = 'x' * 10**6 %}{{ a | replace('x', a) }}",
    "{% set a = 'x' * 10**6 %}{{ ([a] * 10**4) | join }}",
    "{% set a = 'x' * 10**6 %}{{ ('y' * 10**4).join(a) }}",
    "{{ ('x\\n' * 10**5) | indent('y' * 10**5) }}",
    "{{ ('x' * 10**5).translate({120: 'y' * 10**5}) }}",
    "{{ [[1]] | tojson(indent=10**10) }}",
    "{{ (['x' * 10**8] * 10**3) | string | length }}",
    # A prompt far longer than what is given.
    "{% for i in range(99999) %}" + "literal text " * 800 + "{% endfor %}",
    "{{ '%100000000d' % 1 }}",
    "{{ strftime_now('%Y' * 10**9) }}",
    # Numbers with more digits than Python writes, and numbers that are none.
    "{{ 10 ** 5000 }}",
    "{{ messages[0].content | length ** 5000 }}",
    "{{ 2.0 ** 5000 }}",
    "{{ 1 // 0 }}",
    "{{ 1 % 0 }}",
    "{{ (10 ** 400) | float + (10 ** 400) / 3 }}",
    # A reason without end, and syntax without end.
    "{{ raise_exception('a\\nb' * 10**6) }}",
    "{{ " + "(" * 50_000,
    "{% if x %}" * 5000 + "{% endif %}" * 5000,
    "{{ x" + ".a" * 99_999 + " }}",
    # Out of the sandbox.
    "{{ messages.append(1) }}",
    "{% include '/etc/hostname' %}",
    "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% for c in ().__class__.__base__.__subclasses__() %}{{ c() }}{% endfor %}",
    "{{ ('{0.__class__.__name__}' | attr('format'))(1)() }}",
]


@pytest.mark.integration
@pytest.mark.parametrize("source", HOSTILE, ids=range(len(HOSTILE)))
def test_templates_can_neither_reach_out_nor_exhaust_the_machine(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_SECONDS", 0.1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DecoderyError) as caught:
        ChatTemplate(source).render(CHATS[0])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100_000, f"{grown} KiB"


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    literal = ChatTemplate("{% for i in range(99999) %}" + "literal text " * 800 + "{% endfor %}")
    with pytest.raises(PromptError, match="fails on these messages: it makes far more text"):
        literal.render(CHATS[0])
    with pytest.raises(PromptError, match="was stopped on these messages: it takes more than 1024 MiB of memory"):
        ChatTemplate("{{ messages[0].content * 10**10 }}").render(CHATS[0])
    monkeypatch.setattr(chat, "_SECONDS", 0.1)
    with pytest.raises(PromptError, match=r"was stopped on these messages: it takes more than 0\.1 s"):
        ChatTemplate(HOSTILE[0]).render(CHATS[0])


def test_the_renderer_is_kept_and_begun_anew_when_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render(CHATS[0]) == "Why is there a tide?"
    process = chat.renderers.idle[0].popen
    assert template.render(CHATS[0]) == "Why is there a tide?" and chat.renderers.idle[0].popen is process
    monkeypatch.setattr(chat, "_SECONDS", 0.1)
    with pytest.raises(PromptError, match="was stopped"):
        ChatTemplate(HOSTILE[0]).render(CHATS[0])
    monkeypatch.undo()
    assert template.render(CHATS[0]) == "Why is there a tide?"
    monkeypatch.setattr(sys, "executable", "/bin/false")
    chat.renderers.idle[0].popen.kill()
    chat.renderers.idle[0].popen.wait()
    with pytest.raises(PromptError, match="does not start"):
        template.render(CHATS[0])


def test_messages_that_cannot_be_sent_are_named() -> None:
    nested: list[Any] = []
    for _ in range(10**5):
        nested = [nested]
    for content in (nested, 10**5000):
        with pytest.raises(PromptError, match="a chat message holds"):
            ChatTemplate("{{ messages }}").render([{"role": "user", "content": content}])
    assert (
        ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "\ud800\n\x00"}])
        == "\ud800\n\x00"
    )


def test_a_long_conversation_is_rendered() -> None:
    content = "The tide rises and falls. " * 4000
    chat = [{"role": ("user", "assistant")[n % 2], "content": content} for n in range(21)]
    assert len(ChatTemplate(TEMPLATES["chatml"]).render(chat)) > 2_000_000
