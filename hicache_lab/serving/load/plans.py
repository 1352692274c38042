"""What to send: seeded plans of prompts that touch a cache in known ways.

A plan is a list of phases, one after the other; a phase is a list of sessions, which run side by side; a
session is a list of turns, each waiting for the answer before. The same seed gives the same prompts, token
for token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

from hicache_lab.base.errors import UsageError

if TYPE_CHECKING:
    from hicache_lab.traffic.traces import Trace

Form = Literal["ids", "text"]
Tokens = tuple[int, ...]
ID_RANGE = (10, 500)  # ordinary tokens in any vocabulary of 500 or more
_WORDS = "cache host device page token layer rank prefix prompt batch queue tier".split()


@dataclass(frozen=True)
class Turn:
    """New prompt tokens (or words) of one turn, and how long an answer to ask for."""

    tokens: Tokens
    max_new_tokens: int


@dataclass(frozen=True)
class Session:
    """Turns one after the other.

    Attributes:
        turns: each turn's prompt is the whole conversation so far, answers included, and its own tokens.
        at_s: when it starts after the phase did (trace replay), or None.
    """

    turns: tuple[Turn, ...]
    at_s: float | None = None


@dataclass(frozen=True)
class Phase:
    """Sessions that run side by side; the next phase waits until all have ended."""

    name: str
    sessions: tuple[Session, ...]


@dataclass(frozen=True)
class Plan:
    """A named, seeded plan.

    Attributes:
        name: what kind it is.
        seed: of its random numbers.
        phases: in order.
        form: prompts as token ids, or as text with about one word a token.
        parameters: what it was made from, for the record.
    """

    name: str
    seed: int
    phases: tuple[Phase, ...]
    form: Form = "ids"
    parameters: Mapping[str, int | float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.form not in {"ids", "text"}:
            raise UsageError(f"form: expected ids or text, got {self.form!r}")

    @property
    def requests(self) -> int:
        """Prompts in all phases."""
        return sum(len(session.turns) for phase in self.phases for session in phase.sessions)


def as_text(tokens: Sequence[int]) -> str:
    """Tokens as words, the same words for the same tokens."""
    return "".join(f" {_WORDS[token % len(_WORDS)]}{token}" for token in tokens)


def multi_turn(
    *,
    seed: int,
    conversations: int,
    turns: int,
    first_tokens: int,
    turn_tokens: int,
    answer_tokens: int,
    system_tokens: int = 0,
    form: Form = "ids",
) -> Plan:
    """Conversations that grow: every turn sends all that was said before.

    Args:
        seed: of the prompts.
        conversations: how many.
        turns: in each.
        first_tokens: the first message.
        turn_tokens: every later message.
        answer_tokens: every answer.
        system_tokens: a prefix that all conversations share.
        form: ids or text.
    """
    parameters = _recorded(locals(), "conversations", "turns", "first_tokens", "turn_tokens")
    draw = _Drawer(seed)
    system = draw(system_tokens)
    sessions = tuple(
        Session(
            tuple(
                Turn((system + draw(first_tokens)) if turn == 0 else draw(turn_tokens), answer_tokens)
                for turn in range(turns)
            )
        )
        for _ in range(conversations)
    )
    return Plan("multi_turn", seed, (Phase("conversations", sessions),), form, parameters)


def rounds(
    *,
    seed: int,
    conversations: int,
    turns: int,
    first_tokens: int,
    turn_tokens: int,
    answer_tokens: int,
    form: Form = "ids",
) -> Plan:
    """Conversations that take turns: each has its turn before any of them comes back, as users do who read and type.

    One session at a time sends them in an order that is known, so a cache of a known size forgets a known part of them.
    Answers are not sent back: a turn is what was said before and something new.

    Args:
        seed: of the prompts.
        conversations: how many.
        turns: of each; one phase a turn.
        first_tokens: the first message.
        turn_tokens: every later message.
        answer_tokens: every answer.
        form: ids or text.
    """
    parameters = _recorded(locals(), "conversations", "turns", "first_tokens", "turn_tokens")
    draw = _Drawer(seed)
    whole_prompts = [draw(first_tokens + (turns - 1) * turn_tokens) for _ in range(conversations)]
    phases = tuple(
        Phase(
            f"turn {turn + 1}",
            tuple(
                Session((Turn(tokens[: first_tokens + turn * turn_tokens], answer_tokens),)) for tokens in whole_prompts
            ),
        )
        for turn in range(turns)
    )
    return Plan("rounds", seed, phases, form, parameters)


def shared_prefix(
    *,
    seed: int,
    groups: int,
    prompts_per_group: int,
    prefix_tokens: int,
    suffix_tokens: int,
    answer_tokens: int,
    form: Form = "ids",
) -> Plan:
    """Groups of prompts with a common beginning (system prompts, documents), in mixed order."""
    parameters = _recorded(locals(), "groups", "prompts_per_group", "prefix_tokens")
    draw = _Drawer(seed)
    prefixes = [draw(prefix_tokens) for _ in range(groups)]
    sessions = [
        Session((Turn(prefix + draw(suffix_tokens), answer_tokens),))
        for prefix in prefixes
        for _ in range(prompts_per_group)
    ]
    draw.random.shuffle(sessions)
    return Plan("shared_prefix", seed, (Phase("prompts", tuple(sessions)),), form, parameters)


def random_prompts(*, seed: int, prompts: int, prompt_tokens: int, answer_tokens: int, form: Form = "ids") -> Plan:
    """Prompts that share nothing: what a cache cannot help with."""
    parameters = _recorded(locals(), "prompts", "prompt_tokens")
    draw = _Drawer(seed)
    sessions = tuple(Session((Turn(draw(prompt_tokens), answer_tokens),)) for _ in range(prompts))
    return Plan("random", seed, (Phase("prompts", sessions),), form, parameters)


def write_evict_read(
    *,
    seed: int,
    prompts: int,
    prompt_tokens: int,
    answer_tokens: int,
    evict_tokens: int,
    form: Form = "ids",
) -> Plan:
    """Write prompts, push them off the device with others, and read them again: where are they found?

    Args:
        seed: of the prompts.
        prompts: written and read again.
        prompt_tokens: length of each.
        answer_tokens: length of the answers.
        evict_tokens: distinct tokens between writing and reading; above the device pool everything must have
            left it.
        form: ids or text.
    """
    parameters = _recorded(locals(), "prompts", "prompt_tokens", "evict_tokens")
    draw = _Drawer(seed)
    written = tuple(Session((Turn(draw(prompt_tokens), answer_tokens),)) for _ in range(prompts))
    fillers = -(-evict_tokens // prompt_tokens)
    evicting = tuple(Session((Turn(draw(prompt_tokens), answer_tokens),)) for _ in range(fillers))
    phases = (Phase("write", written), Phase("evict", evicting), Phase("read", written))
    return Plan("write_evict_read", seed, phases, form, parameters)


def plan_of(name: str, seed: int, parameters: Mapping[str, Any]) -> Plan:
    """Make a plan again from what a result recorded of it.

    Raises:
        UsageError: a replayed trace, which the record does not hold.
    """
    makers: dict[str, Callable[..., Plan]] = {
        "multi_turn": multi_turn,
        "rounds": rounds,
        "shared_prefix": shared_prefix,
        "random": random_prompts,
        "write_evict_read": write_evict_read,
    }
    if name not in makers:
        raise UsageError(f"plan {name}: cannot be made again from its seed; expected one of {', '.join(makers)}")
    names = signature(makers[name]).parameters
    return makers[name](seed=seed, **{name: value for name, value in parameters.items() if name in names})


def warmup_plan(plan: Plan, count: int) -> Plan:
    """Short prompts that share nothing with the plan's."""
    return random_prompts(seed=-1 - plan.seed, prompts=count, prompt_tokens=16, answer_tokens=4, form=plan.form)


def trace_replay(
    trace: Trace,
    requests: int | None = None,
    *,
    seed: int,
    shrink: float = 1.0,
    speed: float = 1.0,
    most_prompt_tokens: int | None = None,
    most_answer_tokens: int | None = None,
    form: Form = "ids",
) -> Plan:
    """Replay a trace: real arrivals and real sharing, tokens made up from the block ids.

    Args:
        trace: with prefix blocks by id, equal ids meaning equal tokens.
        requests: the first so many of it; None: all. Arrivals are counted from the first.
        seed: of the tokens; a block id gives the same tokens wherever it appears.
        shrink: replay blocks and answers this many times shorter, for a small server; sharing stays as it is.
        speed: replay arrivals this many times faster.
        most_prompt_tokens: cut prompts here (the server's context), whole blocks only.
        most_answer_tokens: cut answers here.
        form: ids or text.

    Raises:
        InputError: the trace holds lengths only, so nobody knows which prompts share a prefix.
    """
    if shrink < 1 or speed <= 0:
        raise UsageError("trace replay: expected shrink >= 1 and speed > 0")
    trace.require_prefixes("a replay")
    head = trace if requests is None else trace.head(requests)
    size = max(int(head.block_tokens / shrink), 1)
    blocks: dict[int, Tokens] = {}
    sessions: list[Session] = []
    for place in range(head.requests):
        first = int(head.offsets[place])
        length = max(int(head.input_tokens[place] / shrink), 1)
        prompt: list[int] = []
        for block in head.ids[first : first + int(head.prompt_blocks[place])].tolist():
            if most_prompt_tokens is not None and len(prompt) + size > most_prompt_tokens:
                break
            if block not in blocks:
                blocks[block] = _Drawer(f"{seed}/{block}")(size)
            prompt.extend(blocks[block])
        tokens = tuple(prompt[:length]) or _Drawer(f"{seed}/short/{len(sessions)}")(1)
        answer = max(int(head.output_tokens[place] / shrink), 1)
        answer = answer if most_answer_tokens is None else min(answer, most_answer_tokens)
        at_s = 0.0 if head.arrival_s is None else float(head.arrival_s[place] - head.arrival_s.min())
        sessions.append(Session((Turn(tokens, answer),), at_s=at_s / speed))
    if not sessions:
        raise UsageError("trace replay: the trace has no requests")
    parameters = {"requests": len(sessions), "block_tokens": size, "shrink": shrink, "speed": speed}
    return Plan("trace_replay", seed, (Phase("trace", tuple(sessions)),), form, parameters)


class _Drawer:
    """Draws token sequences; two draws share no prefix but by a chance of 1 in 490 per token."""

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)

    def __call__(self, count: int) -> Tokens:
        low, high = ID_RANGE
        return tuple(self.random.choices(range(low, high), k=count))


def _recorded(arguments: Mapping[str, Any], *positive: str) -> dict[str, int | float | str]:
    """What a plan was made from, checked; seed and form are recorded beside it."""
    for name in positive:
        if arguments[name] < 1:
            raise UsageError(f"{name}: expected 1 or more, got {arguments[name]}")
    return {name: value for name, value in arguments.items() if name not in {"seed", "form"}}
