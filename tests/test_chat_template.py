"""The chat template: the form of content that it reads, turns that stay open, and several threads."""

import subprocess
import sys

import pytest

from conftest import add_tokenizer, refused
from draftwing.errors import PromptError, TokenizerError
from draftwing.text.tokenizer import Tokenizer

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
AT_ONCE = """
import sys, threading
from pathlib import Path
from draftwing.text.tokenizer import Tokenizer
tokenizer, begin, found = Tokenizer(Path(sys.argv[1])), threading.Barrier(12), []
def ask():
    begin.wait()
    try:
        found.append(len(tokenizer.encode_chat([{"role": "user", "content": "hello"}])) > 0)
    except Exception as error:
        found.append(error)
threads = [threading.Thread(target=ask) for _ in range(12)]
[each.start() for each in threads], [each.join() for each in threads]
print(found.count(True), [each for each in found if each is not True][:1])
"""


def test_the_first_dialogues_may_come_all_at_once(tmp_path):
    """In a Python of its own: what is imported once is never imported by two threads again."""
    folder = add_tokenizer(tmp_path, chat_template=TEMPLATE, tokenizer_class="PreTrainedTokenizerFast")
    done = subprocess.run([sys.executable, "-c", AT_ONCE, str(folder)], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("12 []"), done.stdout + done.stderr[-2000:]


TEXT = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{% if c['type'] == 'text' %}{{ c['text'] | trim }}"
    "{% endif %}{% endfor %}</{{ m.role }}>{% endfor %}"
)
EITHER = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for c in m.content %}[{{ c['text'] }}]{% endfor %}{% endif %}</{{ m.role }}>{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>"
    "{% endfor %}"
)
END = "{% if add_generation_prompt %}<bot>{% endif %}"


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.fixture
def rendered(tmp_path):
    """The text that a template makes of messages."""

    def render(template, messages, **variables):
        tokenizer = Tokenizer(add_tokenizer(tmp_path, chat_template=template + END))
        return tokenizer.decode(tokenizer.encode_chat(messages, **variables))

    return render


@pytest.mark.parametrize("template", [TEXT, PARTS, EITHER, NO_SYSTEM])
def test_content_reaches_templates_of_every_form(rendered, template):
    for content in ("Is rain wet?", parts("Is rain ", "wet?")):
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]
        messages.append({"role": "user", "content": parts("Why?")})
        expected = "<user>Is rain wet?</user><assistant>Yes.</assistant><user>Why?</user><bot>"
        assert rendered(template, messages) == expected
    if template != NO_SYSTEM:
        messages = [{"role": "system", "content": parts("Be brief.")}, {"role": "user", "content": ""}]
        assert rendered(template, messages) == "<system>Be brief.</system><user></user><bot>"


def test_parts_that_are_not_text_are_refused(rendered):
    for part in ({"type": "image_url"}, {"type": "text", "text": 5}, {"type": "refusal", "refusal": "no"}, "x", {}):
        with refused(PromptError, "message 2 has a part of type", "reads parts of type text"):
            rendered(TEXT, [{"role": "user", "content": "x"}, {"role": "user", "content": [part]}])
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert (
        rendered(TEXT, [{"role": "user", "content": "x"}, refusal]) == "<user>x</user><assistant>No.</assistant><bot>"
    )


def test_a_prefix_is_no_question(rendered):
    """Templates may prepare the whole dialogue for the answer that they are asked to open."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "prefix": True}]
    template = "{% if add_generation_prompt %}[answer]{% endif %}" + TEXT
    assert rendered(template, messages) == "<user>x</user><assistant>y"
    assert rendered(template, messages[:1]) == "[answer]<user>x</user><bot>"


@pytest.mark.parametrize("template", [TEXT, PARTS, EITHER])
def test_a_prefix_is_continued(rendered, template):
    """Also one that ends in blanks, which templates strip, or that is a part of what closes its turn."""
    for said in ("Yes, it", "Yes, ", "as", "</assistant>", " Hm"):
        for content in (said, parts(said)):
            messages = [{"role": "user", "content": "Wet?"}, {"role": "assistant", "content": content, "prefix": True}]
            assert rendered(template, messages) == f"<user>Wet?</user><assistant>{said.lstrip()}"
        messages[1]["prefix"] = False
        assert rendered(template, messages) == f"<user>Wet?</user><assistant>{said.strip()}</assistant><bot>"


def test_a_prefix_without_text_is_none(rendered):
    for content in ("", [], None):
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content, "prefix": True}]
        assert rendered(TEXT, messages) == "<user>x</user><bot>"


def test_prefixes_that_cannot_be_continued_are_refused(rendered):
    answer = {"role": "assistant", "content": "x", "prefix": True}
    for messages in (
        [{"role": "user", "content": "x", "prefix": True}],
        [answer, {"role": "user", "content": "x"}],
        *([{**answer, "prefix": value}] for value in ("yes", 1, 0.0, [])),
        [{**answer, "tool_calls": [{}]}],
    ):
        with refused(PromptError, "message 1 has prefix", "only the last message"):
            rendered(TEXT, messages)
    with refused(TokenizerError, "does not show the last message"):
        rendered("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", [answer])


def test_places_for_system_messages(tmp_path):
    dropped = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    for template, expected in ((TEXT, True), (PARTS, True), (NO_SYSTEM, False), (dropped, False)):
        assert Tokenizer(add_tokenizer(tmp_path, chat_template=template)).template_reads_system == expected


def test_errors_of_templates_name_no_folder(rendered, tmp_path):
    for messages in ([{"role": "system", "content": "x"}], [{"role": "user"}]):
        with pytest.raises(TokenizerError) as caught:
            rendered(NO_SYSTEM + "{% for m in messages %}{{ m.content + 1 }}{% endfor %}", messages)
        assert str(tmp_path) not in str(caught.value)
