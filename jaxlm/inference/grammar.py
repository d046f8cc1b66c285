"""Grammars that a text is held to, by the library llguidance: which tokens may come next. Imports no JAX."""

import copy
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxlm.core.errors import InputError
from jaxlm.core.extras import install
from jaxlm.data.tokenizers import Tokenizer
from jaxlm.inference.grammar_errors import explained, no_schema, shortened

if TYPE_CHECKING:
    import llguidance

GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]

MAX_GRAMMAR_BYTES = 64 << 10
MAX_REGEX_BYTES = 2 << 10  # some take the library a time that grows with the square of their length
_KEPT = 64  # compiled grammars

# What compiling and each mask may take. The library counts work, not time, so that all processes of one engine come to
# the same end: 25 ms or so of regular expressions at first, and 10 ms of them and 5 ms of rules for each mask.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 150_000,
    "step_max_items": 50_000,
    "max_items_in_row": 4_000,
    "max_lexer_states": 50_000,  # 1 or 2 kB each
    "max_grammar_size": 200_000,
}
_MOST_OPTIONAL = 950  # properties: each takes four of the items in a row

# JSON is written compactly: a model that likes blanks would write little else.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class GrammarError(InputError):
    """A grammar that cannot be compiled, or that a text cannot be held to any further."""


class Grammar(NamedTuple):
    """A grammar of whole texts.

    Attributes:
      kind: "json_object", any object of JSON; "json_schema", the values of a schema; "regex", the texts that a regular
        expression matches from their beginning to their end; "lark", those of the rule `start` of a Lark grammar.
      text: of the schema, the expression or the grammar.
      around: a Lark grammar of longer texts, in which these texts are `@text`; "" for these texts alone.
      whitespace: of JSON, a regular expression of the blanks that may stand between any two of its tokens; "" lets one
        space follow a comma or a colon.
    """

    kind: GrammarKind
    text: str = ""
    around: str = ""
    whitespace: str = ""


class Grammars:
    """The compiler of grammars for the tokens of a model. It may be called from several threads.

    Args:
      tokenizer: of the model.
      vocab_size: the model's number of ids; ids without a token are in no text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiled: OrderedDict[Grammar, CompiledGrammar | GrammarError] = OrderedDict()
        self._lock = threading.Lock()

    def kept(self, grammar: Grammar) -> "CompiledGrammar | None":
        """Return a grammar that was compiled before, at once; None where it was not, or was too long ago. Raises
        GrammarError as `compile` did."""
        with self._lock:
            if (compiled := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
        if isinstance(compiled, GrammarError):
            raise GrammarError(str(compiled))  # an error keeps where it was raised
        return compiled

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """Return a compiled grammar, which may take a second.

        Raises GrammarError for a grammar that cannot be compiled, or that only the empty text or none fits, and
        InputError without the library.
        """
        if (compiled := self.kept(grammar)) is not None:
            return compiled
        tokenizer, known_W = self._library_tokenizer, _bits(np.flatnonzero(self._has_token_V), self._vocab_size)
        try:
            compiled = CompiledGrammar.of(grammar, tokenizer, self._vocab_size, known_W)
        except GrammarError as error:
            self._keep(grammar, error)
            raise
        self._keep(grammar, compiled)
        return compiled

    def matcher(
        self, compiled: "CompiledGrammar", stop_token_ids: Collection[int] = (), min_tokens: int = 0
    ) -> "Matcher":
        """Return the beginning of a text. Raises GrammarError where no token may begin the text.

        Args:
          stop_token_ids: ids that end the text, once it fits the grammar.
          min_tokens: the tokens before which none ends it.
        """
        ends = [id for id in stop_token_ids if id < self._vocab_size and self._has_token_V[id]]
        matcher = Matcher(compiled, self._vocab_size, ends, min_tokens)
        if matcher.error:
            raise matcher.error
        return matcher

    def warm(self) -> None:
        """Read the tokenizer now. Raises InputError without the library."""
        _ = self._library_tokenizer

    def _keep(self, grammar: Grammar, compiled: "CompiledGrammar | GrammarError") -> None:
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)

    @cached_property
    def _has_token_V(self) -> np.ndarray:
        return self._tokenizer.valid_token_mask(self._vocab_size)

    @cached_property
    def _library_tokenizer(self) -> "llguidance.LLTokenizer":
        try:
            import llguidance
        except ImportError:
            raise InputError(f"a grammar needs the package llguidance: {install('grammar')}") from None
        words = _Words(self._tokenizer, self._vocab_size)
        return llguidance.LLTokenizer(words, n_vocab=len(words.tokens))  # type: ignore[arg-type]  # by its attributes


class Matcher:
    """A text that is drawn token by token and held to a grammar.

    A token that ends the text may come exactly where the text so far fits the grammar; where nothing else may follow,
    the text has ended without one.

    Attributes:
      allowed_W: uint32 [⌈V / 32⌉], the ids that may come next: bit i % 32 of word i // 32 is that of id i.
      has_ended: true once the text fits the grammar and no other text that begins with it does.
      error: why the text cannot go on, if it cannot.
    """

    def __init__(self, compiled: "CompiledGrammar", vocab_size: int, stop_token_ids: Collection[int], min_tokens: int):
        self._matcher, self._vocab_size, self._min_tokens = compiled.matcher.deep_copy(), vocab_size, min_tokens
        self._stops_W, self._known_W, self._count = _bits(stop_token_ids, vocab_size), compiled.known_W, 0
        self.has_ended, self.error = False, None
        self.allowed_W = compiled.first_W
        self._allow(compiled.first_W, compiled.is_accepting)

    def accept(self, token: int) -> None:
        """Add a token that may come next, other than one that ends the text."""
        self._count += 1
        if not self._matcher.consume_token(token):
            self._fail(shortened(_message(self._matcher)))
            return
        if self._matcher.is_accepting() and self._matcher.is_stopped():
            self._allow(np.zeros_like(self._stops_W), is_accepting=True)
            return
        following_W = _following(self._matcher, self._vocab_size) & self._known_W
        if self._matcher.is_error():
            self._fail(shortened(_message(self._matcher)))
        else:
            self._allow(following_W, self._matcher.is_accepting())

    def forced(self, most: int) -> list[int]:
        """Return the tokens of the text that the grammar leaves no choice about, at most so many. The same text may be
        cut into other tokens, which are allowed too."""
        return self._matcher.deep_copy().compute_ff_tokens()[:most]

    def possible(self, tokens: Sequence[int]) -> list[int]:
        """Return those of some tokens, from the first on, that may follow one after the other and do not end the
        text."""
        tokens = list(itertools.takewhile(lambda token: not _has(self._stops_W, token), tokens))
        return tokens[: self._matcher.deep_copy().validate_tokens(tokens)]

    def allowed_after(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """Return the ids that may come next (`allowed_W`), and those that may after each of some tokens that are
        accepted one after the other; none any more from where the text has ended or cannot go on."""
        ahead = copy.copy(self)
        ahead._matcher, allowed = self._matcher.deep_copy(), [self.allowed_W]
        for token in tokens:
            ahead.accept(token)
            if ahead.has_ended or ahead.error:
                break
            allowed.append(ahead.allowed_W)
        return allowed

    def _allow(self, following_W: np.ndarray, is_accepting: bool) -> None:
        """Take the tokens that may follow by the grammar alone, and whether the text so far fits it."""
        may_end = is_accepting and self._count >= self._min_tokens
        self.has_ended = may_end and not following_W.any()
        self.allowed_W = following_W & ~self._stops_W | (self._stops_W if may_end else 0)
        if not self.has_ended and not self.allowed_W.any():
            if is_accepting and not following_W.any():
                self._fail(f"its text has ended after {self._count} tokens, and min_tokens = {self._min_tokens}")
            else:
                self._fail(f"no token of the model may follow after {self._count} tokens")

    def _fail(self, why: str) -> None:
        self.error = GrammarError(f"the grammar cannot be followed: {why}")


class CompiledGrammar(NamedTuple):
    """A grammar at the beginning of a text. `first_W`: the ids that may begin it, and `known_W`, those that have a
    token, as `Matcher` has them."""

    matcher: "llguidance.LLMatcher"
    first_W: np.ndarray
    is_accepting: bool
    known_W: np.ndarray

    @classmethod
    def of(
        cls, grammar: Grammar, tokenizer: "llguidance.LLTokenizer", vocab_size: int, known_W: np.ndarray
    ) -> "CompiledGrammar":
        import llguidance

        name = _NAMES[grammar.kind]

        def refused(message: str) -> GrammarError:
            return GrammarError(f"{name} cannot be used: {explained(grammar.kind, grammar.text, message)}")

        most = MAX_REGEX_BYTES if grammar.kind == "regex" else MAX_GRAMMAR_BYTES
        if (size := len("".join(grammar[1:]).encode("utf-8", "surrogatepass"))) > most:
            raise GrammarError(f"{name} of {size:,} bytes is longer than {most:,}; shorten it")
        if grammar.kind == "json_schema" and (why := no_schema(grammar.text)):
            raise GrammarError(f"{name} {why}")
        limits = llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)
        try:
            matcher = llguidance.LLMatcher(tokenizer, _rules(grammar), log_level=0, limits=limits)
        except ValueError as error:
            raise refused(str(error)) from None
        if matcher.is_error():
            raise refused(_message(matcher))
        first_W = _following(matcher, vocab_size) & known_W
        if matcher.is_error():
            raise refused(_message(matcher))
        if not first_W.any():
            raise GrammarError(f"{name} cannot be used: no text of this model's tokens fits it but maybe the empty one")
        return cls(matcher, first_W, matcher.is_accepting(), known_W)


_NAMES = {
    "json_object": "a JSON object",
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "lark": "the Lark grammar",
}


def _rules(grammar: Grammar) -> str:
    """Return a grammar as the library takes it. Raises ValueError for a schema that is no JSON."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "regex":
            rules = LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            rules = LLMatcher.grammar_from_lark(grammar.text)
        case _:
            schema = '{"type": "object"}' if grammar.kind == "json_object" else grammar.text
            options: Any = {"whitespace_pattern": grammar.whitespace} if grammar.whitespace else JSON_OPTIONS
            rules = LLMatcher.grammar_from_json_schema(schema, overrides=options)
            check_optional(json.loads(schema))
    if not grammar.around:
        return rules
    (text,) = json.loads(rules)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": grammar.around}, {**text, "name": "text"}]})


def json_rule(schema: Mapping[str, Any], *, is_lenient: bool = False) -> str:
    """Return the JSON values of a schema as an expression of a Lark grammar.

    `is_lenient`: keywords that the library does not know are left out, in place of an error. Raises GrammarError for an
    object with too many optional properties.
    """
    check_optional(schema)
    options = {**JSON_OPTIONS, "lenient": is_lenient}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def check_optional(schema: Any) -> None:
    """Raise GrammarError for an object with more optional properties between two required ones than a text can be held
    to: all of them may come next."""
    if isinstance(schema, list):
        for each in schema:
            check_optional(each)
    if not isinstance(schema, Mapping):
        return
    properties, required = schema.get("properties"), schema.get("required")
    run = longest = 0
    for name in properties if isinstance(properties, Mapping) else ():
        run = 0 if isinstance(required, list) and name in required else run + 1
        longest = max(longest, run)
    if longest > _MOST_OPTIONAL:
        raise GrammarError(
            f"the JSON schema has an object with {longest:,} optional properties in a row, and a text can be held to "
            f"{_MOST_OPTIONAL}; require some of them, or divide them over several objects"
        )
    for each in schema.values():
        check_optional(each)


class _Words:
    """The tokens of a model as the library reads them: bytes, and an end of its own behind the last id."""

    is_tokenizer_wrapper = True  # by which the library knows its form
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        known = min(vocab_size, tokenizer.vocab_size)
        self.tokens = [*map(tokenizer.bytes_of, range(known)), *[b""] * (vocab_size - known), b"<end>"]
        self.eos_token_id = vocab_size
        controls = {id for id in tokenizer.controls.values() if id < vocab_size}
        self.special_token_ids = [*sorted(controls), vocab_size]
        special = frozenset(self.special_token_ids)
        self._ids = {each: id for id, each in enumerate(self.tokens) if each and id not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> Sequence[int]:
        """Return the tokens of a text that a grammar leaves no choice about: as the tokenizer cuts it, unless it adds
        something, such as a blank."""
        try:
            tokens = self._tokenizer.encode(text)
        except InputError:
            tokens = []
        content = text.encode()
        if b"".join(self.tokens[token] for token in tokens) == content:
            return tokens
        tokens, at = [], 0
        while at < len(content):
            ends = range(min(at + self._longest, len(content)), at, -1)
            end = next((end for end in ends if content[at:end] in self._ids), None)
            if end is None:
                break  # what is left has no tokens
            tokens.append(self._ids[content[at:end]])
            at = end
        return tokens


def _following(matcher: "llguidance.LLMatcher", vocab_size: int) -> np.ndarray:
    """Return the ids that may follow by the grammar alone, as `Matcher.allowed_W`."""
    row = np.zeros(-(-(vocab_size + 1) // 32), np.uint32)  # with a bit for the library's end
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    row[vocab_size // 32] &= ~np.uint32(1 << vocab_size % 32)
    return row[: -(-vocab_size // 32)]


def _has(bits_W: np.ndarray, id: int) -> bool:
    return bool(bits_W[id // 32] >> id % 32 & 1)


def _bits(ids: Collection[int], vocab_size: int) -> np.ndarray:
    """Return a set of ids as `Matcher.allowed_W`."""
    bits_W = np.zeros(-(-vocab_size // 32), np.uint32)
    for id in ids:
        bits_W[id // 32] |= np.uint32(1 << id % 32)
    return bits_W


def _message(matcher: "llguidance.LLMatcher") -> str:
    """Return why a text cannot go on, without the state of the parser."""
    return matcher.get_error().partition("\n<")[0]
