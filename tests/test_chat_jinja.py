"""Chat formats read from Jinja templates: made incremental, proved, or refused by the name of what shows that they cannot be."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.chat import Delta, OutputParser, TextDelta
from model.chat.formats import UnknownChatFormat, chat_format, detect_chat_format
from model.chat.jinja import JinjaFormat, UnstableTemplate
from model.chat.jinja_proof import PROBES, incremental_ids, load_jinja_format, steps
from model.chat.jinja_template import ChatTemplate, NoTemplate, TemplateRefused
from model.chat.marks import Marks, Spellings
from model.chat.minimax_m3 import MiniMaxM3Format
from model.conversation import AssistantItem, Head, Item, Json, SystemItem, Tool, ToolCall, ToolResultItem, UserItem
from model.tokenizer import Tokenizer
from tests.scripted import asked, assert_nothing_is_held, starts_with
from tests.serving import chat, serving
from tests.test_chat_minimax_m3 import check_item_equals_deltas, joined
from tests.upstream import Script, Upstream

TEMPLATES = Path(__file__).parent / "data" / "templates"
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@dataclass(frozen=True, slots=True)
class Family:
    """A template and its control tokens; those of `plain` are shown as text, as the tokenizers of such models have it."""

    template: str
    end: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    begin: str | None = None


CHATML = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
FAMILIES: dict[str, Family] = {
    "chatml": Family("chatml", "<|im_end|>", ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), CHATML),
    "chatml without tool tokens": Family("chatml", "<|im_end|>", ("<|im_start|>", "<|im_end|>"), ("<think>", "</think>")),
    "thinking": Family("chatml_thinking", "<|im_end|>", ("<|im_start|>", "<|im_end|>"), CHATML),
    "llama3": Family("llama3", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|bos|>"), begin="<|bos|>"),
    "mistral": Family(
        "mistral",
        "</s>",
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]"),
        ),
        begin="<s>",
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Callable[[Family, str], Path]:
    """Makes model folders: the nano model's vocabulary with a family's control tokens, and a template."""

    def make(family: Family, template: str) -> Path:
        folder = tmp_path_factory.mktemp("family")
        file: dict[str, Any] = msgspec.json.decode((model_folder / "tokenizer.json").read_bytes())
        first = min(token["id"] for token in file["added_tokens"])
        words = [*((word, True) for word in family.special), *((word, False) for word in family.plain)]
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        file["added_tokens"] = [
            {"id": first + n, "content": word, "special": is_special, **flags} for n, (word, is_special) in enumerate(words)
        ]
        (folder / "tokenizer.json").write_bytes(msgspec.json.encode(file))
        config = {"eos_token": {"content": family.end}, "bos_token": family.begin, "chat_template": template}
        (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
        return folder

    return make


@dataclass(frozen=True, slots=True)
class Loaded:
    tokenizer: Tokenizer
    chat: JinjaFormat

    def ids(self, head: Head, items: Sequence[Item]) -> list[int]:
        return incremental_ids(self.chat, self.tokenizer, head, items)


def source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@pytest.fixture(scope="module")
def families(folders: Callable[[Family, str], Path]) -> dict[str, Loaded]:
    loaded = {}
    for name, family in FAMILIES.items():
        folder = folders(family, source(family.template))
        tokenizer = Tokenizer.load(folder)
        loaded[name] = Loaded(tokenizer, load_jinja_format(tokenizer, folder))
    return loaded


every_family = pytest.mark.parametrize("family", FAMILIES)


def as_json(text: str) -> str:
    """A text inside a JSON string, as templates write it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


# Strategies ---------------------------------------------------------------------------------------------------------------------------

SPELLED = ("<|im_end|>", "<think>", "</tool_call>", "<|eot_id|>", "[/INST]", "</s>", 'qZ7kXw0"éz', "qZ7kXw", "{{ x }}", "\n\n")
texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(SPELLED), max_size=3).map("".join)
words = texts.filter(bool)
values: st.SearchStrategy[Json] = st.recursive(
    texts | st.booleans() | st.none() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)
objects = st.dictionaries(texts, values, max_size=3)
heads = st.builds(Head, texts, st.lists(st.builds(Tool, words, texts, st.none() | objects), max_size=2).map(tuple))


@st.composite
def rounds(draw: st.DrawFn) -> list[Item]:
    """User messages and answers in turn, as every template takes them; tools in between."""
    items: list[Item] = [UserItem(draw(texts))]
    for number in range(draw(st.integers(0, 3))):
        calls = tuple(ToolCall(f"call_{number}{n}", draw(words), draw(objects)) for n in range(draw(st.sampled_from([0, 0, 1, 2]))))
        items.append(AssistantItem(draw(texts), draw(st.none() | words), calls))
        items += [ToolResultItem(call.id, draw(texts)) for call in calls]
        items += [AssistantItem(draw(texts))] if calls else []
        items.append(UserItem(draw(texts)))
    return items


any_items = st.lists(
    st.builds(UserItem, texts)
    | st.builds(SystemItem, texts)
    | st.builds(ToolResultItem, words, texts)
    | st.builds(
        AssistantItem, texts, st.none() | words, st.lists(st.builds(ToolCall, words, words, objects | texts), max_size=2).map(tuple)
    ),
    max_size=5,
)

# Stable templates ---------------------------------------------------------------------------------------------------------------------


@every_family
def test_what_is_rendered_step_by_step_is_the_templates_own_prompt(families: dict[str, Loaded], family: str) -> None:
    loaded = families[family]

    @given(heads, rounds())
    @QUICK
    def check(head: Head, items: list[Item]) -> None:
        pieces, _ = loaded.chat.rendering(head, items)
        assert loaded.ids(head, items) == loaded.tokenizer.encode_pieces(pieces)

    check()


@pytest.mark.slow
@pytest.mark.case("TOK-10")
@every_family
def test_the_next_prompt_starts_with_this_prompt_and_what_was_generated(families: dict[str, Loaded], family: str) -> None:
    loaded = families[family]
    chat, encode = loaded.chat, loaded.tokenizer.encode_pieces

    @given(heads, rounds(), rounds(), st.lists(st.integers(0, 8000), max_size=20), st.booleans())
    @QUICK
    def check(head: Head, items: list[Item], more: list[Item], generated: list[int], stopped: bool) -> None:
        prompt = loaded.ids(head, items)
        turn = AssistantItem("what was parsed")
        ended = [*generated, chat.stop_ids[0]] if stopped else generated
        closed = [*ended, *encode(chat.close_turn(ended[-1] if ended else None))]
        assert closed[-1] == chat.stop_ids[0]
        following = [*prompt, *closed]
        for pieces in steps(chat, more, turn):
            following += encode(pieces)
        imported = loaded.ids(head, [*items, turn, *more])
        rest = following[len(prompt) + len(closed) :] + encode(chat.open_turn(more[-1]))
        assert imported[len(imported) - len(rest) - 1 :] == [chat.stop_ids[0], *rest]
        stem = len(prompt) - len(encode(chat.open_turn(items[-1])))
        assert imported[:stem] == prompt[:stem]

    check()


@every_family
def test_any_order_of_any_items_is_rendered_and_grows_at_its_end(families: dict[str, Loaded], family: str) -> None:
    loaded = families[family]
    control = set(loaded.tokenizer.control.values())

    @given(heads, any_items)
    @QUICK
    def check(head: Head, items: list[Item]) -> None:
        pieces = loaded.chat.head(head)
        for item, previous in zip(items, [None, *items], strict=False):
            added = loaded.chat.item(item, previous)
            if isinstance(item, UserItem | ToolResultItem | SystemItem) and item.text:
                written = "".join(piece for piece in added if isinstance(piece, str))
                assert item.text in written or as_json(item.text) in written
            pieces += added
        ids = loaded.tokenizer.encode_pieces(pieces)
        assert [id for id in ids if id in control] == [piece for piece in pieces if isinstance(piece, int)]

    check()


@every_family
def test_outside_text_never_becomes_a_control_token(families: dict[str, Loaded], family: str) -> None:
    loaded = families[family]
    spelled = "".join(loaded.tokenizer.control) + 'qZ7kXw0"éz'

    def controls(text: str) -> list[int]:
        call = ToolCall("c", "f" + text, {"k" + text: ["v" + text]})
        head = Head("s" + text, (Tool("f" + text, "d" + text, {"t" + text: "x" + text}),))
        items: list[Item] = [
            UserItem("u" + text),
            AssistantItem("a" + text, "r" + text, (call,)),
            ToolResultItem("c", "t" + text),
            SystemItem("s" + text),
        ]
        ids = loaded.ids(head, items)
        shown = loaded.tokenizer.decode_bytes(ids).decode()
        assert all(word + text in shown or as_json(word + text) in shown for word in "sfduat")
        return [id for id in ids if id in set(loaded.tokenizer.control.values())]

    assert controls(spelled) == controls("")


@pytest.mark.parametrize(
    ("family", "ending"),
    [
        ("chatml", "s<|im_end|>\n<|im_start|>assistant\n"),
        ("llama3", "s<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("mistral", "[SYSTEM_PROMPT]s[/SYSTEM_PROMPT]"),
    ],
)
def test_a_turn_may_follow_system_text_alone(families: dict[str, Loaded], family: str, ending: str) -> None:
    loaded = families[family]
    assert loaded.tokenizer.decode_bytes(loaded.ids(Head("s"), [])).decode().endswith(ending)


@pytest.mark.case("INP-12")
def test_texts_pass_byte_for_byte_though_the_template_trims(families: dict[str, Loaded]) -> None:
    shown = families["llama3"].tokenizer.decode_bytes(families["llama3"].ids(Head(), [UserItem("  two  \n")])).decode()
    assert "\n\n  two  \n<|eot_id|>" in shown


@pytest.mark.parametrize(("option", "written"), [("", 'say \\"é\\"\\n<|eot_id|>'), ("ensure_ascii=True", 'say \\"\\u00e9\\"\\n<|eot_id|>')])
def test_texts_that_the_template_writes_as_json_are_json(folders: Callable[[Family, str], Path], option: str, written: str) -> None:
    template = source("llama3").replace("{'output': message.content} | tojson", f"{{'output': message.content}} | tojson({option})")
    folder = folders(FAMILIES["llama3"], template)
    tokenizer = Tokenizer.load(folder)
    pieces = load_jinja_format(tokenizer, folder).item(
        ToolResultItem("c", 'say "é"\n<|eot_id|>'), AssistantItem(calls=(ToolCall("c", "f", {}),))
    )
    assert f'{{"output": "{written}"}}' in "".join(piece for piece in pieces if isinstance(piece, str))


def test_an_order_that_the_template_refuses_is_rendered_as_behind_another_kind(families: dict[str, Loaded]) -> None:
    mistral = families["mistral"]
    items: list[Item] = [UserItem("a"), UserItem("b"), SystemItem("c"), AssistantItem("d"), AssistantItem("e"), UserItem("f")]
    with pytest.raises(TemplateRefused, match="alternate"):
        mistral.chat.rendering(Head("s"), items)
    shown = mistral.tokenizer.decode_bytes(mistral.ids(Head("s"), items)).decode()
    assert shown == "<s>[SYSTEM_PROMPT]s[/SYSTEM_PROMPT][INST]a[/INST][INST]b[/INST][INST]c[/INST]d</s>e</s>[INST]f[/INST]"


def test_ids_of_calls_are_shortened_where_the_template_takes_no_others(families: dict[str, Loaded]) -> None:
    items: list[Item] = [UserItem("a"), AssistantItem("", None, (ToolCall("call_long", "f", {}),)), ToolResultItem("call_long", "r")]
    shown = families["mistral"].tokenizer.decode_bytes(families["mistral"].ids(Head(), items)).decode()
    _, called, _, result, _ = (
        shown.replace("[ARGS]", "|").replace("[CALL_ID]", "|").replace("[TOOL_RESULTS]", "|").replace("[TOOL_CONTENT]", "|").split("|")
    )
    assert called == result
    assert len(called) == 9


def test_the_switch_that_keeps_earlier_reasoning_is_found(families: dict[str, Loaded]) -> None:
    thinking = families["thinking"]
    shown = thinking.tokenizer.decode_bytes(thinking.ids(Head(), [UserItem("a"), AssistantItem("b", "why"), UserItem("c")])).decode()
    assert "<think>\nwhy\n</think>\n\nb<|im_end|>" in shown


def test_the_nano_models_own_template_gives_the_same_ids_as_the_format_that_is_written_out(model_folder: Path) -> None:
    tokenizer = Tokenizer.load(model_folder)
    read, written = load_jinja_format(tokenizer, model_folder), MiniMaxM3Format(tokenizer)
    assert read.stop_ids == written.stop_ids
    assert tokenizer.encode_pieces(read.open_turn(None)) == tokenizer.encode_pieces(written.open_turn(None))

    @given(heads, rounds(), any_items)
    @QUICK
    def check(head: Head, items: list[Item], more: list[Item]) -> None:
        items += [item for item in more if not any(isinstance(call.arguments, str) for call in getattr(item, "calls", ()))]
        assert tokenizer.encode_pieces(read.head(head)) == tokenizer.encode_pieces(written.head(head))
        for item, previous in zip(items, [None, *items], strict=False):
            assert tokenizer.encode_pieces(read.item(item, previous)) == tokenizer.encode_pieces(written.item(item, previous))
            assert tokenizer.encode_pieces(read.open_turn(item)) == tokenizer.encode_pieces(written.open_turn(item))

    check()


@pytest.mark.anyio
async def test_a_server_with_a_format_from_a_template_is_exact(upstream: Upstream, model_folder: Path) -> None:
    with serving(upstream.url, model_folder, engine_chat_format="jinja") as served:
        assert isinstance(served.server.turns.chat, JinjaFormat)
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
        for text in ("one", "two", "three"):
            upstream.script(Script(say=f"Answer {text}.", reason="Hm."))
            messages.append({"role": "user", "content": text})
            reply = await chat(served.url, messages, stream=True)
            assert reply.message["content"] == f"Answer {text}."
            messages.append(reply.message)
        assert reply.turn == "exact"
        assert all(starts_with(later, earlier) for earlier, later in itertools.pairwise(asked(upstream)))
        assert_nothing_is_held(served)


@pytest.mark.anyio
async def test_what_a_template_cannot_express_is_the_clients_to_change(upstream: Upstream, folders: Callable[[Family, str], Path]) -> None:
    picky = source("chatml").replace("(tool | tojson)", "(tool | tojson) ~ (tool.function.parameters.properties.items() | list | length)")
    with serving(upstream.url, folders(FAMILIES["chatml"], picky)) as served:
        function: dict[str, Any] = {"name": "stop"}
        messages = [{"role": "user", "content": "hi"}]
        refused = await chat(served.url, messages, stream=True, tools=[{"type": "function", "function": function}])
        assert (refused.status, refused.error and refused.error["code"]) == (400, "unsupported")
        assert (await chat(served.url, messages, stream=True)).status == 200
        assert_nothing_is_held(served)


# Templates that cannot be served ------------------------------------------------------------------------------------------------------

UNSTABLE: dict[str, tuple[str, str, str, str]] = {
    "today": ("<|im_start|>system\\n", "<|im_start|>system\\n' ~ strftime_now('%d %b %Y') ~ '", "tool|user", "date of today"),
    "reasoning is dropped": (
        "message.reasoning_content %}",
        "message.reasoning_content and not (messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list) %}",
        "reasoning",
        "Think",
    ),
    "messages are counted": ("message.role + '\\n' + message", "message.role + '\\n' + loop.index ~ '. ' + message", "head", "every head"),
    "the last user message is marked": (
        "message.content + '<|im_end|>",
        "message.content + ('!' if loop.last else '') + '<|im_end|>",
        "plain",
        "!",
    ),
    "text of users comes twice": ("'\\n' + message.content + '", "'\\n' + message.content + message.content + '", "user", "twice"),
    "text of users is left out": ("'\\n' + message.content + '<|im_end|>", "'\\n<|im_end|>", "user", "left out"),
    "turns do not end": (
        "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool' %}",
        "{{- '\\n' }}\n    {%- elif message.role == 'tool' %}",
        "assistant|calls",
        "stops",
    ),
    "an empty thought opens a turn": (
        "add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n",
        "add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n",
        "generation prompt",
        "starts with something else",
    ),
    "system text is refused": (
        "{{- '<|im_start|>system\\n' ~ opening }}",
        "{{- raise_exception('no system text') if messages[0].role == 'system' }}",
        "head",
        "no system text",
    ),
    "tools are in the first message": (
        "message.role + '\\n' + message.content",
        "message.role + '\\n' + ((tools | tojson) if tools and loop.first else '') + message.content",
        "head",
        "every head",
    ),
}


@pytest.mark.case("TOK-10")
@pytest.mark.parametrize("change", UNSTABLE)
def test_a_template_whose_prompts_do_not_only_grow_is_refused_with_what_shows_it(
    folders: Callable[[Family, str], Path], change: str
) -> None:
    old, new, probe, reason = UNSTABLE[change]
    template = source("chatml")
    assert old in template
    folder = folders(FAMILIES["chatml"], template.replace(old, new))
    with pytest.raises(UnstableTemplate, match=reason) as refused:
        load_jinja_format(Tokenizer.load(folder), folder)
    assert refused.value.probe in probe.split("|")
    assert "--engine-chat-format" in str(refused.value)
    assert "chat_template.jinja" in str(refused.value)


def test_the_names_of_probes_are_told_apart() -> None:
    assert len({probe.name for probe in PROBES}) == len(PROBES)


def test_added_tokens_that_swallow_white_space_are_refused(folders: Callable[[Family, str], Path]) -> None:
    """The tokenizers library would encode the template's own text in another way."""
    folder = folders(FAMILIES["chatml"], source("chatml"))
    file = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(file.replace(b'"rstrip":false', b'"rstrip":true'))
    with pytest.raises(UnstableTemplate, match="tokenizers library"):
        load_jinja_format(Tokenizer.load(folder), folder)


def test_a_template_that_is_broken_is_refused_in_its_own_words(folders: Callable[[Family, str], Path]) -> None:
    folder = folders(FAMILIES["chatml"], "{% if %}")
    with pytest.raises(TemplateRefused, match="cannot be compiled"):
        load_jinja_format(Tokenizer.load(folder), folder)


def test_a_template_cannot_reach_outside(folders: Callable[[Family, str], Path]) -> None:
    with pytest.raises(TemplateRefused, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}").render([])


# Choosing a format --------------------------------------------------------------------------------------------------------------------


def test_a_model_that_no_written_format_fits_is_served_by_its_template(folders: Callable[[Family, str], Path], model_folder: Path) -> None:
    folder = folders(FAMILIES["llama3"], source("llama3"))
    assert detect_chat_format(Tokenizer.load(folder), folder).name == "jinja"
    nano = Tokenizer.load(model_folder)
    assert detect_chat_format(nano, model_folder).name == "minimax_m3"
    assert [chat_format(name, nano, model_folder).name for name in ("jinja", "auto")] == ["jinja", "minimax_m3"]
    with pytest.raises(UnknownChatFormat, match="known: auto, minimax_m3, jinja"):
        chat_format("klingon", nano, model_folder)


def test_of_several_templates_the_one_for_tools_is_read_and_a_file_goes_first(folders: Callable[[Family, str], Path]) -> None:
    family = FAMILIES["chatml"]
    folder = folders(family, "")
    tokenizer = Tokenizer.load(folder)
    config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())

    def write(**changes: Any) -> None:
        (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode({**config, **changes}))

    write(chat_template=[{"name": "default", "template": "{{ x."}, {"name": "tool_use", "template": source("chatml")}])
    assert load_jinja_format(tokenizer, folder).name == "jinja"
    write(chat_template=None)
    with pytest.raises(NoTemplate, match="chat_template"):
        load_jinja_format(tokenizer, folder)
    with pytest.raises(UnknownChatFormat, match=r"jinja: .*chat_template"):
        detect_chat_format(tokenizer, folder)
    (folder / "chat_template.jinja").write_text(source("chatml"))
    write(chat_template="{{ x.")
    assert load_jinja_format(tokenizer, folder).name == "jinja"


# Parsing ------------------------------------------------------------------------------------------------------------------------------


def spoken(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of `text` with the control tokens in it as such, as a model generates them."""
    return tokenizer.encode_pieces(Marks(Spellings(tokenizer.control)).pieces(text))


def parse(loaded: Loaded, ids: Sequence[int], cuts: Sequence[int] = ()) -> tuple[list[Delta], OutputParser]:
    parser = loaded.chat.parser(())
    deltas: list[Delta] = []
    for start, stop in itertools.pairwise([0, *sorted(cut * len(ids) // 100 for cut in cuts), len(ids)]):
        deltas += parser.feed(ids[start:stop])
    return deltas + parser.finish(), parser


@pytest.mark.parametrize("family", ["chatml", "thinking"])
def test_what_is_rendered_is_parsed_to_the_same_meaning(families: dict[str, Loaded], family: str) -> None:
    loaded = families[family]
    stripped = texts.map(str.strip)
    names = st.from_regex(r"[A-Za-z_]{1,8}", fullmatch=True)
    calls = st.lists(st.builds(ToolCall, st.just(""), names, objects), max_size=3).map(tuple)

    @given(st.builds(AssistantItem, stripped, stripped.filter(bool), calls), st.lists(st.integers(0, 100), max_size=30))
    @QUICK
    def check(item: AssistantItem, cuts: list[int]) -> None:
        opened = loaded.tokenizer.encode_pieces(loaded.chat.open_turn(UserItem("")))
        rendered = loaded.tokenizer.encode_pieces(loaded.chat.item(item, UserItem("")))
        assert rendered[: len(opened)] == opened
        deltas, parser = parse(loaded, rendered[len(opened) :], cuts)
        said = check_item_equals_deltas(parser, deltas)
        assert (said.text, said.reasoning) == (item.text, item.reasoning)
        assert [(call.name, call.arguments) for call in said.calls] == [(call.name, call.arguments) for call in item.calls]
        assert not parser.open_call

    check()


def test_any_chunking_of_any_output_gives_the_same_deltas_joined(families: dict[str, Loaded]) -> None:
    loaded = families["chatml"]
    parts = st.sampled_from([*loaded.tokenizer.control, '{"name": "f", "arguments": {"a": 1}}', '{"name": ""}', "{", " \n", "é", "text"])

    @given(st.lists(parts, max_size=20), st.lists(st.integers(0, 9000), max_size=10), st.lists(st.integers(0, 100), max_size=30))
    @QUICK
    def check(some: list[str], noise: list[int], cuts: list[int]) -> None:
        ids = spoken(loaded.tokenizer, "".join(some)) + noise
        whole, one = parse(loaded, ids)
        chunked, other = parse(loaded, ids, cuts)
        assert [part[1:] for part in joined(whole)[2]] == [part[1:] for part in joined(chunked)[2]]
        assert joined(whole)[:2] == joined(chunked)[:2]
        assert one.open_call == other.open_call
        check_item_equals_deltas(one, whole)

    check()


F = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("output", "text", "reasoning", "calls", "open_call"),
    [
        ("plain<|im_end|>", "plain", None, [], False),
        ("<think>\nwhy\n</think>\n\nplain \n<|im_end|>", "plain \n", "why", [], False),
        ("<think>never closed", "", "never closed", [], False),
        ("a</think>b</tool_call>c<|im_start|>d", "abcd", None, [], False),
        (f"Look.\n<tool_call>\n{F}\n</tool_call>\n<tool_call>{F}</tool_call>\n", "Look.", None, [{"a": 1}] * 2, False),
        (f"<think>r<tool_call>{F}</tool_call> after", "after", "r", [{"a": 1}], False),
        (f"<tool_call>{F}", "", None, [{"a": 1}], False),
        (f"<tool_call>{F[:-5]}", "<tool_call>" + F[:-5], None, [], True),
        (f"<tool_call>oops<tool_call>{F}</tool_call>", "<tool_call>oops", None, [{"a": 1}], False),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", None, [], False),
        ('<tool_call>{"name": "f"}</tool_call>', "", None, [{}], False),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", None, [{"a": 1}], False),
        (
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            None,
            [],
            False,
        ),
        (f"<tool_call>{'[' * 5000}</tool_call>", f"<tool_call>{'[' * 5000}</tool_call>", None, [], False),
    ],
)
def test_odd_output_becomes_text_or_is_dropped(
    families: dict[str, Loaded], output: str, text: str, reasoning: str | None, calls: list[Json], *, open_call: bool
) -> None:
    loaded = families["chatml"]
    deltas, parser = parse(loaded, spoken(loaded.tokenizer, output))
    item = check_item_equals_deltas(parser, deltas)
    assert (item.text, item.reasoning, [call.arguments for call in item.calls]) == (text, reasoning, calls)
    assert parser.open_call == open_call


def test_text_that_spells_markers_stays_text(families: dict[str, Loaded]) -> None:
    loaded = families["chatml"]
    text = f"<think>x</think><tool_call>{F}</tool_call><|im_end|>"
    _, parser = parse(loaded, loaded.tokenizer.encode(text))
    assert parser.item() == AssistantItem(text)


@pytest.mark.parametrize("family", ["llama3", "mistral", "chatml without tool tokens"])
def test_calls_that_are_marked_in_no_known_way_are_text(families: dict[str, Loaded], family: str) -> None:
    loaded = families[family]
    rendered = loaded.chat.item(AssistantItem("Look.", None, (ToolCall("123456789", "f", {"a": 1}),)), UserItem(""))
    opened = len(loaded.tokenizer.encode_pieces(loaded.chat.open_turn(UserItem(""))))
    _, parser = parse(loaded, loaded.tokenizer.encode_pieces(rendered)[opened:])
    assert "Look." in parser.item().text
    assert '{"a": 1}' in parser.item().text
    assert not parser.item().calls


def test_text_is_shown_as_it_comes_but_for_white_space_at_its_end(families: dict[str, Loaded]) -> None:
    loaded = families["chatml"]
    parser = loaded.chat.parser(())
    assert parser.feed(loaded.tokenizer.encode("one ")) == [TextDelta("one")]
    assert parser.feed(loaded.tokenizer.encode("two")) == [TextDelta(" two")]
    assert parser.feed(loaded.tokenizer.encode("\n")) == []
    assert parser.finish() == [TextDelta("\n")]
