"""The order of the data: the same whenever an epoch is begun, similar lengths together, every input once."""

import torch

from budgetformer.training.trainer import LengthGrouped
from fitting import BATCH, EPOCHS, ROWS, make_data, run


def test_order_is_a_function_of_seed_and_epoch():
    lengths, epoch = make_data().lengths, [0]
    order = LengthGrouped(lengths, 7, 3, lambda: epoch[0])
    first = list(order)
    assert sorted(first) == list(range(ROWS))
    torch.randn(5)  # dropout draws numbers too
    assert list(order) == first
    epoch[0] = 1
    assert list(order) != first
    assert list(LengthGrouped(lengths, 7, 4, lambda: 0)) != first


def test_batches_hold_similar_lengths():
    data = make_data(601)

    def padding(order):
        batches = [[data.lengths[i] for i in order[b : b + BATCH]] for b in range(0, len(order), BATCH)]
        return sum(max(batch) * len(batch) - sum(batch) for batch in batches)

    grouped, shuffled = list(LengthGrouped(data.lengths, BATCH, 3, lambda: 0)), torch.randperm(601).tolist()
    assert padding(grouped) < 0.2 * padding(shuffled)


def test_every_input_is_seen_once_an_epoch(tmp_path):
    data = make_data()
    run(tmp_path, data=data, validation=False)
    seen = data.seen[-EPOCHS * ROWS :]
    epochs = [seen[i : i + ROWS] for i in range(0, len(seen), ROWS)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert epochs[0] != epochs[1]
