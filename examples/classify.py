"""Classify a few texts with a trained model at several budgets.

Run: python examples/classify.py runs/demo "I was charged twice for one coffee" "Where is my new card?"
"""

import sys

import torch
from transformers import AutoTokenizer

from budgetformer.hf import BudgetFormerForSequenceClassification

TEXTS = ["My card still has not arrived", "I was charged twice for one coffee", "How do I change my PIN?"]
BUDGETS = (None, 1.0, 0.5, 0.25, 0.1)  # None: the budget that the model itself finds right for each text


def main(folder: str, texts: list[str]) -> None:
    """Print label, probability and share of heads for every text and budget."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BudgetFormerForSequenceClassification.from_pretrained(folder).eval()
    batch = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")

    for budget in BUDGETS:
        with torch.no_grad():
            output = model(**batch, budget=budget)
        chances, classes = output.logits.softmax(-1).max(-1)
        print(f"\nbudget {'its own choice' if budget is None else budget}")
        for text, label, chance, share in zip(texts, classes, chances, output.head_share, strict=True):
            name = model.config.id2label[int(label)]
            print(f"  {share:4.0%} of heads  {name} ({chance:.1%})  {text}")

    # A batch may mix budgets: one number per text.
    mixed = torch.linspace(0.1, 1.0, len(texts))
    with torch.no_grad():
        shares = model(**batch, budget=mixed).head_share
    print("\nmixed in one batch:", ", ".join(f"{share:.0%}" for share in shares))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python examples/classify.py RUN_FOLDER [TEXT ...]\nmake a run folder with: make demo")
    main(sys.argv[1], sys.argv[2:] or TEXTS)
