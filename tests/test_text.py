"""Text of what is generated: stop strings, streams, characters of several tokens."""

from __future__ import annotations

import pytest

from eagle_decode.engine import Engine
from eagle_decode.sampling import SamplingParams
from eagle_decode.text import TextStream, UnreadableToken
from oracle_drafter import ChainOfTruth, scripted_engine
from scripted_target import ScriptedTarget
from tiny_models import ByteTokenizer


def test_stop_string_cuts_tokens_text_and_logprobs_alike():
    text = "a ha ha ha x and more"
    for stop, kept in [(" ha ha", "a ha ha"), ("ha x", "a ha ha ha x"), (("zz", "a ha"), "a ha"), ("a", "a")]:
        expected = kept[
            : min(at for s in ([stop] if isinstance(stop, str) else stop) if (at := kept.find(s)) >= 0)
        ]
        for speculate in (False, True):
            script = list(text.encode())
            drafter = ChainOfTruth(script, levels=7)
            engine = Engine(ScriptedTarget({7: script}), draft=drafter, tokenizer=ByteTokenizer())
            result = engine.generate([7], SamplingParams(stop=stop, logprobs=True), speculate=speculate)[0]
            assert bytes(result.tokens).decode() == kept
            assert result.text == expected
            assert len(result.logprobs) == len(result.tokens) == result.metrics.tokens
            assert result.finish_reason == "stop"
            assert result.stop_reason in stop if isinstance(stop, tuple) else result.stop_reason == stop


class PieceTokenizer:
    """Decodes as SentencePiece does: every word brings its space, and the first one loses it."""

    WORDS = ("", "▁Hello", "▁world", ",", "▁and")  # 0: special

    def decode(self, ids, **_):
        return "".join(self.WORDS[i] for i in ids).replace("▁", " ").removeprefix(" ")


@pytest.mark.parametrize("special", [[0], [0, 0, 0]])
def test_spaces_behind_special_tokens_stay(special):
    tokens = [*special, 1, *special, 2, *special, 3, 4, 2]
    stream = TextStream(PieceTokenizer())
    assert [stream.push([token]) for token in tokens] == [None] * len(tokens)
    assert stream.take(final=True) == PieceTokenizer().decode(tokens) == "Hello world, and world"
    stream = TextStream(PieceTokenizer(), ("lo wor",))
    assert stream.push(tokens) == 2 * len(special) + 2
    assert stream.take(final=True) == "Hel"


STREAMED = "naïve café — 東京 🙂🙂 <en <end> never"


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("stop", [(), ("<end>",), ("nowhere", "en <end"), ("🙂🙂 <",)])
def test_stream_adds_up_and_never_splits(speculate, stop):
    script = list(STREAMED.encode())
    scripts = {7: script, 8: script[::-1]}
    params = SamplingParams(stop=stop, max_new_tokens=len(script), logprobs=True)
    whole = scripted_engine(scripts, seed=3).generate([[7], [8]], params, speculate=speculate)
    chunks = list(scripted_engine(scripts, seed=3).stream([[7], [8]], params, speculate=speculate))
    for index, result in enumerate(whole):
        mine = [chunk for chunk in chunks if chunk.request == index]
        assert [token for chunk in mine for token in chunk.tokens] == result.tokens
        assert [value for chunk in mine for value in chunk.logprobs] == result.logprobs
        assert "".join(chunk.text for chunk in mine) == result.text
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + [result.finish_reason]
        drafted = sum(sum(chunk.accepted) for chunk in mine)
        assert result.metrics.accepted_tokens - result.metrics.cut_tokens <= drafted
        assert drafted <= result.metrics.accepted_tokens
    first = whole[0].text
    expected = STREAMED[: min([STREAMED.find(s) for s in stop if s in STREAMED], default=None)]
    assert first == expected
    for chunk in chunks:
        if chunk.request == 0:
            assert "\ufffd" not in chunk.text
            assert not any(s in chunk.text for s in stop)


def test_text_is_held_back_only_while_it_may_change():
    stream = TextStream(ByteTokenizer(), stop=("abcd",))
    shown = []
    for byte in "xabcxabé".encode():
        assert stream.push([byte]) is None
        shown.append(stream.take())
    assert shown == ["x", "", "", "", "abcx", "", "", "", "abé"]
    assert stream.take(final=True) == ""


def test_text_that_never_completes_is_flushed():
    stream = TextStream(ByteTokenizer())
    stream.push([65, 0xE6, 0x9D])
    assert stream.take() == "A"
    assert stream.take(final=True) == "\ufffd"


def test_an_unreadable_token_leaves_no_trace():
    class Picky(ByteTokenizer):
        def decode(self, ids, **options):
            if ids[0] == ord("!") or 300 in ids:
                raise IndexError
            return super().decode(ids, **options)

    stream = TextStream(Picky())
    assert stream.push([*b"ab"]) is None
    with pytest.raises(UnreadableToken) as caught:
        stream.push([ord("!")])  # read after "b", refused by itself
    assert (caught.value.token, caught.value.count) == (ord("!"), 0)
    assert isinstance(caught.value.__cause__, IndexError)
    with pytest.raises(UnreadableToken) as caught:
        stream.push([*b"cd", 300, *b"ef"])
    assert (caught.value.token, caught.value.count) == (300, 2)
    assert stream.take(final=True) == "abcd"


def test_tokens_are_read_alike_however_many_come_at_a_time():
    class Strict(ByteTokenizer):
        """Refuses half a character, which a longer text would complete."""

        def decode(self, ids, **options):
            return bytes(ids).decode("utf-8")

    for tokens in ("aé".encode(), "é".encode()):
        one_by_one, together = TextStream(Strict()), TextStream(Strict())
        for token in tokens[:-2]:
            one_by_one.push([token])
        with pytest.raises(UnreadableToken) as expected:
            one_by_one.push(tokens[-2:-1])
        with pytest.raises(UnreadableToken) as caught:
            together.push(tokens)
        assert caught.value.token == expected.value.token == 0xC3
        assert caught.value.count == len(tokens) - 2
        assert together.take(final=True) == one_by_one.take(final=True) == tokens[:-2].decode()


def test_an_answer_of_one_token_is_streamed():
    engine = scripted_engine({7: [65, 66]})
    chunks = list(engine.stream([7], SamplingParams(max_new_tokens=1)))
    assert [(chunk.tokens, chunk.text, chunk.accepted, chunk.finish_reason) for chunk in chunks] == [
        ([65], "A", [False], "length")
    ]
