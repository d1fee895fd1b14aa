"""Chats: what the loss is of, with which weight; user's text stays text; what is cut, packed, mixed and refused."""

import functools
import gzip
import json
import sys

import numpy as np
import pytest
import tokenizers

from tests.trainer.data.chat_templates import STYLES, Style, make_folder, random_chat, random_text
from trainer.config import ChatConfig, SourceConfig
from trainer.data import DataError, make_train_iterator
from trainer.data.chat_template import find_chat_template
from trainer.data.packing import PackedSequences, check_lengths
from trainer.data.validation_set import ValidationSet

pytest.importorskip("jinja2", reason="renders chat templates")

# The template makes the mark of a role of its own text and the role.
SIMPLE = Style(
    """{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|stop|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|stop|>"),
    None,
    "<|endoftext|>",
)


@pytest.fixture
def folder(tmp_path, rng):
    """A folder with the simple template; returns its tokenizer.json."""
    return make_folder(tmp_path / "folder", SIMPLE, rng)


@pytest.fixture
def write(tmp_path):
    def write(rows, name: str = "chats.jsonl") -> str:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        content = gzip.compress(content) if name.endswith(".gz") else content
        path = tmp_path / name
        if not path.exists() or path.read_bytes() != content:  # a file that is written again is another one
            path.write_bytes(content)
        return name

    return write


@pytest.fixture
def load_chats(load, folder, write):
    """Loads rows, of which the first is in the validation file too; returns all as documents in the rows' order."""

    def load_chats(rows, *, file: str | None = None, **chat):
        validation = write([{"messages": turns("validation", "text")}], "validation.jsonl")
        return load(
            "chats",
            file or write(rows),
            validation_files=[validation],
            tokenizer=str(folder),
            chat=ChatConfig(**chat),
        ).train

    return load_chats


@pytest.fixture
def refuses_chats(load_chats, folder):
    """Checks that rows are refused with a message, under another template if one is given."""

    def refuses_chats(message: str, rows, template: str | None = None, **chat) -> None:
        if template is not None:
            path = folder.with_name("other.jinja")
            path.write_text(template)
            chat["template"] = str(path)
        with pytest.raises(DataError, match=message):
            load_chats(rows, **chat)

    return refuses_chats


def turns(*contents: str):
    """A user and the assistant, by turns."""
    return [
        {"role": "user" if index % 2 == 0 else "assistant", "content": content}
        for index, content in enumerate(contents)
    ]


def random_rows(rng, count: int, most: int = 5):
    """Rows of conversations for the simple template, some of them with weights."""
    rows = []
    for _ in range(count):
        messages = random_chat(rng, most, calls=False)
        for message in messages:
            if message["role"] == "assistant" and rng.random() < 0.3:
                message["weight"] = float(rng.choice([-0.5, 0.0, 2.0]))
        rows.append({"messages": messages, **({"weight": 3.0} if rng.random() < 0.2 else {})})
    return rows


@functools.cache
def open_tokenizer(path: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(path)


def expected_of(row, file, loss: str):
    """The tokens of a row and their weights, by the library itself and the template's meaning."""
    encoder, text, parts = open_tokenizer(str(file)), "", []
    row_weight = row.get("weight", 1.0)
    assistants = [index for index, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    for index, message in enumerate(row["messages"]):
        text += f"<|{message['role']}|>"
        start = len(text)
        text += f"{message['content']}<|stop|>\n"
        if message["role"] == "assistant" and (loss != "last" or index == assistants[-1]):
            parts.append((start, len(text), message.get("weight", 1.0) * row_weight))
    encoding = encoder.encode(text, add_special_tokens=False)
    weights = [row_weight if loss == "all" else 0.0] * len(encoding.ids)
    for start, stop, weight in parts:
        for token, (first, end) in enumerate(encoding.offsets):
            if first < stop and end > start:
                weights[token] = weight
    return encoding.ids, weights


def read(documents, index: int):
    """All tokens of a chat, and the weights of all but the first."""
    tokens = documents.tokens(index).tolist()
    assert documents.stream(index, 0, len(tokens)).tolist() == tokens, "nothing is added to a chat"
    return tokens, documents.weights(index, 0, len(tokens) - 1).tolist()


@pytest.mark.parametrize("loss", ["assistant", "all", "last"])
def test_each_token_has_the_weight_of_its_turn(load_chats, folder, rng, loss):
    rows = random_rows(rng, 40)
    documents = load_chats(rows, loss=loss)
    for index, row in enumerate(rows):
        tokens, weights = expected_of(row, folder, loss)
        assert read(documents, index) == (tokens, weights[1:])
    part = sorted(rng.integers(0, len(tokens) - 1, 2).tolist())
    assert documents.weights(index, part[0], part[1] - part[0]).tolist() == weights[1:][slice(*part)]


def test_other_files_hold_the_same_chats(load_chats, folder, write, tmp_path, rng):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = random_rows(rng, 10)
    rows.append({"messages": turns(random_text(rng), random_text(rng))})
    expected = [read(load_chats(rows), index) for index in range(len(rows))]
    parquet.write_table(arrow.Table.from_pylist([{"weight": None, **row} for row in rows]), tmp_path / "chats.parquet")
    rows[-1] = dict(zip(("prompt", "completion"), (each["content"] for each in rows[-1]["messages"]), strict=True))
    for file in ("chats.parquet", write(rows, "chats.jsonl.gz")):
        documents = load_chats(rows, file=file)
        assert [read(documents, index) for index in range(len(rows))] == expected


@pytest.mark.parametrize("style", STYLES)
def test_a_users_text_never_becomes_a_special_token(style, load, write, tmp_path, rng):
    style = STYLES[style]
    file = make_folder(tmp_path / "styled", style, rng)
    own = find_chat_template(file, None)
    special = [name for name in (style.bos, style.eos, *style.special) if name]
    spelled = [name for name in special if name != "<|channel|>"]  # which harmony refuses itself
    plain, rows = [], []
    for _ in range(12):
        chat = random_chat(rng, calls=False)
        plain.append(chat)
        rows.append([{**message, "content": _spell(message["content"], spelled, rng)} for message in chat])
    loaded = load(
        "chats",
        write([{"messages": chat} for chat in rows]),
        validation_files=[write([{"messages": turns("a", "b")}], "validation.jsonl")],
        tokenizer=str(file),
    ).train
    encoder = open_tokenizer(str(file))
    for index, (chat, without) in enumerate(zip(rows, plain, strict=True)):
        tokens = loaded.tokens(index).tolist()
        for name in special:  # as many as in the chat that spells none
            assert tokens.count(encoder.token_to_id(name)) == own.render(without).count(name)
        # A special token may take the white space that follows it with it.
        assert "".join(encoder.decode(tokens, skip_special_tokens=False).split()) == "".join(own.render(chat).split())


def _spell(text: str, names, rng) -> str:
    """A text with special tokens in it, and at times a part of one at its end."""
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(len(text) + 1))
        text = text[:place] + str(rng.choice(names)) + text[place:]
    return text


@pytest.mark.parametrize("parts", [("<|st", "op|>"), ("<|", "stop|>"), ("<|stop|", ">"), (" <", "|", "stop", "|> ")])
def test_texts_side_by_side_make_no_special_token(load_chats, folder, parts, rng):
    template = folder.with_name("parts.jinja")
    template.write_text(
        "{% for message in messages %}<|{{ message.role }}|>{% for each in message.content %}{{ each.text|trim }}"
        "{% endfor %}<|stop|>{% endfor %}"
    )
    content = [{"type": "text", "text": part} for part in parts]
    before, after = random_text(rng), random_text(rng)
    texts = [{"role": "user", "content": [{"text": before}, *content, {"text": after}]}]
    answer = {"role": "assistant", "content": [{"text": "yes"}]}
    tokens, _ = read(load_chats([{"messages": [*texts, answer]}], loss="all", template=str(template)), 0)
    encoder = open_tokenizer(str(folder))
    assert tokens.count(encoder.token_to_id("<|stop|>")) == 2
    assert encoder.decode(tokens).count("<|stop|>") == 1, "the user's, as text"


@pytest.mark.parametrize(
    ("around", "content"),
    [("<|{}|>", "stop"), ("<|st{}", "op|> then"), ("{}op|>", "first <|st"), ("{}|>", "a <|stop\n")],
)
def test_a_text_makes_no_special_token_with_the_templates_own(load_chats, folder, around, content):
    template = folder.with_name("around.jinja")
    body = around.format("{{ message.content|trim }}")
    template.write_text("{% for message in messages %}<|user|>" + body + "<|stop|>{% endfor %}")
    tokens, _ = read(load_chats([{"messages": turns(content, "yes")}], loss="all", template=str(template)), 0)
    encoder = open_tokenizer(str(folder))
    assert tokens.count(encoder.token_to_id("<|stop|>")) == 2
    assert encoder.decode(tokens).count("<|stop|>") == 1, "the user's, as text"


def test_a_role_makes_its_own_mark_and_no_other_token(load_chats, folder):
    rows = [{"messages": [{"role": role, "content": "a"}, *turns("b", "c")]} for role in ("user", "x<|stop|>")]
    documents, encoder = load_chats(rows, loss="all"), open_tokenizer(str(folder))
    for index, num_marks in enumerate((2, 1)):
        tokens, _ = read(documents, index)
        counts = [tokens.count(encoder.token_to_id(name)) for name in ("<|stop|>", "<|user|>")]
        assert counts == [3, num_marks]


def test_what_hides_a_users_special_token_is_refused(refuses_chats, rng):
    rows = [{"messages": turns(f"a<|stop|>{random_text(rng)}", "b")}]
    for change in ("message.content.split('<|stop|>')[0]", "message.content|replace('<|stop|>', '')"):
        template = SIMPLE.template.replace("message.content", change)
        refuses_chats(
            r"chats.jsonl:1: a message spells a special token, and .*other.jinja makes another", rows, template
        )
    rows = [{"messages": turns("a\U00100001", "b")}]
    refuses_chats(r"chats.jsonl:1: the chat can't be tokenized: it holds the private character U\+100001", rows)


def test_generation_tags_in_a_macro_and_around_a_part_are_followed(load_chats, folder, rng):
    template = folder.with_name("tags.jinja")
    template.write_text(
        "{% macro turn(message) %}{% if message.role == 'assistant' %}<|assistant|>{% generation %}"
        "{{ message.content }}{% endgeneration %}<|stop|>{% else %}<|user|>{{ message.content }}<|stop|>{% endif %}"
        "{% endmacro %}{% for message in messages %}{{ turn(message) }}{% endfor %}"
    )
    # A mark may take white space behind it with it. The tokens of one character all count.
    answer = random_text(rng).lstrip() + "🙂"
    documents = load_chats([{"messages": turns("a", answer)}], template=str(template))
    tokens, weights = read(documents, 0)
    counted = [token for token, weight in zip(tokens[1:], weights, strict=True) if weight]
    assert open_tokenizer(str(folder)).decode(counted, skip_special_tokens=False) == answer


@pytest.mark.parametrize("too_long", ["cut", "drop"])
@pytest.mark.parametrize("loss", ["assistant", "last"])
def test_a_chat_that_is_too_long_ends_with_a_turn_that_fits_or_is_dropped(load_chats, folder, rng, too_long, loss):
    short, long = "reads a long", "reads a long context " * 200
    rows = [{"messages": turns(short, short, short, long)}, {"messages": turns(long, short)}]  # cut, and dropped
    rows += random_rows(rng, 38, most=8)
    whole = [expected_of(row, folder, loss) for row in rows]
    length = int(np.percentile([len(tokens) for tokens, _ in whole], 15))
    documents = load_chats(rows, loss=loss, too_long=too_long)
    fitting = documents.within(length)
    counts = {"num_chats": 40, "num_chats_cut": 0, "num_chats_dropped": 0, "num_tokens_left_out": 0}
    packed = PackedSequences(documents, length)
    for index, (row, (tokens, _)) in enumerate(zip(rows, whole, strict=True)):
        kept = len(tokens)
        if len(tokens) - 1 > length:
            fewer = [{**row, "messages": row["messages"][:stop]} for stop in range(1, len(row["messages"]))]
            last = max((i for i, each in enumerate(row["messages"]) if each["role"] == "assistant"))
            ends = [
                len(expected_of(part, folder, "all")[0])
                for part in fewer
                if part["messages"][-1]["role"] == "assistant"
                and part["messages"][-1].get("weight", 1.0)
                and (loss != "last" or len(part["messages"]) == last + 1)
            ]
            kept = max((end for end in ends if end <= length + 1), default=0) if too_long == "cut" else 0
            counts["num_chats_cut" if kept else "num_chats_dropped"] += 1
            counts["num_tokens_left_out"] += len(tokens) - max(kept, 1)
        assert fitting.tokens(index).tolist() == tokens[:kept]
    assert documents.cuts(length) == counts
    assert counts["num_chats_dropped"] > 0
    assert counts["num_chats_cut"] > 0 or (too_long, loss) != ("cut", "assistant")
    assert documents.within(10**6) is documents

    total = sum(int(packed[index]["weights"].astype(bool).sum()) for index in range(len(packed)))
    lengths = [len(fitting.tokens(index)) for index in range(40)]
    assert total == sum(sum(map(bool, weights[1:kept])) for (_, weights), kept in zip(whole, lengths, strict=True))
    pieces = packed.pieces
    assert (pieces.start == 0).all(), "no chat is cut to be packed"


def test_what_is_too_long_is_refused_by_choice_and_where_nothing_fits(load_chats, rng):
    rows = [{"messages": turns("a", "b")}, {"messages": turns("a", f"{random_text(rng)} reads a long context " * 9)}]
    message = r"chats.jsonl:2: the chat has \d+ tokens, more than sequence_length=20 holds \(1 such chats\)"
    with pytest.raises(DataError, match=message):
        load_chats(rows, too_long="refuse").within(20)
    with pytest.raises(DataError, match=r"no turn of any chat ends within sequence_length=2; raise it"):
        check_lengths(load_chats(rows), 2)


def test_refusals_name_the_row_and_the_remedy(refuses_chats, rng):
    good = {"messages": turns("a", "b")}
    for row, message in (
        ({"text": "a"}, "expected a field 'messages', or 'prompt' and 'completion'; it has text"),
        ({"messages": []}, "field 'messages' is empty, expected an array of turns"),
        ({"messages": "a"}, "field 'messages' is text, expected an array"),
        ({"prompt": ["a"], "completion": "b"}, "field 'prompt' is an array, expected text; give turns as 'messages'"),
        ({"messages": ["a"]}, r"messages\[0\] is text, expected an object"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\]: field 'role' is null, expected text"),
        ({"messages": turns("a")}, "no turn of the assistant, which the loss would be of; drop the chat"),
        ({**good, "weight": "1"}, "field 'weight' is text, expected a number"),
        ({**good, "weight": True}, "field 'weight' is a boolean, expected a number"),
        ({**good, "weight": 1e39}, "weight=1e\\+39 is not a finite number in float32"),
        ({**good, "tools": {}}, "field 'tools' is an object, expected an array"),
        ({"messages": [{"role": "user", "content": "a", "weight": 1}]}, "the assistant's turns have weights"),
        ({"messages": turns("a\ud800", "b")}, "the chat can't be tokenized: .*surrogates not allowed"),
        ({"messages": [{"role": "user", "content": None, "n": 1}, *turns("a", "b")]}, None),
    ):
        if message is not None:
            refuses_chats(rf"chats.jsonl:2: .*{message}|chats.jsonl:2: {message}", [good, row])
    refuses_chats("every token in 1 file has weight 0; give one a weight", [{**good, "weight": 0}])


def test_refusals_of_templates(refuses_chats, load, load_chats, folder, write, monkeypatch):
    rows = [{"messages": turns("a", "b")}, {"messages": [{"role": "bard", "content": "a"}, *turns("c", "d")]}]
    refusing = (
        "{% if message.role == 'bard' %}{{ raise_exception('bards are not heard: ' + message.content) }}{% endif %}"
    )
    template = SIMPLE.template.replace("<|{{", refusing + "<|{{")
    refuses_chats(r"chats.jsonl:2: the chat template refuses this chat: bards are not heard: a$", rows, template)
    refuses_chats(r"refuses this chat: UndefinedError: 'x' is undefined", rows, "{{ x.y }}")
    refuses_chats(r"refuses this chat: SecurityError: ", rows, "{{ ''.__class__.__mro__ }}")
    refuses_chats(r"other.jinja: not a chat template: line 2: ", rows, "\n{% for %}")
    other_end = SIMPLE.template.replace("<|stop|>", "{{ '<|stop|>' if loop.last or message.role == 'user' else '' }}")
    twice = [{"messages": turns("a", "b", "c", "d")}]
    remedy = "set data.chat.template .*, or data.chat.loss to last"
    refuses_chats(rf"chats.jsonl:1: messages\[1\]: the text up to this turn .* {remedy}", twice, other_end)
    load_chats(twice, template=str(folder.with_name("other.jinja")), loss="last")
    tags = SIMPLE.template.replace("{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}")
    refuses_chats(r"4 parts between generation tags for 2 turns of the assistant", twice, tags, loss="last")
    with pytest.raises(DataError, match=r"data.chat.template='missing.jinja' is no file; give the path"):
        load_chats(rows, template="missing.jinja")
    with pytest.raises(
        DataError, match=r"chats need the special tokens of a tokenizer.json, and data.tokenizer is 'byte'"
    ):
        load("chats", write(rows))
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "jinja2", None)
        refuses_chats(r"chat templates need jinja2, which is not installed; run `pip install", rows)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        folder.with_name(name).unlink(missing_ok=True)
    refuses_chats(
        r"folder has no chat template: neither chat_template.jinja, nor chat_template in tokenizer_conf", rows
    )


def test_another_template_or_choice_makes_other_tokens(load_chats, load, folder, rng):
    rows = random_rows(rng, 5)
    first = read(load_chats(rows), 0)
    load_chats(rows)
    assert not any("tokenizing" in line for line in load.said), "they are in the cache"
    assert read(load_chats(rows, loss="all"), 0) != first
    load_chats(rows, too_long="drop")
    assert any("tokenizing" in line for line in load.said)
    own = folder.with_name("chat_template.jinja")
    own.write_text(SIMPLE.template.replace("message.content", "message.content + '!'"))
    assert read(load_chats(rows), 0) != first


def test_a_mixture_of_chats_and_text_cuts_no_chat(load, folder, write, write_jsonl, tmp_path, rng):
    length = 128
    write_jsonl(tmp_path / "texts.jsonl", [random_text(rng, 60) for _ in range(30)])
    sources = (
        SourceConfig("chats", (str(tmp_path / write(random_rows(rng, 120, 2))),), "chats", weight=2.0),
        SourceConfig("more", (str(tmp_path / write(random_rows(rng, 60, 6), "more.jsonl")),), "chats"),
        SourceConfig("text", (str(tmp_path / "texts.jsonl"),), "jsonl"),
    )
    corpus = load("stdlib", sources=sources, tokenizer=str(folder))
    iterator = make_train_iterator(
        corpus,
        sources=sources,
        sequence_length=length,
        batch_size=4,
        seed=int(rng.integers(99)),
        num_prefetch_batches=1,
    )
    chats = {}
    for source in ("chats", "more"):
        documents = corpus.sources[source].train.within(length)
        for index in range(len(documents)):
            if len(documents.tokens(index)) > 1:
                tokens, weights = read(documents, index)
                chats[(*tokens,)] = weights
    begin = corpus.tokenizer.delimiters.begin
    num_chats = 0
    for _, batch in zip(range(12), iterator, strict=False):
        for row in range(4):
            arrays = {name: array[row] for name, array in batch.arrays.items()}
            for segment in range(1, arrays["segment_ids"].max() + 1):
                own = arrays["segment_ids"] == segment
                tokens = (arrays["tokens"][own][0], *arrays["targets"][own])
                if tokens in chats:
                    num_chats += 1
                    assert arrays["weights"][own].tolist() == chats[tokens]
                else:
                    assert (arrays["weights"][own] == 1).all(), "a text, or a part of one"
    iterator.close()
    assert num_chats > 20
    places = iterator.mixture()
    assert 0.4 < places["chats"]["share"] < 0.6
    assert set(corpus.validation.are_chats) == {False, True}
    plain = corpus.sources["text"].train
    assert plain.stream(0, 0, 1).tolist() == [begin]
    validation = ValidationSet.choose(corpus, sequence_length=length, num_sequences=4, sources=sources)
    assert validation.count_bytes(corpus.tokenizer) is None


def test_an_epoch_goes_on_at_other_lengths_with_whole_chats(load_chats, load, folder, write, rng):
    rows = random_rows(rng, 60, 6)
    corpus = load("chats", write(rows), tokenizer=str(folder), validation_fraction=0.2)
    state = None
    for length in (128, 512, 64):
        options = {"sequence_length": length, "batch_size": 2, "seed": 3, "num_prefetch_batches": 1}
        iterator, again = (make_train_iterator(corpus, **options) for _ in range(2))
        if state is not None:
            iterator.set_state(state)
        begins = {(*corpus.train.tokens(index, 2),) for index in range(len(corpus.train))}
        next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        batch = next(iterator).arrays
        again.set_state(state)
        for name, array in next(again).arrays.items():
            np.testing.assert_array_equal(array, batch[name])
        first = (batch["positions"] == 0) & (batch["segment_ids"] > 0)
        assert {*zip(batch["tokens"][first], batch["targets"][first], strict=True)} <= begins
        for each in (iterator, again):
            each.close()
