"""Described workloads: seeded generators for the traffic shapes that decide whether a host tier pays.

Every generator is a function of plain numbers and a seed; its ``Trace`` says in ``origin`` how it was made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hicache_lab.base.errors import UsageError
from hicache_lab.traffic.traces.trace import Floats, Ints, Trace


def mooncake_like(requests: int = 12_031, seed: int = 0, requests_per_s: float = 3.4) -> Trace:
    """Conversations fitted to Mooncake's published FAST'25 conversation trace.

    One shared first block, sessions of a geometric number of turns, lognormal lengths and think times, blocks of 512
    tokens, a last partial block that nobody shares, outputs of known length and unknown content, as in the file.
    Published: 12,031 requests, mean input 12,035 tokens, mean output 343, 23.98 blocks a request, ideal hit 0.366.
    """
    block = 512
    again = 0.385  # probability of another turn; with it the number of unique blocks comes out
    rng = np.random.default_rng(seed)
    sessions = max(1, round(requests * (1 - again)))
    turns = rng.geometric(1 - again, sessions)
    first, session = _first_of(turns)
    count = first.size
    output = np.minimum(rng.exponential(343.0, count) + 1, 2000).astype(np.int64)
    new = np.where(first, rng.lognormal(8.50, 1.255, count), rng.lognormal(4.7, 2.3, count)).astype(np.int64) + 400
    inputs = np.minimum(_cumulative_inputs(new, output, first), 128_000)
    start = np.cumsum(rng.exponential(requests / requests_per_s / sessions, sessions))
    gaps = np.where(first, 0.0, rng.lognormal(np.log(123.0), 1.07, count))
    return _from_sessions(
        session=session,
        inputs=inputs,
        outputs=output,
        arrival=start[session] + _within_session(gaps, first),
        shared_blocks=np.ones(count, np.int64),
        group=np.zeros(count, np.int64),
        block=block,
        partial_tails=True,
        origin=f"generated: mooncake_like seed {seed}",
    )


def multi_turn(
    sessions: int = 500,
    turns: float = 6.0,
    first_tokens: int = 1500,
    turn_tokens: int = 300,
    output_tokens: int = 300,
    system_prompts: int = 4,
    system_tokens: int = 512,
    think_s: float = 60.0,
    sessions_per_s: float = 0.5,
    block_tokens: int = 64,
    seed: int = 0,
) -> Trace:
    """Chats: each turn sends the whole history again; sessions share one of a few system prompts."""
    rng = np.random.default_rng(seed)
    lengths = rng.geometric(1 / max(turns, 1.0), sessions)
    first, session = _first_of(lengths)
    count = first.size
    output = _lognormal(rng, output_tokens, 0.6, count)
    new = np.where(first, _lognormal(rng, first_tokens, 0.8, count), _lognormal(rng, turn_tokens, 0.8, count))
    group = _popular(rng, system_prompts, sessions)[session]
    gaps = np.where(first, 0.0, rng.lognormal(np.log(max(think_s, 1e-9)), 0.8, count))
    shared = max(system_tokens // block_tokens, 0)
    start = np.cumsum(rng.exponential(1 / sessions_per_s, sessions))
    return _from_sessions(
        session=session,
        inputs=_cumulative_inputs(new, output, first) + shared * block_tokens,
        outputs=output,
        arrival=start[session] + _within_session(gaps, first),
        shared_blocks=np.full(count, shared, np.int64),
        group=group,
        block=block_tokens,
        origin=f"generated: multi_turn seed {seed}",
    )


def agentic(
    sessions: int = 300,
    steps: float = 20.0,
    tools: int = 3,
    tools_tokens: int = 4096,
    task_tokens: int = 800,
    observation_tokens: int = 600,
    output_tokens: int = 150,
    tool_s: float = 4.0,
    sessions_per_s: float = 0.2,
    block_tokens: int = 64,
    seed: int = 0,
) -> Trace:
    """Tool loops: a long shared tool prompt, many short steps, each sending the whole transcript again."""
    made = multi_turn(
        sessions=sessions,
        turns=steps,
        first_tokens=task_tokens,
        turn_tokens=observation_tokens,
        output_tokens=output_tokens,
        system_prompts=tools,
        system_tokens=tools_tokens,
        think_s=tool_s,
        sessions_per_s=sessions_per_s,
        block_tokens=block_tokens,
        seed=seed,
    )
    return _renamed(made, f"generated: agentic seed {seed}")


def shared_system_prompt(
    requests: int = 5000,
    system_prompts: int = 20,
    system_tokens: int = 2048,
    user_tokens: int = 500,
    output_tokens: int = 200,
    requests_per_s: float = 5.0,
    block_tokens: int = 64,
    seed: int = 0,
) -> Trace:
    """Single-turn traffic behind some system prompts of unequal popularity."""
    made = multi_turn(
        sessions=requests,
        turns=1.0,
        first_tokens=user_tokens,
        output_tokens=output_tokens,
        system_prompts=system_prompts,
        system_tokens=system_tokens,
        sessions_per_s=requests_per_s,
        block_tokens=block_tokens,
        seed=seed,
    )
    return _renamed(made, f"generated: shared_system_prompt seed {seed}")


def rag(
    requests: int = 4000,
    documents: int = 2000,
    documents_per_request: int = 4,
    document_tokens: int = 1024,
    system_tokens: int = 512,
    question_tokens: int = 128,
    output_tokens: int = 200,
    skew: float = 1.1,
    requests_per_s: float = 3.0,
    block_tokens: int = 64,
    seed: int = 0,
) -> Trace:
    """Retrieval: a system prompt, then popular documents in order of retrieval, then a question of its own.

    A document's KV is reusable only behind the same documents before it: position is part of a prefix.
    """
    rng = np.random.default_rng(seed)
    document = max(document_tokens // block_tokens, 1)
    system = max(system_tokens // block_tokens, 1)
    question = max(question_tokens // block_tokens, 1)
    weights = 1.0 / np.arange(1, documents + 1) ** skew
    chosen = rng.choice(documents, (requests, documents_per_request), p=weights / weights.sum())
    bodies = (system + chosen[:, :, None] * document + np.arange(document)).reshape(requests, -1)
    heads = np.broadcast_to(np.arange(system), (requests, system))
    own = system + documents * document + np.arange(requests * question).reshape(requests, question)
    contents = np.concatenate([heads, bodies, own], axis=1)
    made = Trace.build(
        contents.ravel(),
        np.arange(requests + 1, dtype=np.int64) * contents.shape[1],
        block_tokens=block_tokens,
        input_tokens=np.full(requests, contents.shape[1] * block_tokens, np.int64),
        output_tokens=_lognormal(rng, output_tokens, 0.6, requests),
        arrival_s=np.cumsum(rng.exponential(1 / requests_per_s, requests)),
    )
    return _renamed(made, f"generated: rag seed {seed}")


def cyclic_scan(
    items: int = 50, item_tokens: int = 4096, rounds: int = 4, block_tokens: int = 64, seed: int = 0
) -> Trace:
    """The same prompts over and over in the same order: LRU gains nothing until all of them fit, then everything.

    ``seed`` changes nothing here; it is taken so that all generators can be called alike.
    """
    blocks = max(item_tokens // block_tokens, 1)
    order = np.tile(np.arange(items), rounds)
    ids = (order[:, None] * blocks + np.arange(blocks)).ravel()
    made = Trace.build(
        ids,
        np.arange(order.size + 1, dtype=np.int64) * blocks,
        block_tokens=block_tokens,
        input_tokens=np.full(order.size, blocks * block_tokens, np.int64),
    )
    return _renamed(made, f"generated: cyclic_scan {items} items (seed {seed} not used)")


def bench_multiturn(
    clients: int = 80,
    rounds: int = 10,
    request_tokens: int = 2048,
    output_tokens: int = 1,
    question_tokens: int = 0,
    max_parallel: int = 4,
    barrier: bool = False,
    outputs_reused: bool = False,
    block_tokens: int = 64,
    seed: int = 1,
) -> Trace:
    """The request stream of SGLang's ``benchmark/hicache/bench_multiturn.py``.

    Clients send ``rounds`` prompts, each the whole history plus ``question_tokens`` (0: ``request_tokens``) new ones;
    a ready client is drawn at random, ``max_parallel`` are under way, the oldest finishes first. With ``barrier``
    everybody finishes a round before anybody starts the next. The client sends text, and an answer's text does not
    give the same tokens again: its published hit rates are those of prompts alone, unless ``outputs_reused``.
    """
    rng = np.random.default_rng(seed)
    new = question_tokens or request_tokens
    order = _client_order(rng, clients, rounds, max_parallel, barrier)
    round_of = np.zeros(order.size, np.int64)
    rounds_sent = np.zeros(clients, np.int64)
    for index, client in enumerate(order.tolist()):
        round_of[index] = rounds_sent[client]
        rounds_sent[client] += 1
    inputs = request_tokens + round_of * (output_tokens + new)
    return _from_sessions(
        session=order,
        inputs=inputs,
        outputs=np.full(order.size, output_tokens, np.int64),
        arrival=None,
        shared_blocks=np.zeros(order.size, np.int64),
        group=np.zeros(order.size, np.int64),
        block=block_tokens,
        outputs_known=outputs_reused,
        origin=f"generated: bench_multiturn seed {seed}",
    )


GENERATORS: Mapping[str, Callable[..., Trace]] = {
    maker.__name__: maker
    for maker in (mooncake_like, multi_turn, agentic, shared_system_prompt, rag, cyclic_scan, bench_multiturn)
}


def generate(name: str, **parameters: Any) -> Trace:
    """Call a generator by name with checked parameters; text values (from a command line) are converted.

    Raises:
        UsageError: an unknown generator or parameter, or a value of the wrong type.
    """
    if name not in GENERATORS:
        raise UsageError(f"--generate: expected one of {', '.join(GENERATORS)}, got {name!r}")
    accepted = inspect.signature(GENERATORS[name]).parameters
    values = {}
    for key, value in parameters.items():
        if key not in accepted:
            raise UsageError(f"--param {key}: {name} takes {', '.join(accepted)}")
        kind = type(accepted[key].default)
        try:
            values[key] = _converted(value, kind)
        except ValueError:
            raise UsageError(f"--param {key}: expected {kind.__name__}, got {value!r}") from None
        _check_range(key, values[key])
    try:
        return GENERATORS[name](**values)
    except (MemoryError, OverflowError):
        raise UsageError(f"--generate {name}: a trace of that size does not fit into memory; ask for less") from None


_MAY_BE_ZERO = ("seed", "system_tokens", "question_tokens", "think_s", "tool_s", "skew", "output_tokens")


def _check_range(key: str, value: Any) -> None:
    if isinstance(value, bool):
        return
    if key in _MAY_BE_ZERO:
        if not 0 <= value < np.inf:
            raise UsageError(f"--param {key}: expected a number of at least 0, got {value!r}")
    elif not 0 < value < np.inf:
        least = "at least 1" if isinstance(value, int) else "a number above 0"
        raise UsageError(f"--param {key}: expected {least}, got {value!r}")


def _converted(value: Any, kind: type) -> Any:
    """A parameter's value of its own kind; text is converted.

    Raises:
        ValueError: it is of another kind.
    """
    if not isinstance(value, str):
        if isinstance(value, kind) or (kind is float and isinstance(value, int)):
            return value
        raise ValueError
    if kind is not bool:
        return kind(value.replace("_", "").replace(",", ""))
    if value.lower() not in ("true", "false", "1", "0"):
        raise ValueError
    return value.lower() in ("true", "1")


def _renamed(trace: Trace, origin: str) -> Trace:
    return replace(trace, origin=origin, notes=())


def _lognormal(rng: np.random.Generator, mean: float, sigma: float, count: int) -> Ints:
    """Lengths of at least 1 whose expectation is ``mean``."""
    return np.maximum(rng.lognormal(np.log(max(mean, 1)) - sigma**2 / 2, sigma, count), 1).astype(np.int64)


def _popular(rng: np.random.Generator, groups: int, count: int) -> Ints:
    """Draw groups of Zipf-like popularity."""
    weights = 1.0 / np.arange(1, max(groups, 1) + 1)
    return rng.choice(max(groups, 1), count, p=weights / weights.sum()).astype(np.int64)


def _first_of(turns: Ints) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], Ints]:
    """Flat turns of sessions: which ones open a session, and whose they are."""
    first = np.zeros(int(turns.sum()), bool)
    first[np.concatenate(([0], np.cumsum(turns)[:-1]))] = True
    return first, np.cumsum(first) - 1


def _cumulative_inputs(new: Ints, output: Ints, first: np.ndarray[Any, np.dtype[np.bool_]]) -> Ints:
    """Prompt lengths when every turn sends the history (prompts and outputs) and ``new`` tokens."""
    added = new.copy()
    added[1:] += np.where(first[1:], 0, output[:-1])
    total = np.cumsum(added)
    starts = np.flatnonzero(first)
    before = np.repeat(total[starts] - added[starts], np.diff(np.concatenate((starts, [first.size]))))
    return total - before


def _within_session(gaps: Floats, first: np.ndarray[Any, np.dtype[np.bool_]]) -> Floats:
    """Time since a session's start, from the gaps before each turn."""
    total = np.cumsum(gaps)
    starts = np.flatnonzero(first)
    return total - np.repeat(total[starts], np.diff(np.concatenate((starts, [first.size]))))


def _client_order(rng: np.random.Generator, clients: int, rounds: int, parallel: int, barrier: bool) -> Ints:
    if barrier:
        return np.concatenate([rng.permutation(clients) for _ in range(rounds)]).astype(np.int64)
    ready = list(range(clients))
    under_way: list[int] = []
    left = [rounds] * clients
    order = []
    while ready or under_way:
        if ready and len(under_way) < max(parallel, 1):
            client = ready.pop(int(rng.integers(len(ready))))
            under_way.append(client)
            order.append(client)
            left[client] -= 1
        else:
            done = under_way.pop(0)
            if left[done]:
                ready.append(done)
    return np.array(order, np.int64)


def _from_sessions(
    *,
    session: Ints,
    inputs: Ints,
    outputs: Ints,
    arrival: Floats | None,
    shared_blocks: Ints,
    group: Ints,
    block: int,
    origin: str,
    partial_tails: bool = False,
    outputs_known: bool | None = None,
) -> Trace:
    """Lay out block ids of sessions that grow: shared prefix of the group, then the session's own blocks.

    With ``partial_tails`` the trace is as Mooncake's (prompts only, the last partial block has an id of its own);
    otherwise whole blocks of prompt and stored output get ids.
    """
    from hicache_lab.traffic.traces import _loops

    order = np.arange(session.size) if arrival is None else np.argsort(arrival, kind="stable")
    session, inputs, outputs = session[order], inputs[order], outputs[order]
    shared, group = shared_blocks[order], group[order]
    known = not partial_tails if outputs_known is None else outputs_known
    stored = inputs + np.maximum(outputs - 1, 0) if known else inputs
    whole = stored // block
    tails = np.where((inputs % block > 0) & partial_tails, 1, 0)
    lengths = whole + tails
    most = np.zeros(int(session.max()) + 1, np.int64)
    np.maximum.at(most, session, np.maximum(whole - shared, 0))
    group_size = int(shared.max(initial=0))
    base = group_size * (int(group.max(initial=0)) + 1)
    private = base + np.concatenate(([0], np.cumsum(most)[:-1]))
    tail_ids = np.where(tails > 0, base + int(most.sum()) + np.cumsum(tails) - 1, -1)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    ids = np.empty(int(offsets[-1]), np.uint32)
    _loops.fill_requests(ids, offsets, shared, group * group_size, private[session], tail_ids)
    return Trace(
        ids=ids,
        offsets=offsets,
        prompt_blocks=lengths if partial_tails else inputs // block,
        input_tokens=inputs,
        output_tokens=outputs,
        unique_blocks=base + int(most.sum()) + int(tails.sum()),
        block_tokens=block,
        arrival_s=None if arrival is None else arrival[order],
        outputs_known=known,
        origin=origin,
    )
