"""The Hugging Face skin: Auto classes, files, pipeline, and plain Trainer with one callback of ours."""

import logging
import warnings
from dataclasses import asdict

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    pipeline,
)

import budgetformer
from budgetformer import losses, metrics
from budgetformer.config import BudgetConfig
from budgetformer.errors import BudgetFormerError, ModelFolderError, UsageError
from budgetformer.hf import (
    BudgetFormerConfig,
    BudgetFormerForSequenceClassification,
    BudgetFormerModel,
    BudgetSchedule,
)
from budgetformer.schedule import Schedule
from budgetformer.text import Encoded, collator
from core_helpers import HEADS, LAYERS, hf_config, ids_and_keep, shake, stir

LENGTHS = [11, 5, 1, 8]


def classifier(budget=None, **changes):
    made = stir(shake(BudgetFormerForSequenceClassification(hf_config(budget, **changes)), 0.2))
    assert isinstance(made, BudgetFormerForSequenceClassification)
    return made.eval()


# ---------------------------------------------------------------- Auto classes and files


def test_auto_classes_know_us():
    config = hf_config()
    assert isinstance(AutoModel.from_config(config), BudgetFormerModel)
    assert isinstance(AutoModelForSequenceClassification.from_config(config), BudgetFormerForSequenceClassification)
    assert isinstance(AutoConfig.for_model("budgetformer"), BudgetFormerConfig)


@torch.no_grad()
def test_saving_and_loading_is_bitwise(tmp_path):
    model = classifier(BudgetConfig(target=0.4, estimator="gumbel"), norm="pre", head_hidden="tanh")
    model.multiplier.fill_(0.625)
    model.budgetformer.encoder.profile.copy_(torch.tensor([0.9, 0.5, 0.2]))
    model.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    before, after = model.state_dict(), again.state_dict()
    assert set(before) == set(after)
    assert {"multiplier", "budgetformer.encoder.profile"} < set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert again.config.budget_config == model.config.budget_config
    assert again.config.encoder_config == model.config.encoder_config
    ids, keep = ids_and_keep(LENGTHS, 11)
    for budget in (None, 0.3):
        assert torch.equal(again(ids, keep, budget=budget).logits, model(ids, keep, budget=budget).logits)
    # The bare encoder of the same folder.
    bare = AutoModel.from_pretrained(tmp_path)
    found = bare(ids, keep).last_hidden_state
    assert torch.equal(found, model.budgetformer(ids, keep).last_hidden_state)


def test_a_model_made_from_a_bare_encoder_starts_new_parts_as_a_new_model_does(tmp_path):
    """Loading a folder without routers or classifier must leave no memory uninitialised."""
    bare = BudgetFormerModel(hf_config())
    state = {k: v for k, v in bare.state_dict().items() if ".router." not in k and not k.endswith("profile")}
    bare.save_pretrained(tmp_path, state_dict=state)
    model = BudgetFormerForSequenceClassification.from_pretrained(tmp_path).eval()
    ids, keep = ids_and_keep(LENGTHS, 11)
    out = model(ids, keep)
    assert out.gates.all()
    assert torch.equal(model.multiplier, torch.zeros(()))
    assert torch.equal(model.budgetformer.encoder.profile, torch.ones(LAYERS))
    word = "encoder.embeddings.word.weight"
    assert torch.equal(model.budgetformer.state_dict()[word], bare.state_dict()[word])


def test_outputs_as_mapping_and_as_tuple():
    model = classifier()
    ids, keep = ids_and_keep(LENGTHS, 11)
    out = model(ids, keep, output_attentions=True, output_hidden_states=True)
    assert out.logits.shape == (4, 5)
    assert out.gates.shape == (4, LAYERS, HEADS)
    assert out.wanted.shape == (4, LAYERS)
    torch.testing.assert_close(out.head_share, out.gates.mean((1, 2)))
    assert len(out.hidden_states) == LAYERS + 1
    assert out.attentions[0].shape == (4, HEADS, 11, 11)
    assert out.loss is None
    torch.testing.assert_close(model(ids, keep, return_dict=False)[0], out.logits)
    assert model.get_input_embeddings() is model.budgetformer.encoder.embeddings.word


def test_bad_masks_are_refused():
    model = classifier()
    ids, keep = ids_and_keep(LENGTHS, 11)
    with pytest.raises(UsageError, match="attention_mask has the shape"):
        model(ids, keep[:, :7])
    keep[2] = False
    with pytest.raises(UsageError, match="row 2 has no real token"):
        model(ids, keep)


# ---------------------------------------------------------------- hostile and mistaken configurations


@pytest.mark.parametrize(
    "change",
    [
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation_internal": "evil/kernel"},
        {"experts_implementation": "evil/kernel"},
    ],
    ids=str,
)
def test_a_config_that_names_foreign_code_is_refused(change, tmp_path):
    import json

    with pytest.raises(ModelFolderError, match="only eager and sdpa"):
        hf_config(**change)
    classifier().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelFolderError, match="only eager and sdpa"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 6}, "num_heads=6: must divide hidden_size=35"),
        ({"hidden_size": -35}, "hidden_size=-35"),
        ({"budget": {"target": 2.0}}, "target=2.0"),
        ({"budget": {"estimator": "magic"}}, "estimator='magic'"),
        ({"pooling": "max"}, "pooling='max'"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(change, words):
    settings = {**hf_config().to_dict(), **change}
    settings.pop("model_type", None)
    with pytest.raises(BudgetFormerError, match=words):
        BudgetFormerConfig(**settings)


def test_the_names_of_other_libraries_for_the_sizes():
    config = hf_config()
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (LAYERS, HEADS, 35)
    assert config.max_position_embeddings == 31


# ---------------------------------------------------------------- pipeline


@pytest.fixture
def folder(tokenizer_folder, tmp_path):
    classifier(num_labels=3, id2label={0: "no", 1: "yes", 2: "perhaps"}).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(tmp_path)
    return tmp_path


class Listener(logging.Handler):
    """Keeps what is said at warning level and above."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.heard = []

    def emit(self, record):
        self.heard.append(record.getMessage())


def test_a_pipeline_answers_without_a_warning(folder):
    logger, listener = logging.getLogger("transformers"), Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            classify = pipeline("text-classification", model=str(folder), device="cpu")
            texts = ["my card is lost", "why", "where is the money transfer"]
            alone = [classify(text)[0] for text in texts]
            together = classify(texts, batch_size=3, top_k=None)
        logger.warning("is anybody listening?")
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
    assert listener.heard == ["is anybody listening?"]
    assert {row["label"] for row in together[0]} == {"no", "yes", "perhaps"}
    for one, all_scores in zip(alone, together, strict=True):
        assert one["label"] == all_scores[0]["label"]
        assert one["score"] == pytest.approx(all_scores[0]["score"], abs=1e-5)
        assert sum(row["score"] for row in all_scores) == pytest.approx(1.0, abs=1e-5)


# ---------------------------------------------------------------- losses


def test_single_and_multi_label_losses():
    model = classifier()
    ids, keep = ids_and_keep(LENGTHS, 11)
    one = torch.tensor([0, 4, 2, 2])
    out = model(ids, keep, labels=one)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, one))
    assert set(out.loss_parts) == {"task"}, "in use the budget is no part of the loss"
    several = torch.randint(0, 2, (4, 5)).float()
    out = model(ids, keep, labels=several)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(out.logits, several)
    torch.testing.assert_close(out.loss, expected)
    model.config.problem_type = "multi_label_classification"
    torch.testing.assert_close(model(ids, keep, labels=several.long()).loss, expected)


def test_the_training_loss_by_its_parts():
    budget = BudgetConfig(target=0.4, stiffness=3.0, multiplier_rate=0.5)
    model = classifier(budget, distillation=0.25, distillation_temperature=3.0).train()
    model.multiplier.fill_(2.0)
    model.overspent.fill_(0.5)
    ids, keep = ids_and_keep(LENGTHS, 11)
    labels, teacher = torch.tensor([0, 4, 2, 2]), torch.randn(4, 5)
    out = model(ids, keep, labels=labels, teacher_logits=teacher)
    problem = "single_label_classification"
    torch.testing.assert_close(out.loss_parts["task"], 0.75 * losses.task(out.logits, labels, problem).detach())
    told = 0.25 * losses.distillation(out.logits, teacher, problem, 3.0)
    torch.testing.assert_close(out.loss_parts["distillation"], told.detach())
    # The budget's part is on the share of head FLOPs: inputs weigh what a head costs at their length.
    lengths = keep.sum(1).double()
    weights = 8 * lengths * 35 * 5 + 4 * lengths**2 * 5
    gap = float((out.head_share.double() * weights).sum() / weights.sum()) - 0.4
    assert float(out.loss_parts["budget"]) == pytest.approx((2 + 3 * 0.5) * gap, rel=1e-4)
    torch.testing.assert_close(out.loss.detach(), sum(out.loss_parts.values()))
    # Dual ascent, after the loss: the multiplier has moved by rate * gap, and the profile towards the shares.
    assert float(model.multiplier) == pytest.approx(2 + 0.5 * gap, rel=1e-4)
    assert float(model.overspent) == pytest.approx(gap, rel=1e-4)
    shares = out.gates.mean((0, 2))
    torch.testing.assert_close(model.budgetformer.encoder.profile, 1 + 0.05 * (shares - 1))


def test_evaluation_does_not_move_the_multiplier():
    model = classifier(BudgetConfig(target=0.4))
    ids, keep = ids_and_keep(LENGTHS, 11)
    model(ids, keep, labels=torch.tensor([0, 4, 2, 2]))
    model.train()(ids, keep, labels=torch.tensor([0, 4, 2, 2]), budget=0.5)
    assert float(model.multiplier) == 0.0
    assert torch.equal(model.budgetformer.encoder.profile, torch.ones(LAYERS))


def test_spread_rewards_heads_where_the_teacher_errs():
    ids, keep = ids_and_keep([7, 7, 7, 7], 7)
    labels, teacher = torch.tensor([0, 1, 2, 3]), 5 * torch.randn(4, 5)
    parts = []
    for spread in (0.0, 0.5):
        torch.manual_seed(0)
        model = classifier(BudgetConfig(target=0.4, spread=spread)).train()
        out = model(ids, keep, labels=labels, teacher_logits=teacher)
        parts.append(float(out.loss_parts["budget"]))
    unsure = losses.difficulty(teacher, labels, "single_label_classification")
    reward = (unsure * (out.head_share - out.head_share.mean())).mean()
    assert parts[1] == pytest.approx(parts[0] - 0.5 * float(reward), abs=1e-5)


def test_the_papers_loss_explores_then_exploits():
    model = classifier(BudgetConfig(target=0.4, loss="paper", estimator="paper", entropy_weight=0.1)).train()
    ids, keep = ids_and_keep(LENGTHS, 11)
    signs = []
    for progress in (0.0, 1.0):
        model.progress = progress
        parts = model(ids, keep, labels=torch.tensor([0, 4, 2, 2])).loss_parts
        assert set(parts) == {"task", "budget", "entropy"}
        signs.append(float(parts["entropy"]))
    assert signs[0] < 0 < signs[1]


def test_a_budget_of_one_trains_the_dense_model():
    """No head is switched off and no router learns, whatever the exploration."""
    model = classifier(BudgetConfig(target=1.0)).train()
    model.progress = 0.0
    ids, keep = ids_and_keep(LENGTHS, 11)
    out = model(ids, keep, labels=torch.tensor([0, 4, 2, 2]))
    out.loss.backward()
    assert out.gates.all()
    assert set(out.loss_parts) == {"task"}
    routers = [p.grad for n, p in model.named_parameters() if ".router." in n]
    assert all(g is None or not g.any() for g in routers)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.filterwarnings("ignore:use_reentrant=True would take:UserWarning")
def test_gradient_checkpointing_equals_plain(reentrant):
    """The same noise, the same heads, the same gradients; forwards are counted to see that it does run again."""
    how = None if reentrant is None else {"use_reentrant": reentrant}
    ids, keep = ids_and_keep(LENGTHS, 11)
    found = []
    for saving in (False, True):
        torch.manual_seed(0)
        model = classifier(BudgetConfig(target=0.5), dropout=0.1, attention_dropout=0.1).train()
        model.progress = 0.1
        calls = []
        # Where the layer begins: the second run is cut short as soon as backward has what it needs.
        router = model.budgetformer.encoder.layers[0].attention.router
        router.register_forward_pre_hook(lambda *a, calls=calls: calls.append(1))
        if saving:  # renamed on the way to transformers 6
            named = [n for n in ("activation", "gradient") if hasattr(model, f"{n}_checkpointing_enable")]
            getattr(model, f"{named[0]}_checkpointing_enable")(how)
        torch.manual_seed(1)
        out = model(ids, keep, labels=torch.tensor([0, 4, 2, 2]))
        out.loss.backward()
        found.append((out.loss.detach(), out.gates, {n: p.grad for n, p in model.named_parameters()}))
        assert len(calls) == (2 if saving else 1)
        assert not out.gates.all()
    (loss, gates, grads), (again, gates_again, grads_again) = found
    assert torch.equal(gates, gates_again)
    torch.testing.assert_close(loss, again)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, grads_again[name], msg=name)


def test_reentrant_checkpointing_would_cost_routers_a_gradient_so_it_is_off():
    with pytest.warns(UserWarning, match="use_reentrant=True would take the budget's gradient"):
        classifier(BudgetConfig(target=0.5)).activation_checkpointing_enable({"use_reentrant": True})


# ---------------------------------------------------------------- Trainer


def task(rows=256):
    """Texts of 3 to 13 tokens whose label is whether token 7 comes in them."""
    items = []
    for i in range(rows):
        ids = torch.randint(10, 97, (3 + i % 11,))
        if i % 2:
            ids[int(torch.randint(0, len(ids), ()))] = 7
        items.append({"input_ids": ids.tolist(), "labels": i % 2})
    return Encoded(items)


class Watch(BudgetSchedule):
    """Notes the progress that the model is told."""

    def __init__(self):
        self.seen = []

    def on_step_begin(self, args, state, control, **kwargs):
        super().on_step_begin(args, state, control, **kwargs)
        self.seen.append(kwargs["model"].progress)


def test_plain_trainer_with_one_callback_learns_task_and_budget(tmp_path):
    budget = BudgetConfig(target=0.4, multiplier_rate=0.2)
    model = BudgetFormerForSequenceClassification(hf_config(budget, num_labels=2, initializer_range=0.1))
    data, watch = task(), Watch()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=160,
        per_device_train_batch_size=32,
        learning_rate=5e-3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        seed=0,
    )
    before = metrics.predict(model.eval(), data, batch_size=64)
    assert before.gates.all()
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collator(0), callbacks=[watch])
    trainer.train()
    assert watch.seen == [step / 160 for step in range(160)]
    assert model.progress == 1.0
    after = metrics.predict(model.eval(), data, batch_size=64)
    labels = torch.tensor([item["labels"] for item in data.items])
    accuracy = (after.logits.argmax(-1) == labels).float().mean()
    share = after.gates.mean()
    assert float(accuracy) > 0.9, "it learns the task"
    assert abs(float(share) - 0.4) < 0.12, "and comes down to its budget"
    assert bool((after.gates.sum(-1) >= 1).all())
    assert float(model.multiplier) != 0.0
    torch.testing.assert_close(model.budgetformer.encoder.profile.mean(), share, rtol=0, atol=0.15)


# ---------------------------------------------------------------- the gap between training and use


@pytest.mark.parametrize(
    ("estimator", "gap"), [("soft_topk", False), ("gumbel", False), ("top_p", False), ("paper", True)]
)
def test_the_soft_hard_gap_shows_who_trains_another_function(estimator, gap):
    loss = "paper" if estimator == "paper" else "lagrange"
    model = classifier(BudgetConfig(target=0.4, estimator=estimator, loss=loss))
    data = task(128)
    data = data.with_column("labels", [i % 5 for i in range(128)])
    found = metrics.evaluate(model, data, batch_size=32)
    assert (found["soft_hard_disagreement"] > 0) is gap
    if not gap:
        assert found["soft_hard_gap"] == 0.0
    assert 0.0 < found["head_share"] < 1.0
    assert not any(module.training for module in model.modules())


def test_the_last_steps_of_training_see_what_use_sees():
    """At the end of the schedule a training forward without dropout is bitwise the masked path of use."""
    model = classifier(BudgetConfig(target=0.4))
    ids, keep = ids_and_keep(LENGTHS, 11)
    use = model(ids, keep)
    model.train()
    model.progress = 1.0
    assert Schedule(budget=model.config.budget_config).at(1.0) == Schedule(budget=model.config.budget_config).settled
    training = model(ids, keep)
    assert torch.equal(training.logits, use.logits)
    assert torch.equal(training.gates, use.gates)
    model.progress = 0.0
    assert not torch.equal(model(ids, keep).gates, use.gates), "the beginning of the schedule explores"


def test_the_package_offers_its_names_lazily():
    assert budgetformer.BudgetFormerConfig is BudgetFormerConfig
    assert budgetformer.from_pretrained_encoder.__module__ == "budgetformer.convert"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = budgetformer.nothing
    assert asdict(BudgetConfig()) == hf_config().budget
