"""The prompt of a conversation, beside the one that transformers makes of the same folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from services import CHATS, COMPLETIONS, byte_level, serving
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from firsttoken.assets import tokenizer_files
from firsttoken.study.errors import RequestError
from firsttoken_serve.chat.chat_template import ChatTemplate, read_template
from firsttoken_serve.chat.template_renderer import RENDERER
from firsttoken_serve.chat.text import read_vocabulary

Files = dict[str, Any]  # what each side file holds: JSON, or a text

USER = [{"role": "user", "content": 'the <b>inn</b> \u65e5\u672c & "it"\n'}]
TURNS = [
    {"role": "system", "content": " in "},
    *USER,
    {"role": "assistant", "content": "hen"},
    {"role": "user", "content": "thin"},
]
NULLS = [{"role": "user", "content": "the", "name": None}, {"role": "assistant", "content": None}, *USER]
CASES = Path(__file__).parent / "chats"

CHATML = (
    "{%- for m in messages %}\n    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
HEADERS = (  # as Llama 3 writes turns, with the day and what is not given
    "{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = strftime_now('%Y') %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set first = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set first = '' %}{%- endif %}"
    "{{- '<|h|>system<|/h|>' + date_string + first + '<|im_end|>' }}{%- if tools is not none %}TOOLS{%- endif %}"
    "{%- if documents is none %}NONE{%- endif %}"
    "{%- for message in messages %}{%- if not (message.role == 'ipython' or 'tool_calls' in message) %}"
    "{{- '<|h|>' + message['role'] + '<|/h|>\\n\\n'+ message['content'] | trim + '<|im_end|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|h|>assistant<|/h|>' }}{%- endif %}"
)
STRICT = (  # as Mistral and Gemma refuse what does not alternate
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ ' [INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + ' ' + eos_token}}"
    "{% endif %}{% endfor %}"
)
GENERATION = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if m.role == 'assistant' %}\n"
    "{% generation %}\n  {{ m['content'] }}{{ eos_token }}{% endgeneration %}{% else %}{{ ns.n }}{{ m.content }}\n"
    "{%- endif -%}{% endfor %}"
)
LOOPS = (
    "{% for m in messages %}{% if loop.index0 == 2 %}{% continue %}{% endif %}{% if m.content is none %}N{% endif %}"
    "{{ m.content }}{% if loop.last %}{% break %}{% endif %}{% else %}none{% endfor %}"
)
JSON = (
    "{% for m in messages %}{{ m|tojson }}{{ m | tojson(indent=2) }}{{ m | tojson(ensure_ascii=True, sort_keys=True) }}"
    "{{ m|tojson(separators=(',', ':')) }}{{ m|tojson(True, 1) }}{% endfor %}"
)
NAMES = (
    "{{ [bos_token, eos_token, pad_token, unk_token, sep_token, cls_token, mask_token]|join('/') }}"
    "{{ image_token }}{{ eot_token }}{{ pad_token is defined }}{{ messages[0].content }}"
)
MACROS = (
    "{% macro turn(m, last=false) %}{{ m.role|title }}: {{ m.content | replace('\\n', ' ') | indent(2) }}{% endmacro %}"
    "{% for role, group in messages|groupby('role') %}{{ role }}={{ group|length }};{% endfor %}"
    "{{ messages|map(attribute='role')|unique|list|string }}{{ dict(a=1)|items|list }}"
    "{{ messages[-1].content.split('<')[0].strip() }}"
    "{% for m in messages %}{{ turn(m, last=loop.last) }}\r\n{% endfor %}"
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
)
NEWER = (
    "{{ bos_token }}{{ messages[0].get('content') }}{{ messages[::-1][0]['content'] }}"
    "{% if enable_thinking is defined and not enable_thinking %}x{% endif %}"
)
ADDED = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
OLD = {"__type": "AddedToken", **ADDED}
SETTINGS, MAP, FILE = tokenizer_files.SETTINGS, tokenizer_files.SPECIAL_MAP, tokenizer_files.TEMPLATE
MORE = f"{tokenizer_files.TEMPLATES}/"
BOTH = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "T"}]

TABLE: dict[str, Files] = {
    **{
        f"template {number}": {SETTINGS: {"bos_token": "<s>", "eos_token": "</s>", "chat_template": text}}
        for number, text in enumerate((CHATML, HEADERS, STRICT, GENERATION, LOOPS, JSON, NAMES, MACROS, NEWER))
    },
    "a list of names": {SETTINGS: {"chat_template": BOTH}},
    "a mapping of names": {SETTINGS: {"chat_template": {"default": NAMES, "rag": "R"}}},
    "names without a default": {SETTINGS: {"chat_template": BOTH[1:]}},
    "no template": {SETTINGS: {"bos_token": "<s>"}},
    "no side file": {},
    "a file": {FILE: STRICT, SETTINGS: {"bos_token": "<s>", "eos_token": "</s>"}},
    "a file before the settings": {FILE: NAMES, SETTINGS: {"chat_template": "S", "eos_token": "</s>"}},
    "a file before a list": {FILE: "F{{ messages[0].content }}", SETTINGS: {"chat_template": BOTH}},
    "a folder of others": {FILE: CHATML, f"{MORE}tool_use.jinja": "T", SETTINGS: {}},
    "a folder with the default": {FILE: "F", f"{MORE}default.jinja": CHATML, SETTINGS: {}},
    "a folder without one": {f"{MORE}tool_use.jinja": "T", SETTINGS: {"chat_template": CHATML}},
    "line ends of another system": {
        FILE: "{% if true %}\r\nA{{ '\r\n' }}\r\n{% endif %}\r\n{{ messages[0].content }}\r\n"
    },
    "tokens as objects": {SETTINGS: {"bos_token": OLD, "eos_token": None, "chat_template": NAMES}},
    "tokens in their own map": {MAP: {"bos_token": ADDED, "eos_token": "</s>"}, SETTINGS: {"chat_template": NAMES}},
    "a map before the settings": {MAP: {"bos_token": "<t>"}, SETTINGS: {"bos_token": "<s>", "chat_template": NAMES}},
    "a map that is not read": {
        MAP: {"bos_token": "<t>", "unk_token": "<u>"},
        SETTINGS: {
            "bos_token": "<s>",
            "added_tokens_decoder": {"0": {"content": "<end>", "special": True}},
            "chat_template": NAMES,
        },
    },
    "tokens of its own kind": {SETTINGS: {"image_token": "<img>", "eot_token": OLD, "chat_template": NAMES}},
    "extra tokens by name": {SETTINGS: {"extra_special_tokens": {"image_token": "<img>"}, "chat_template": NAMES}},
    "extra tokens in a list": {
        SETTINGS: {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "chat_template": CHATML}
    },
    "tokens added by number": {
        SETTINGS: {
            "added_tokens_decoder": {
                "9": {"content": "<|im_end|>", "special": True, "rstrip": True},
                "8": {"content": "<|im_start|>", "special": False, "normalized": True},
            },
            "chat_template": CHATML,
        }
    },
    "flags that are no tokens": {SETTINGS: {"add_bos_token": True, "add_eos_token": False, "chat_template": NAMES}},
    "a class that is unknown": {SETTINGS: {"tokenizer_class": "SomethingFast", "chat_template": NAMES}},
    "a class without tokens": {SETTINGS: {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": NAMES}},
    "Llama's class over bytes": {SETTINGS: {"tokenizer_class": "LlamaTokenizerFast", "chat_template": NAMES}},
    "Qwen's class": {SETTINGS: {"tokenizer_class": "Qwen2Tokenizer", "chat_template": NAMES}},
    "Qwen's class that names none": {
        SETTINGS: {"tokenizer_class": "Qwen2Tokenizer", "pad_token": None, "chat_template": NAMES}
    },
    "GPT-2's class": {SETTINGS: {"tokenizer_class": "GPT2TokenizerFast", "chat_template": NAMES}},
    "the class in the configuration": {
        "config.json": {"tokenizer_class": "GPT2Tokenizer"},
        SETTINGS: {"chat_template": NAMES},
    },
    "a model type's own class": {
        "config.json": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        SETTINGS: {"chat_template": NAMES},
    },
    "a model type that takes no class": {
        "config.json": {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        SETTINGS: {"tokenizer_class": "LlamaTokenizer", "chat_template": NAMES},
    },
    "a template that is none": {FILE: "{% for m in messages %}"},
    "a filter that nobody knows": {FILE: "{{ messages|nofilter }}"},
    "a tag that nobody knows": {FILE: "{% generate %}"},
    "a name that begins with an underscore": {FILE: "{% set n = namespace(_a=1) %}x"},
    "a template that refuses": {FILE: "{{ raise_exception('no') }}"},
    "a template of nothing": {FILE: ""},
    "the case of named templates": {
        SETTINGS: json.loads((CASES / "tokenizer_config_named_templates.json").read_text())
    },
    "the case of the generation tag": {FILE: (CASES / "chat_template_generation_tag.jinja").read_text()},
}


def tokenizer(begins: bool) -> Tokenizer:
    """Of bytes; one that ``begins`` texts puts a token before each."""
    made = byte_level()
    if begins:
        made.add_special_tokens(["<s>"])
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    return made


def write(folder: Path, files: Files, begins: bool = False) -> None:
    """A folder of a tiny Llama without weights, with these side files."""
    folder.mkdir()
    tokenizer(begins).save(str(folder / "tokenizer.json"))
    for name, content in ({"config.json": {}} | files).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if name == "config.json":
            content = CONFIG | content
        path.write_bytes(content.encode() if isinstance(content, str) else json.dumps(content).encode())


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("name", TABLE)
def test_prompts_are_those_of_transformers(name: str, begins: bool, tmp_path: Path) -> None:
    """Text and ids are the same; a conversation that one of both cannot render, the other cannot either."""
    write(tmp_path / "model", TABLE[name], begins)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    template, vocabulary = read_template(tmp_path / "model"), read_vocabulary(tmp_path / "model", 4096)
    for messages in (USER, TURNS, NULLS, TURNS[1:], TURNS[:1]):
        try:
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:
            with pytest.raises(RequestError):
                template.prompt(messages)
            continue
        if not expected:  # where there is a template of nothing
            continue
        assert template.prompt(messages) == expected
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert vocabulary.chat_ids(messages) == ids


ENDS = {  # what stands in the side files, and the ends of answers in a chat by name; "<end>" has the id 0
    "the tokenizer's end": ({SETTINGS: {"eos_token": "<|im_end|>", "chat_template": "x"}}, ["<|im_end|>"]),
    "the template's end": ({FILE: CHATML, SETTINGS: {"extra_special_tokens": ["<|im_end|>"]}}, ["<|im_end|>"]),
    "both": (
        {FILE: STRICT.replace("eos_token", "'</t>'"), SETTINGS: {"eos_token": "</s>", "pad_token": "</t>"}},
        ["</s>", "</t>"],
    ),
    "the longer of two": ({FILE: CHATML, SETTINGS: {"extra_special_tokens": ["<|im", "<|im_end|>"]}}, ["<|im_end|>"]),
    "the model's, first": (
        {"generation_config.json": {"eos_token_id": [0, 5]}, FILE: CHATML, SETTINGS: {"eos_token": "<|im_end|>"}},
        [0, 5, "<|im_end|>"],
    ),
    "one that is the model's": ({"config.json": {"eos_token_id": 0}, SETTINGS: {"eos_token": "<end>"}}, [0]),
    "a text that is no token": ({FILE: CHATML.replace("<|im_end|>", "##")}, []),
    "an end behind other text": ({FILE: CHATML.replace("<|im_end|>", " so. <end>")}, []),
    "a template that refuses answers": (
        {FILE: "{{ raise_exception('no') }}", SETTINGS: {"eos_token": "<end>"}},
        ["<end>"],
    ),
    "a template without answers": ({FILE: "{{ messages[0].content }}<end>"}, []),
    "a token beyond the embedding": ({"config.json": {"vocab_size": 260}, SETTINGS: {"eos_token": "</s>"}}, []),
    "nothing": ({"generation_config.json": {"eos_token_id": None}, "config.json": {"eos_token_id": 3}}, []),
}


@pytest.mark.parametrize("name", ENDS)
def test_answers_in_a_chat_end_where_the_model_the_tokenizer_or_the_template_says(name: str, tmp_path: Path) -> None:
    """Ids of the model come first, then the tokenizer's own end, then what the template writes behind an answer."""
    files, expected = ENDS[name]
    write(tmp_path / "model", files)
    vocabulary = read_vocabulary(tmp_path / "model", 64)
    ids = [one if isinstance(one, int) else vocabulary.tokenizer.token_to_id(one) for one in expected]
    assert vocabulary.chat_stop_ids == tuple(ids)
    assert vocabulary.stop_ids == tuple(one for one in expected if isinstance(one, int))


TIME, MEMORY, SIZE = (
    "takes more than 2 s",
    "takes more than 512 MiB of memory",
    "writes more than 16,777,216 characters",
)
ENDLESS = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x": TIME,
    "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}": MEMORY,
    "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n }}": MEMORY,
    "{{ 'a' * 4000000000 }}": MEMORY,
    "{{ 'a'|center(10 ** 10) }}": MEMORY,
    "{{ '%9999999999s' % 'a' }}": MEMORY,
    "{{ ('a' * 1000000)|replace('a', 'a' * 1000000) }}": MEMORY,
    "{{ range(99999)|map('string')|join('a' * 100000) }}": MEMORY,
    "{{ 'a' * 17000000 }}": SIZE,
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "says maximum recursion depth exceeded",
}


def test_a_model_without_a_template_says_what_it_answers() -> None:
    with pytest.raises(RequestError, match=r"^messages: this model has no chat template; ask /v1/completions$"):
        ChatTemplate({}, {}).prompt(USER)


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_without_an_end_is_named_in_one_line(template: str) -> None:
    """It may be a loop, or one product within which nothing else runs; the next template is rendered as ever."""
    chat = ChatTemplate({"default": template}, {})
    with pytest.raises(RequestError, match=f"messages: the model's chat template {ENDLESS[template]}") as refused:
        chat.prompt(USER)
    assert "\n" not in str(refused.value)
    assert ChatTemplate({"default": "{{ messages[0].content }}"}, {}).prompt(USER) == USER[0]["content"]


def test_a_conversation_may_take_no_longer_than_a_trial() -> None:
    """A template that is quick with one question is ended with others, and then goes on."""
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    chat = ChatTemplate(
        {"default": f"{{{{ messages[0].content }}}}{{% if messages|length > 2 %}}{loops}{{% endif %}}"}, {}
    )
    with pytest.raises(RequestError, match=TIME):
        chat.prompt(TURNS)
    assert chat.prompt(USER) == USER[0]["content"]


def test_templates_are_rendered_anew_where_their_process_was_ended() -> None:
    chat = ChatTemplate({"default": CHATML}, {})
    before = chat.prompt(USER)
    process = RENDERER._running()
    process.kill()
    process.wait()
    assert chat.prompt(USER) == before
    RENDERER.close()
    assert chat.prompt(USER) == before


PARTS = {  # what walks over parts of a turn's content, of which a text has none
    "all roles": "{% for m in messages %}{{ m.role }}: {% for c in m.content %}{{ c.text }}{% endfor %};{% endfor %}",
    "by key": (
        "{% for m in messages %}<|{{ m['role'] }}|>{% for c in m['content'] if c['type'] == 'text' %}"
        "{{ c['text'] | trim }}{% if not loop.last %}+{% endif %}{% endfor %}\n{% endfor %}"
    ),
    "selected": (
        "{% for m in messages %}{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
        "{% generation %}{{ c['text'] + '\n' }}{% endgeneration %}{% endfor %}{% endfor %}"
    ),
    "the first": "{% for m in messages %}{{ m.content[0].text }}/{% endfor %}",
    "a macro": (
        "{% macro say(content) %}{% for c in content %}{{ c.text }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ say(m.content) }};{% endfor %}"
    ),
    "strict": (
        "{% for m in messages %}{% if m.content is string %}{{ raise_exception('give parts') }}{% endif %}"
        "{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
    ),
}
EITHER = {  # what takes both, and answers in texts alone
    "both": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %};{% endfor %}"
    ),
    "a user's parts": (
        "{% for m in messages %}{% if m.role == 'user' %}{% for c in m.content %}{{ c.text }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %};{% endfor %}"
    ),
}


def in_parts(turn: dict[str, Any]) -> dict[str, Any]:
    return turn | {"content": [{"type": "text", "text": turn["content"]}]}


@pytest.mark.parametrize("name", PARTS | EITHER)
def test_a_template_gets_the_form_of_content_that_it_reads(name: str, tmp_path: Path) -> None:
    """As a text and in parts, as transformers renders what the template can read."""
    write(tmp_path / "model", {FILE: (PARTS | EITHER)[name]})
    theirs, template = AutoTokenizer.from_pretrained(tmp_path / "model"), read_template(tmp_path / "model")
    for turns in (USER, TURNS, TURNS[1:]):
        readable = [in_parts(turn) if name in PARTS or turn["role"] == "user" else turn for turn in turns]
        expected = theirs.apply_chat_template(readable, tokenize=False, add_generation_prompt=True)
        assert all(turn["content"].strip() in expected for turn in turns)
        assert template.prompt(turns) == template.prompt(list(map(in_parts, turns))) == expected


def test_several_parts_stay_several_where_the_template_walks_over_them(tmp_path: Path) -> None:
    """And are one text where it reads texts."""
    turns = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("the", "inn")]}]
    write(tmp_path / "model", {FILE: PARTS["by key"]})
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    expected = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert read_template(tmp_path / "model").prompt(turns) == expected
    assert "the+inn" in expected
    assert ChatTemplate({"default": CHATML}, {}).prompt(turns).startswith("<|im_start|>user\ntheinn<|im_end|>")


def test_a_template_without_an_end_holds_up_no_start(plain: Path, tmp_path: Path, capfd: Any) -> None:
    """Completions are answered, and chats refused in one line, which the terminal says, too."""
    folder = Path(shutil.copytree(plain, tmp_path / "model"))
    (folder / FILE).write_text(next(iter(ENDLESS)))
    with serving(folder) as url:
        refused = httpx.post(f"{url}{CHATS}", json={"messages": USER}, timeout=120)
        answered = httpx.post(f"{url}{COMPLETIONS}", json={"prompt": "the", "max_tokens": 2}, timeout=120)
    line = f"the model's chat template {TIME}"
    assert answered.status_code == 200
    assert refused.status_code == 400 and refused.json()["error"]["message"] == f"messages: {line}; ask /v1/completions"
    assert f"firsttoken: model: {line}; /v1/completions is served\n" in capfd.readouterr().err
