# ruff: noqa: RUF001 (signs that look alike are what is tested)
"""The engine's tokenizer gives what transformers gives for the same folder, whatever the text; damage is refused."""

import json
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    DistilBertTokenizer,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
    XLMRobertaTokenizer,
)

import budgetformer.hf  # noqa: F401 (AutoTokenizer asks for the class of a config)
from budgetformer.convert import convert_checkpoint
from budgetformer.engine import tokenizer as engine
from budgetformer.engine.tokenizer import FolderTokenizer
from budgetformer.errors import ModelFolderError, UsageError
from budgetformer.tokens import longest_input, tokenise
from core_helpers import WORDS, save_tokenizer
from tiny import make_folder
from tiny import tokenizer as tiny_tokenizer

SENTENCES = [
    "Where is my card? I lost the card at the bank, and the money never came.",
    "Ünïcode, emoji 🙂 and a long-ish-hyphenated word; 12,345.67 €.",
    "混ぜた text with 漢字 and עברית, مرحبا بالعالم.",
    "the blue transfer is THE BLUE TRANSFER, why",
]
TEXTS = [
    *SENTENCES,
    "",
    " ",
    "\t\n\r\x0b\u2028 \u00a0",
    "\x00\x01\x7f\ufffd\ufeff",
    "🙂🙃👩‍👩‍👧‍👦🏳️‍🌈",
    "שלום עולם مرحبا بالعالم \u202eabc\u202c",
    "e\u0301e\u0301 A\u030a n\u0303 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘",
    "[CLS] the card [SEP] is [MASK] [PAD] [UNK] </s> <s> <mask> <pad> <unk>",
    "[CLS][SEP]x[CLS]",
    "##card ##s",
    "a" * 101 + " " + "b" * 100,
    "ﬁ ½ Ⅷ ＡＢＣ ß ẞ İ ı ǅ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010fffd",
    "card  lost,money.bank!is(my)the@blue#never$came%why",
    "<num> one <num>, <Num>",
]
LONG = "the card is lost in 漢字 Zürich 🙂 " * 3300  # over 100 KB


def save(words, folder: Path, **config_changes) -> Path:
    """A folder as `save_pretrained` leaves it, with options of `tokenizer_config.json` changed by hand afterwards."""
    words.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "budgetformer"}')
    change(folder, **config_changes)
    return folder


def change(folder: Path, **changes) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "remove"}))


def wordpieces() -> dict[str, int]:
    letters = sorted({letter for text in SENTENCES for letter in text.lower() if not letter.isspace()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *WORDS, *letters, *(f"##{letter}" for letter in letters), "Where", "THE", "B", "##L", "ü", "u"]
    return {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}


def byte_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    model = json.loads(core.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def unigrams() -> list[tuple[str, float]]:
    letters = sorted({letter for text in SENTENCES for letter in text if not letter.isspace()})
    pieces = [*(f"▁{word}" for word in WORDS), "▁", *letters]
    special = [(word, 0.0) for word in ("<s>", "<pad>", "</s>", "<unk>")]
    return [*special, *((piece, -2.0 - 0.1 * i) for i, piece in enumerate(pieces)), ("<mask>", 0.0)]


def with_token_of_its_own(words):
    words.add_tokens([AddedToken("<num>", single_word=False, lstrip=True, normalized=False)])
    return words


def characters() -> bytes:
    """A sentencepiece table of characters that turns "a" into "z": a double array, then the texts it points at."""
    units = [0] * 1024
    root, inner = 256, 512
    node = root ^ ord("a")
    units[0], units[node], units[node ^ inner] = root << 10, ord("a") | 1 << 8 | inner << 10, 1 << 31
    return struct.pack("<1025I", 4 * len(units), *units) + b"z\0"


def with_normalizer(folder: Path, normalizer) -> Path:
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.normalizer = normalizer
    core.save(str(folder / "tokenizer.json"))
    return folder


def word_level(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "budgetformer"}')
    return tmp_path


# fmt: off
FOLDERS = {
    "tiny": lambda path: save(tiny_tokenizer(), path),
    "words": word_level,
    "bert": lambda path: save(BertTokenizer(vocab=wordpieces()), path),
    "bert, old name of its class": lambda path: save(BertTokenizer(vocab=wordpieces()), path, tokenizer_class="BertTokenizerFast"),  # noqa: E501
    "bert, cased": lambda path: save(BertTokenizer(vocab=wordpieces(), do_lower_case=False), path),
    "bert, cased by hand": lambda path: save(BertTokenizer(vocab=wordpieces()), path, do_lower_case=False),
    "bert, accents by hand": lambda path: save(BertTokenizer(vocab=wordpieces()), path, strip_accents=False),
    "bert, signs by hand": lambda path: save(BertTokenizer(vocab=wordpieces()), path, tokenize_chinese_chars=False),
    "bert, defaults": lambda path: save(BertTokenizer(vocab=wordpieces(), do_lower_case=False), path, do_lower_case="remove"),  # noqa: E501
    "bert, other frame": lambda path: save(BertTokenizer(vocab=wordpieces()), path, cls_token="bank", sep_token="blue"),
    "bert, other unknown": lambda path: save(BertTokenizer(vocab=wordpieces()), path, unk_token="why"),
    "bert, split specials": lambda path: save(BertTokenizer(vocab=wordpieces()), path, split_special_tokens=True),
    "bert, token of its own": lambda path: save(with_token_of_its_own(BertTokenizer(vocab=wordpieces())), path),
    "bert, tokens by hand": lambda path: save(BertTokenizer(vocab=wordpieces()), path, extra_special_tokens=["<num>", "never"], new_token="came"),  # noqa: E501
    "bert, old table of tokens": lambda path: save(BertTokenizer(vocab=wordpieces()), path, added_tokens_decoder={
        "500": {"content": "<num>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False, "special": False}}),  # noqa: E501
    "bert, as of no class": lambda path: save(BertTokenizer(vocab=wordpieces()), path, tokenizer_class="remove"),
    "bert, as of a class unheard of": lambda path: save(BertTokenizer(vocab=wordpieces()), path, tokenizer_class="NewTokenizer"),  # noqa: E501
    "bert, cut on the left": lambda path: save(BertTokenizer(vocab=wordpieces(), truncation_side="left"), path),
    "distilbert": lambda path: save(DistilBertTokenizer(vocab=wordpieces()), path),
    "roberta": lambda path: save(RobertaTokenizer(*byte_pairs()), path),
    "roberta, prefix": lambda path: save(RobertaTokenizer(*byte_pairs(), add_prefix_space=True), path),
    "roberta, prefix by hand": lambda path: save(RobertaTokenizer(*byte_pairs()), path, add_prefix_space=True),
    "roberta, token of its own": lambda path: save(with_token_of_its_own(RobertaTokenizer(*byte_pairs())), path),
    "xlm-roberta": lambda path: save(XLMRobertaTokenizer(vocab=unigrams()), path),
    "xlm-roberta, prefix by hand": lambda path: save(XLMRobertaTokenizer(vocab=unigrams()), path, add_prefix_space=False),  # noqa: E501
    "xlm-roberta, table": lambda path: with_normalizer(FOLDERS["xlm-roberta"](path), normalizers.Precompiled(characters())),  # noqa: E501
    "xlm-roberta, table and more": lambda path: with_normalizer(FOLDERS["xlm-roberta"](path), normalizers.Sequence([
        normalizers.Lowercase(), normalizers.Precompiled(characters())])),
    "xlm-roberta, no table": lambda path: with_normalizer(FOLDERS["xlm-roberta"](path), normalizers.Lowercase()),
    "no frame": lambda path: save(PreTrainedTokenizerFast(tokenizer_object=bare(), unk_token="[UNK]"), path, model_input_names=["input_ids", "token_type_ids"]),  # noqa: E501
}
# fmt: on


def bare() -> Tokenizer:
    core = Tokenizer(models.WordLevel({"[UNK]": 0, "card": 1, "bank": 2}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return core


def both(folder: Path):
    ours = FolderTokenizer.load(folder)
    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    return ours, theirs


def assert_equal(ours, theirs, texts, pairs=None, lengths=(512,)):
    for length in lengths:
        found = tokenise(ours, texts, pairs, max_length=length)
        wanted = tokenise(theirs, texts, pairs, max_length=length)
        for text, a, b in zip(texts, found, wanted, strict=True):
            assert (a.ids, a.types, a.truncated) == (b.ids, b.types, b.truncated), (length, text[:60])


@pytest.fixture(scope="module")
def demo(minilm, tmp_path_factory) -> Path:
    """The real MiniLM as a folder of ours."""
    folder = tmp_path_factory.mktemp("demo")
    convert_checkpoint(minilm, folder)
    return folder


# ---------------------------------------------------------------- equal to transformers


@pytest.mark.parametrize("name", FOLDERS)
def test_equals_transformers(name, tmp_path):
    ours, theirs = both(FOLDERS[name](tmp_path))
    assert_equal(ours, theirs, TEXTS, lengths=(512, 7))
    assert_equal(ours, theirs, TEXTS, TEXTS[::-1], lengths=(512, 11))
    for pair in (False, True):
        assert ours.num_special_tokens_to_add(pair=pair) == theirs.num_special_tokens_to_add(pair=pair)
    for field in ("model_input_names", "truncation_side", "model_max_length", "pad_token_id"):
        assert getattr(ours, field) == getattr(theirs, field), field


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("bert", "bert, cased by hand"),
        ("bert", "bert, accents by hand"),
        ("bert", "bert, signs by hand"),
        ("bert", "bert, other frame"),
        ("bert", "bert, other unknown"),
        ("bert", "bert, split specials"),
        ("bert", "bert, token of its own"),
        ("bert", "bert, tokens by hand"),
        ("bert", "bert, old table of tokens"),
        ("roberta", "roberta, prefix by hand"),
        ("xlm-roberta", "xlm-roberta, prefix by hand"),
        ("xlm-roberta", "xlm-roberta, table"),
    ],
)
def test_the_texts_tell_such_folders_apart(one, other, tmp_path):
    """The test above says something about an option only when the texts are read differently with it."""
    made = [
        tokenise(FolderTokenizer.load(FOLDERS[name](tmp_path / name)), TEXTS, max_length=512) for name in (one, other)
    ]
    assert [x.ids for x in made[0]] != [x.ids for x in made[1]]


def test_the_demo_model_with_hostile_texts(demo):
    ours, theirs = both(demo)
    assert type(theirs).__name__ == "BertTokenizer"
    assert_equal(ours, theirs, [*TEXTS, LONG], lengths=(512, 128, 3))
    assert_equal(ours, theirs, [*TEXTS, LONG], [LONG, *TEXTS], lengths=(512, 17, 4))
    assert longest_input(type("Config", (), {"max_positions": 9999}), ours) == 512


def test_the_demo_model_with_random_texts(demo):
    ours, theirs = both(demo)
    dice = random.Random(5)
    signs = [
        *range(1, 0x250),
        *range(0x300, 0x370),
        *range(0x590, 0x700),
        *range(0x4E00, 0x4E40),
        *range(0x1F300, 0x1F700),
    ]
    texts = ["".join(chr(dice.choice(signs)) for _ in range(dice.randrange(40))) for _ in range(500)]
    assert_equal(ours, theirs, texts, lengths=(512, 9))
    assert_equal(ours, theirs, texts, texts[1:] + texts[:1], lengths=(13,))


@pytest.mark.parametrize("side", ["left", "right"])
def test_both_sides_are_cut(side, demo, tmp_path):
    for file in demo.iterdir():
        (tmp_path / file.name).symlink_to(file) if file.suffix == ".safetensors" else (
            tmp_path / file.name
        ).write_bytes(file.read_bytes())
    change(tmp_path, truncation_side=side)
    ours, theirs = both(tmp_path)
    assert ours.truncation_side == side
    assert_equal(ours, theirs, [*TEXTS, LONG], [*TEXTS[3:], *TEXTS[:3], LONG], lengths=(5, 40))
    cut = tokenise(ours, ["card lost money bank"], max_length=4)[0].ids
    assert cut == ours(["card lost" if side == "right" else "money bank"]).encodings[0].ids


def test_files_of_transformers_before_5(tmp_path):
    folder = FOLDERS["bert"](tmp_path)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"unk_token": "[UNK]", "cls_token": {"content": "bank", "lstrip": False, "normalized": False}})
    )
    ours, theirs = both(folder)
    assert_equal(ours, theirs, TEXTS, TEXTS[::-1])
    assert ours(["card"]).encodings[0].ids[0] == wordpieces()["bank"]
    (folder / "added_tokens.json").write_text(json.dumps({"<num>": len(wordpieces())}))
    ours, theirs = both(folder)
    assert_equal(ours, theirs, TEXTS)
    assert len(wordpieces()) in tokenise(ours, ["<num>"], max_length=9)[0].ids


def test_what_the_file_says_of_cutting_and_padding_is_switched_off(tmp_path):
    folder = FOLDERS["bert"](tmp_path)
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.enable_truncation(max_length=3, direction="left")
    core.enable_padding(length=50)
    core.save(str(folder / "tokenizer.json"))
    ours, theirs = both(folder)
    assert len(ours(["card"]).encodings[0].ids) == 3
    assert len(ours(["card lost bank"]).encodings[0].ids) == 5
    assert ours.truncation_side == theirs.truncation_side == "left"
    assert_equal(ours, theirs, TEXTS, lengths=(512, 5))


# ---------------------------------------------------------------- texts that are none


@pytest.mark.parametrize("texts", [["\ud800"], ["card", "\udfff lost"], ["card\ud83d", "\ud800", "bank"]])
def test_half_a_sign_fails_as_it_does_in_transformers(texts, tmp_path):
    """As a cut file may hold: the batch fails with what the predictor expects, then row by row only that row does."""
    kinds, ids = [], []
    for tokenizer in both(FOLDERS["bert"](tmp_path)):
        with pytest.raises((TypeError, ValueError)) as caught:
            tokenise(tokenizer, texts, max_length=9)
        kinds.append(caught.type)
        whole = [text for text in texts if text.isprintable()]
        ids.append([tokenise(tokenizer, [text], max_length=9)[0].ids for text in whole])
    assert kinds[0] == kinds[1]
    assert ids[0] == ids[1]


def test_as_many_pairs_as_texts(tmp_path):
    ours = FolderTokenizer.load(FOLDERS["bert"](tmp_path))
    with pytest.raises(ValueError, match="shorter"):
        ours(["card", "bank"], ["lost"])
    with pytest.raises(UsageError, match="2 special tokens leave no room"):
        tokenise(ours, ["card"], max_length=2)


# ---------------------------------------------------------------- damage


def write(name, content):
    def damage(folder):
        (folder / name).write_bytes(content)

    return damage


def edit(name, **changes):
    def damage(folder):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def without_unknown(folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"].pop("[UNK]")
    content["added_tokens"] = []
    path.write_text(json.dumps(content))
    change(folder, tokenizer_class="TokenizersBackend", unk_token="remove")


# fmt: off
DAMAGES = {
    "missing": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json missing"),
    "missing config": (lambda folder: (folder / "tokenizer_config.json").unlink(), "tokenizer_config.json missing"),
    "empty": (write("tokenizer.json", b""), "not a tokenizer"),
    "cut short": (lambda folder: write("tokenizer.json", (folder / "tokenizer.json").read_bytes()[:900])(folder), "not a tokenizer"),  # noqa: E501
    "not text": (write("tokenizer.json", b"\xff\xfe\x00"), "not a tokenizer"),
    "of another kind": (write("tokenizer.json", b'{"version": "1.0", "model": {"type": "New"}}'), "not a tokenizer"),
    "config no JSON": (write("tokenizer_config.json", b"{"), "not valid JSON"),
    "config a list": (write("tokenizer_config.json", b"[]"), "holds a list"),
    "config of numbers": (edit("tokenizer_config.json", cls_token=5), "make no tokenizer"),
    "lower-casing a word": (edit("tokenizer_config.json", do_lower_case="yes"), "make no tokenizer"),
    "a side unheard of": (edit("tokenizer_config.json", truncation_side="top"), "truncation_side is 'top'"),
    "a length in words": (edit("tokenizer_config.json", model_max_length="long"), "make no tokenizer"),
    "of another class": (edit("tokenizer_config.json", tokenizer_class="RobertaTokenizer"), "a WordPiece model in a RoBERTa"),  # noqa: E501
    "of another class still": (edit("tokenizer_config.json", tokenizer_class="XLMRobertaTokenizer"), "a WordPiece model in an XLM"),  # noqa: E501
    "no unknown": (without_unknown, r"Missing \[UNK\]"),
}
# fmt: on


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_in_one_line(name, tmp_path):
    folder = FOLDERS["bert"](tmp_path)
    damage, message = DAMAGES[name]
    damage(folder)
    with pytest.raises(ModelFolderError, match=message) as caught:
        FolderTokenizer.load(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_file_too_large_is_not_read(tmp_path, monkeypatch):
    folder = FOLDERS["bert"](tmp_path)
    monkeypatch.setattr(engine, "MAX_TOKENIZER_BYTES", 1000)
    with pytest.raises(ModelFolderError, match="larger than 1,000 bytes"):
        FolderTokenizer.load(folder)


def test_a_model_folder_is_read_without_torch_and_transformers(tmp_path):
    folder = make_folder(tmp_path / "model")
    code = (
        "import sys\nfrom budgetformer.engine.tokenizer import FolderTokenizer\n"
        "from budgetformer.tokens import tokenise\n"
        f"print(tokenise(FolderTokenizer.load({str(folder)!r}), ['my card'], max_length=9)[0].ids)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ids, heavy = done.stdout.splitlines()
    assert json.loads(ids) == tokenise(tiny_tokenizer(), ["my card"], max_length=9)[0].ids
    assert heavy == "[]"
