"""Tokenizers of checkpoints, from GGUF metadata or `tokenizer.json`, and the tiny model's byte tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from decoder.checkpoints.gguf import GgufFile
from decoder.checkpoints.json_file import read_json_object
from decoder.checkpoints.stored import map_file
from decoder.text.chat import DEFAULT_CHAT_TEMPLATE, ChatTemplate, default_template, special_token_text
from decoder.text.codecs import ByteLevelCodec, PieceCodec
from decoder.text.cuts import SPACE, TextCutter, piece_cutter, word_cutter
from decoder.text.tokenizer import ByteCodec, Codec, Tokenizer, fingerprint
from libsym.errors import Invalid

Json: TypeAlias = dict[str, Any]

_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "</s>")
"""Special tokens that end an answer, even if the checkpoint does not declare them as end tokens."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # values of tokenizer.ggml.token_type

_LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2_PATTERN = _LLAMA_3_PATTERN.replace("{1,3}", "")
_GPT_2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_MAX_PIECE = 1024
"""Maximum number of letters of a piece. The time to try every split of a piece grows with the square of its length."""


def _smollm() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _llama_3() -> PreTokenizer:
    return _pattern(_LLAMA_3_PATTERN)


def _qwen_2() -> PreTokenizer:
    return _pattern(_QWEN_2_PATTERN)


def _pattern(pattern: str) -> PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@dataclass(frozen=True, slots=True)
class _Splitter:
    """The pre-tokenizer that a name in `tokenizer.ggml.pre` stands for."""

    build: Callable[[], PreTokenizer]
    whole_words: bool = False
    """Whether a word of the vocabulary becomes one token, even if no merges lead to it."""
    composed: bool = False
    """Whether text is first normalized to composed form (NFC), as in training."""


# This table has only names whose tokenizers the tests compare with transformers. The name "default" is not here:
# converters write that name when they do not recognise the tokenizer.
_SPLITTERS = {
    "smollm": _Splitter(_smollm),
    "gpt-2": _Splitter(_gpt2),
    "llama-bpe": _Splitter(_llama_3, whole_words=True),
    "qwen2": _Splitter(_qwen_2, composed=True),
}


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Return the tiny model's tokenizer: a token for each byte."""
    if vocab_size < ByteCodec.VOCAB_SIZE:
        raise Invalid(f"a byte tokenizer needs a vocabulary of at least {ByteCodec.VOCAB_SIZE}, not {vocab_size}")
    return Tokenizer(
        ByteCodec(),
        vocab_size=vocab_size,
        bos_id=ByteCodec.BOS,
        eos_ids=frozenset({ByteCodec.EOS}),
        special_ids=frozenset({ByteCodec.BOS, ByteCodec.EOS, ByteCodec.PAD}),
        chat=ChatTemplate(DEFAULT_CHAT_TEMPLATE, {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}),
        fingerprint=fingerprint(["bytes", "<bos>", "<eos>", "<pad>"]),
    )


def gguf_tokenizer(file: GgufFile, vocab_size: int) -> Tokenizer:
    """Return the tokenizer in a GGUF file's metadata."""
    model = file.text("tokenizer.ggml.model")
    if model not in {"gpt2", "llama"}:
        raise Invalid(
            f"{file.path}: the tokenizer model {model[:40]!r} is not supported: "
            "byte-level BPE ('gpt2') and SentencePiece ('llama') are"
        )
    tokens, types = file.texts("tokenizer.ggml.tokens"), file.integers("tokenizer.ggml.token_type")
    _check_vocabulary(tokens, vocab_size, str(file.path))
    if len(types) != len(tokens):
        raise Invalid(f"{file.path}: {len(tokens)} tokens have {len(types)} types: the file is damaged")
    added = {i: tokens[i] for i, kind in enumerate(types) if kind in {_CONTROL, _USER_DEFINED} and tokens[i]}
    library, order = _gguf_bytes(file, tokens) if model == "gpt2" else _gguf_pieces(file, tokens, types)
    for special, kind in ((True, _CONTROL), (False, _USER_DEFINED)):
        texts = [text for i, text in added.items() if types[i] == kind]
        library.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
    ids = {key: _gguf_token(file, key, len(tokens)) for key in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    words = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ends = {ids["eos"], ids["eot"], ids["eom"]} - {None}
    template = file.text("tokenizer.chat_template", "")
    codec: Codec
    if model == "gpt2":
        codec = ByteLevelCodec(library, tokens, added, str(file.path), word_cutter(added.values()))
    else:
        normal = [token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL]
        cutter = piece_cutter(normal, added.values(), adds_space=_adds_space(file))
        codec = PieceCodec(library, tokens, added, cutter)
    return Tokenizer(
        codec,
        vocab_size=vocab_size,
        bos_id=ids["bos"],
        eos_ids=frozenset(i for i in ends if i is not None)
        | _named_ends({i: text for i, text in added.items() if types[i] == _CONTROL}),  # in Gemma, </s> is HTML
        special_ids=frozenset(i for i, kind in enumerate(types) if kind in {_CONTROL, _UNKNOWN}),
        chat=ChatTemplate(
            template or None, {word: tokens[i] for key, word in words.items() if (i := ids[key]) is not None}
        ),
        fingerprint=fingerprint(tokens, order, [f"{i}={text}" for i, text in added.items()]),
    )


def huggingface_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer in a checkpoint's directory: `tokenizer.json`, its configuration and its chat template."""
    path = directory / "tokenizer.json"
    description = read_json_object(path)
    kind = _codec_kind(description, path)
    try:
        library = LibraryTokenizer.from_buffer(bytes(map_file(path)))
    except BaseException as error:  # the library raises bare Exception, and BaseException in a panic
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise Invalid(f"{path}: the tokenizers library cannot read it: {' '.join(str(error).split())[:200]}") from error
    # A checkpoint's file may ask for truncation or padding. System calls must not truncate or pad.
    library.no_truncation()
    library.no_padding()
    vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
    last = max(vocabulary.values(), default=-1)
    if last >= vocab_size:
        raise Invalid(f"{path}: has token {last}, the model's vocabulary ends at {vocab_size - 1}")
    tokens: list[str | None] = [None] * (last + 1)
    for text, token in vocabulary.items():
        tokens[token] = text
    added = {token: entry.content for token, entry in library.get_added_tokens_decoder().items()}
    special = {token: text for token, text in added.items() if library.get_added_tokens_decoder()[token].special}
    codec: Codec
    if kind == "pieces":
        codec = PieceCodec(library, tokens, added, _piece_cutter_of(description, added))
    else:
        cutter = word_cutter(added.values()) if _splits_as_known(description) else None
        codec = ByteLevelCodec(library, tokens, added, str(path), cutter)
    texts = _special_texts(directory)
    merges = description["model"].get("merges", [])
    return Tokenizer(
        codec,
        vocab_size=vocab_size,
        bos_id=_declared_bos(directory, texts, vocabulary),
        eos_ids=_declared_ends(directory, texts, vocabulary) | _named_ends(special),
        special_ids=frozenset(special),
        chat=ChatTemplate(_template_of(directory), texts),
        fingerprint=fingerprint(
            [text or "" for text in tokens],
            [pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
            [f"{token}={text}" for token, text in added.items()],
        ),
    )


def _gguf_bytes(file: GgufFile, tokens: Sequence[str]) -> tuple[LibraryTokenizer, Sequence[str]]:
    """Return a byte-level tokenizer, and its merges for the fingerprint."""
    name = file.text("tokenizer.ggml.pre", "default")
    splitter = _SPLITTERS.get(name)
    if splitter is None:
        known = ", ".join(_SPLITTERS)
        raise Invalid(f"{file.path}: the pre-tokenizer {name[:40]!r} is not supported: {known} are")
    merges = file.texts("tokenizer.ggml.merges")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    library = _library(file.path, tokens, pairs, ignore_merges=splitter.whole_words)
    if splitter.composed:
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = splitter.build()
    library.decoder = decoders.ByteLevel()
    return library, merges


def _gguf_pieces(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> tuple[LibraryTokenizer, Sequence[str]]:
    """Return a SentencePiece tokenizer, and its scores for the fingerprint."""
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise Invalid(f"{file.path}: {len(tokens)} tokens have {len(scores)} scores: the file is damaged")
    unknown = [token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN]
    bytes_there = {token for token, kind in zip(tokens, types, strict=True) if kind == _BYTE}
    if missing := [byte for byte in range(256) if f"<0x{byte:02X}>" not in bytes_there]:
        raise Invalid(f"{file.path}: the vocabulary has no token for the byte {missing[0]}: this is not supported")
    pieces = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL}
    library = _library(
        file.path,
        tokens,
        piece_merges(pieces),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    spaces: list[Normalizer] = [normalizers.Replace(" ", SPACE)]
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _adds_space(file):
        spaces.insert(0, normalizers.Prepend(SPACE))
        steps.append(decoders.Strip(" ", 1, 0))
    library.normalizer = normalizers.Sequence(spaces)
    library.decoder = decoders.Sequence(steps)
    return library, [f"{score:g}" for score in scores]


def _adds_space(file: GgufFile) -> bool:
    return file.flag("tokenizer.ggml.add_space_prefix", default=True)


def piece_merges(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return SentencePiece's rule as a list of merges.

    The rule: of all pieces that two neighbours would form, the piece with the highest score is merged first.
    """
    merges = []
    if any(len(piece) > _MAX_PIECE for piece in pieces):
        raise Invalid(f"the vocabulary has a piece of more than {_MAX_PIECE} letters: the file is damaged")
    for piece in sorted(pieces, key=pieces.__getitem__, reverse=True):
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        merges += [(left, right) for left, right in halves if left in pieces and right in pieces]
    return merges


def _library(path: Path, tokens: Sequence[str], merges: list[tuple[str, str]], **settings: Any) -> LibraryTokenizer:
    vocabulary = {text: i for i, text in enumerate(tokens)}
    try:
        return LibraryTokenizer(models.BPE(vocab=vocabulary, merges=merges, **settings))
    except Exception as error:  # the library raises bare Exception, for a merge of unknown tokens
        raise Invalid(f"{path}: the merges do not fit the vocabulary: {' '.join(str(error).split())[:200]}") from error


def _check_vocabulary(tokens: Sequence[str], vocab_size: int, where: str) -> None:
    if len(tokens) > vocab_size:
        raise Invalid(f"{where}: the tokenizer has {len(tokens)} tokens, the model only {vocab_size}")
    if len(set(tokens)) != len(tokens):
        raise Invalid(f"{where}: the vocabulary has a token twice: the file is damaged")


def _gguf_token(file: GgufFile, key: str, num_tokens: int) -> int | None:
    name = f"tokenizer.ggml.{key}_token_id"
    if name not in file.metadata:
        return None
    token = file.integer(name)
    if not 0 <= token < num_tokens:
        raise Invalid(f"{file.path}: {name} = {token} is not in the vocabulary of {num_tokens}")
    return token


def _named_ends(special: Mapping[int, str]) -> frozenset[int]:
    return frozenset(token for token, text in special.items() if text in _END_TOKENS)


def _codec_kind(description: Json, path: Path) -> str:
    """Return `bytes` or `pieces`, by the decoder in a `tokenizer.json`. Invalid: the decoder is of another kind."""
    model, decoder = description.get("model"), description.get("decoder")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(decoder, dict):
        raise Invalid(f"{path}: is not a BPE tokenizer with a decoder, which is what this release supports")
    steps = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    if kinds == ["ByteLevel"]:
        return "bytes"
    if "ByteFallback" in kinds and model.get("byte_fallback") is True:
        return "pieces"
    raise Invalid(f"{path}: the decoder {json.dumps(kinds)} is not supported: ByteLevel and ByteFallback are")


def _splits_as_known(description: Json) -> bool:
    """Return whether a byte-level `tokenizer.json` normalizes and splits text in ways that `cuts.py` supports."""
    steps = _steps(description.get("pre_tokenizer"), "pretokenizers")
    splits = any(step.get("type") == "Split" or step.get("use_regex") is True for step in steps)
    normalizer = description.get("normalizer")
    return normalizer in (None, {"type": "NFC"}) and splits and all(map(_is_known_step, steps))


def _is_known_step(step: Json) -> bool:
    match step.get("type"):
        case "ByteLevel":
            return step.get("add_prefix_space") is False
        case "Digits":
            return True
        case "Split":
            pattern = step.get("pattern")
            expression = pattern.get("Regex") if isinstance(pattern, dict) else None
            is_plain = step.get("behavior") == "Isolated" and not step.get("invert")
            return is_plain and expression in {_LLAMA_3_PATTERN, _QWEN_2_PATTERN, _GPT_2_PATTERN}
        case _:
            return False


def _piece_cutter_of(description: Json, added: Mapping[int, str]) -> TextCutter | None:
    """Return a cutter for a SentencePiece `tokenizer.json`. None: the file normalizes more than spaces."""
    spelling = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = {"type": "Prepend", "prepend": SPACE}
    steps = _steps(description.get("normalizer"), "normalizers")
    if description.get("pre_tokenizer") is not None or steps not in ([spelling], [prefix, spelling]):
        return None
    pieces = description["model"].get("vocab", {})
    spelled_out = set(added.values())
    ordinary = (piece for piece in pieces if piece not in spelled_out)
    return piece_cutter(ordinary, added.values(), adds_space=len(steps) == 2)


def _steps(part: Any, key: str) -> list[Json]:
    """Return the steps of a part of a `tokenizer.json`: a sequence, one step, or nothing."""
    if not isinstance(part, dict):
        return []
    steps = part.get(key) if part.get("type") == "Sequence" else [part]
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def _optional(path: Path) -> Json:
    return read_json_object(path) if path.exists() else {}


def _special_texts(directory: Path) -> dict[str, str]:
    """Return the texts of `bos_token`, `eos_token` and the like, by name."""
    texts = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):  # the second file wins
        for name, value in _optional(directory / file).items():
            if name.endswith("_token") and (text := special_token_text(value)) is not None:
                texts[name] = text
    return texts


def _declared_ids(directory: Path, key: str, vocabulary: Mapping[str, int]) -> Iterable[int]:
    """Yield the token ids that the configuration files declare under a key, as one number or a list."""
    for file in ("generation_config.json", "config.json"):
        value = _optional(directory / file).get(key)
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token) is not int or not 0 <= token <= max(vocabulary.values(), default=-1):
                raise Invalid(f"{directory / file}: {key} = {str(value)[:80]} is not in the vocabulary")
            yield token


def _declared_bos(directory: Path, texts: Mapping[str, str], vocabulary: Mapping[str, int]) -> int | None:
    named = vocabulary.get(texts.get("bos_token", ""))
    return named if named is not None else next(iter(_declared_ids(directory, "bos_token_id", vocabulary)), None)


def _declared_ends(directory: Path, texts: Mapping[str, str], vocabulary: Mapping[str, int]) -> frozenset[int]:
    named = vocabulary.get(texts.get("eos_token", ""))
    return frozenset(_declared_ids(directory, "eos_token_id", vocabulary)) | ({named} if named is not None else set())


def _template_of(directory: Path) -> str | None:
    path = directory / "chat_template.jinja"
    if not path.exists():
        return default_template(_optional(directory / "tokenizer_config.json").get("chat_template"))
    try:
        return str(map_file(path), "utf-8")
    except UnicodeDecodeError as error:
        raise Invalid(f"{path}: is not UTF-8") from error
