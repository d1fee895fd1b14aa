"""Chat templates in the styles of published models, the tokenizers for them, and random conversations.

Each template tells by `{% generation %}` what the assistant writes; `without_generation` leaves that out.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_LLAMA = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant", "tool"] %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {{- "<|start_header_id|>" + message["role"] + "<|end_header_id|>\\n\\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}
        {%- for call in message.tool_calls or [] %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + "}" }}
        {%- endfor %}
        {{- (message["content"] or "") | trim + "<|eot_id|>" }}
        {%- endgeneration %}
    {%- else %}
        {{- message["content"] | trim + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""

_QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_GEMMA = """{{ bos_token }}
{%- set first = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] + '\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
    {%- if role == 'model' %}
{% generation %}
{{ (message['content'] or '') | trim }}<end_of_turn>
{% endgeneration %}
    {%- else %}
        {{- (message['content'] or '') | trim }}<end_of_turn>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}"""

_HARMONY = """
{%- macro header(role, channel) -%}
    <|start|>{{ role }}{% if channel %}<|channel|>{{ channel }}{% endif %}<|message|>
{%- endmacro -%}
{{- header("system", "") }}Knowledge until {{ strftime_now("%Y")[:2] }}xx.
# Valid channels: analysis, final<|end|>
{%- for message in messages %}
    {%- if "<|channel|>" in (message.content or "") %}
        {{- raise_exception("a message has a channel tag in its content") }}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- for call in message.tool_calls or [] %}
            {{- "<|start|>assistant to=functions." + call.function.name }}
            {%- generation %}
                {{- "<|channel|>commentary<|message|>" + call.function.arguments | tojson(indent=1) + "<|call|>" }}
            {%- endgeneration %}
        {%- endfor %}
        {%- if not message.tool_calls %}
            {{- "<|start|>assistant" }}
            {%- generation %}
                {{- "<|channel|>final<|message|>" + message.content }}
                {{- "<|return|>" if loop.last else "<|end|>" }}
            {%- endgeneration %}
        {%- endif %}
    {%- else %}
        {{- header(message.role, "") + (message.content or "") + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

_MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' %}
        {{- '[INST] ' ~ message.content ~ '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] ' ~ message.content ~ '[/TOOL_RESULTS]' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}
            {%- if message.tool_calls %}
                {{- '[TOOL_CALLS] ' ~ message.tool_calls | map(attribute='function') | list | tojson }}
            {%- endif %}
            {{- ' ' ~ (message.content or '') ~ eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- raise_exception('Only user, system, tool and assistant roles are supported, with ' ~ message.role) }}
    {%- endif %}
{%- endfor %}
"""

_PHI = """
{% for message in messages %}
    {% if message['role'] == 'assistant' %}
        {{- '<|assistant|>\\n' }}
        {%- generation %}
            {{- (message['content'] or '') + '<|end|>\\n' }}
        {%- endgeneration %}
    {% else %}
        {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}
"""

# Parts of a content, and a loop that is left early.
_PARTS = """
{%- for message in messages -%}
<|turn|>{{ message.role | upper }}:
{% if message.role == "assistant" %}{% generation %}{{ message.content or "-" }}<|stop|>{% endgeneration %}

{% else %}
{%- for line in (message.content or "").splitlines() %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {{- loop.index ~ ". " ~ line }}
{% endfor -%}
<|stop|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|turn|>ASSISTANT:
{% endif %}"""

# The roles are plain text, and so are the marks around them.
_PLAIN = """
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- 'Assistant:' }}{% generation %}{{ ' ' + (message['content'] or '') | trim + eos_token }}{% endgeneration %}
    {%- else %}
        {{- message['role'].capitalize() + ': ' + message['content'] + '\\n\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""


class Style(NamedTuple):
    """A template, and the tokenizer that belongs to it."""

    template: str
    special: tuple[str, ...]
    bos: str | None
    eos: str
    added: tuple[str, ...] = ()
    """Tokens that are added and not special."""
    is_byte_level: bool = True


STYLES = {
    "llama": Style(
        _LLAMA, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|begin_of_text|>", "<|end_of_text|>"
    ),
    "qwen": Style(_QWEN, ("<|im_start|>", "<|im_end|>"), None, "<|endoftext|>", ("<think>", "</think>", "<tool_call>")),
    "gemma": Style(_GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>", is_byte_level=False),
    "harmony": Style(
        _HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
        "<|startoftext|>",
        "<|endoftext|>",
    ),
    "mistral": Style(
        _MISTRAL,
        ("[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
        "<s>",
        "</s>",
        is_byte_level=False,
    ),
    "phi": Style(_PHI, ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>"), None, "<|endoftext|>"),
    "parts": Style(_PARTS, ("<|turn|>", "<|stop|>"), None, "<|endoftext|>", is_byte_level=False),
    "plain": Style(_PLAIN, (), "<|endoftext|>", "<|endoftext|>"),
}


def without_generation(template: str) -> str:
    """The template without its generation tags, which renders the same text."""
    return re.sub(r"\{%(-?) (end)?generation (-?)%\}", r"{%\1 if true \3%}", template).replace(
        "{% if true %}", "{% if true %}"
    )


def make_folder(folder: Path, style: Style, rng: np.random.Generator, *, template: str | None = None) -> Path:
    """Writes a tokenizer and a chat template, as a file or in tokenizer_config.json; returns the tokenizer.json."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

    special = [*dict.fromkeys([*filter(None, (style.bos, style.eos)), *style.special])]
    texts = [random_text(rng) for _ in range(300)]
    if style.is_byte_level:
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.NFC() if rng.random() < 0.5 else None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=str(rng.choice(["first", "always", "never"])))
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        alphabet, special = [], [*special, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    flags = {name: bool(rng.random() < 0.3) for name in ("rstrip",)}
    if style.special:
        tokenizer.add_special_tokens([AddedToken(name, normalized=False, **flags) for name in style.special])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in style.added])
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:  # the bytes' tokens are no special ones
        token["special"] = token["special"] and not token["content"].startswith("<0x")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    stated: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": style.eos}
    stated |= {"bos_token": style.bos} if style.bos else {}
    source = style.template if template is None else template
    if rng.random() < 0.5:
        (folder / "chat_template.jinja").write_text(source)
    elif rng.random() < 0.5:
        stated["chat_template"] = source
    else:
        stated["chat_template"] = [{"name": "other", "template": "nothing"}, {"name": "default", "template": source}]
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder / "tokenizer.json"


_WORDS = (
    "the model",
    "reads",
    "a",
    "long context",
    "naïve",
    "日本語",
    "🙂 tokens",
    "x<y",
    "{}",
    "[1, 2]",
    "3.14",
    "\n",
    "  ",
    "-",
)


def random_text(rng: np.random.Generator, most: int = 12) -> str:
    """Words and white space, without special tokens; it ends with a letter, and may begin with white space."""
    words = rng.choice(_WORDS, rng.integers(0, most)).tolist()
    glue = rng.choice(["", " ", "\n", "\t"], len(words)).tolist()
    return "".join(word + between for word, between in zip(words, glue, strict=True)) + str(rng.choice(["end", "z "]))


def random_chat(rng: np.random.Generator, most: int = 5, *, calls: bool = True) -> list[dict[str, Any]]:
    """A conversation of up to so many turns of the assistant, some of which call a tool."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": random_text(rng)})
    for _ in range(rng.integers(1, most + 1)):
        messages.append({"role": "user", "content": random_text(rng, 30)})
        if calls and rng.random() < 0.3:
            arguments = {"text": random_text(rng), "count": int(rng.integers(9)), "of": [1.5, None, True]}
            function = {"name": f"find_{rng.integers(9)}", "arguments": arguments}
            messages.append(
                {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
            )
            messages.append({"role": "tool", "content": random_text(rng)})
        thought = f"<think>\n{random_text(rng)}\n</think>\n\n" if rng.random() < 0.3 else ""
        messages.append({"role": "assistant", "content": thought + random_text(rng, 30).lstrip()})
    if rng.random() < 0.2:
        messages.append({"role": "user", "content": random_text(rng)})
    return messages
