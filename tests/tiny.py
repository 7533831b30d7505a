"""A whole model folder in a second: random weights, unequal sizes, a tokenizer built on the spot."""

from pathlib import Path

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WORDS = ("card", "lost", "where", "is", "my", "the", "pay", "money", "back", "please", "top", "up", "cash", "not")
LABELS = ["cash", "lost card", "transfer"]


def tokenizer():
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    pieces = [*CHARACTERS, *(f"##{c}" for c in CHARACTERS)]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*special, *WORDS, *pieces]))}
    core = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def make_folder(path: Path, *, multi_label: bool = False, routed: bool = False, blocks: int = 1) -> Path:
    """3 layers of 5 heads, width 35, 23 positions, three labels; dense, or with routers that differ by text, of heads
    or of heads and so many feed-forward blocks.
    """
    import torch

    from budgetformer.hf import BudgetFormerConfig, BudgetFormerForSequenceClassification
    from core_helpers import stir

    words = tokenizer()
    config = BudgetFormerConfig(
        vocab_size=len(words),
        hidden_size=35,
        num_layers=3,
        num_heads=5,
        intermediate_size=53 if blocks == 1 else 32 * blocks,
        max_positions=23,
        initializer_range=0.5,
        id2label=dict(enumerate(LABELS)),
        label2id={name: i for i, name in enumerate(LABELS)},
        problem_type="multi_label_classification" if multi_label else "single_label_classification",
        budget={
            "target": 0.4 if routed else 1.0,
            **({} if blocks == 1 else {"scope": "heads+blocks", "ffn_blocks": blocks}),
        },
    )
    torch.manual_seed(7)
    model = BudgetFormerForSequenceClassification(config)
    (stir(model) if routed else model).save_pretrained(path)
    words.save_pretrained(path)
    return path
