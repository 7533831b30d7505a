"""The routes: /predict, Open Inference Protocol v2, /inspect, health, info, metrics, and the page."""

import asyncio
import time
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
from fastapi import FastAPI, Path, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from budgetformer import __version__
from budgetformer.ports.server.guard import Guard, answer_to, failure, too_large
from budgetformer.ports.server.measures import CONTENT_TYPE
from budgetformer.ports.server.protocol import (
    Failure,
    InferParameters,
    InferRequest,
    Inspection,
    InspectRequest,
    Model,
    Prediction,
    PredictRequest,
    Refused,
    read,
)
from budgetformer.ports.server.service import Answered, HungUp, Limits, Service

PAGE = {
    "": ("index.html", "text/html"),
    "style.css": ("style.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
# Nothing but our own files, no inline script or style, nobody's frame: what a text or a label holds cannot run.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
REASONS = {
    400: "empty, or no JSON",
    401: "a wrong key",
    404: "another model's name",
    408: "the body did not come",
    413: "too large",
    415: "no JSON",
    421: "a name that is not this server's",
    422: "not as described",
    424: "the model failed",
    429: "overloaded",
    503: "no engine, or no time",
}
Responses = dict[int | str, dict[str, Any]]
FAILURES: Responses = {code: {"model": Failure, "description": why} for code, why in REASONS.items()}


def create_app(
    service: Service,
    *,
    key: str | None = None,
    hosts: frozenset[str] | None = None,
    echo: Callable[[str], None] = lambda line: None,
) -> Guard:
    """The application for a service. key: asked of every request but those for the page's files and the health. hosts:
    the names that requests may be for, None is any.
    """
    foreign: Responses = {421: FAILURES[421]}
    app = FastAPI(title="BudgetFormer", version=__version__, docs_url=None, redoc_url=None, responses=foreign)
    bodies: dict[str, Any] = {}

    def takes(model: type[BaseModel]) -> dict[str, Any]:
        """The part of the description that says what a route reads: it reads by itself, once and in one step."""
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        bodies.update(schema.pop("$defs", {}))
        bodies[model.__name__] = schema
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        return {"requestBody": {"required": True, "content": content}}

    @app.post(
        "/predict",
        openapi_extra=takes(PredictRequest),
        responses={**FAILURES, 200: {"model": list[Prediction] | list[list[Prediction]]}},
    )
    async def predict(request: Request) -> Response:
        """Classify texts: all classes of each, the most probable first. As text-embeddings-inference does."""
        asked = await _read(request, PredictRequest, service.limits)
        answered = await service.classify(
            asked.pairs, gone=request.receive, budget=asked.budget, truncate=asked.truncate
        )
        values = answered.logits if asked.raw_scores else answered.probabilities
        ranked = [_ranked(service, row, asked.top) for row in values]
        return _json(ranked if isinstance(asked.inputs, list) else ranked[0], answered, service)

    @app.post("/inspect", openapi_extra=takes(InspectRequest), responses={**FAILURES, 200: {"model": Inspection}})
    async def inspect(request: Request) -> Response:
        """What ran for one text: heads and blocks layer by layer, FLOPs and time."""
        asked = await _read(request, InspectRequest, service.limits)
        pair = [(asked.text, asked.text_pair)]
        answered = await service.classify(pair, gone=request.receive, budget=asked.budget, detail=True)
        return _json(_inspection(service, answered), answered, service)

    @app.get("/health", responses={503: FAILURES[503]})
    async def health() -> dict[str, Any]:
        """Whether the engine is there; how often it had to be started again."""
        _check_ready(service)
        return {"status": "ok", "engine_restarts": service.backend.restarts}

    @app.get("/info", responses={401: FAILURES[401]})
    async def info() -> dict[str, Any]:
        """The model, how it is computed, and the limits; names as text-embeddings-inference has them, and ours."""
        return _info(service)

    @app.get("/metrics", responses={401: FAILURES[401], 200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def metrics() -> Response:
        """Counters and histograms for Prometheus."""
        return Response(service.measures.text(), media_type=CONTENT_TYPE)

    @app.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        """The server answers."""
        return {"live": True}

    @app.get("/v2/health/ready", responses={503: FAILURES[503]})
    async def ready() -> dict[str, bool]:
        """The engine answers, too."""
        _check_ready(service)
        return {"ready": True}

    @app.get("/v2", responses={401: FAILURES[401]})
    async def server() -> dict[str, Any]:
        """The server, by the Open Inference Protocol."""
        return {"name": "budgetformer", "version": __version__, "extensions": []}

    # There is one model; said in the description, so that clients made from it know.
    ours: Any = Path(json_schema_extra={"enum": [service.name]})
    named: Responses = {code: FAILURES[code] for code in (401, 404, 422)}

    @app.get("/v2/models/{name}", responses=named)
    async def model(name: str = ours) -> dict[str, Any]:
        """The model's inputs and outputs."""
        return _metadata(service, name)

    @app.get("/v2/models/{name}/ready", responses={**named, 503: FAILURES[503]})
    async def model_ready(name: str = ours) -> dict[str, Any]:
        """The model answers."""
        _metadata(service, name)
        _check_ready(service)
        return {"name": name, "ready": True}

    @app.post("/v2/models/{name}/infer", openapi_extra=takes(InferRequest), responses=FAILURES)
    async def infer(request: Request, name: str = ours) -> Response:
        """Classify texts, by the Open Inference Protocol: BYTES in, labels and probabilities out."""
        _metadata(service, name)
        asked = await _read(request, InferRequest, service.limits)
        given = asked.parameters or InferParameters()
        answered = await service.classify(
            asked.pairs, gone=request.receive, budget=given.budget, truncate=given.truncate
        )
        return _json(_inferred(service, asked, answered), answered, service)

    for name, (file, kind) in PAGE.items():
        app.get(f"/{name}", include_in_schema=False)(_file(file, kind))

    @app.exception_handler(Refused)
    @app.exception_handler(HungUp)
    @app.exception_handler(Exception)
    async def _failed(request: Request, error: Exception) -> Response:
        return answer_to(error)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        answer = failure(Refused(error.status_code, "Validation", str(error.detail)))
        answer.headers.update(error.headers or {})
        return answer

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schema["components"]["schemas"] |= bodies
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = described
    return Guard(app, {"/predict": predict, "/inspect": inspect}, service, key=key, hosts=hosts, echo=echo)


async def _read(request: Request, model: type[Model], limits: Limits) -> Model:
    """The body of a request, at most so large and in so much time.

    Raises:
        Refused: 400, 408, 413, 415 or 422.
        HungUp: the client was gone before its end.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # Also what keeps other sites' pages from posting here from a visitor's browser.
        raise Refused(415, "Validation", "give JSON, and say so: Content-Type: application/json")
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(limits.seconds):
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise HungUp
                body += message.get("body", b"")
                if len(body) > limits.body:
                    raise too_large(limits.body)
                more = message.get("more_body", False)
    except TimeoutError:
        raise Refused(408, "Validation", f"the body did not come in {limits.seconds:g} s") from None
    return read(model, bytes(body))


def _ranked(service: Service, values: np.ndarray, top: int | None) -> list[dict[str, Any]]:
    """Classes and their values, the greatest first."""
    labels, rounded = service.backend.facts["labels"], values.astype(np.float64).round(6).tolist()
    order = np.argsort(-values, kind="stable")[:top].tolist()
    return [{"label": labels[i], "score": rounded[i]} for i in order]


def _inspection(service: Service, answered: Answered) -> dict[str, Any]:
    job, row = answered.job, answered.job.rows[0]
    blocks = row["blocks"].tolist() if "blocks" in row else [None] * service.backend.facts["layers"]
    gates, wanted = row["gates"].tolist(), row["wanted"].astype(np.float64).round(4).tolist()
    ran, dense = row["flops"].tolist()
    return {
        "classes": _ranked(service, answered.probabilities[0], None),
        "layers": [
            {"heads": heads, "blocks": run, "wanted": wish}
            for heads, run, wish in zip(gates, blocks, wanted, strict=True)
        ],
        "tokens": answered.tokens,
        "truncated": job.tokens[0].truncated,
        "budget": job.budget,
        "share": round(float(row["share"]), 4),
        "flops": ran,
        "flops_dense": dense,
        "engine_ms": round(1e3 * job.engine_s, 3),
    }


def _inferred(service: Service, asked: InferRequest, answered: Answered) -> dict[str, Any]:
    labels, chances = service.backend.facts["labels"], answered.probabilities.astype(np.float64).round(6)
    rows, classes = chances.shape
    best = chances.argmax(1).tolist()
    made = {
        "label": ("BYTES", [rows], [labels[i] for i in best]),
        "score": ("FP32", [rows], chances.max(1).tolist()),
        "probabilities": ("FP32", [rows, classes], chances.ravel().tolist()),
        "units_share": ("FP32", [rows], [round(share, 4) for share in answered.shares]),
    }
    names = list(made) if asked.outputs is None else [one.name for one in asked.outputs]
    words = ("datatype", "shape", "data")
    return {
        "model_name": service.name,
        "model_version": "1",
        "id": asked.id,
        "parameters": {"budget": _used(service, answered)},
        "outputs": [{"name": name, **dict(zip(words, made[name], strict=True))} for name in names],
    }


def _used(service: Service, answered: Answered) -> float | str:
    """The budget that was named, or in a word whose own it was."""
    budget = answered.job.budget
    return service.policy.word if budget is None else round(budget, 4)


def _json(answer: Any, answered: Answered, service: Service) -> Response:
    """The answer, and in its headers what it took: whole milliseconds as in text-embeddings-inference, and parts of
    them as `Server-Timing` has them.
    """
    job = answered.job
    seconds = {
        "tokenization": answered.tokenization_s,
        "queue": job.queue_s,
        "inference": job.engine_s,
        "total": time.perf_counter() - answered.began,
    }
    headers = {f"x-{name}-time": str(round(1e3 * value)) for name, value in seconds.items()}
    headers |= {
        "server-timing": ", ".join(f"{name};dur={1e3 * value:.3f}" for name, value in seconds.items()),
        "x-compute-type": "cpu",
        "x-compute-time": headers["x-total-time"],
        "x-compute-characters": str(answered.characters),
        "x-compute-tokens": str(answered.tokens),
        "x-budget": str(_used(service, answered)),
        "x-units-share": f"{sum(answered.shares) / len(answered.shares):.4f}",
    }
    return Response(to_json(answer), media_type="application/json", headers=headers)


def _check_ready(service: Service) -> None:
    if not service.backend.ready:
        raise Refused(503, "Unhealthy", "the engine is being started again", retry_s=1)


def _info(service: Service) -> dict[str, Any]:
    facts, limits = service.backend.facts, service.limits
    names = dict(enumerate(facts["labels"]))
    low, high = service.policy.limits
    return {
        "model_id": service.name,
        "model_dtype": facts["dtype"],
        "model_type": {"classifier": {"id2label": names, "label2id": {name: i for i, name in names.items()}}},
        "max_concurrent_requests": limits.requests,
        "max_input_length": facts["max_length"],
        "max_batch_tokens": service.batch_tokens,
        "max_client_batch_size": limits.texts,
        "max_queue_tokens": service.queue_tokens,
        "payload_limit": limits.body,
        "timeout": limits.seconds,
        "auto_truncate": True,
        "version": __version__,
        "path": facts["path"],
        "multi_label": facts["multi_label"],
        "layers": facts["layers"],
        "heads": facts["heads"],
        "blocks": facts["blocks"],
        "budget": {"mode": service.policy.word, "low": low, "high": high, "target": facts["target"]},
    }


def _metadata(service: Service, name: str) -> dict[str, Any]:
    if name != service.name:
        raise Refused(404, "Validation", "no model of this name; /info has the name")

    def tensor(name: str, kind: str, *more: int) -> dict[str, Any]:
        return {"name": name, "datatype": kind, "shape": [-1, *more]}

    numbers = [tensor("score", "FP32"), tensor("probabilities", "FP32", len(service.backend.facts["labels"]))]
    return {
        "name": name,
        "versions": ["1"],
        "platform": "budgetformer",
        "inputs": [tensor("text", "BYTES"), tensor("text_pair", "BYTES")],
        "outputs": [tensor("label", "BYTES"), *numbers, tensor("units_share", "FP32")],
    }


def _file(name: str, kind: str) -> Callable[[], Any]:
    content = (resources.files("budgetformer.ports.server") / "page" / name).read_bytes()

    async def page() -> Response:
        return Response(content, media_type=kind, headers=PAGE_HEADERS)

    return page
