"""Trees: each target once, after the tokens of its branch, with its weight; what is split, saved and refused."""

import dataclasses
import gzip
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ScheduledWindow
from layers import GPTConfig
from trainer.config import DataConfig, SourceConfig, TrainConfig
from trainer.data import ByteTokenizer, DataError
from trainer.data.batches import make_train_iterator
from trainer.data.documents import Delimiters
from trainer.data.token_cache import TokenCache
from trainer.data.tree_packing import PackedTrees, pack
from trainer.data.tree_tokenization import tokenize_trees
from trainer.data.validation_set import ValidationSet
from trainer.step.flops import FlopCounter

END = 256
DELIMITERS = Delimiters(END, END)
MODEL = GPTConfig(vocab_size=8, num_layers=1, width=8, num_heads=1, num_kv_heads=1, head_dim=8, mlp_width=8)

texts = st.text("ab", min_size=0, max_size=4)
weights = st.sampled_from([None, 0.0, 1.0, -0.5, 2.0])
completions = st.recursive(
    st.fixed_dictionaries({"text": texts, "weight": weights}),
    lambda inner: st.fixed_dictionaries(
        {"text": texts, "weight": weights, "completions": st.lists(inner, min_size=1, max_size=3)}
    ),
    max_leaves=8,
)
trees = st.fixed_dictionaries(
    {"prompt": texts, "weight": weights, "completions": st.lists(completions, min_size=1, max_size=4)}
)


def without_nones(tree):
    """A tree as a file has it: no weight is the default one."""
    tree = {name: value for name, value in tree.items() if value is not None}
    if "completions" in tree:
        tree["completions"] = [without_nones(each) for each in tree["completions"]]
    return tree


def targets_of(tree, begin, end):
    """Of each target of a tree: all tokens up to it, and its weight. And the branches."""
    found, branches = [], []

    def walk(node, text, before, default):
        tokens = [*text.encode()]
        children = node.get("completions", [])
        if not children and end is not None:
            tokens.append(end)
        for token in tokens:
            before = (*before, token)
            found.append((before, node.get("weight", default)))
        for child in children:
            walk(child, child["text"], before, 1.0)
        if not children:
            branches.append(before)

    walk(tree, tree["prompt"], () if begin is None else (begin,), 0.0)
    if begin is None:
        found = [(before, weight) for before, weight in found if len(before) > 1]
    return found, branches


def read_back(row):
    """Of each target of a sequence: all tokens up to it, as attention sees them, and its weight."""
    found = []
    index = np.arange(len(row["tokens"]))
    for query in np.flatnonzero(row["segment_ids"]):
        is_seen = (index <= query) & (query < row["q_end"]) & (row["segment_ids"] == row["segment_ids"][query])
        np.testing.assert_array_equal(row["positions"][is_seen], np.arange(is_seen.sum()))
        found.append(((*row["tokens"][is_seen].tolist(), int(row["targets"][query])), float(row["weights"][query])))
    return found


def load_trees(folder, lines, delimiters=DELIMITERS):
    path = folder / "trees.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cache = TokenCache(folder / "cache")
    return tokenize_trees([path], ByteTokenizer(delimiters), cache, lambda line: None).documents


def counted(targets):
    return Counter(target for target in targets if target[1])


@settings(max_examples=150, deadline=None)
@given(
    lines=st.lists(trees, min_size=1, max_size=6).map(lambda lines: [without_nones(line) for line in lines]),
    room=st.integers(0, 30),
    has_begin=st.booleans(),
    has_end=st.booleans(),
)
def test_every_target_comes_once_after_its_branch(tmp_path_factory, lines, room, has_begin, has_end):
    begin, end = END if has_begin else None, END if has_end else None
    if not has_begin:
        lines = [line | {"prompt": "p" + line["prompt"]} for line in lines]
    lines.append({"prompt": "some", "completions": [{"text": "thing"}]})
    expected, branches = zip(*(targets_of(line, begin, end) for line in lines), strict=True)
    lengths = [len(branch) - 1 for each in branches for branch in each]
    documents = load_trees(tmp_path_factory.mktemp("trees"), lines, Delimiters(begin, end))
    packed = pack(documents, max(lengths) + room)
    rows = [packed[i] for i in range(len(packed))]
    found = [target for row in rows for target in read_back(row)]
    assert counted(found) == counted(target for each in expected for target in each)
    # What isn't counted is there, too: the branches to their ends, and the context that a split repeats.
    if end is not None:
        assert Counter(each for each, _ in found if each[-1] == end and len(each) > 1) == Counter(
            branch for each in branches for branch in each
        )
    num_tokens = sum(int((row["segment_ids"] > 0).sum()) for row in rows)
    assert num_tokens == len(found) == int(packed.pieces.length.sum())
    sharing = packed.sharing()
    assert sharing["num_tokens"] == num_tokens
    assert sharing["num_tokens_repeated"] == num_tokens - sum(map(len, expected))
    if has_end:  # a completion without a token is no branch otherwise
        assert sharing["num_branches"] == len(lengths)
        assert sharing["num_tokens_saved"] == sum(lengths) - num_tokens
    pieces = Counter(packed.pieces.document.tolist()).values()
    num_parts = [number for number in pieces if number > 1]
    assert (sharing["num_trees_split"], sharing["num_parts_of_split"]) == (len(num_parts), sum(num_parts))
    for index, row in enumerate(rows):
        is_padding = row["segment_ids"] == 0
        assert all(not array[is_padding].any() for array in row.values())
        # The attended pairs of the batch follow from the signed lengths.
        signed = packed.document_lengths(index)
        pairs = (np.sign(signed) * np.abs(signed) * (np.abs(signed) + 1) // 2).sum()
        assert (signed.sum(), pairs) == ((~is_padding).sum(), (row["positions"] + 1)[~is_padding].sum())
        assert {name: (array.shape, array.dtype) for name, array in row.items()} == {
            name: (array.shape, array.dtype) for name, array in packed.empty_sequence().items()
        }
    # The first branch of each tree, for who reads documents.
    if has_end:
        plain = documents.as_texts()
        firsts = [tuple(plain.stream(i, 0, int(plain.num_targets[i]) + 1).tolist()) for i in range(len(lines))]
        assert firsts == [each[0] for each in branches]


def test_a_tree_is_split_at_its_top(tmp_path):
    """Two completions share a part, and the one that is too long for a part goes into two."""
    deep = {"text": "de", "completions": [{"text": "fghi", "weight": 3}, {"text": "jk"}]}
    line = {"prompt": "pp", "weight": 5, "completions": [{"text": "aaa"}, {"text": "bbb"}, {"text": "cc"}, deep]}
    packed = pack(load_trees(tmp_path, [line], Delimiters(None, None)), 7)
    parts = [packed[i] for i in range(len(packed))]
    texts = sorted(bytes(part["targets"][part["segment_ids"] > 0].tolist()).decode() for part in parts)
    assert texts == ["paaabbb", "pcc", "pdefghi", "pdejk"]
    of_prompt = [part["weights"][0] for part in parts]
    assert sorted(of_prompt) == [0, 0, 0, 5]
    assert packed.sharing() == {
        "num_trees": 1,
        "num_branches": 5,
        "num_tokens": 22,
        "num_tokens_saved": 4 + 4 + 3 + 7 + 5 - 22,
        "num_trees_split": 1,
        "num_parts_of_split": 4,
        "num_tokens_repeated": 5,
    }


def test_a_branch_longer_than_a_sequence_is_refused_with_its_line(tmp_path):
    lines = [{"prompt": "p", "completions": [{"text": "a" * n}]} for n in (3, 9, 7)]
    documents = load_trees(tmp_path, lines)
    with pytest.raises(DataError, match=r"trees.jsonl:2: a branch has 11 tokens, more than sequence_length=8 \(2 such"):
        pack(documents, 8)
    assert isinstance(pack(documents, 11), PackedTrees)


COMPLETIONS = [{"text": "a"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"completions": COMPLETIONS}, "trees.jsonl:2: no field 'prompt' before the completions; it has completions"),
        ({"text": "a"}, "trees.jsonl:2: no field 'prompt' before the completions; it has text"),
        ({"prompt": 3, "completions": COMPLETIONS}, "trees.jsonl:2: field 'prompt' is a number, expected text"),
        ({"prompt": "p"}, "trees.jsonl:2: no completions of its prompt; give one"),
        ({"prompt": "p", "completions": []}, "trees.jsonl:2: no completions of its prompt"),
        ({"prompt": "p", "completions": {"text": "a"}}, "2: field 'completions' is an object, expected an array"),
        ({"prompt": "p", "completions": ["a"]}, r"2: completions\[0\] is text, expected an object"),
        ({"prompt": "p", "completions": [{"weight": 1}]}, r"2: completions\[0\]: no field 'text'; it has weight"),
        (
            {"prompt": "p", "completions": [{"text": "a", "completions": [{"text": "b"}, {"text": None}]}]},
            r"2: completions\[0\].completions\[1\]: field 'text' is null, expected text",
        ),
        ({"prompt": "p", "completions": [{"text": "a", "weight": "1"}]}, r"completions\[0\]: field 'weight' is text"),
        (
            {"prompt": "p", "completions": [{"text": "a", "weight": True}]},
            "field 'weight' is a boolean, expected",
        ),
        ({"prompt": "p", "completions": [{"text": "a", "weight": float("nan")}]}, "weight=nan is not a finite number"),
        ({"prompt": "p", "completions": [{"text": "a", "weight": -1e39}]}, "weight=-1e[+]39 is not a finite number"),
        ({"prompt": "p", "weight": float("inf"), "completions": COMPLETIONS}, "trees.jsonl:2: weight=inf is not a fin"),
    ],
)
def test_refuses_a_line(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        load_trees(tmp_path, [{"prompt": "p", "completions": COMPLETIONS}, line])


def test_refuses_trees_that_teach_nothing(tmp_path):
    with pytest.raises(DataError, match="every token in 1 file has weight 0; give one a weight"):
        load_trees(tmp_path, [{"prompt": "p", "completions": [{"text": "a", "weight": 0}]}])
    with pytest.raises(DataError, match=r"trees.jsonl:1: its prompt has no token, and no token begins documents"):
        load_trees(tmp_path, [{"prompt": "", "completions": COMPLETIONS}], Delimiters(None, END))
    (tmp_path / "trees.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match=r"trees.jsonl holds no trees"):
        tokenize_trees([tmp_path / "trees.jsonl"], ByteTokenizer(), TokenCache(tmp_path / "c"), lambda line: None)


def test_a_tree_deeper_than_python_recurses(tmp_path):
    tree = {"text": "z"}
    for _ in range(400):
        tree = {"text": "a", "completions": [tree]}
    packed = pack(load_trees(tmp_path, [{"prompt": "p", "completions": [tree]}]), 512)
    assert bytes(packed[0]["targets"][:402].tolist()) == b"p" + b"a" * 400 + b"z"


def test_a_config_refuses_what_trees_cannot_have():
    data = {"source": "trees", "files": ("trees.jsonl",)}
    with pytest.raises(ValueError, match=r"restart at each branch, which data.keep_documents_apart=False leaves out"):
        DataConfig(**data, keep_documents_apart=False)
    with pytest.raises(ValueError, match=r"'a': format='trees' isn't drawn in a mixture.*set data.source to trees"):
        SourceConfig("a", ("trees.jsonl",), "trees")
    window = dataclasses.replace(MODEL, masks=(ScheduledWindow(4, 8, 10),))
    with pytest.raises(ValueError, match=r"ScheduledWindow.*counts tokens of the sequence.*use LocalMask\(7, 0\)"):
        TrainConfig("trees", window, 1000, data=DataConfig(**data))


@pytest.fixture
def write(tmp_path, rng):
    lengths = rng.integers(1, 20, (40, 4)).tolist()

    def write(name="trees.jsonl.gz", weight=-0.5):
        lines = [
            {
                "prompt": f"{number} " + "x" * of_prompt,
                "completions": [{"text": "y" * length, "weight": weight} for length in of_completions],
            }
            for number, (of_prompt, *of_completions) in enumerate(lengths)
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)

    return write


def test_a_stream_goes_on_where_it_was(write, load):
    write()
    corpus = load("trees", "trees.jsonl.gz", vocab_size=257)
    options = {"sequence_length": 64, "batch_size": 3, "seed": 1, "num_prefetch_batches": 2}
    one, other = (make_train_iterator(corpus, **options) for _ in range(2))
    for _ in range(3):
        next(one)
    state = json.loads(json.dumps(one.get_state()))
    assert other.set_state(state) == []
    for _ in range(9):
        ours, theirs = next(other).arrays, next(one).arrays
        for name in theirs:
            np.testing.assert_array_equal(ours[name], theirs[name])
    assert one.sharing()["num_tokens_saved"] > 0
    one.close()
    other.close()


def test_trees_that_are_left_of_an_epoch_come_once_at_another_length(write, load):
    write()
    corpus = load("trees", "trees.jsonl.gz", vocab_size=257)
    options = {"batch_size": 1, "seed": 3, "num_prefetch_batches": 1}
    begun, longer = (make_train_iterator(corpus, sequence_length=length, **options) for length in (100, 150))

    def read(iterator, count=None):
        found, epoch = [], iterator.get_state()["epoch"]
        while iterator.get_state()["epoch"] == epoch if count is None else len(found) < count:
            found.append(next(iterator).arrays)
        # Each tree begins with its number, and then a space.
        trees = [
            bytes(arrays["targets"][0][arrays["segment_ids"][0] == segment][:3].tolist()).split(b" ")[0]
            for arrays in found
            for segment in range(1, arrays["segment_ids"].max() + 1)
        ]
        return [int(tree) for tree in trees]

    before = read(begun, 5)
    [line] = longer.set_state(json.loads(json.dumps(begun.get_state())))
    rest = read(longer)
    assert before
    assert sorted(before + rest) == sorted(read(longer)), "no tree was split"
    assert f"epoch 1 goes on with {len(rest)} of its {len(corpus.train)} documents" in line
    begun.close()
    longer.close()


def test_another_weight_is_other_data(write, load):
    fingerprints = []
    for name, weight in (("one", 1.0), ("same", 1.0), ("other", -1.0)):
        write(f"{name}.jsonl", weight)
        fingerprints.append(load("trees", f"{name}.jsonl").fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_validation_is_padded_with_sequences_of_the_same_arrays(write, load):
    write()
    corpus = load("trees", "trees.jsonl.gz", validation_fraction=0.3)
    validation = ValidationSet.choose(corpus, sequence_length=64, num_sequences=3)
    batches = validation.batches(2)
    assert [sorted(batch.arrays) for batch in batches] == [sorted(validation.sequences.empty_sequence())] * 2
    assert not batches[-1].arrays["segment_ids"][-1].any()
    assert validation.count_bytes(corpus.tokenizer) is None


def test_trees_of_one_prompt_stay_together(tmp_path, load):
    lines = [{"prompt": f"prompt {i % 5}", "completions": [{"text": str(i)}]} for i in range(60)]
    (tmp_path / "trees.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = load("trees", "trees.jsonl", validation_fraction=0.4)
    prompts = [
        {bytes(part.tokens(i, 9)[1:].tolist()) for i in range(len(part))} for part in (corpus.train, corpus.validation)
    ]
    assert not prompts[0] & prompts[1]
    assert len(prompts[0] | prompts[1]) == 5


def test_a_single_tree_or_prompt_is_refused(tmp_path, load, refuses):
    line = json.dumps({"prompt": "p", "completions": [{"text": "a"}]}) + "\n"
    (tmp_path / "trees.jsonl").write_text(line)
    refuses(r"trees.jsonl:1: the only tree can't be both trained on and validated", "trees", "trees.jsonl")
    (tmp_path / "trees.jsonl").write_text(line * 3)
    refuses("all 3 trees have the same prompt", "trees", "trees.jsonl")


def test_flops_of_a_tree_are_those_of_its_tokens():
    counter = FlopCounter(MODEL, 16)
    # A prompt of 5 with completions of 3 and 2: tokens 5 + 3 + 2, pairs 15 + (6 + 7 + 8) + (6 + 7).
    tree = counter.of_documents([np.array([5, 8, -5, 7, -5])]).causal
    pair = counter.of_documents([np.array([2])]).causal - 2 * counter.of_documents([np.array([1])]).causal
    token = counter.of_documents([np.array([1])]).causal - pair
    assert tree == 10 * token + (15 + 21 + 13) * pair
