"""MiniMax-M3's format: what is rendered is what its parser, and the model's own template, read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from model.chat import CallArguments, CallStart, Delta, OutputParser, Piece, ReasoningDelta, TextDelta
from model.chat.formats import CHAT_FORMATS, UnknownChatFormat, detect_chat_format
from model.chat.minimax_m3 import BEGIN, BLOCK, CALLS, CALLS_END, END, NAMESPACE, THINK, THINK_END, MiniMaxM3Format
from model.conversation import AssistantItem, Head, Item, Json, SystemItem, Tool, ToolCall, ToolResultItem, UserItem
from model.nano import make_nano
from model.tokenizer import Tokenizer
from model.vocabulary import read_vocabulary

MARKERS = (BEGIN, BLOCK, END, THINK, THINK_END, NAMESPACE, CALLS, CALLS_END)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "nano"
    make_nano(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(nano: Path) -> Tokenizer:
    return Tokenizer.load(nano)


def counting_ids() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"call_{next(numbers):024x}"


@pytest.fixture(scope="module")
def m3(tokenizer: Tokenizer) -> MiniMaxM3Format:
    return MiniMaxM3Format(tokenizer)


def parse(
    tokenizer: Tokenizer, ids: Sequence[int], tools: Sequence[Tool] = (), cuts: Sequence[int] = ()
) -> tuple[list[Delta], OutputParser]:
    parser = MiniMaxM3Format(tokenizer, new_call_id=counting_ids()).parser(tools)
    deltas: list[Delta] = []
    for start, stop in itertools.pairwise([0, *sorted({min(cut, len(ids)) for cut in cuts}), len(ids)]):
        deltas += parser.feed(ids[start:stop])
    return deltas + parser.finish(), parser


def joined(deltas: Sequence[Delta]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Reasoning, text, and the calls (id, name, JSON text) that the deltas say."""
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    calls: list[tuple[str, str, str]] = []
    for start in (delta for delta in deltas if isinstance(delta, CallStart)):
        assert start.index == len(calls)
        fragments = [delta.fragment for delta in deltas if isinstance(delta, CallArguments) and delta.index == start.index]
        calls.append((start.id, start.name, "".join(fragments)))
    return reasoning, text, calls


def check_item_equals_deltas(parser: OutputParser, deltas: Sequence[Delta]) -> AssistantItem:
    reasoning, text, calls = joined(deltas)
    item = parser.item()
    assert (item.reasoning or "", item.text) == (reasoning, text)
    assert [(call.id, call.name, call.arguments) for call in item.calls] == [
        (id, name, msgspec.json.decode(fragments)) for id, name, fragments in calls
    ]
    return item


def marked(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of `text` with the markers in it as control tokens, as a model generates them."""
    pieces: list[Piece] = [text]
    for marker in MARKERS:
        split: list[Piece] = []
        for piece in pieces:
            parts: list[Piece] = [*piece.split(marker)] if isinstance(piece, str) else [piece]
            for number, part in enumerate(parts):
                split += [tokenizer.control[marker], part] if number else [part]
        pieces = split
    return tokenizer.encode_pieces(pieces)


def tool(name: str, **properties: Json) -> Tool:
    return Tool(name, "", {"type": "object", "properties": properties})


# Strategies ---------------------------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from([*MARKERS, "a\r\n\tb ", "<invoke name='x'>"])
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters='>"'), min_size=1, max_size=8).filter(
    lambda name: name.strip() and not name.startswith("/")
)
scalars = texts | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
values: st.SearchStrategy[Json] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=6
)
arguments = st.dictionaries(names, values, max_size=4)


def schema_of(value: Json) -> dict[str, Json]:
    """A schema that allows `value` and says its type."""
    match value:
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer"}
        case float():
            return {"type": "number"}
        case str():
            return {"type": "string"}
        case list():
            choices: list[Json] = [schema_of(item) for item in value]
            return {"type": "array", "items": choices[0] if choices else {}}
        case dict():
            return {"type": "object", "properties": {name: schema_of(item) for name, item in value.items()}}
        case None:
            return {"type": "null"}


def uniform(value: Json) -> Json:
    """`value` with each list cut to its first item, as one item schema describes them all."""
    match value:
        case list():
            return [uniform(item) for item in value[:1]]
        case dict():
            return {name: uniform(item) for name, item in value.items()}
        case _:
            return value


calls = st.tuples(names, arguments).map(lambda call: (call[0], {name: uniform(value) for name, value in call[1].items()}))


@st.composite
def assistant_items(draw: st.DrawFn) -> tuple[AssistantItem, list[Tool]]:
    drawn = draw(st.lists(calls, max_size=3, unique_by=lambda call: call[0]))
    item = AssistantItem(
        text=draw(texts),
        reasoning=draw(texts) or None,
        calls=tuple(ToolCall(f"call_{i:024x}", name, values) for i, (name, values) in enumerate(drawn)),
    )
    return item, [Tool(name, "", schema_of(values)) for name, values in drawn]


@st.composite
def conversations(draw: st.DrawFn) -> list[Item]:
    """Items in an order that clients send; results follow calls."""
    items: list[Item] = [UserItem(draw(texts))]
    for _ in range(draw(st.integers(0, 4))):
        item, _ = draw(assistant_items())
        items.append(item)
        items += [ToolResultItem(call.id, draw(texts)) for call in item.calls]
        items += draw(st.lists(st.builds(UserItem, texts) | st.builds(SystemItem, texts), max_size=2))
    return items


def pairs(items: Sequence[Item]) -> list[tuple[Item, Item | None]]:
    return list(zip(items, [None, *items], strict=False))


# Invariants ---------------------------------------------------------------------------------------------------------------------------


@QUICK
@given(data=st.data(), ids=st.lists(st.integers(0, 8200), max_size=60), cuts=st.lists(st.integers(0, 60), max_size=60))
def test_any_chunking_of_any_output_gives_the_same_deltas_joined(
    tokenizer: Tokenizer, data: st.DataObject, ids: list[int], cuts: list[int]
) -> None:
    tags = [
        "<tool_call>",
        '<invoke name="f">',
        "<a>",
        "</a>",
        "</b>",
        "<item>",
        "</item>",
        "</invoke>",
        "</tool_call>",
        "12",
        "é",
        '{"k": 1}',
        "\n",
    ]
    structure = st.sampled_from([*MARKERS, *(NAMESPACE + tag for tag in tags), *tags])
    for part in data.draw(st.lists(structure, max_size=40)):
        ids += marked(tokenizer, part)
    tools = [tool("f", a={"type": "string"}, b={"type": ["integer", "object", "null"]})]
    whole, one = parse(tokenizer, ids, tools)
    chunked, other = parse(tokenizer, ids, tools, cuts=[cut * len(ids) // 60 for cut in cuts])
    assert joined(whole) == joined(chunked)
    assert (one.item(), one.open_call) == (other.item(), other.open_call)
    check_item_equals_deltas(one, whole)


@QUICK
@given(drawn=assistant_items(), cuts=st.lists(st.integers(0, 200), max_size=20))
def test_what_is_rendered_is_parsed_to_the_same_meaning(
    tokenizer: Tokenizer, m3: MiniMaxM3Format, drawn: tuple[AssistantItem, list[Tool]], cuts: list[int]
) -> None:
    item, tools = drawn
    opened = m3.open_turn(UserItem(""))
    rendered = m3.item(item, UserItem(""))
    assert rendered[: len(opened)] == opened
    deltas, parser = parse(tokenizer, tokenizer.encode_pieces(rendered[len(opened) :]), tools, cuts)
    assert parser.item() == item
    assert not parser.open_call
    check_item_equals_deltas(parser, deltas)


@pytest.mark.slow
@pytest.mark.case("TOK-10")
@QUICK
@given(system=texts, items=conversations(), generated=st.lists(st.integers(0, 8191), max_size=20), stopped=st.booleans(), more=texts)
def test_the_next_prompt_starts_with_this_prompt_and_what_was_generated(
    tokenizer: Tokenizer, m3: MiniMaxM3Format, system: str, items: list[Item], generated: list[int], stopped: bool, more: str
) -> None:
    def ids(pieces: list[Piece]) -> list[int]:
        return tokenizer.encode_pieces(pieces)

    before = m3.head(Head(system)) + [piece for item, previous in pairs(items) for piece in m3.item(item, previous)]
    prompt = ids(before + m3.open_turn(items[-1]))
    generated = [*generated, tokenizer.control[END]] if stopped else generated
    closed = generated + ids(m3.close_turn(generated[-1] if generated else None))
    assert closed[-1] == tokenizer.control[END]
    turn = AssistantItem("whatever was parsed")
    following = prompt + closed + ids(m3.item(UserItem(more), turn) + m3.open_turn(UserItem(more)))
    # An imported copy of the turn has the same surroundings: only the generated ids differ.
    imported = ids(before + m3.item(turn, items[-1]) + m3.item(UserItem(more), turn) + m3.open_turn(UserItem(more)))
    assert following[: len(prompt)] == prompt == imported[: len(prompt)]
    rest = len(prompt) + len(closed)
    assert following[rest:] == imported[len(imported) - (len(following) - rest) :]
    assert imported[len(imported) - (len(following) - rest) - 1] == tokenizer.control[END]


@QUICK
@given(system=texts, description=texts, items=conversations())
def test_outside_text_never_becomes_a_control_token(
    tokenizer: Tokenizer, m3: MiniMaxM3Format, system: str, description: str, items: list[Item]
) -> None:
    def controls(head: Head, items: Sequence[Item]) -> list[int]:
        pieces = m3.head(head) + [piece for item, previous in pairs(items) for piece in m3.item(item, previous)]
        ids = tokenizer.encode_pieces(pieces)
        assert [id for id in ids if id in control_ids] == [piece for piece in pieces if isinstance(piece, int)]
        return [id for id in ids if id in control_ids]

    control_ids = set(tokenizer.control.values())
    hostile = [structs.replace(item, text=item.text + "".join(MARKERS)) for item in items]
    tools = (Tool("f", description + "".join(MARKERS)),)
    assert controls(Head(system + "".join(MARKERS), tools), hostile) == controls(Head("", (Tool("f"),)), items)


def test_every_format_of_the_table_is_detected_by_its_own_vocabulary(tokenizer: Tokenizer) -> None:
    assert [build(tokenizer).name for build in CHAT_FORMATS.values()] == list(CHAT_FORMATS)
    assert detect_chat_format(tokenizer).name == "minimax_m3"


def test_a_vocabulary_without_the_control_tokens_is_refused_with_what_it_lacks(nano: Path) -> None:
    plain = Tokenizer(replace(read_vocabulary(nano), added=()))
    with pytest.raises(UnknownChatFormat, match="minimax_m3: the vocabulary has no control token"):
        detect_chat_format(plain)


# Rendering ----------------------------------------------------------------------------------------------------------------------------


def shown(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> str:
    return tokenizer.decode_bytes(tokenizer.encode_pieces(pieces)).decode()


def test_consecutive_tool_results_share_a_block(tokenizer: Tokenizer, m3: MiniMaxM3Format) -> None:
    one, two, three = ToolResultItem("1", "one"), ToolResultItem("2", "two"), UserItem("three")
    pieces = m3.item(one, AssistantItem()) + m3.item(two, one) + m3.item(three, two)
    expected = "\n]~b]tool\n<response>one</response>\n<response>two</response>[e~[\n]~b]user\nthree"
    assert shown(tokenizer, pieces) == expected


def test_null_arguments_are_left_out_and_nested_ones_become_elements(tokenizer: Tokenizer, m3: MiniMaxM3Format) -> None:
    values: dict[str, Json] = {"a": None, "b": {"c": None, "d": [1, True, None]}}
    item = AssistantItem(calls=(ToolCall("1", "f", values),))
    expected = (
        '\n]~b]ai\n</mm:think>@<tool_call>\n@<invoke name="f">@<b>@<d>@<item>1@</item>@<item>true@</item>@<item>@</item>@</d>@</b>'
        "@</invoke>\n@</tool_call>[e~["
    )
    assert shown(tokenizer, m3.item(item, AssistantItem())) == expected.replace("@", NAMESPACE)


@pytest.mark.parametrize(("mode", "prefix"), [("adaptive", ""), ("enabled", THINK), ("disabled", THINK_END)])
def test_the_thinking_mode_decides_how_a_turn_opens(tokenizer: Tokenizer, mode: str, prefix: str) -> None:
    chat = MiniMaxM3Format(tokenizer, thinking=mode)  # type: ignore[arg-type]  # parametrized literals are plain strings
    assert shown(tokenizer, chat.open_turn(UserItem("")))[len("[e~[\n]~b]ai\n") :] == prefix
    assert f"Current thinking mode: {mode}." in shown(tokenizer, chat.head(Head()))


def test_enabled_thinking_parses_the_first_text_as_reasoning(tokenizer: Tokenizer) -> None:
    parser = MiniMaxM3Format(tokenizer, thinking="enabled").parser(())
    parser.feed(marked(tokenizer, "because</mm:think>yes"))
    parser.finish()
    assert parser.item() == AssistantItem("yes", "because")


# Parsing ------------------------------------------------------------------------------------------------------------------------------

EDIT = tool(
    "edit",
    path={"type": "string"},
    count={"type": "integer"},
    ratio={"type": "number"},
    force={"type": "boolean"},
    lines={"type": "array", "items": {"type": "integer"}},
    options={"type": "object", "properties": {"deep": {"type": "boolean"}}},
    either={"anyOf": [{"type": "string"}, {"type": "null"}]},
)


def nested(depth: int, value: Json) -> Json:
    for _ in range(depth):
        value = {"k": value}
    return value


def call_of(tokenizer: Tokenizer, body: str, *, end: str = "@</invoke>\n@</tool_call>", tools: Sequence[Tool] = (EDIT,)) -> Json:
    """The arguments of one call whose invocation holds `body` ("@" stands for the namespace token)."""
    text = f'@<tool_call>\n@<invoke name="edit">{body}{end}'.replace("@", NAMESPACE)
    deltas, parser = parse(tokenizer, marked(tokenizer, text), tools)
    arguments = check_item_equals_deltas(parser, deltas).calls[0].arguments
    assert isinstance(arguments, dict)
    return arguments


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("@<path>42@</path>", {"path": "42"}),
        ("@<count>42@</count>@<ratio>1.5@</ratio>@<force>true@</force>", {"count": 42, "ratio": 1.5, "force": True}),
        ("@<count>many@</count>", {"count": "many"}),
        ("@<count>" + "9" * 5000 + "@</count>", {"count": "9" * 5000}),
        ("@<lines>@<item>1@</item>@<item>2@</item>@</lines>", {"lines": [1, 2]}),
        ("@<lines>[1, 2]@</lines>", {"lines": [1, 2]}),
        ("@<lines>[1e999]@</lines>@<ratio>1_0@</ratio>@<count> 7 @</count>", {"lines": "[1e999]", "ratio": "1_0", "count": 7}),
        ("@<lines>" + "[" * 900 + "]" * 900 + "@</lines>", {"lines": "[" * 900 + "]" * 900}),
        ("@<options>" + "[" * 9000 + "@</options>", {"options": "[" * 9000}),
        ("@<unknown>" + "@<k>" * 70 + "@</unknown>", {"unknown": nested(63, "<k>" * 7)}),
        ("@<lines>@</lines>@<options>@</options>", {"lines": [], "options": {}}),
        ("@<options>@<deep>true@</deep>@<more>x@</more>@</options>", {"options": {"deep": True, "more": "x"}}),
        ("@<either>null@</either>", {"either": None}),
        ("@<unknown>@<item>a@</item>@<item>b@</item>@</unknown>", {"unknown": ["a", "b"]}),
        ("@<unknown>@<k>a@</k>\n@<k>b@</k>@</unknown>", {"unknown": {"k": ["a", "b"]}}),
        ("@<unknown>pre@<k>a@</k>@</unknown>", {"unknown": {"k": "a", "$text": "pre"}}),
        ("@<path>a@<b>c@</b>d@</path>", {"path": "a<b>c</b>d"}),
        ("@<path>a@</path>@<path>b@</path>@<count>1@</count>@<count>2@</count>", {"path": "a", "count": 1}),
        ("\n  @<path>a\n@</path>\n stray\n", {"path": "a\n"}),
        ("@<path>a<mm:think>b@</path>", {"path": "a<mm:think>b"}),
        ("@<path>]<]minimax[<b>@</path>", {"path": "]<]minimax[<b>"}),
        ("", {}),
    ],
)
def test_arguments_are_typed_by_the_schema(tokenizer: Tokenizer, body: str, expected: Json) -> None:
    assert call_of(tokenizer, body) == expected


def test_a_string_argument_streams_as_it_grows(tokenizer: Tokenizer) -> None:
    parser = MiniMaxM3Format(tokenizer).parser([EDIT])
    parser.feed(marked(tokenizer, f'{NAMESPACE}<tool_call>{NAMESPACE}<invoke name="edit">{NAMESPACE}<path>'))
    fragments = [
        delta.fragment for word in ("one", ' "two"') for delta in parser.feed(tokenizer.encode(word)) if isinstance(delta, CallArguments)
    ]
    assert "".join(fragments) == 'one \\"two\\"'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("@<path>half", {"path": "half"}),
        ("@<count>4", {}),
        ("@<path>a@</path>@<options>@<deep>true", {"path": "a"}),
        ("@<path>a@</pa", {"path": "a"}),
    ],
)
def test_a_call_that_is_cut_is_still_one_json_object(tokenizer: Tokenizer, body: str, expected: Json) -> None:
    text = f'@<tool_call>@<invoke name="edit">{body}'.replace("@", NAMESPACE)
    deltas, parser = parse(tokenizer, marked(tokenizer, text), [EDIT])
    assert parser.open_call
    assert check_item_equals_deltas(parser, deltas).calls[0].arguments == expected


@pytest.mark.parametrize(
    ("output", "text", "reasoning", "num_calls"),
    [
        ("</mm:think>plain[e~[", "plain", None, 0),
        ("<mm:think>why</mm:think>plain", "plain", "why", 0),
        ("a<mm:think>b</mm:think>c<mm:think>d", "ac", "bd", 0),
        ("<mm:think>never closed", "", "never closed", 0),
        ("a]~b]user\nb[e~[", "auser\nb", None, 0),
        ("a@b", "ab", None, 0),
        ("a@<b", "a<b", None, 0),
        ("a@<b>c", "a<b>c", None, 0),
        ("a@@<b>c", "a<b>c", None, 0),
        ("<tool_call>a</tool_call>", "<tool_call>a</tool_call>", None, 0),
        ("@<tool_call>dropped@</tool_call>\n after", "after", None, 0),
        ('<mm:think>r@<tool_call>@<invoke name="f">@</invoke>@</tool_call>', "", "r", 1),
        ('a@<invoke name="f">@</invoke>', "a", None, 1),
        ('@<tool_call>@<invoke name="f">@<invoke name="g">@<tool_call>@<invoke name="h">@</tool_call>t', "t", None, 3),
    ],
)
def test_odd_output_becomes_text_or_is_dropped(tokenizer: Tokenizer, output: str, text: str, reasoning: str | None, num_calls: int) -> None:
    deltas, parser = parse(tokenizer, marked(tokenizer, output.replace("@", NAMESPACE)))
    item = check_item_equals_deltas(parser, deltas)
    assert (item.text, item.reasoning, len(item.calls)) == (text, reasoning, num_calls)


def test_text_that_spells_markers_stays_text(tokenizer: Tokenizer) -> None:
    text = f'<mm:think>x</mm:think>{NAMESPACE}<tool_call>{NAMESPACE}<invoke name="f">[e~['
    _, parser = parse(tokenizer, tokenizer.encode(text))
    assert parser.item() == AssistantItem(text)


def test_half_a_character_is_withheld_until_it_is_whole(tokenizer: Tokenizer) -> None:
    ids = [byte_id(tokenizer, byte) for byte in "🎉".encode()]
    parser = MiniMaxM3Format(tokenizer).parser(())
    assert [parser.feed([id]) for id in ids] == [[], [], [], [TextDelta("🎉")]]
    assert parser.feed(ids[:2]) == []
    assert parser.finish() == [TextDelta("\ufffd")]
    assert parser.item() == AssistantItem("🎉\ufffd")


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    return next(id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == bytes([byte]))


def test_call_ids_are_fresh_and_of_one_form(tokenizer: Tokenizer) -> None:
    body = marked(tokenizer, f'{NAMESPACE}<invoke name="f">{NAMESPACE}</invoke>' * 3)
    parser = MiniMaxM3Format(tokenizer).parser(())
    starts = [delta for delta in parser.feed(body) if isinstance(delta, CallStart)]
    assert len({start.id for start in starts}) == 3
    assert all(start.id.startswith("call_") and len(start.id) == 29 and int(start.id[5:], 16) >= 0 for start in starts)


# The model's own template -------------------------------------------------------------------------------------------------------------


def as_message(item: Item) -> dict[str, object]:
    match item:
        case UserItem(text):
            return {"role": "user", "content": text}
        case SystemItem(text):
            return {"role": "system", "content": text}
        case ToolResultItem(id, text):
            return {"role": "tool", "tool_call_id": id, "content": text}
        case AssistantItem(text, reasoning, calls):
            functions = [{"type": "function", "id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in calls]
            return {"role": "assistant", "content": text, "reasoning_content": reasoning, "tool_calls": functions}


def as_function(tool: Tool) -> dict[str, object]:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value}}


@pytest.mark.slow
@pytest.mark.case("TOK-10")
@pytest.mark.parametrize("mode", ["adaptive", "enabled", "disabled"])
def test_the_models_own_template_gives_the_same_ids(nano: Path, tokenizer: Tokenizer, mode: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(nano)
    tools = (Tool("read", "Read a file <b> “é”.", {"type": "object", "properties": {"path": {"type": "string"}}}), Tool("stop"))
    values: dict[str, Json] = {"path": "a b\n", "n": 3, "x": 1.5e-7, "ok": False, "no": None, "deep": {"l": [1, ["é", {"k": "v"}], None]}}
    items: list[Item] = [
        UserItem("Hi.\r\n  there  "),
        AssistantItem("Let me see. ", "Hm.\n", (ToolCall("1", "read", values), ToolCall("2", "stop", {}))),
        ToolResultItem("1", "one."),
        ToolResultItem("2", ""),
        AssistantItem("Done.", None),
        SystemItem("Note."),
        UserItem("漢字 🎉"),
        AssistantItem("", "only thought"),
        UserItem("bye"),
    ]
    chat = MiniMaxM3Format(tokenizer, thinking=mode)  # type: ignore[arg-type]  # parametrized literals are plain strings
    for head in (Head(), Head("You are terse.\n"), Head("You are terse.", tools), Head("", tools)):
        for count in range(1, len(items) + 1):
            some = items[:count]
            pieces = chat.head(head) + [piece for item, previous in pairs(some) for piece in chat.item(item, previous)]
            messages = [{"role": "system", "content": head.system}] * bool(head.system) + [as_message(item) for item in some]
            text = theirs.apply_chat_template(
                messages,
                tools=[as_function(tool) for tool in head.tools] or None,
                add_generation_prompt=True,
                tokenize=False,
                thinking_mode=mode,
            )
            ids = theirs.encode(text, add_special_tokens=False)
            assert tokenizer.encode_pieces(pieces + chat.open_turn(some[-1])) == ids, json.dumps(messages)
