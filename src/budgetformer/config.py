"""What an encoder and its budget are made of: frozen, valid or not constructed. Presets are rows."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from budgetformer.errors import UsageError

ESTIMATORS = ("soft_topk", "paper", "gumbel", "hard_concrete", "top_p")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")
NORMS = ("post", "pre")
POOLINGS = ("mean", "first")
ROUTER_VIEWS = ("mean", "mean+first", "mean+max")
BUDGET_LOSSES = ("lagrange", "paper")
RELEVANCES = ("learned", "fixed")
SECONDS = ("self", "twin")
SCOPES = ("heads", "heads+blocks")
GROUPINGS = ("contiguous", "weights", "coactivation")
MULTI_LABEL = "multi_label_classification"  # the problem type of a model that gives a text several labels, or none
BLOCK = 32  # neurons: blocks of the feed-forward layers are multiples of it, as the kernels' panels are
# Numbers and paths of the engine; the kernels count the types in this order.
DTYPES = ("fp32", "bf16", "int8")
PATHS = ("auto", "avx512_bf16", "avx512", "avx2", "plain", "torch")
BATCH_TOKENS = 4096  # tokens computed together: enough to fill the threads, little memory


def _need(holds: bool, owner: str, name: str, value: Any, rule: str) -> None:
    if not holds:
        raise UsageError(f"{owner}: {name}={value!r}: {rule}")


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """How a budget is learned and spent. Written for units of a sublayer; a head is one kind of unit.

    `target` is the mean share of the units' FLOPs that training aims at, in (0, 1]. `scope` says what the units are:
    heads, or heads and blocks of feed-forward neurons, `ffn_blocks` equal ones in each layer; one target holds over
    all of them. `view` is what a router sees of an input: the mean over real tokens, alone or beside the first token
    or the maximum. `relevance` says whose order the units have: learned, of each input, or fixed, that of the dense
    twin's importance, so that what an input gets of its own is a second answer.
    """

    target: float = 1.0
    estimator: str = "soft_topk"
    scope: str = "heads"
    ffn_blocks: int = 12
    min_units: int = 1  # of each sublayer; 0 lets one be skipped whole
    # A second answer with every unit on, for inputs whose first is unsure.
    second: str = "self"  # whose units: the model's own, or those of its dense twin, kept beside them as they are
    first: float = 1.0  # share of the target that the first answers spend; the second ones get the rest; 1: no second
    cascade: float = 0.0  # margin between the two best probabilities below which an input is answered again
    whole: float = 0.0  # share of the training steps at each level, and with every unit on unless the twin answers then
    levels: Sequence[float] = ()  # budgets that the model is trained at besides, so that it is good there too
    router_hidden: int = 64
    view: str = "mean"
    relevance: str = "learned"
    prior: float = 1.0  # scale of the dense twin's head importance in the scores that a router starts from
    # exploration -> exploitation, as shares of training progress
    anneal_until: float = 0.5  # the budget has come down from 1 to the target
    explore_until: float = 0.6  # noise on the scores is gone, rounding is deterministic
    noise: float = 1.0  # scale of the Gumbel noise at the start
    tau_start: float = 1.0
    tau_end: float = 0.1
    # the budget's loss
    loss: str = "lagrange"
    multiplier_rate: float = 0.2  # step of the dual ascent, per training step
    stiffness: float = 40.0  # weight of the last step's overspending beside the multiplier
    share_min: float = 0.1  # the paper's hinge interval
    share_max: float = 0.9
    entropy_weight: float = 0.01  # the paper's entropy term
    spread: float = 0.0  # weight of the reward for spending where the teacher is unsure

    def __post_init__(self):
        def need(name: str, holds: bool, rule: str) -> None:
            _need(holds, "budget", name, getattr(self, name), rule)

        need("target", 0.0 < self.target <= 1.0, "must lie in (0, 1]; 1 keeps every head")
        need("estimator", self.estimator in ESTIMATORS, f"choose one of {', '.join(ESTIMATORS)}")
        need("scope", self.scope in SCOPES, f"choose one of {', '.join(SCOPES)}")
        need("ffn_blocks", self.ffn_blocks >= 2, "must be 2 or more")
        need("view", self.view in ROUTER_VIEWS, f"choose one of {', '.join(ROUTER_VIEWS)}")
        need("loss", self.loss in BUDGET_LOSSES, f"choose one of {', '.join(BUDGET_LOSSES)}")
        need("min_units", self.min_units >= 0, "must be 0 or more")
        need("first", 0.0 < self.first <= 1.0, "is a share of the target, so it must lie in (0, 1]")
        paid = self.first == 1.0 or self.scope == "heads+blocks"
        need("first", paid, 'a second answer runs whole layers, so the budget must too: scope="heads+blocks"')
        need("cascade", 0.0 <= self.cascade <= 1.0, "is a difference of probabilities, so it must lie in [0, 1]")
        need("whole", 0.0 <= self.whole < 1.0, "is a share of the steps, so it must lie in [0, 1)")
        object.__setattr__(self, "levels", tuple(self.levels))  # JSON has lists
        shares = all(isinstance(level, int | float) and 0.0 < level < 1.0 for level in self.levels)
        need("levels", shares, "every level is a share of the units, so it must lie in (0, 1)")
        need("second", self.second in SECONDS, f"choose one of {', '.join(SECONDS)}")
        paid = self.second == "self" or self.scope == "heads+blocks"
        need(
            "second",
            paid,
            'the twin runs whole layers, so the budget must be of whole layers too: scope="heads+blocks"',
        )
        room = not self.levels or 0.0 < self.whole * self.taught < 1.0
        need("levels", room, f"each takes whole={self.whole} of the steps, and some must be left; change whole")
        need("relevance", self.relevance in RELEVANCES, f"choose one of {', '.join(RELEVANCES)}")
        need(
            "relevance",
            self.relevance == "learned" or self.prior > 0,
            "a fixed order is the prior's: prior must be above 0",
        )
        need("router_hidden", self.router_hidden >= 1, "must be 1 or more")
        need("tau_end", 0.0 < self.tau_end <= self.tau_start, "must be above 0 and at most tau_start")
        for name in ("anneal_until", "explore_until"):
            need(name, 0.0 <= getattr(self, name) <= 1.0, "is a share of training, so it must lie in [0, 1]")
        for name in ("noise", "multiplier_rate", "stiffness", "entropy_weight", "spread", "prior"):
            need(name, getattr(self, name) >= 0.0, "must be 0 or more")
        need("share_min", 0.0 <= self.share_min <= self.share_max <= 1.0, "need 0 <= share_min <= share_max <= 1")

    @property
    def routes(self) -> bool:
        """False for a dense model: a target of 1, held, leaves nothing to decide, and no router runs."""
        return self.target < 1.0 or self.loss != "lagrange"

    @property
    def first_target(self) -> float:
        """The mean share that the first answers spend: what the routers learn to hold."""
        return self.target * self.first

    @property
    def taught(self) -> int:
        """How many budgets beside the first answers' own take a share of the steps; the twin has been taught."""
        return len(self.levels) + (self.second == "self")

    @property
    def may_answer_twice(self) -> bool:
        """Second answers are settled when training ends: where asked for, or in a fixed order where there is somebody
        to give good ones.
        """
        taught = self.second == "twin" or self.whole > 0
        return self.first < 1.0 or (
            self.routes and self.relevance == "fixed" and self.scope == "heads+blocks" and taught
        )

    @property
    def blocks(self) -> int:
        """Blocks of each feed-forward layer that have a budget; 1 where the layer is one piece."""
        return self.ffn_blocks if self.scope == "heads+blocks" else 1

    def check_blocks(self, intermediate_size: int) -> None:
        """UsageError unless the feed-forward layers can be cut into these blocks."""
        if self.blocks > 1 and intermediate_size % (self.blocks * BLOCK):
            raise UsageError(
                f"ffn_blocks={self.ffn_blocks}: {intermediate_size} neurons cannot be cut into so many blocks of a "
                f"multiple of {BLOCK}"
            )

    def check_kept(self, encoder: "EncoderConfig") -> None:
        """UsageError unless every block that `encoder` names as kept is one of these blocks."""
        for names in encoder.kept_blocks or ():
            if self.blocks == 1 or names[-1] >= self.blocks:
                raise UsageError(f"kept_blocks names block {names[-1]}: {self.blocks} of each layer have a budget")


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes and choices of an encoder. The defaults are BERT-base's.

    kept_heads, kept_blocks: of each layer, the heads and feed-forward blocks that are left of `num_heads` and of the
    budget's `ffn_blocks`, where others were cut for good; they keep their numbers, and so do routings. None: all.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_positions: int = 512  # longest input, in tokens
    position_offset: int = 0  # RoBERTa's tables start at pad_token_id + 1
    token_types: int = 2  # 0: none
    embedding_size: int | None = None  # ELECTRA's small embeddings; None: hidden_size
    pad_token_id: int = 0
    activation: str = "gelu"
    norm: str = "post"
    norm_eps: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    kept_heads: Sequence[Sequence[int]] | None = None
    kept_blocks: Sequence[Sequence[int]] | None = None

    def __post_init__(self):
        def need(name: str, holds: bool, rule: str) -> None:
            _need(holds, "encoder", name, getattr(self, name), rule)

        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "max_positions"):
            value = getattr(self, name)
            need(name, isinstance(value, int) and value >= 1, "must be a whole number of 1 or more")
        need(
            "num_heads",
            self.hidden_size % self.num_heads == 0,
            f"must divide hidden_size={self.hidden_size} without a rest",
        )
        need("activation", self.activation in ACTIVATIONS, f"choose one of {', '.join(ACTIVATIONS)}")
        need("norm", self.norm in NORMS, f"choose one of {', '.join(NORMS)}")
        need("embedding_size", self.embedding_size is None or self.embedding_size >= 1, "must be None or 1 or more")
        for name in ("position_offset", "token_types"):
            need(name, getattr(self, name) >= 0, "must be 0 or more")
        for name in ("dropout", "attention_dropout"):
            need(name, 0.0 <= getattr(self, name) < 1.0, "must lie in [0, 1)")
        rule = "must name one unit or more of each layer, each once and in order"
        need("kept_heads", names_units(self.kept_heads, self.num_layers, self.num_heads), rule)
        need("kept_blocks", names_units(self.kept_blocks, self.num_layers, None), rule)

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "EncoderConfig":
        """The row `name` of `PRESETS`, with `changes` on top."""
        if name not in PRESETS:
            raise UsageError(f"preset={name!r}: there is none of that name; choose one of {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **changes})


def names_units(kept: Any, layers: int, units: int | None) -> bool:
    """Whether `kept` is None, or of each layer a list of one unit or more below `units`, each once and in order."""
    if kept is None:
        return True
    lists = isinstance(kept, list | tuple) and len(kept) == layers
    return lists and all(
        isinstance(names, list | tuple)
        and len(names) > 0
        and all(type(name) is int and name >= 0 and (units is None or name < units) for name in names)
        and all(a < b for a, b in pairwise(names))
        for names in kept
    )


# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    # The paper's encoder trained from scratch (arXiv 2604.22583, section on experiments): 4 layers, D = 768, H = 8.
    "paper": dict(hidden_size=768, num_layers=4, num_heads=8, intermediate_size=3072, token_types=2),
    "base":  dict(hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072),
    "mini":  dict(hidden_size=384, num_layers=6, num_heads=12, intermediate_size=1536),
    "tiny":  dict(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, max_positions=64, vocab_size=97),
}
# fmt: on


def known_fields(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """The entries of `values` that are fields of the dataclass `cls`."""
    names = {field.name for field in fields(cls)}
    return {key: value for key, value in values.items() if key in names}
