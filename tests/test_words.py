"""The lint of words: each rule has examples that it refuses and examples that it accepts."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "check-words"


@pytest.fixture(scope="module")
def lint():
    loader = SourceFileLoader("check_words", str(SCRIPT))
    module = module_from_spec(spec_from_loader("check_words", loader))
    loader.exec_module(module)
    return module


def of(lint, source, path="engine.py"):
    return [flaw for _, flaw in lint.in_python(source, Path(path))]


@pytest.mark.parametrize(
    "source",
    [
        "def tell(engine): ...",
        "class Teacher:\n    taught: int = 0",
        "def push(untold): ...",
        "heard = []",
        "async def say(what): ...",
        "class Nursery: ...",
    ],
)
def test_a_name_with_a_verb_of_speech_or_a_private_noun_is_refused(lint, source):
    assert of(lint, source)


@pytest.mark.parametrize(
    "source",
    [
        "def notify(engine): ...",
        "learning_rate = 1e-3",
        "unknown = {}",
        "self.acknowledged = 1",
        "def reset(): ...",
    ],
)
def test_a_name_with_the_fields_words_passes(lint, source):
    assert not of(lint, source)


def test_the_name_of_a_test_is_a_sentence(lint):
    assert of(lint, "def test_nobody_waits(): ...")
    assert of(lint, "def test_the_engine_tells_its_state(): ...")
    assert not of(lint, "def test_an_unknown_key_is_an_error_that_says_how_to_mend_it(): ...")


def test_the_name_of_a_module_is_a_name(lint):
    assert of(lint, "", "somewhere/nursery.py")
    assert not of(lint, "", "somewhere/fork_server.py")


@pytest.mark.parametrize(
    "text",
    [
        "Waits that end.",
        "Be empty.",
        "Take it.",
        "Say why.",
        "Count.",
        "Find none.",
        "Submit the chunk.",
        "The same for a request from there.",
        "Those that are waiting.",
        "What it has written.",
        "Of one request.",
        "Send it to whoever waits for it.",
        "Tell the engine of the tokens.",
        "Return what the pool knows of it.",
    ],
)
def test_a_docstring_without_subject_or_news_or_with_dialect_is_refused(lint, text):
    assert of(lint, f'def submit(chunk):\n    """{text}"""')


@pytest.mark.parametrize(
    "text",
    [
        "Send a chunk to its instance.",
        "Offer every request once.",
        "Return the tokens that the request has so far.",
        "Raise if the chunk is unknown.",
        "A chunk that one instance runs.",
        "What does a chunk cost?",
    ],
)
def test_a_docstring_that_says_more_than_the_name_passes(lint, text):
    assert not of(lint, f'def submit(chunk):\n    """{text}"""')


def test_a_docstring_may_repeat_a_name_that_is_not_its_own(lint):
    assert of(lint, 'class Pool:\n    def close(self):\n        """Close the pool."""')
    assert not of(lint, 'class Pool:\n    def close(self):\n        """Delete the files."""')


def test_comments_and_messages_are_prose(lint):
    assert of(lint, "x = 1  # nobody reads it")
    assert of(lint, 'raise ValueError("whoever sent it knows")')
    assert not of(lint, "x = 1  # read by the scheduler")


@pytest.mark.parametrize(
    "page",
    [
        "What is missing is what groups are like while that is still being found out.",
        "Text.\n\nWhat they cost is below.",
        "These, and the next, on one or two iterations.",
        "Whoever came first is served first.",
        "The server tells the engines.",
    ],
)
def test_a_page_that_the_style_quotes_as_unreadable_is_refused(lint, page):
    assert lint.in_page("\n\n" + page)


@pytest.mark.parametrize(
    "page",
    [
        "The server notifies the engines. What does it cost? Nothing.",
        "Run it:\n\n```\ntell --nobody\n```\n\nand read `teach`.",
    ],
)
def test_questions_and_code_in_a_page_pass(lint, page):
    assert not list(lint.in_page(page))


@pytest.mark.parametrize(
    "page",
    [
        f"A sentence {'of words ' * 25}.",
        f"A short one. Then - {'of words ' * 25}.",
        f"- one\n- two {'of words ' * 25}",
        f"A line {'wrapped too late ' * 7}",
    ],
)
def test_a_sentence_without_a_breath_and_a_line_that_is_not_wrapped_are_refused(lint, page):
    page = page if "late" in page else page.replace(" of words", "\nof words")
    assert list(lint.in_layout(page))


@pytest.mark.parametrize(
    "page",
    [
        f"{'A sentence of six words ends. ' * 3}\n{'Another one has two more than that. ' * 3}",
        "- one\n" * 60,
        f"| a table | {'may be wide ' * 20} |",
        f"```\n{'code ' * 60}\n```",
        f"`{'code ' * 10}` is one word of a [link]({'far/' * 30}away.md).",
    ],
)
def test_short_sentences_lists_tables_and_code_pass(lint, page):
    assert not list(lint.in_layout(page))


def test_names_and_comments_of_cpp_are_checked(lint):
    assert list(lint.in_cpp("void teach(int n);"))
    assert list(lint.in_cpp("int n;  // nobody reads it"))
    assert not list(lint.in_cpp("void append(int n);  // at the end of the text"))


def test_rooms_are_packages_where_a_folder_holds_several(lint):
    assert lint.room_of("plugins/divided_rollout/README.md") == "plugins/divided_rollout"
    assert lint.room_of("seer_core/runtime/loop.py") == "seer_core"


def test_the_clean_rooms_are_clean(lint):
    assert lint.main([]) == 0
