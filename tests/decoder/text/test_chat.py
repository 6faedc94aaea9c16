"""Chat templates beside `apply_chat_template` of transformers, and what they object to."""

from typing import Any

import pytest

from libsym.errors import Invalid
from tests.decoder.small_checkpoints import TEMPLATE, of_transformers, small_library
from tests.decoder.text.vocabularies import ELABORATE, GEMMA, QWEN, smollm, smollm_file, templated

CALL = {"function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
TOOLS = [{"type": "function", "function": {"name": "grüßen", "parameters": {"a": [1, None, True, "<&'\">"]}}}]


def said(*pairs: tuple[str, Any], **last: Any) -> list[dict[str, Any]]:
    messages = [{"role": role, "content": content} for role, content in pairs]
    return [*messages[:-1], messages[-1] | last] if last else messages


SMOLLM = str(smollm_file().text("tokenizer.chat_template"))
PARTS = [{"type": "text", "text": "a "}, {"type": "image"}]
ASKS, ADDS = ("user", "1 + 1?"), ("assistant", "<think>\nsum\n</think>\n\nI add.")
CHATS: dict[str, tuple[str, list[dict[str, Any]], list[Any] | None]] = {
    "smollm": (SMOLLM, said(("user", "What is 2+2?")), None),
    "smollm, system": (SMOLLM, said(("system", "Be brief."), ("user", "Hi <|im_end|> & <b>")), None),
    "smollm, turns": (SMOLLM, said(("user", "a"), ("assistant", "b"), ("user", "  c\n")), None),
    "elaborate": (ELABORATE, said(("user", " x "), ("tool", "-"), ("assistant", "y")), None),
    "elaborate, tools": (ELABORATE, said(("user", " x "), ("tool", "-"), ("assistant", "y")), TOOLS),
    "gemma": (GEMMA, said(("user", " hi "), ("assistant", "you")), None),
    "gemma, system": (GEMMA, said(("system", "brief"), ("user", "hi")), None),
    "gemma, parts": (GEMMA, said(("user", PARTS)), None),
    "qwen": (QWEN, said(("system", "brief"), ("user", "hi")), None),
    "qwen, tools": (QWEN, [*said(ASKS, ADDS, tool_calls=[CALL, CALL]), *said(("tool", "2"), ("tool", "2"))], TOOLS),
}


@pytest.mark.parametrize("chat", CHATS)
def test_a_template_gives_transformers_prompt(chat):
    template, messages, tools = CHATS[chat]
    theirs = of_transformers("PreTrainedTokenizerFast")(
        tokenizer_object=small_library(), bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=template
    )
    for asks in (True, False):
        expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=asks, tokenize=False)
        assert templated(template).chat_template(messages, tools, asks) == expected
        if chat.startswith("smollm"):
            assert smollm().chat_template(messages, tools, asks) == expected


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("{{ raise_exception('no\nsystem role') }}", [], "refused the messages: no system role"),
        (GEMMA, said(("user", "x"), ("user", "x")), "refused the messages: Conversation roles must alternate user/"),
        ("{% if %}", [], "broken at line 1"),
        ("{{ messages[0]['content'] + 'x' }}", [{"role": "user"}], "refused the messages"),
        ("{{ messages[0].content + 'x' }}", said(("user", 7)), "refused the messages"),
        ("{{ messages.append(1) }}", [], "refused the messages"),
        ("{{ ''.__class__.__mro__ }}", [], "refused the messages"),
        ("{% for i in range(10**9) %}{% endfor %}", [], "refused the messages"),
        (None, [], "has no chat template"),
        (TEMPLATE, "hello", "a conversation is a list of messages"),
        (TEMPLATE, ["hello"], "a conversation is a list of messages"),
    ],
)
def test_what_a_template_objects_to_is_one_line(template, messages, reason):
    with pytest.raises(Invalid, match=reason) as caught:
        templated(template).chat_template(messages)
    assert "\n" not in str(caught.value)


def test_a_template_is_given_variables_but_none_of_its_own():
    tokenizer = templated("{% if enable_thinking %}<think>{% endif %}{{ messages[0].content }}")
    turns, thinking = said(("user", "a")), {"enable_thinking": True}
    assert tokenizer.chat_template(turns) == "a"
    assert tokenizer.chat_template(turns, variables=thinking) == "<think>a"
    assert tokenizer.chat_tokens(turns, variables=thinking) == tokenizer.encode("<think>a")
    for name in ("messages", "bos_token"):
        with pytest.raises(Invalid, match=f"{name} cannot be given as a variable"):
            tokenizer.chat_template(turns, variables={name: []})
