"""Chat templates: what they write beside what transformers writes, and templates that do not end, or take too much."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from octavo.errors import CheckpointError, ConfigError
from octavo.server import ChatTemplate
from octavo.server.error_responses import ResponseError

TALK = [
    {"role": "system", "content": "Be brief, <b>Ann</b>."},
    {"role": "user", "content": "Grüße & 'quotes'"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Hi\n"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
LONG = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

# The forms in which templates are published: each with the constructs of one family, and words of its own.
FORMS = {
    "marks for training": """{{ bos_token }}
{%- for m in messages %}
    {% if m.role == 'assistant' %}
<|a|>{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}

    {% else %}
<|{{ m.role }}|>{{ m.content }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|a|>{% endif %}""",
    "a set inside a generation block": """{% set ns = namespace(n=0) %}{% set x = 'out' %}{% for m in messages %}
{%- generation %}{% set x = m.role %}{% set ns.n = ns.n + 1 %}{{ loop.index }}{{ x }}{% endgeneration -%}
{{ x }}{{ ns.n }}{% endfor %}""",
    "tojson with every argument": """{% for m in messages %}
{{ m | tojson }}
{{ m | tojson(ensure_ascii=True) }}
{{ m | tojson(separators=(',', ':'), sort_keys=true) }}
{{ m | tojson(indent=2, ensure_ascii=false) }}
{{ [m.role, 1.5, none, true] | tojson(true, 1) }}
{% endfor %}""",
    "tools and dates": """{%- if tools is not none %}TOOLS {{ tools | tojson }}{% endif %}
{%- if documents is not none %}DOCUMENTS{% endif %}
{%- set date = date_string if date_string is defined else strftime_now('%d %b %Y %z|%Z') %}
Today: {{ date }}
{%- for m in messages[1:] %}
    {%- if loop.index0 % 2 == 1 and m.role != 'assistant' %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '[' + m.role | upper + '] ' + (m['content'] | trim) + (eos_token if m.role == 'assistant' else '') }}
{%- endfor %}""",
    "trimmed blocks": """{{ bos_token }}
{%- for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
<{{ m.role }}> {{ m.content | trim }} {{ {'é': m.role} | tojson }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}""",
    "loop controls and macros": """{% macro turn(m) %}
<{{ m.role }}>{{ m.content.split(',')[-1].strip() }}</{{ m.role }}>{% endmacro %}
{% for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{{ turn(m) }}
{% endfor %}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | length }}""",
}


@pytest.fixture
def template():
    """Makes templates, whose processes end with the test."""
    made = []

    def make(*given, **settings):
        made.append(ChatTemplate(*given, **settings))
        return made[-1]

    yield make
    for own in made:
        own.close()


@pytest.mark.parametrize("form", FORMS)
def test_rendering_matches_transformers(template, byte_tokenizer, form):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer, **TOKENS)
    wanted = theirs.apply_chat_template(TALK, chat_template=FORMS[form], tokenize=False, add_generation_prompt=True)
    assert template(FORMS[form], TOKENS).render(TALK) == wanted


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (LONG, "did not end within 0.3 s and was stopped; write it again"),
        ("{{ 'a' * 10**9 * 9 }}", "exceeded its memory limit"),
        ("{{ range(90000) | list | string * 10000 }}", "exceeded its memory limit"),
    ],
    ids=["time", "memory in one piece", "memory of a filter"],
)
def test_endless_template_is_stopped_and_the_next_renders(template, source, says):
    hostile = template("{% if messages[0].content == 'x' %}" + source + "{% else %}fine{% endif %}", seconds=0.3)
    with pytest.raises(ResponseError, match=says) as refused:
        hostile.render([{"role": "user", "content": "x"}])
    assert refused.value.status == 500
    assert hostile.render(TALK) == "fine"


def test_rendering_stops_one_character_beyond_the_limit(template):
    endless = template("{% for a in range(99999) %}{% for b in range(99999) %}abc{% endfor %}{% endfor %}")
    assert endless.render(TALK, most=1000) == ("abc" * 400)[:1001]
    assert template("{{ 'a' * 10**6 }}").render(TALK, most=10) == "a" * 11
    assert template("abc").render(TALK, most=3) == "abc"


def test_killed_process_is_restarted(template):
    own = template("{{ messages[0].role }}")
    before = own._process.pid
    os.kill(before, signal.SIGKILL)
    own._process.wait()
    assert own.render(TALK) == "system"
    assert own._process.pid != before


def test_close_ends_a_running_render(template):
    """As a server that is told to end does: nothing waits for the template."""
    own, refused = template(LONG, seconds=20), []

    def render():
        with pytest.raises(ResponseError, match="ended with status -9") as error:
            own.render(TALK)
        refused.append(error.value.status)

    thread = threading.Thread(target=render)
    thread.start()
    while not own._lock.locked():
        pass
    own.close()
    thread.join(60)
    assert refused == [500]


def test_damaged_templates_are_checkpoint_errors():
    with pytest.raises(CheckpointError, match="chat template is damaged"):
        ChatTemplate("{% for %}")
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate("{{ " + "(" * 100_000 + " }}")
    with pytest.raises(CheckpointError, match=r"did not end within 0.2 s"):
        ChatTemplate("{{ 9**9999999 }}" * 50, seconds=0.2)


def test_sandbox_blocks_access_to_the_machine(template):
    for source in (
        "{{ '\\ud800' }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ strftime_now.__globals__.json }}",
    ):
        with pytest.raises(ConfigError, match="rejects these messages"):
            template(source).render(TALK)


def test_the_process_imports_neither_torch_nor_octavo():
    from octavo.server import template_process

    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print(*sys.modules)"
    command = [sys.executable, "-P", "-c", code, template_process.__file__]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "octavo", "numpy"} & set(loaded)
