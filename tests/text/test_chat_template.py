"""Chat templates against transformers' apply_chat_template."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import CHATML, byte_level, save
from transformers import PreTrainedTokenizerFast

from minisgl.errors import RequestError
from minisgl.text.chat_template import ChatTemplate
from minisgl.text.tokenizer import Tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Grüße <b>&\n'x' \"y\" 🎉"}
ASSISTANT = {"role": "assistant", "content": "Hello."}

LLAMA2_LIKE = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant!') }}
    {% endif %}
    {% if message['role'] == 'user' %}[INST] {{ message['content'] | trim }} [/INST]{% else %}
{% generation %} {{ message['content'] }}{{ eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
"""
TEMPLATES = {
    "chatml": CHATML,
    "whitespace": "{% for m in messages %}\n  {%- if m.role == 'user' %}\n U: {{ m.content }}\n"
    "  {% endif %}\n\n{% endfor %}",
    "json": "{% for m in messages %}{{ m | tojson }}|{{ m.content | tojson(indent=2) }}{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.index > 2 %}"
    "{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "tools": "{% if tools is none %}none{% endif %}{% if documents %}docs{% endif %}{{ unknown is defined }}",
    "year": "{{ strftime_now('%Y') }}",
}


def both(folder: Path, template: str | list[dict[str, str]]) -> tuple[ChatTemplate, PreTrainedTokenizerFast]:
    save(byte_level(), folder, bos_token="<s>", eos_token="<|im_end|>", chat_template=template)
    return ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder)), (
        PreTrainedTokenizerFast.from_pretrained(folder)
    )


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompted", [True, False])
def test_the_text_is_what_transformers_renders(tmp_path: Path, name: str, prompted: bool) -> None:
    ours, theirs = both(tmp_path, TEMPLATES[name])
    for messages in ([USER], [SYSTEM, USER], [SYSTEM, USER, ASSISTANT, USER]):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompted)
        assert ours.render(messages, add_generation_prompt=prompted) == expected


TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"


@pytest.mark.parametrize("template", [CHATML, TRIMMED], ids=["chatml", "trimmed"])
@pytest.mark.parametrize("content", ["Hel", "Hel ", " Hel", "Hel\n", "x", "Grüße 🎉"])
def test_a_last_message_is_continued_as_transformers_does(
    tmp_path: Path, template: str, content: str
) -> None:
    ours, theirs = both(tmp_path, template)
    for last in ({**ASSISTANT, "content": content}, {**USER, "content": content}):
        messages = [SYSTEM, {**USER, "content": content}, last]
        expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        assert ours.render(messages, continue_final_message=True) == expected


@pytest.mark.parametrize(
    ("template", "last", "param"),
    [
        (TEMPLATES["namespace"], ASSISTANT, "continue_final_message"),
        (CHATML, {**ASSISTANT, "tool_calls": []}, "continue_final_message"),
        (LLAMA2_LIKE, USER, "messages"),
    ],
)
def test_a_message_that_the_template_cant_leave_open_is_refused(
    tmp_path: Path, template: str, last: dict[str, Any], param: str
) -> None:
    ours, _ = both(tmp_path, template)
    with pytest.raises(RequestError) as caught:
        ours.render([USER, last], continue_final_message=True)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_the_generation_tag_is_tolerated(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, LLAMA2_LIKE)
    messages = [USER, ASSISTANT, USER]
    assert ours.render(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_a_template_that_wants_alternating_roles_refuses_in_its_own_words(tmp_path: Path) -> None:
    ours, _ = both(tmp_path, LLAMA2_LIKE)
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        ours.render([USER, USER])
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{% if %}", "does not compile"),
        ("{{ messages[0]['content'] + 1 }}", "refused these messages"),
        ("{{ messages.append(1) }}", "refused these messages"),
        ("{{ messages.__class__.__mro__ }}", "refused these messages"),
        ("{{ 1 // 0 }}", "refused these messages"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "refused these messages"),
        ("{% for i in range(999999999) %}{% endfor %}", "refused these messages"),
    ],
)
def test_whatever_a_template_does_is_a_400(template: str | None, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        ChatTemplate(template, {}).render([USER])
    assert caught.value.status == 400


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    ours, theirs = both(tmp_path, several)
    assert ours.render([USER]) == theirs.apply_chat_template([USER], tokenize=False) == "D"


def test_a_jinja_file_wins_over_the_config(tmp_path: Path) -> None:
    save(byte_level(), tmp_path, chat_template="config")
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}|")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<s>"}))
    ours = ChatTemplate.from_folder(tmp_path, Tokenizer.from_folder(tmp_path))
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.render([USER]) == theirs.apply_chat_template([USER], tokenize=False) == "file <s>|"


def test_rendering_leaves_the_messages_as_they_were(tmp_path: Path) -> None:
    ours, _ = both(tmp_path, CHATML)
    message = dict(USER)
    ours.render([message])
    assert message == USER


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, True),
        (LLAMA2_LIKE, False),
        (TEMPLATES["whitespace"], False),
        (
            "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            False,
        ),
        (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            False,
        ),
        (None, False),
    ],
)
def test_whether_a_late_system_message_is_written_where_it_stands(source: str | None, expected: bool) -> None:
    assert ChatTemplate(source, {}).takes_late_system is expected
