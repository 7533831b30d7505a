"""Dense checkpoints of every family become ours and equal their source; what cannot be trusted is refused."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    GPT2Config,
    RobertaConfig,
    XLMRobertaConfig,
)

import budgetformer
from budgetformer import convert
from budgetformer.config import BudgetConfig
from budgetformer.errors import ModelFolderError, UsageError
from budgetformer.hf import BudgetFormerForSequenceClassification, BudgetFormerModel
from core_helpers import WORDS, move_padding, save_tokenizer, shake

CLOSE = dict(rtol=0.0, atol=1e-5)
BERT_SIZES = dict(
    vocab_size=97,
    hidden_size=35,
    num_hidden_layers=3,
    num_attention_heads=7,
    intermediate_size=53,
    max_position_embeddings=31,
    id2label={0: "no", 1: "yes", 2: "perhaps"},
    label2id={"no": 0, "yes": 1, "perhaps": 2},
)
ROBERTA_SIZES = {**BERT_SIZES, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}
CONFIGS = {
    "bert": BertConfig(**BERT_SIZES),
    "bert-gelu_new-pad5": BertConfig(**{**BERT_SIZES, "hidden_act": "gelu_new", "pad_token_id": 5}),
    "bert-relu-types3": BertConfig(**BERT_SIZES, hidden_act="relu", type_vocab_size=3, layer_norm_eps=1e-3),
    "roberta": RobertaConfig(**ROBERTA_SIZES),
    "xlm-roberta": XLMRobertaConfig(**ROBERTA_SIZES),
    "electra": ElectraConfig(**BERT_SIZES, embedding_size=17),
    "electra-wide": ElectraConfig(**BERT_SIZES, embedding_size=35),
    "distilbert": DistilBertConfig(
        vocab_size=97, dim=35, n_layers=3, n_heads=7, hidden_dim=53, max_position_embeddings=31, num_labels=3
    ),
}
NAMES = tuple(CONFIGS)


def dense(name, folder, kind=AutoModel):
    """A random checkpoint on disk, with no bias at 0 and no norm at 1, and the model it holds."""
    model = shake(kind.from_config(CONFIGS[name], attn_implementation="eager"), 0.2).eval()
    model.save_pretrained(folder)
    return model


def batch(config):
    """Ids without the padding id inside a text, the padding on the right, and token types."""
    keep = torch.arange(23)[None] < torch.tensor([23, 5, 1, 11])[:, None]
    ids = torch.randint(6, 97, (4, 23)).masked_fill(~keep, config.pad_token_id)
    kinds = getattr(config, "type_vocab_size", 1)
    types = torch.randint(0, kinds, (4, 23)).masked_fill(~keep, 0) if kinds > 1 else None
    return ids, keep, types


def answer(theirs, ids, keep, types):
    """What transformers says when the positions count real tokens, as ours do and as its RoBERTa does by itself."""
    options = {} if types is None else {"token_type_ids": types}
    if "roberta" not in theirs.config.model_type:
        options["position_ids"] = (keep.long().cumsum(1) - 1).clamp_min(0)
    return theirs(input_ids=ids, attention_mask=keep.long(), **options)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_hidden_states_equal_the_source(name, side, tmp_path):
    theirs = dense(name, tmp_path)
    ours = budgetformer.from_pretrained_encoder(tmp_path)
    assert isinstance(ours, BudgetFormerModel)
    ids, keep, types = batch(theirs.config)
    if side == "left":
        types = None if types is None else move_padding(types, keep)[0]
        ids, keep = move_padding(ids, keep)
    found = ours(ids, keep, types, output_hidden_states=True)
    expected = answer(theirs, ids, keep, types).last_hidden_state
    assert expected[keep].std() > 0.1
    torch.testing.assert_close(found.last_hidden_state[keep], expected[keep], **CLOSE)
    assert found.gates.all()
    if side == "right":  # without a word about positions, as a user of transformers would call it
        options = {} if types is None else {"token_type_ids": types}
        plain = theirs(input_ids=ids, attention_mask=keep.long(), **options)
        torch.testing.assert_close(found.last_hidden_state[keep], plain.last_hidden_state[keep], **CLOSE)
    else:
        unpadded = ours(ids[1:2, -5:], None, None if types is None else types[1:2, -5:]).last_hidden_state
        torch.testing.assert_close(found.last_hidden_state[1:2, -5:], unpadded, **CLOSE)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_fine_tuned_classifiers_equal_the_source(name, tmp_path):
    theirs = dense(name, tmp_path, AutoModelForSequenceClassification)
    ours = budgetformer.from_pretrained_encoder(tmp_path)
    assert isinstance(ours, BudgetFormerForSequenceClassification)
    ids, keep, types = batch(theirs.config)
    expected = answer(theirs, ids, keep, types).logits
    assert expected.std() > 0.01
    torch.testing.assert_close(ours(ids, keep, types).logits, expected, **CLOSE)
    assert ours.config.id2label == theirs.config.id2label
    # Saved and loaded, it is the same model.
    ours.save_pretrained(tmp_path / "ours")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(ids, keep, types).logits, ours(ids, keep, types).logits)


@pytest.mark.parametrize("name", NAMES)
def test_key_tables_are_reversible_bit_for_bit(name):
    theirs = shake(AutoModel.from_config(CONFIGS[name]))
    family, sizes = convert.family_of(theirs.config), convert.encoder_config(theirs.config)
    state = theirs.state_dict()
    ours = convert.to_ours(state, family, sizes)
    back = convert.to_theirs(ours, family, sizes)
    assert set(state) - set(back) <= {"pooler.dense.weight", "pooler.dense.bias"}, (
        "only the pooler has no place in ours"
    )
    assert set(back) <= set(state)
    assert all(torch.equal(back[key], state[key]) for key in back)
    # Every tensor of our encoder but the routers and their profile is in the table.
    encoder = budgetformer.BudgetFormerModel(budgetformer.BudgetFormerConfig(**vars(sizes))).encoder
    assert {k for k in encoder.state_dict() if ".router." not in k and k != "profile"} == set(ours)


def test_a_checkpoint_without_a_tensor_is_refused():
    theirs = AutoModel.from_config(CONFIGS["bert"])
    state = theirs.state_dict()
    del state["encoder.layer.1.attention.self.key.bias"]
    sizes = convert.encoder_config(theirs.config)
    with pytest.raises(ModelFolderError, match=r"no tensor 'encoder\.layer\.1\.attention\.self\.key\.bias'"):
        convert.to_ours(state, convert.FAMILIES["bert"], sizes)


def test_a_new_classifier_takes_labels_budget_and_changes(tmp_path):
    dense("bert", tmp_path)
    ours = budgetformer.from_pretrained_encoder(
        tmp_path, labels=["a", "b"], budget=BudgetConfig(target=0.3), pooling="first", dropout=0.0
    )
    assert ours.config.id2label == {0: "a", 1: "b"}
    assert ours.config.label2id == {"a": 0, "b": 1}
    assert (ours.config.budget_config.target, ours.config.pooling, ours.config.dropout) == (0.3, "first", 0.0)
    assert budgetformer.from_pretrained_encoder(tmp_path, labels=5).config.num_labels == 5
    assert not ours.training


def test_other_families_are_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match="model_type='gpt2': no key table"):
        convert.family_of(GPT2Config())
    odd = BertConfig(**BERT_SIZES)
    odd.position_embedding_type = "relative_key"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UsageError, match="only absolute can be converted"):
        convert.family_of(odd)


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_pickles_are_refused_and_never_opened(tmp_path):
    folder, mark = tmp_path / "pickled", tmp_path / "exploded"
    folder.mkdir()
    CONFIGS["bert"].save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ModelFolderError, match=r"no \*\.safetensors"):
        budgetformer.from_pretrained_encoder(folder)
    assert not mark.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert mark.exists(), "the bomb is real"


def test_a_checkpoint_that_asks_for_code_is_refused(tmp_path):
    dense("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling.Evil"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match="auto_map"):
        budgetformer.from_pretrained_encoder(tmp_path)


def test_token_ids_that_drifted_are_refused(tmp_path):
    """A tokenizer whose vocabulary has another order than the source's reads other words."""
    save_tokenizer(tmp_path / "source")
    save_tokenizer(tmp_path / "drifted", (*WORDS[5:], *WORDS[:5]))
    same = AutoTokenizer.from_pretrained(tmp_path / "source")
    drifted = AutoTokenizer.from_pretrained(tmp_path / "drifted")
    assert convert.compare_token_ids(tmp_path / "source", same)
    with pytest.raises(ModelFolderError, match="reads other token ids"):
        convert.compare_token_ids(tmp_path / "source", drifted)


def test_convert_checkpoint_reports_what_it_checked(tmp_path):
    theirs = dense("bert", tmp_path / "dense", AutoModelForSequenceClassification)
    save_tokenizer(tmp_path / "dense")
    report = convert.convert_checkpoint(tmp_path / "dense", tmp_path / "ours", budget=BudgetConfig(target=0.5))
    assert report["token_ids_equal"] is True
    assert report["heads_on"] == 1.0
    assert report["max_difference"] < 1e-5
    assert report["labels"] == list(theirs.config.id2label.values())
    assert (report["family"], report["classifier"]) == ("bert", True)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    assert again.config.budget_config.target == 0.5
    assert AutoTokenizer.from_pretrained(tmp_path / "ours")("my card")["input_ids"][1:-1] == [
        4 + WORDS.index("my"),
        4 + WORDS.index("card"),
    ]
    assert not list((tmp_path / "ours").glob("*.bin"))


def test_the_real_minilm_equals_its_source(minilm, tmp_path):
    report = convert.convert_checkpoint(minilm, tmp_path)
    assert report["family"] == "bert"
    assert report["token_ids_equal"] is True
    assert report["heads_on"] == 1.0
    assert report["max_difference"] < 1e-5


def test_the_real_minilms_drifted_tokenizer_is_refused(minilm, tmp_path):
    """The same checkpoint with a vocabulary that lost one word."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm / name, tmp_path / name)
    honest = AutoTokenizer.from_pretrained(minilm)
    assert convert.compare_token_ids(tmp_path, honest)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    vocabulary["pass"], vocabulary["##code"] = vocabulary["##code"], vocabulary["pass"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ModelFolderError, match="reads other token ids"):
        convert.compare_token_ids(tmp_path, honest)
