"""The server, in one process and without a network: the same routes, limits and queue as under `serve`."""

import asyncio
import json
import math
import subprocess
import sys

import numpy as np
import pytest

import server_helpers
import tiny
from budgetformer.cli import serving as serving_command
from budgetformer.errors import UsageError
from budgetformer.ports.server.guard import hosts_of
from budgetformer.ports.server.policy import Policy
from budgetformer.ports.server.process import EngineFailed, EngineLost, _Pipes
from budgetformer.ports.server.service import Limits
from budgetformer.ports.server.worker import HEAD, Frame, pack, size_of, unpack
from budgetformer.predict import Predictor
from budgetformer.settings import ServeSettings, resolve
from server_helpers import serving

SECRET = "zebra"
TEXTS = ["where is my card", "lost the card", "top up", "please pay my money back not cash"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return server_helpers.load(tiny.make_folder(tmp_path_factory.mktemp("server"), routed=True))


def post(engine, body, path="/predict", **options):
    """One request to a server of its own."""

    async def scenario():
        async with serving(engine, **options) as (client, _, _):
            return await client.post(path, json=body)

    return asyncio.run(scenario())


def scores(rows):
    """Answers as arrays in the model's order of classes."""
    return np.array([[{one["label"]: one["score"] for one in row}[label] for label in tiny.LABELS] for row in rows])


# Budgets


def test_a_policy_is_read_from_a_setting():
    assert Policy.parse(None) == Policy("learned")
    assert Policy.parse("calibrated").share(9.0) is None
    assert Policy.parse("0.4").share(9.0) == 0.4
    load = Policy.parse("0.2:1.0")
    assert [load.share(waiting) for waiting in (0, 1, 2, 4, 99)] == pytest.approx([1.0, 0.8, 0.6, 0.2, 0.2])
    assert [load.allows(share) for share in (0.1, 0.2, 1.0)] == [False, True, True]
    assert [Policy.parse("0.4").allows(share) for share in (0.0, 0.01, 1.0)] == [False, True, True]


@pytest.mark.parametrize("text", ["1.5", "0", "0.8:0.2", "0.1:0.2:0.3", "much", "", "nan", "0.1:"])
def test_what_is_no_policy_is_refused(text):
    with pytest.raises(UsageError, match="LOW:HIGH"):
        Policy.parse(text)


# /predict


def test_answers_are_those_of_the_engine(engine):
    expected = engine.predict(TEXTS).probabilities
    answered = post(engine, {"inputs": TEXTS})
    assert answered.status_code == 200
    assert scores(answered.json()) == pytest.approx(expected, abs=1e-6)
    for row in answered.json():
        assert [one["score"] for one in row] == sorted((one["score"] for one in row), reverse=True)


def test_one_text_is_one_list_and_two_texts_are_no_pair(engine):
    one, two = post(engine, {"inputs": TEXTS[0]}).json(), post(engine, {"inputs": TEXTS[:2]}).json()
    assert [list(one[0]), len(one)] == [["label", "score"], 3]
    assert len(two) == 2
    assert scores(two) == pytest.approx(engine.predict(TEXTS[:2]).probabilities, abs=1e-6)


def test_pairs_are_objects_or_lists_inside_the_list(engine):
    expected = engine.predict(["lost card"], ["top up"]).probabilities
    alone = engine.predict(["cash"]).probabilities
    assert not np.allclose(expected, engine.predict(["lost card"]).probabilities)
    assert scores([post(engine, {"inputs": {"text": "lost card", "text_pair": "top up"}}).json()]) == pytest.approx(
        expected, abs=1e-6
    )
    mixed = post(engine, {"inputs": [["lost card", "top up"], ["cash"], {"text": "lost card", "text_pair": "top up"}]})
    assert scores(mixed.json()) == pytest.approx(np.concatenate([expected, alone, expected]), abs=1e-6)


def test_logits_and_fewer_classes_on_request(engine):
    raw = post(engine, {"inputs": TEXTS, "raw_scores": True}).json()
    assert scores(raw) == pytest.approx(engine.predict(TEXTS).output.logits, abs=1e-6)
    for top in (1, 1.0):
        assert [len(row) for row in post(engine, {"inputs": TEXTS, "top": top}).json()] == [1] * 4


def test_each_answer_says_which_budget_it_had(engine):
    learned = post(engine, {"inputs": TEXTS})
    assert learned.headers["x-budget"] == "learned"
    assert float(learned.headers["x-units-share"]) == pytest.approx(engine.predict(TEXTS).head_share.mean(), abs=1e-4)
    asked = post(engine, {"inputs": TEXTS, "budget": 0.4})
    assert (asked.headers["x-budget"], asked.headers["x-units-share"]) == ("0.4", "0.4000")
    fixed = post(engine, {"inputs": TEXTS}, budget="0.6")
    assert (fixed.headers["x-budget"], fixed.headers["x-units-share"]) == ("0.6", "0.6000")
    assert scores(fixed.json()) == pytest.approx(engine.predict(TEXTS, budget=0.6).probabilities, abs=1e-6)


def test_a_request_may_ask_for_a_budget_within_the_limits(engine):
    assert post(engine, {"inputs": "cash", "budget": 0.3}, budget="0.2:0.6").headers["x-budget"] == "0.3"
    refused = post(engine, {"inputs": "cash", "budget": 0.7}, budget="0.2:0.6")
    assert (refused.status_code, refused.json()["error"]) == (422, "budget: this server takes 0.2 to 0.6")


def test_times_are_in_the_headers(engine):
    headers = post(engine, {"inputs": TEXTS}).headers
    parts = dict(part.split(";dur=") for part in headers["server-timing"].split(", "))
    assert list(parts) == ["tokenization", "queue", "inference", "total"]
    assert float(parts["total"]) >= float(parts["inference"]) > 0
    assert headers["x-compute-tokens"] == str(sum(len(ids) for ids in map(tokens_of(engine), TEXTS)))
    assert headers["x-compute-characters"] == str(sum(map(len, TEXTS)))


def tokens_of(engine):
    return lambda text: engine.tokenizer([text]).encodings[0].ids


def test_a_long_text_is_cut_or_refused(engine):
    long = "card " * 40
    assert scores([post(engine, {"inputs": long}).json()]) == pytest.approx(
        engine.predict([long]).probabilities, abs=1e-6
    )
    refused = post(engine, {"inputs": ["cash", long], "truncate": False})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")
    assert "longer than 23 tokens" in refused.json()["error"]


# Wrong requests


@pytest.mark.parametrize(
    ("body", "status", "kind", "says"),
    [
        (b"{", 400, "Validation", "no JSON"),
        (b"[" * 100_000, 400, "Validation", "recursion limit"),
        (b'{"inputs": "\\ud800 zebra"}', 400, "Validation", "no JSON"),
        (b'"zebra"', 422, "Validation", "the body"),
        (b'{"zebra": 1}', 422, "Validation", "inputs: field required"),
        (b'{"inputs": "  "}', 400, "Empty", "white space"),
        (b'{"inputs": []}', 400, "Empty", "empty"),
        (b'{"inputs": ["cash", ""]}', 400, "Empty", "white space"),
        (b'{"inputs": ["zebra", 5]}', 422, "Validation", "inputs must be"),
        (b'{"inputs": [["zebra", "zebra", "zebra"]]}', 422, "Validation", "inputs must be"),
        (b'{"inputs": null}', 422, "Validation", "inputs must be"),
        (b'{"inputs": "zebra", "budget": 1.5}', 422, "Validation", "budget: input should be less"),
        (b'{"inputs": "zebra", "budget": "zebra"}', 422, "Validation", "budget: input should be a valid number"),
        (b'{"inputs": "zebra", "budget": NaN}', 422, "Validation", "budget"),
        (b'{"inputs": "zebra", "budgett": 1}', 422, "Validation", "budgett: extra"),
        (b'{"inputs": ["a","a","a","a","a","a"]}', 422, "Validation", "at most 5"),
    ],
)
def test_a_wrong_request_is_refused_without_quoting_it(engine, body, status, kind, says):
    async def scenario():
        async with serving(engine, limits=Limits(texts=5)) as (client, _, backend):
            answered = await client.post("/predict", content=body, headers={"content-type": "application/json"})
            return answered, backend.batches

    answered, batches = asyncio.run(scenario())
    assert answered.status_code == status, answered.text
    assert answered.json()["error_type"] == kind
    assert says in answered.json()["error"]
    assert SECRET not in answered.json()["error"].replace("zebra: extra", "")
    assert not batches


def test_only_json_is_read(engine):
    async def scenario():
        async with serving(engine) as (client, _, _):
            body = json.dumps({"inputs": "cash"})
            kinds = ("text/json", "application/jsonl", "application/json; charset=utf-8", "Application/JSON")
            return [
                (await client.post("/predict", content=body, headers={"content-type": k})).status_code for k in kinds
            ]

    assert asyncio.run(scenario()) == [415, 415, 200, 200]


def test_a_large_body_is_refused_before_it_is_read(engine):
    async def endless():
        for _ in range(10_000):
            sent.append(1)
            yield b"x" * 100

    sent = []

    async def scenario():
        async with serving(engine, limits=Limits(body=1000)) as (client, _, _):
            told = await client.post("/predict", json={"inputs": "a" * 1000})
            chunked = await client.post("/predict", content=endless(), headers={"content-type": "application/json"})
            fits = await client.post("/predict", json={"inputs": "a" * 900})
            return told.status_code, chunked.status_code, fits.status_code

    assert asyncio.run(scenario()) == (413, 413, 200)
    assert len(sent) < 20


def test_a_body_that_does_not_come_is_given_up(engine):
    async def scenario():
        async with serving(engine, limits=Limits(seconds=0.05)) as (client, _, _):

            async def slow():
                yield b"{"
                await asyncio.sleep(30)

            return await client.post("/predict", content=slow(), headers={"content-type": "application/json"})

    assert asyncio.run(scenario()).status_code == 408


# Foreign pages


NAMED = ["models.example.org", " Models.Example.NET ", "fd00::1"]


def test_a_server_of_this_machine_alone_goes_by_its_own_names():
    local = {"localhost", "127.0.0.1", "::1"}
    assert hosts_of("127.0.0.1", "127.0.0.1", None) == local
    assert hosts_of("::1", "localhost", None) == local
    assert hosts_of("127.0.0.2", "Box", None) == {*local, "127.0.0.2", "box"}
    assert hosts_of("127.0.0.1", "127.0.0.1", ",".join(NAMED)) == {
        *local,
        *("models.example.org", "models.example.net", "fd00::1"),
    }
    assert hosts_of("0.0.0.0", "0.0.0.0", None) is None
    assert hosts_of("::", "::", None) is None
    assert hosts_of("10.0.0.7", "10.0.0.7", "box") == {*local, "box"}


@pytest.mark.parametrize("named", ["http://box", "box:80", "box/", "a,,b", "[::1]", "*", "a b", ".box", "b\nx", ","])
def test_what_is_no_name_of_a_host_is_refused(named):
    with pytest.raises(UsageError, match="names of hosts with commas between") as refused:
        hosts_of("127.0.0.1", "127.0.0.1", named)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("host", "through"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("127.0.0.1:1", True),
        ("[::1]", True),
        ("[::1]:8000", True),
        ("models.example.org:443", True),
        ("attacker.example", False),
        ("localhost.attacker.example:8000", False),
        ("attacker.example:127.0.0.1", False),
        ("localhost@attacker.example", False),
        ("127.0.0.1.attacker.example", False),
        ("[::1].attacker.example", False),
        ("127.0.0.2", False),
        ("::1", False),
        ("localhost:", True),
        ("localhost:x", False),
        (" ", False),
        ("", False),
    ],
)
def test_a_request_for_another_name_is_refused(engine, host, through):
    async def scenario():
        hosts = hosts_of("127.0.0.1", "127.0.0.1", "models.example.org")
        async with serving(engine, hosts=hosts) as (client, _, backend):
            client.headers["host"] = host
            answers = [await client.get(path) for path in ("/", "/health", "/info", "/metrics", "/openapi.json")]
            answers += [await client.post("/predict", json={"inputs": "cash"})]
            answers += [await client.post("/inspect", json={"text": "cash"})]
            return answers, backend.batches

    answers, batches = asyncio.run(scenario())
    assert {answered.status_code for answered in answers} == {200 if through else 421}
    assert bool(batches) == through
    if not through:
        assert all(answered.json()["error_type"] == "Validation" for answered in answers)
        assert all("--allow-host" in answered.json()["error"] for answered in answers)


def test_a_request_without_a_name_is_refused_where_names_are_asked_for(engine):
    async def scenario(hosts):
        async with serving(engine, hosts=hosts) as (client, _, _):
            sent = []

            async def send(message):
                sent.append(message)

            scope = {"type": "http", "method": "GET", "path": "/health", "headers": [], "query_string": b""}
            await client._transport.app(scope, None, send)
            return sent[0]["status"]

    assert asyncio.run(scenario(frozenset({"localhost"}))) == 421
    assert asyncio.run(scenario(None)) == 200


def test_no_foreign_page_can_post(engine):
    """What a browser sends without asking first is refused; and when it asks, nothing is allowed."""
    simple = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=application/json", None)
    simple += ("text/plain; application/json", "text/plain;charset=application/json")
    bodies = {
        "/predict": {"inputs": "cash"},
        "/inspect": {"text": "cash"},
        "/v2/models/tiny/infer": {"inputs": [tensor(["cash"])]},
    }
    asked = {
        "origin": "https://attacker.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }

    async def scenario():
        async with serving(engine) as (client, _, backend):
            posted, preflights = [], []
            for path, body in bodies.items():
                for kind in simple:
                    headers = {"origin": "https://attacker.example"} | ({"content-type": kind} if kind else {})
                    posted.append(await client.post(path, content=json.dumps(body), headers=headers))
                preflights.append(await client.options(path, headers=asked))
            before = len(backend.batches)
            posted_well = [await client.post(path, json=body) for path, body in bodies.items()]
            return posted, preflights, before, posted_well

    posted, preflights, before, posted_well = asyncio.run(scenario())
    assert [answered.status_code for answered in posted] == [415] * len(simple) * len(bodies)
    assert before == 0
    assert [answered.status_code for answered in preflights] == [405] * len(bodies)
    for answered in (*posted, *preflights, *posted_well):
        assert not [name for name in answered.headers if name.startswith("access-control")]
    assert [answered.status_code for answered in posted_well] == [200] * len(bodies)


# The key


def test_the_key_is_asked_of_all_but_the_page_and_the_health(engine):
    async def scenario():
        async with serving(engine, key="right") as (client, _, _):
            found = {}
            for key in (None, "Bearer wrong", "Bearer righ", "Bearer rightt", "right", "Bearer right"):
                client.headers = {} if key is None else {"authorization": key}
                answers = [await client.post("/predict", json={"inputs": "cash"})]
                answers += [await client.get(path) for path in ("/info", "/metrics", "/v2", "/openapi.json")]
                found[key] = {answered.status_code for answered in answers}
            client.headers = {}
            open_ = [await client.get(path) for path in ("/", "/page.js", "/style.css", "/health", "/v2/health/ready")]
            return found, {answered.status_code for answered in open_}

    found, open_ = asyncio.run(scenario())
    assert found.pop("Bearer right") == {200}
    assert all(statuses == {401} for statuses in found.values())
    assert open_ == {200}


# The queue


def waiting(engine, tasks, **options):
    """Start a request, hold its batch in the engine, put others behind it, then let go: answers, service, backend."""

    async def scenario():
        async with serving(engine, **options) as (client, service, backend):
            backend.open.clear()
            first = asyncio.create_task(client.post("/predict", json={"inputs": "cash"}))
            while not backend.batches:
                await asyncio.sleep(0.001)
            others = []
            for body in tasks:
                others.append(asyncio.create_task(client.post("/predict", json=body)))
                await asyncio.sleep(0.01)
            backend.open.set()
            return await asyncio.gather(first, *others), service, backend

    return asyncio.run(scenario())


def test_what_waits_is_computed_together_up_to_a_number_of_tokens(engine):
    lengths = [len(tokens_of(engine)(text)) for text in TEXTS]
    answers, _, backend = waiting(engine, [{"inputs": text} for text in TEXTS], batch_tokens=sum(lengths[:3]))
    assert backend.lengths == [[3], lengths[:3], lengths[3:]]
    expected = engine.predict(["cash", *TEXTS]).probabilities
    assert scores([answered.json() for answered in answers]) == pytest.approx(expected, abs=1e-6)


def test_named_and_learned_budgets_are_not_mixed_in_a_batch(engine):
    bodies = [
        {"inputs": "top up"},
        {"inputs": "cash", "budget": 0.2},
        {"inputs": "card", "budget": 1.0},
        {"inputs": "pay"},
    ]
    answers, _, backend = waiting(engine, bodies)
    assert [len(lengths) for lengths in backend.lengths] == [1, 1, 2, 1]
    assert [arrays.get("budget", np.zeros(0)).tolist() for arrays in backend.batches] == [[], [], [0.2, 1.0], []]
    assert [answered.headers["x-budget"] for answered in answers[1:]] == ["learned", "0.2", "1.0", "learned"]


def test_the_budget_follows_the_load(engine):
    size = len(tokens_of(engine)("cash"))
    answers, service, _ = waiting(engine, [{"inputs": "cash"}] * 7, budget="0.2:1.0", batch_tokens=size)
    used = [float(answered.headers["x-budget"]) for answered in answers]
    # Alone; then six, five, ... more behind it, each a batch's worth, and the lowest is reached at four.
    assert used == pytest.approx([1.0, 0.2, 0.2, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert service.queue.budget == pytest.approx(1.0)


def test_a_full_queue_answers_429_and_says_when_to_come_back(engine):
    size = len(tokens_of(engine)("cash"))
    answers, service, _ = waiting(engine, [{"inputs": "cash"}] * 5, queue_tokens=3 * size)
    assert [answered.status_code for answered in answers] == [200, 200, 200, 200, 429, 429]
    refused = answers[-1]
    assert refused.json()["error_type"] == "Overloaded"
    assert int(refused.headers["retry-after"]) >= 1
    assert (len(service.queue), service.queue.waiting_tokens) == (0, 0)


def test_a_request_larger_than_the_queue_is_taken_when_nothing_waits(engine):
    assert post(engine, {"inputs": TEXTS}, queue_tokens=1).status_code == 200


def test_so_many_requests_are_in_progress_and_no_more(engine):
    answers, _, _ = waiting(engine, [{"inputs": "cash"}] * 4, limits=Limits(requests=3))
    assert [answered.status_code for answered in answers] == [200, 200, 200, 429, 429]


def test_what_cannot_be_answered_in_time_is_refused_at_once(engine):
    async def scenario():
        async with serving(engine, limits=Limits(seconds=5)) as (client, service, backend):
            service.queue._pace = 10.0  # seconds a token
            backend.ready = False
            first = asyncio.create_task(client.post("/predict", json={"inputs": "cash"}))
            await asyncio.sleep(0.02)
            second = await client.post("/predict", json={"inputs": "cash"})
            backend.ready = True
            return (await first).status_code, second.status_code, int(second.headers["retry-after"])

    assert asyncio.run(scenario()) == (200, 429, 30)


def test_what_takes_too_long_is_answered_503_and_not_computed(engine):
    async def scenario():
        async with serving(engine, limits=Limits(seconds=0.05)) as (client, service, backend):
            backend.ready = False
            answered = await client.post("/predict", json={"inputs": TEXTS})
            left = len(service.queue)
            backend.ready = True
            await asyncio.sleep(0.05)
            return answered, left, backend.batches

    answered, left, batches = asyncio.run(scenario())
    assert (answered.status_code, answered.json()["error_type"], left) == (503, "Unhealthy", 0)
    assert not batches


def leaving(gone):
    """A request for all texts, as a server sees it, whose client hangs up when `gone` is set: scope and receive."""
    messages = iter([{"type": "http.request", "body": json.dumps({"inputs": TEXTS}).encode()}])

    async def receive():
        message = next(messages, None)
        if message is None:
            await gone.wait()
            return {"type": "http.disconnect"}
        return message

    headers = [(b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": "/predict", "headers": headers, "query_string": b""}, receive


def test_texts_of_a_client_that_hung_up_are_never_computed(engine):
    async def scenario():
        async with serving(engine) as (client, service, backend):
            app = client._transport.app
            backend.ready = False
            gone, sent = asyncio.Event(), []
            scope, receive = leaving(gone)

            async def send(message):
                sent.append(message["type"] == "http.response.start" and message["status"])

            hung_up = asyncio.create_task(app(scope, receive, send))
            await asyncio.sleep(0.02)
            stayed = asyncio.create_task(client.post("/predict", json={"inputs": "cash"}))
            await asyncio.sleep(0.02)
            before = len(service.queue)
            gone.set()
            await hung_up
            after = len(service.queue)
            backend.ready = True
            return (await stayed).status_code, before, after, backend.lengths, sent[0]

    status, before, after, lengths, hung_up = asyncio.run(scenario())
    assert (status, before, after, hung_up) == (200, 5, 1, 499)
    assert lengths == [[3]]


def test_what_is_left_of_a_request_is_not_computed_when_its_client_hangs_up(engine):
    async def scenario():
        async with serving(engine, batch_tokens=1) as (client, service, backend):
            backend.open.clear()
            gone, statuses = asyncio.Event(), []
            scope, receive = leaving(gone)

            async def send(message):
                statuses.append(message.get("status"))

            request = asyncio.create_task(client._transport.app(scope, receive, send))
            while not backend.batches:
                await asyncio.sleep(0.001)
            before = len(service.queue)
            gone.set()
            await request
            backend.open.set()
            await asyncio.sleep(0.02)
            return before, len(service.queue), len(backend.batches), statuses[0]

    assert asyncio.run(scenario()) == (3, 0, 1, 499)


# Between the two processes


def test_a_frame_is_read_as_it_was_written():
    arrays = {
        "ids": np.arange(5, dtype=np.int32),
        "gates": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
        "logits": np.array([[0.5, -np.inf, 1e-30]], np.float32),
        "share": np.array([1 / 3, 2.0]),
    }
    for frame in (Frame(0.25, arrays), Frame(1.0), Frame(table={"error": "ä", "exit_code": 4}), Frame(2.0, arrays, {})):
        packed = pack(frame)
        assert size_of(packed[: HEAD.size]) == len(packed) - HEAD.size
        found = unpack(packed[: HEAD.size], packed[HEAD.size :])
        assert (found.number, found.table, list(found.arrays)) == (frame.number, frame.table, list(frame.arrays))
        for name, array in frame.arrays.items():
            assert (found.arrays[name].dtype, found.arrays[name].shape) == (array.dtype, array.shape)
            assert (found.arrays[name] == array).all()


@pytest.mark.parametrize("piece", [1, 7, HEAD.size, 30, 1000])
def test_frames_are_found_however_a_pipe_cuts_them(piece):
    async def scenario():
        came = []
        pipes = _Pipes(came.append, lambda: None)
        written = b"".join(pack(Frame(float(n), {"ids": np.arange(n + 1, dtype=np.int32)})) for n in range(5))
        for at in range(0, len(written), piece):
            pipes.pipe_data_received(1, written[at : at + piece])
        return [(frame.number, frame.arrays["ids"].tolist()) for frame in came]

    assert asyncio.run(scenario()) == [(float(n), list(range(n + 1))) for n in range(5)]


# An engine that fails


def fails(engine, errors, bodies):
    async def scenario():
        async with serving(engine) as (client, _, backend):
            backend.ready = False
            tasks = [asyncio.create_task(client.post("/predict", json=body)) for body in bodies]
            await asyncio.sleep(0.02)
            backend.errors, backend.ready = list(errors), True
            return await asyncio.gather(*tasks), backend

    return asyncio.run(scenario())


def test_a_lost_batch_is_tried_again_text_by_text(engine):
    answers, backend = fails(engine, [EngineLost("it ended")], [{"inputs": text} for text in TEXTS])
    assert [answered.status_code for answered in answers] == [200] * 4
    assert [len(lengths) for lengths in backend.lengths] == [4, 1, 1, 1, 1]
    expected = engine.predict(TEXTS).probabilities
    assert scores([answered.json() for answered in answers]) == pytest.approx(expected, abs=1e-6)


def test_a_text_that_ends_the_engine_twice_is_given_up_and_others_are_answered(engine):
    errors = [EngineLost("it ended"), None, EngineLost("it ended")]
    answers, _ = fails(engine, errors, [{"inputs": text} for text in TEXTS])
    assert [answered.status_code for answered in answers] == [200, 503, 200, 200]
    assert answers[1].json()["error_type"] == "Unhealthy"
    assert int(answers[1].headers["retry-after"]) >= 1


def test_a_request_is_given_up_whole(engine):
    errors = [EngineFailed("MemoryError"), EngineFailed("MemoryError")]
    answers, backend = fails(engine, errors, [{"inputs": TEXTS[:3]}, {"inputs": "cash"}])
    assert [answered.status_code for answered in answers] == [424, 200]
    assert answers[0].json() == {"error": "the model failed (MemoryError)", "error_type": "Backend"}
    assert [len(lengths) for lengths in backend.lengths] == [4, 1, 1]


def test_an_answer_that_is_no_number_is_no_answer(engine):
    async def scenario():
        async with serving(engine) as (client, _, backend):
            backend.spoil = True
            return await client.post("/predict", json={"inputs": "cash"})

    answered = asyncio.run(scenario())
    assert (answered.status_code, answered.json()["error_type"]) == (424, "Backend")


def test_health_says_whether_there_is_an_engine(engine):
    async def scenario():
        async with serving(engine) as (client, _, backend):
            paths = ("/health", "/v2/health/ready", "/v2/models/tiny/ready", "/v2/health/live")
            up = [(await client.get(path)).status_code for path in paths]
            backend.ready, backend.restarts = False, 1
            down = [(await client.get(path)).status_code for path in paths]
            told = (await client.get("/metrics")).text
            return up, down, told

    up, down, told = asyncio.run(scenario())
    assert (up, down) == ([200] * 4, [503, 503, 503, 200])
    assert "budgetformer_engine_up 0.0" in told
    assert "budgetformer_engine_restarts_total 1.0" in told


def test_no_text_is_told_when_the_server_itself_fails(engine, monkeypatch, capfd):
    from budgetformer.ports.server import app

    def broken(service, values, top):
        raise ValueError(f"cannot rank {SECRET}")

    monkeypatch.setattr(app, "_ranked", broken)
    said = []
    answered = post(engine, {"inputs": SECRET}, echo=said.append)
    assert (answered.status_code, answered.json()["error"]) == (500, "the server failed (ValueError)")
    assert len(said) == 1
    assert said[0].startswith("a request failed: ValueError in test_server.py, line ")
    assert SECRET not in said[0] + "".join(capfd.readouterr())


# Open Inference Protocol


def infer(engine, inputs, path="/v2/models/tiny/infer", **more):
    return post(engine, {"inputs": inputs, **more}, path)


def tensor(data, name="text", shape=None):
    return {"name": name, "shape": shape or [len(data)], "datatype": "BYTES", "data": data}


def test_inference_by_the_open_protocol(engine):
    answered = infer(engine, [tensor(TEXTS)], id="7", parameters={"budget": 0.4, "other": "left alone"}).json()
    expected = engine.predict(TEXTS, budget=0.4)
    assert (answered["model_name"], answered["id"], answered["parameters"]) == ("tiny", "7", {"budget": 0.4})
    found = {one["name"]: one for one in answered["outputs"]}
    assert found["label"] == {"name": "label", "datatype": "BYTES", "shape": [4], "data": expected.labels}
    assert found["probabilities"]["shape"] == [4, 3]
    assert found["probabilities"]["data"] == pytest.approx(expected.probabilities.ravel().tolist(), abs=1e-6)
    assert found["score"]["data"] == pytest.approx(expected.probabilities.max(1).tolist(), abs=1e-6)
    assert found["units_share"]["data"] == pytest.approx([0.4] * 4)


def test_outputs_are_picked_and_tensors_may_be_nested(engine):
    nested = {**tensor([[text] for text in TEXTS]), "shape": [4, 1]}
    answered = infer(engine, [nested], outputs=[{"name": "label"}]).json()
    assert [one["name"] for one in answered["outputs"]] == ["label"]
    assert answered["outputs"][0]["data"] == engine.predict(TEXTS).labels


def test_pairs_are_two_tensors(engine):
    answered = infer(engine, [tensor(["lost card"]), tensor(["top up"], "text_pair")]).json()
    found = next(one["data"] for one in answered["outputs"] if one["name"] == "probabilities")
    assert found == pytest.approx(engine.predict(["lost card"], ["top up"]).probabilities[0].tolist(), abs=1e-6)


@pytest.mark.parametrize(
    "inputs",
    [
        [],
        [tensor(["a", "b"], shape=[3])],
        [tensor(["a"], "text_pair")],
        [tensor(["a"]), tensor(["a"])],
        [tensor(["a", "b"]), tensor(["a"], "text_pair")],
        [tensor(["a"], "other")],
        [{**tensor(["a"]), "datatype": "FP32"}],
        [{**tensor(["a"]), "data": [1]}],
    ],
)
def test_tensors_that_do_not_fit_are_refused(engine, inputs):
    answered = infer(engine, inputs)
    assert answered.status_code in (400, 422)
    assert set(answered.json()) == {"error", "error_type"}


def test_another_models_name_is_not_found(engine):
    assert infer(engine, [tensor(["a"])], "/v2/models/other/infer").status_code == 404


# What the server says of itself


def test_metrics_count_what_happened(engine):
    async def scenario():
        async with serving(engine, budget="0.4") as (client, _, _):
            await client.post("/predict", json={"inputs": TEXTS})
            await client.post("/predict", json={"inputs": ""})
            await client.get("/" + "x" * 50)
            return (await client.get("/metrics")).text

    told = dict(line.rsplit(" ", 1) for line in asyncio.run(scenario()).splitlines() if not line.startswith("#"))
    assert told['budgetformer_requests_total{route="/predict",status="200"}'] == "1.0"
    assert told['budgetformer_requests_total{route="/predict",status="400"}'] == "1.0"
    assert told['budgetformer_requests_total{route="other",status="404"}'] == "1.0"
    assert told["budgetformer_units_share_count"] == "4.0"
    assert math.isclose(float(told["budgetformer_units_share_sum"]), 1.6, abs_tol=1e-6)
    assert told["budgetformer_budget"] == "0.4"
    assert told["budgetformer_queue_tokens"] == "0.0"
    assert told["budgetformer_engine_seconds_count"] == "1.0"


def test_info_tells_the_model_and_the_limits(engine):
    async def scenario():
        async with serving(engine, budget="0.2:0.8", limits=Limits(texts=7)) as (client, _, _):
            return (await client.get("/info")).json()

    told = asyncio.run(scenario())
    assert told["model_type"]["classifier"]["id2label"] == {str(i): name for i, name in enumerate(tiny.LABELS)}
    assert (told["max_client_batch_size"], told["max_input_length"]) == (7, 23)
    assert (told["layers"], told["heads"], told["blocks"]) == (3, 5, 1)
    assert told["budget"] == {"mode": "load", "low": 0.2, "high": 0.8, "target": 0.4}


def test_inspect_is_what_the_predictor_sees(engine):
    for budget in (None, 0.5):
        seen = Predictor(engine=engine, budget=budget).inspect(TEXTS[3])
        told = post(engine, {"text": TEXTS[3], "budget": budget}, "/inspect").json()
        assert [layer["heads"] for layer in told["layers"]] == seen.gates
        assert told["flops"] / told["flops_dense"] == pytest.approx(seen.flops_share)
        assert told["share"] == pytest.approx(seen.head_share, abs=1e-4)
        assert (told["tokens"], told["truncated"], told["budget"]) == (seen.tokens, False, budget)
        assert [one["label"] for one in told["classes"]] == [label for label, _ in seen.ranked]
        assert told["engine_ms"] > 0


def test_a_text_that_is_looked_at_is_measured_alone(engine):
    async def scenario():
        async with serving(engine) as (client, _, backend):
            backend.ready = False
            tasks = [client.post("/predict", json={"inputs": "cash"}), client.post("/inspect", json={"text": "cash"})]
            tasks = [asyncio.create_task(task) for task in [*tasks, client.post("/predict", json={"inputs": "pay"})]]
            await asyncio.sleep(0.02)
            backend.ready = True
            await asyncio.gather(*tasks)
            return backend.lengths

    assert [len(lengths) for lengths in asyncio.run(scenario())] == [1, 1, 1]


def test_the_page_brings_all_it_needs_and_lets_nothing_else_run(engine):
    async def scenario():
        async with serving(engine) as (client, _, _):
            return [await client.get(path) for path in ("/", "/page.js", "/style.css", "/icon.svg")]

    page, script, style, icon = asyncio.run(scenario())
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert page.headers["x-content-type-options"] == "nosniff"
    for words in ("<style", " style=", " onclick", "javascript:"):
        assert words not in page.text
    assert page.text.count("<script") == page.text.count('<script src="page.js"') == 1
    for file in (page, script, style):
        assert "://" not in file.text
    for words in ("innerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert words not in script.text
    assert icon.headers["content-type"].startswith("image/svg+xml")


def test_the_description_names_every_route(engine):
    async def scenario():
        async with serving(engine) as (client, _, _):
            return (await client.get("/openapi.json")).json()

    told = asyncio.run(scenario())
    assert set(told["paths"]) == {
        *("/predict", "/inspect", "/health", "/info", "/metrics"),
        *("/v2", "/v2/health/live", "/v2/health/ready"),
        *("/v2/models/{name}", "/v2/models/{name}/ready", "/v2/models/{name}/infer"),
    }
    # Every reference leads somewhere.
    names = set(told["components"]["schemas"])
    said = json.dumps(told)
    used = {part.split('"')[0] for part in said.split("#/components/schemas/")[1:]}
    assert used <= names
    assert "#/$defs" not in said


# The command


def test_a_budget_may_be_a_number_in_a_config_file(tmp_path):
    config = tmp_path / "serve.yaml"
    for written, kept in (("0.4", "0.4"), ("1", "1"), ("0.2:1.0", "0.2:1.0"), ("calibrated", "calibrated")):
        config.write_text(f"model: m\nbudget: {written}\n")
        settings, _ = resolve(ServeSettings, {}, config, {})
        assert settings.budget == kept
    with pytest.raises(UsageError, match="a share in \\(0, 1\\], LOW:HIGH, calibrated"):
        resolve(ServeSettings, {"model": "m", "budget": "0.9:0.1"}, None, {})


def test_without_the_extra_one_line_says_which(tmp_path):
    code = (
        "import importlib.util as util, sys; real = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'uvicorn' else real(name, *more)\n"
        "from budgetformer.cli import main; sys.exit(main(['serve', '--model', 'm']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == "budgetformer: serve: uvicorn is not installed; pip install 'budgetformer[server]'\n"


@pytest.mark.parametrize("key", ["two words", "", "schlüssel", "a\nb"])
def test_a_key_that_no_header_can_hold_is_refused(key, monkeypatch, tmp_path):
    file = tmp_path / "key"
    file.write_text(key, encoding="utf-8")
    with pytest.raises(UsageError, match="one word of printable ASCII") as refused:
        serving_command._key(ServeSettings(model="m", api_key_file=str(file)))
    assert not key or key not in str(refused.value)
    monkeypatch.setenv(serving_command.KEY, "right")
    assert serving_command._key(ServeSettings(model="m")) == "right"
