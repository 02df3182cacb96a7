"""The command line and the demo, on a tiny random model saved as a user's would be."""

from __future__ import annotations

import inspect
import io
import json
import runpy
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import eagle_cuda
import eagle_decode.engine
import eagle_decode.train
from eagle_decode import cli
from eagle_decode.demo import Comparison
from eagle_decode.sequence import Chunk
from eagle_decode.terminal import show_stream, table
from tiny_folders import write_folders
from tiny_models import ByteTokenizer

pytestmark = pytest.mark.filterwarnings("ignore:none of .* draft tokens was accepted")  # the head is random


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    return write_folders(tmp_path_factory.mktemp("tiny"))


def run(*arguments: str, stdin: str | None = None, status: int = 0):
    result = CliRunner().invoke(cli.app, list(arguments), input=stdin, catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result


def generate(folders, *arguments: str, stdin: str | None = None) -> list[dict]:
    target, head = folders
    shared = ("--target", target, "--head", head, "--max-new-tokens", "24", "--json")
    return json.loads(run("generate", *shared, *arguments, stdin=stdin).stdout)


@pytest.mark.parametrize(
    "sampling", [(), ("--temperature", "0.9", "--seed", "3", "--top-k", "50", "--top-p", "0.95")]
)
def test_speculation_changes_the_metrics_and_not_the_tokens(folders, sampling):
    (plain,) = generate(folders, "--prompt", "Hello", *sampling, "--no-speculate")
    for tree in (("--nodes", "8"), ("--nodes", "20", "--levels", "5", "--top-k-draft", "3")):
        (drafted,) = generate(folders, "--prompt", "Hello", *sampling, *tree)
        assert drafted["tokens"] == plain["tokens"]
        assert drafted["text"] == plain["text"]
        assert drafted["metrics"]["draft_tokens"] > 0
    assert len(plain["tokens"]) == 24
    assert plain["metrics"]["draft_tokens"] == 0
    assert plain["finish_reason"] == "length"


def test_a_quantised_head_changes_the_drafts_and_not_the_tokens(folders):
    plain = generate(folders, "--prompt", "Hello")[0]
    (off,) = generate(folders, "--prompt", "Hello", "--head-format", "int8", "--no-speculate")
    assert off["tokens"] == plain["tokens"]
    for weights in ("int8", "int4"):
        (drafted,) = generate(folders, "--prompt", "Hello", "--head-format", weights)
        assert drafted["tokens"] == plain["tokens"]
        assert drafted["metrics"]["draft_tokens"] > 0
    with pytest.raises(ValueError, match="^weight_format: expected one of fp8, int8, .* got 'bits'"):
        generate(folders, "--prompt", "Hello", "--head-format", "bits")


def test_static_trees(folders, tmp_path):
    """By name, as a chain, from a file; the document says which."""
    path = tmp_path / "paths.json"
    path.write_text("[[1], [0], [0, 2]]")
    (plain,) = generate(folders, "--prompt", "Hello", "--no-speculate", "--tree-shape", "chain:2")
    assert "tree_shape" not in plain
    for shape, nodes in (("mc_sim_7b_63", 25), ("chain:2", 2), (str(path), 3)):
        (drafted,) = generate(folders, "--prompt", "Hello", "--tree-shape", shape)
        assert drafted["tokens"] == plain["tokens"]
        assert drafted["tree_shape"] == shape
        metrics = drafted["metrics"]
        # Every cycle but the last ones, which the budget cuts.
        assert nodes * (metrics["cycles"] - 6) < metrics["draft_tokens"] <= nodes * metrics["cycles"]
    path.write_text("[[1], [0, 2]]")
    for arguments, message in (
        (
            ("--tree-shape", "star"),
            "^tree_shape: expected mc_sim_7b_63, chain:N or a JSON file of paths, got star",
        ),
        (("--tree-shape", "chain:0"), "^length: expected 1 to 255, got 0"),
        (("--tree-shape", str(path)), r"^tree_shape: .*: paths: expected every node's parent, got \[0, 2\]"),
        (("--tree-shape", "chain:2", "--nodes", "3"), "^tree_shape: expected no --nodes beside it, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(folders, "--prompt", "Hello", *arguments)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="^tree_shape: .*paths.json: "):
        generate(folders, "--prompt", "Hello", "--tree-shape", str(path))
    path.write_text("\ufeff[[0]]", encoding="utf-8")  # a byte-order mark
    assert generate(folders, "--prompt", "Hello", "--tree-shape", str(path))[0]["tokens"]
    path.write_text("{")
    with pytest.raises(ValueError, match="^tree_shape: .*paths.json: Expecting property name"):
        generate(folders, "--prompt", "Hello", "--tree-shape", str(path))


def test_options_reach_the_sampler(folders):
    def tokens(*arguments: str) -> list[int]:
        return generate(folders, "--prompt", "Hello", *arguments)[0]["tokens"]

    hot = ("--temperature", "2")
    greedy, seeded = tokens(), tokens(*hot, "--seed", "1")
    assert seeded != greedy
    assert tokens(*hot, "--seed", "2") != seeded
    assert tokens(*hot, "--seed", "1", "--top-k", "1") == greedy
    assert tokens(*hot, "--seed", "1", "--top-p", "0.000001") == greedy
    for penalty in ("--repetition-penalty", "--presence-penalty", "--frequency-penalty"):
        assert len(set(tokens(penalty, "1000"))) == 24  # no token twice
    assert set(tokens("--logit-bias", "65:1000", "--logit-bias", "66:-1000")) == {65}
    assert tokens("--logit-bias", "256:1000") == [256]  # the end
    assert tokens("--logit-bias", "256:1000", "--min-new-tokens", "7")[7:] == [256]
    assert tokens(*hot, "--seed", "1", "--min-p", "0.999999") == greedy
    assert tokens("--raw") != greedy
    assert tokens("--max-new-tokens", "5") == greedy[:5]
    assert tokens("--dtype", "float32")  # loads and runs


def test_logprobs_are_printed(folders):
    (result,) = generate(folders, "--prompt", "Hello", "--logprobs", "3")
    for token, value, best in zip(result["tokens"], result["logprobs"], result["top_logprobs"], strict=True):
        assert best[0] == [token, value]
        assert len(best) == 3
    assert "top_logprobs" not in generate(folders, "--prompt", "Hello", "--logprobs", "0")[0]
    assert "logprobs" not in generate(folders, "--prompt", "Hello")[0]


def test_stop_string_and_standard_input(folders):
    text = generate(folders, "--prompt", "Hello")[0]["text"]
    stop = text[4:6]
    (stopped,) = generate(folders, "--prompt", "-", "--stop", stop, stdin="Hello")
    assert stopped["text"] == text[: text.index(stop)]
    assert stopped["stop_reason"] == stop


def test_text_is_printed_as_it_is_decoded(folders):
    target, head = folders
    expected = [result["text"] for result in generate(folders, "--prompt", "one", "--prompt", "two")]
    shared = ("generate", "--target", target, "--head", head, "--max-new-tokens", "24")
    single = run(*shared, "--prompt", "one")
    assert single.stdout == printed(expected[0])
    assert "tokens per cycle" in single.stderr
    both = run(*shared, "--prompt", "one", "--prompt", "two")
    assert both.stdout == f"> one\n{printed(expected[0])}\n> two\n{printed(expected[1])}\n"


def spoil(monkeypatch, first: str, position: int) -> None:
    """Makes the target's logits NaN from a position on, for prompts that begin with the letter `first`."""

    def opened(*arguments, **options):
        engine = open_engine(*arguments, **options)
        forward, prefill = engine.target.forward, engine.target.prefill
        keys = []  # of the first token, which nothing stands before

        def spoiled_prefill(prompt, *, cache, request, **rest):
            output = prefill(prompt, cache=cache, request=request, **rest)
            if int(prompt[0]) == engine.tokenizer(first)["input_ids"][0]:
                keys.append(cache[0].k[request, 0].clone())
            return output

        def spoiled_forward(tokens, *, seq_lens, depths, cache, **rest):
            output = forward(tokens, seq_lens=seq_lens, depths=depths, cache=cache, **rest)
            for row in range(len(tokens)):
                if keys and cache[0].k[row, 0].equal(keys[0]):
                    output.logits[row, seq_lens[row] + depths[row] + 1 >= position] = float("nan")
            return output

        engine.target.forward, engine.target.prefill = spoiled_forward, spoiled_prefill
        return engine

    open_engine = cli.open_engine
    monkeypatch.setattr(cli, "open_engine", opened)


@pytest.mark.parametrize("more", [(), ("--no-speculate",)])
def test_a_request_that_cannot_go_on_is_reported(folders, monkeypatch, more):
    """Its text so far is printed, and that of the others; the status is 1."""
    target, head = folders
    shared = ("generate", "--target", target, "--head", head, "--max-new-tokens", "24", "--raw", *more)
    expected = [r["text"] for r in generate(folders, "--raw", "--prompt", "A", "--prompt", "BC", *more)]
    spoil(monkeypatch, "A", 9)
    reason = "the target's logits at position 9 hold no number; check its weights"
    both = run(*shared, "--prompt", "A", "--prompt", "BC", status=1)
    assert f"error: request 0: {reason}" in both.stderr
    assert "request 1" not in both.stderr
    cut = run(*shared, "--prompt", "A", status=1)
    assert f"error: request 0: {reason}" in cut.stderr
    assert len(cut.stdout) < len(printed(expected[0]))
    assert both.stdout == f"> A\n{cut.stdout}\n> BC\n{printed(expected[1])}\n"
    shown = run(*shared, "--prompt", "A", "--prompt", "BC", "--json", status=1)
    first, second = json.loads(shown.stdout)
    assert (first["finish_reason"], len(first["tokens"])) == ("error", 8)
    assert first["error"].startswith(f"request 0: {reason}")
    assert (second["text"], second["finish_reason"], "error" in second) == (expected[1], "length", False)
    assert "error: request 0" in shown.stderr
    assert run(*shared, "--prompt", "BC").stdout == printed(expected[1])


def test_closing_line_says_when_decoding_was_plain(folders):
    target, head = folders
    shared = ("generate", "--target", target, "--prompt", "one", "--max-new-tokens", "4")
    assert "decoded plainly (no --head)" in run(*shared).stderr
    assert "decoded plainly (--no-speculate)" in run(*shared, "--head", head, "--no-speculate").stderr
    note = "a tree of 2 nodes is at most 1 levels deep; --levels 9 asks for more"
    assert note in run(*shared, "--head", head, "--nodes", "2", "--levels", "9").stderr


def test_version():
    assert run("--version").stdout == f"eagle-cuda {eagle_cuda.__version__}\n"


def printed(text: str) -> str:
    """`text` as a console writes it, which drops control characters."""
    console = Console(file=io.StringIO(), highlight=False)
    console.print(text, markup=False, soft_wrap=True)
    return console.file.getvalue()


def test_inspect(folders):
    target, head = folders
    report = json.loads(run("inspect", head, "--target", target, "--json").stdout)
    assert report["kind"] == "eagle3"
    assert report["feature_layers"] == [1, 2, 3]
    assert {"what", "decision", "why"} <= set(report["report"][0])
    shown = run("inspect", head).stdout
    assert "feature layers" in shown
    assert "eagle3" in shown.lower().replace("-", "")


def test_inspect_without_a_target_reports_what_is_borrowed():
    report = {
        line["what"]: line["decision"]
        for line in json.loads(run("inspect", "demo", "--json").stdout)["report"]
    }
    assert report["embedding"] == "the target's embed_tokens.weight"
    assert report["LM head"] == "the head's own"


def test_demo_compares_and_says_so(folders, monkeypatch):
    target, head = folders
    arguments = ("demo", "--target", target, "--head", head, "--max-new-tokens", "16", "--repeats", "2")
    monkeypatch.setenv("COLUMNS", "80")  # the table must fit
    shown = run(*arguments, "--prompt", "Hello", "--prompt", "Good bye").stdout
    assert "identical for 2 of 2 prompts" in shown
    assert shown.count("yes") == 3
    assert "per cycle" in shown
    assert "(int8)" in shown
    assert "(stored)" in run(*arguments, "--prompt", "Hello", "--head-format", "stored").stdout
    without_cycles = run(*arguments, "--prompt", "Hello", "--max-new-tokens", "1").stdout
    assert "identical for 1 of 1 prompts" in without_cycles
    (heading,) = [line for line in shown.splitlines() if "speed-up" in line]
    assert heading.rstrip().endswith("identical")

    real = eagle_decode.engine.Engine.generate

    def wrong(self, prompts, sampling, *, speculate=True):
        results = real(self, prompts, sampling, speculate=speculate)
        if not speculate:
            results[0].tokens[-1] ^= 1
        return results

    monkeypatch.setattr(eagle_decode.engine.Engine, "generate", wrong)
    shown = run(*arguments, "--prompt", "Hello", status=1).stdout
    assert "identical for 0 of 1 prompts" in shown
    assert "NO" in shown
    assert "yes" not in shown


def test_comparison_is_identical_only_if_every_run_is():
    class Same:
        error = None

    class Other:
        error = None

    class Failed:
        tokens, error = [1, 2, 3], "request 0: ..."

    assert Comparison("", [1, 2, 3], [], []).streamed == [1, 2, 3]
    Same.tokens, Other.tokens = [1, 2, 3], [1, 2, 4]
    assert Comparison("", [1, 2, 3], [Same, Same], [Same]).identical
    assert not Comparison("", [1, 2, 3], [Same, Other], [Same]).identical
    assert not Comparison("", [1, 2, 3], [Same], [Same, Other]).identical
    assert not Comparison("", [1, 2, 3], [Same], [Failed]).identical


CHUNKS = [
    Chunk(0, [*b"A"], "A", [False], None, None),
    Chunk(0, [*b"bcd"], "bcd", [True, True, False], None, None),
    Chunk(0, [*"é".encode()[:1]], "", [False], None, None),  # half a character: shown with the other half
    Chunk(0, [*"é".encode()[1:], *b"xy"], "éxy", [True, True, False], None, "length"),
]


def test_drafted_tokens_are_marked():
    coloured = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    assert show_stream(coloured, ByteTokenizer(), CHUNKS) == [*"Abcdéxy".encode()]
    green = "\x1b[1;32m"
    assert coloured.file.getvalue() == f"A{green}bc\x1b[0md{green}éx\x1b[0my\n"
    bare = Console(file=io.StringIO(), color_system=None)
    show_stream(bare, ByteTokenizer(), CHUNKS, brackets=True)
    assert bare.file.getvalue() == "A‹bc›d‹éx›y\n"
    bare = Console(file=io.StringIO(), color_system=None)
    show_stream(bare, ByteTokenizer(), CHUNKS)
    assert bare.file.getvalue() == "Abcdéxy\n"


def test_train_passes_every_option_on(folders, monkeypatch, tmp_path):
    seen = {}
    signature = inspect.signature(eagle_decode.train.train)

    def train(*arguments, **options):
        seen.update(signature.bind(*arguments, **options).arguments)

    monkeypatch.setattr(eagle_decode.train, "train", train)
    monkeypatch.setattr(sys, "argv", ["eagle-cuda", "train", "--out", "a b"])
    run(
        "train", "--target", folders[0], "--out", str(tmp_path / "out"), "--minutes", "2", "--init", "demo",
        "--learning-rate", "0.001", "--restart", "--threads", "1", "--seed", "5", "--max-steps", "3",
        "--draft-vocab-size", "128", "--eval-minutes", "7", "--num-eval-prompts", "2", "--device", "cpu",
        "--muon", "--acceptance-weight", "3", "--candidates", "2", "--num-columns", "4096",
        "--data", "a.jsonl", "--data", "b.jsonl", "--temperatures", "0,0.7",
    )  # fmt: skip
    assert seen["target"] == folders[0]
    assert seen["out"] == tmp_path / "out"
    assert seen["minutes"] == 2
    assert Path(seen["init"]).name == "demo_head"
    assert seen["resume"] is False
    assert (seen["data"], seen["temperatures"]) == ([Path("a.jsonl"), Path("b.jsonl")], (0.0, 0.7))
    assert seen["command"] == "eagle-cuda train --out 'a b'"
    assert (seen["threads"], seen["max_steps"], seen["draft_vocab_size"]) == (1, 3, 128)
    assert (seen["eval_minutes"], seen["num_eval_prompts"], seen["device"]) == (7, 2, "cpu")
    settings = seen["settings"]
    assert (settings.learning_rate, settings.seed, settings.muon) == (0.001, 5, True)
    assert (settings.acceptance_weight, settings.candidates, settings.num_columns) == (3, 2, 4096)
    assert settings.batch_tokens == eagle_decode.train.Settings.batch_tokens


def test_both_names_of_the_recipe_are_one_command(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--out", "x"])
    monkeypatch.setattr(cli, "main", lambda: seen.append(sys.argv))
    runpy.run_module("eagle_decode.train", run_name="__main__")
    assert [argv[1:] for argv in seen] == [["train", "--out", "x"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "no/such/head"), "no/such/head"),
        (("generate", "--target", "no-such-model", "--prompt", "x"), "no-such-model"),
        (("generate", "--target", "TARGET", "--prompt", "x", "--dtype", "int8"), "dtype"),
        (("generate", "--target", "TARGET", "--prompt", "x", "--top-p", "7"), "top_p"),
        (("generate", "--target", "TARGET", "--prompt", "x", "--repetition-penalty", "0"), "repetition_pen"),
        (("generate", "--target", "TARGET", "--prompt", "x", "--logit-bias", "3"), "ID:VALUE"),
        (("generate", "--target", "TARGET", "--prompt", "x", "--logprobs", "3"), "expected --json"),
        (("generate", "--target", "TARGET", "--prompt", "x" * 600), "max_length"),
        (("generate", "--target", "TARGET", "--prompt", " \n"), "prompt: expected text"),
        (("generate", "--target", "TARGET", "--prompt", "x", "--tree-shape", "[/b]"), "got [/b]: "),
        (("train", "--target", "TARGET", "--out", "OUT", "--temperatures", "0,warm"), "got '0,warm'"),
        *(
            (
                ("train", "--target", "TARGET", "--out", "OUT", "--temperatures", heat),
                "some of at least 0, got",
            )
            for heat in ("-1", "nan", "inf")
        ),
        (("generate", "--target", "TARGET", "--prompt", "x", "--tree-shape", "[[0]]" * 99), "got [[0]][[0]]"),
    ],
)
def test_faults_end_with_one_line_and_status_2(folders, arguments, message, monkeypatch, capsys):
    given = [folders[0] if argument == "TARGET" else argument for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["eagle-cuda", *given])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error:")
    assert message in error
    assert "Traceback" not in error


def test_a_narrow_table_wraps_its_text_and_keeps_its_figures():
    console = Console(width=80, file=io.StringIO())
    columns = (
        "prompt",
        "tokens",
        "tokens\nper cycle",
        "plain\ntok/s",
        "speculative\ntok/s",
        "speed-up",
        "identical",
    )
    figures = ["128", "1.75", "113.5", "156.2", "1.38x", "yes"]
    console.print(
        table("Figures", columns, [["Write a short story about a lighthouse keeper " * 2, *figures]])
    )
    shown = console.file.getvalue()
    assert all(figure in shown.split() for figure in figures)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
