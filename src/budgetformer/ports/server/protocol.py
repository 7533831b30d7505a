"""What requests and answers look like: text-embeddings-inference's /predict, Open Inference Protocol v2, and our own.

Messages about a wrong request name the place and the rule, never what stood there: it may be somebody's text.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

Text = Annotated[str, Field(pattern=r"\S", description="a text; it must hold more than white space")]
Share = Annotated[float, Field(gt=0, le=1, description="share of the units to compute")]
# In JSON 1.0 is a whole number.
Count = Annotated[int, Field(ge=1), BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)]
Model = TypeVar("Model", bound=BaseModel)
ANY_INPUTS = "inputs must be a text, an object {text, text_pair}, or a list of texts, [text, text_pair] and objects"


class Refused(Exception):
    """A request that gets no answer: an HTTP status, text-embeddings-inference's word for the kind, and the reason."""

    def __init__(self, status: int, kind: str, reason: str, *, retry_s: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.kind, self.reason, self.retry_s = status, kind, reason, retry_s


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, allow_inf_nan=False)


class Pair(_Request):
    """A text, and the second text of a pair."""

    text: Text
    text_pair: Text | None = None


class PredictRequest(_Request):
    """Texts to classify. One text or one object gives one list of classes; a list, of any length, a list of lists.

    A list of two texts is two texts: a pair is an object, or a list inside the list.
    """

    inputs: (
        Text
        | Pair
        | Annotated[list[Text | Pair | Annotated[list[Text], Field(min_length=1, max_length=2)]], Field(min_length=1)]
    )
    budget: Share | None = None
    truncate: bool = Field(True, description="cut texts that are too long; false refuses them")
    raw_scores: bool = Field(False, description="logits instead of probabilities")
    top: Count | None = Field(None, description="so many classes, the most probable first; all by default")

    @property
    def pairs(self) -> list[tuple[str, str | None]]:
        """Each input as a text and its second one, or None."""
        given = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        return [_pair(one) for one in given]


def _pair(one: "str | Pair | list[str]") -> tuple[str, str | None]:
    if isinstance(one, str):
        return one, None
    return (one.text, one.text_pair) if isinstance(one, Pair) else (one[0], one[1] if len(one) == 2 else None)


class Prediction(BaseModel):
    """A class and its probability, or logit."""

    label: str
    score: float


class InspectRequest(_Request):
    """A text to look into."""

    text: Text
    text_pair: Text | None = None
    budget: Share | None = None


class Layer(BaseModel):
    """How often each unit of a layer ran: 0, 1, and 2 where an unsure text was answered again.

    wanted: the share of its heads that the layer's router asked for. blocks: null where the feed-forward layer is one
    piece.
    """

    heads: list[int]
    blocks: list[int] | None
    wanted: float


class Inspection(BaseModel):
    """What the model did with a text.

    budget: the share that was named, null where it was the model's own. share: that of what has a budget, which ran.
    engine_ms: the median of three runs, alone. flops: floating-point operations that ran, and of the dense model.
    """

    classes: list[Prediction]
    layers: list[Layer]
    tokens: int
    truncated: bool
    budget: float | None
    share: float
    flops: float
    flops_dense: float
    engine_ms: float


class Tensor(BaseModel):
    """An input of an inference request: texts, in as many as the shape says."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)
    name: Literal["text", "text_pair"]
    shape: list[Count] = Field(min_length=1, max_length=2)
    datatype: Literal["BYTES"]
    parameters: dict[str, Any] | None = None
    data: Annotated[list[Text], Field(min_length=1)] | Annotated[list[list[Text]], Field(min_length=1)]

    @property
    def texts(self) -> list[str]:
        """The data, row by row."""
        return [text for one in self.data for text in ([one] if isinstance(one, str) else one)]


class Wanted(BaseModel):
    """An output that is asked for."""

    name: Literal["label", "score", "probabilities", "units_share"]
    parameters: dict[str, Any] | None = None


class InferParameters(BaseModel):
    """Parameters of an inference request; others than ours are left alone."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True, allow_inf_nan=False)
    budget: Share | None = None
    truncate: bool = True


class InferRequest(BaseModel):
    """An inference request of the Open Inference Protocol."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)
    id: str | None = None
    parameters: InferParameters | None = None
    inputs: list[Tensor] = Field(min_length=1, max_length=2)
    outputs: list[Wanted] | None = None

    @property
    def pairs(self) -> list[tuple[str, str | None]]:
        """Each input as a text and its second one, or None.

        Raises:
            Refused: two tensors of one name or of unequal length, no "text", or a shape that is not that of the data.
        """
        given = {tensor.name: tensor for tensor in self.inputs}
        if len(given) != len(self.inputs) or "text" not in given:
            raise Refused(422, "Validation", 'inputs: give a tensor "text", and "text_pair" for pairs, each once')
        for name, tensor in given.items():
            size = 1
            for length in tensor.shape:
                size *= length
            if size != len(tensor.texts):
                raise Refused(422, "Validation", f"inputs: the shape of {name} is not that of its data")
        texts = given["text"].texts
        pairs = given["text_pair"].texts if "text_pair" in given else [None] * len(texts)
        if len(texts) != len(pairs):
            raise Refused(422, "Validation", "inputs: text and text_pair must have as many texts each")
        return list(zip(texts, pairs, strict=True))


class Failure(BaseModel):
    """Why there is no answer."""

    error: str
    error_type: str


def read(model: type[Model], body: bytes) -> Model:
    """A request from JSON.

    Raises:
        Refused: no JSON, or not as `model` says.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
    first = found[0]
    if first["type"] == "json_invalid":
        raise Refused(400, "Validation", f"the body is no JSON ({first['msg'].partition(': ')[2]})")
    if any(one["type"] in ("string_pattern_mismatch", "too_short") for one in found):
        raise Refused(400, "Empty", f"{first['loc'][0]}: empty, or a text that is white space only")
    if model is PredictRequest and first["loc"][:1] == ("inputs",) and first["type"] != "missing":
        raise Refused(422, "Validation", ANY_INPUTS)
    place = ".".join(str(part) for part in first["loc"][:4])[:80]
    raise Refused(422, "Validation", f"{place or 'the body'}: {first['msg'][0].lower()}{first['msg'][1:]}")
