"""The draft servers' client: siblings' text arrives, and no fault of anyone reaches the engine."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from seer_grouped_spec.client import STOP_S, DraftClient
from seer_grouped_spec.handshake import HELLO_BYTES, Handshake
from seer_grouped_spec.wire import Codec, Done, Failure, Frames, WireError, server_of

TEXT = list(range(1000))


def test_two_engines_see_what_the_other_writes_and_not_what_they_wrote(server, engine, wait_for):
    one, two = engine(server), engine(server)
    one.join("g")
    two.join("g")
    one.write("g", "r1", TEXT[:5])
    two.write("g", "r2", TEXT[10:13])
    wait_for(lambda: two.text("g", "r1") == TEXT[:5] and one.text("g", "r2") == TEXT[10:13])
    one.write("g", "r1", TEXT[5:9])
    wait_for(lambda: two.text("g", "r1") == TEXT[:9])
    assert dict(one.given) == {("g", "r2"): 3}
    assert dict(two.given) == {("g", "r1"): 9}
    assert (one.stat("tokens_sent"), one.stat("tokens_received")) == (9, 3)


def test_what_is_fetched_is_only_what_is_new(server, engine, wait_for):
    one, two = engine(server), engine(server)
    for each in (one, two):
        each.join("g")
    one.write("g", "r", np.zeros(50_000))
    wait_for(lambda: two.given["g", "r"] == 50_000)
    before, fetches = two.stat("bytes_received"), two.stat("fetches")
    one.write("g", "r", TEXT[:10])
    wait_for(lambda: two.given["g", "r"] == 50_010)
    idle = 20 * (two.stat("fetches") - fetches)
    assert two.stat("bytes_received") - before < idle + 100
    assert one.stat("bytes_received") < 50_000


def test_groups_are_isolated_and_unregistered_ones_deliver_nothing(server, engine, wait_for, raw):
    one, two = engine(server), engine(server)
    one.join("g", "h")
    two.join("g")
    one.write("h", "r", TEXT[:5])
    one.write("g", "r", TEXT[5:10])
    wait_for(lambda: two.text("g", "r") == TEXT[5:10])
    two.client.unregister_group("g")
    figures = raw(server)
    wait_for(lambda: figures.figures()["clients"] == 1)
    one.write("g", "r", TEXT[:3])
    wait_for(lambda: figures.figures()["tokens_in"] == 13)
    assert dict(two.given) == {("g", "r"): 5}


def test_the_last_words_before_leaving_are_still_sent(server, engine, wait_for, raw):
    one, two, figures = engine(server), engine(server), raw(server)
    one.join("g")
    two.join("g")
    wait_for(lambda: figures.figures()["clients"] == 2)
    one.write("g", "r", TEXT[:5])
    one.client.unregister_group("g")
    wait_for(lambda: two.text("g", "r") == TEXT[:5])


def test_when_all_have_left_the_group_is_dropped_and_may_come_again(server, engine, wait_for, raw):
    one, figures = engine(server), raw(server)
    one.join("g")
    one.write("g", "r", TEXT[:5])
    wait_for(lambda: figures.figures()["tokens_in"] == 5)
    one.client.unregister_group("g")
    wait_for(lambda: figures.figures()["groups"] == 0)
    assert figures.figures()["groups_finished"] == 1
    one.texts.clear()
    one.join("g")
    two = engine(server)
    two.join("g")
    one.write("g", "r", TEXT[5:7])
    wait_for(lambda: two.text("g", "r") == TEXT[5:7])


def test_who_leaves_and_joins_at_once_is_given_everything_again(server, engine, wait_for):
    one, two = engine(server), engine(server)
    for each in (one, two):
        each.join("g")
    one.write("g", "r", TEXT[:50])
    two.write("g", "s", TEXT[:5])
    wait_for(lambda: two.text("g", "r") == TEXT[:50] and one.text("g", "s") == TEXT[:5])
    two.texts.clear()
    two.client.unregister_group("g")
    two.join("g")
    wait_for(lambda: two.text("g", "r") == TEXT[:50] and two.text("g", "s") == TEXT[:5])


def test_a_request_that_moves_is_written_on_elsewhere_and_comes_back(server, engine, wait_for):
    one, two = engine(server), engine(server)
    one.join("g")
    one.write("g", "r", TEXT[:100])
    two.join("g")
    two.texts["g", "r"] = np.asarray(TEXT[:100], np.int32)  # came with the chunk
    two.client.appended("g", "r", 100, np.empty(0, np.int32))
    two.write("g", "r", TEXT[100:120])
    wait_for(lambda: one.text("g", "r") == TEXT[:120])
    assert one.given["g", "r"] == 20
    one.write("g", "r", TEXT[120:130])
    wait_for(lambda: two.text("g", "r") == TEXT[:130])
    two.write("g", "r", TEXT[130:140])
    wait_for(lambda: one.text("g", "r") == TEXT[:140])
    assert one.stat("disagreements") == two.stat("disagreements") == 0


def test_text_that_the_server_lacks_is_asked_of_the_engine(server, engine, wait_for):
    one, two = engine(server), engine(server)
    for each in (one, two):
        each.join("g")
    one.texts["g", "r"] = np.asarray(TEXT[:500], np.int32)
    one.write("g", "r", TEXT[500:510])
    wait_for(lambda: two.text("g", "r") == TEXT[:510])
    assert one.stat("gaps") == 1
    assert one.asked >= 1


def test_text_that_is_gone_is_given_up_and_the_rest_goes_on(server, engine, wait_for):
    one, two = engine(server), engine(server)
    for each in (one, two):
        each.join("g")
    one.remembers = False
    one.write("g", "r", TEXT[:10], at=0)
    one.client.appended("g", "lost", 100, np.ones(5, np.int32))
    wait_for(lambda: one.stat("gave_up") == 1)
    one.client.appended("g", "lost", 105, np.ones(5, np.int32))
    one.write("g", "r", TEXT[10:20])
    wait_for(lambda: two.text("g", "r") == TEXT[:20])
    assert two.given["g", "lost"] == 0


def test_beyond_its_bound_the_queue_drops_the_oldest_and_the_gap_is_repaired(server, engine, wait_for):
    one, two = engine(server, queue_bytes=4000, flush_s=0.3), engine(server)
    for each in (one, two):
        each.join("g")
    wait_for(lambda: one.stat("fetches") > 0)
    for start in range(0, 5000, 100):
        one.write("g", "r", range(start, start + 100))
    assert one.stat("dropped_tokens") > 0
    wait_for(lambda: two.text("g", "r") == list(range(5000)))


def test_a_disagreement_is_counted_and_costs_only_that_request(server, engine, wait_for):
    one, two = engine(server), engine(server)
    one.join("g")
    one.write("g", "r", [1, 2, 3])
    wait_for(lambda: one.stat("tokens_sent") == 3)
    two.join("g")
    two.write("g", "r", [1, 9, 3, 4])
    two.write("g", "s", [5])
    wait_for(lambda: two.stat("disagreements") == 1)
    assert [reason.split(": ", 1)[1] for reason in two.told] == [
        "it has another text of 'r'; such requests are no longer shared"
    ]
    wait_for(lambda: one.text("g", "s") == [5])
    two.write("g", "r", [6])
    two.write("g", "s", [6])
    wait_for(lambda: one.text("g", "s") == [5, 6])
    assert one.text("g", "r") == [1, 2, 3]
    assert two.stat("gave_up") == 1


def test_a_lapsed_group_is_registered_again_by_who_writes_on(server, engine, wait_for, raw):
    one, figures = engine(server), raw(server)
    one.join("g", ttl_s=0.2)
    one.write("g", "r", TEXT[:50])
    wait_for(lambda: figures.figures()["groups_expired"] == 1)
    two = engine(server)
    two.join("g")
    one.write("g", "r", TEXT[50:60])
    wait_for(lambda: two.text("g", "r") == TEXT[:60])


def test_a_group_too_big_for_the_server_is_let_go(start_server, engine, wait_for, raw):
    server = start_server(memory_bytes=40_000)
    one, figures = engine(server), raw(server)
    one.join("g", "h")
    one.write("g", "r", np.zeros(5000))
    wait_for(lambda: figures.figures()["tokens_in"] == 5000)
    one.write("h", "r", np.zeros(6000))
    wait_for(lambda: figures.figures()["groups_evicted"] == 1)
    one.write("g", "r", TEXT[:5])
    wait_for(lambda: one.stat("refused") == 1)
    assert ["no room" in reason for reason in one.told] == [True]
    sent = one.stat("tokens_sent")
    one.write("g", "r", TEXT[:5])
    one.write("h", "r", TEXT[:5])
    wait_for(lambda: one.stat("tokens_sent") == sent + 5)
    assert figures.figures()["held_bytes"] <= 40_000


def test_a_group_of_512(server, engine, wait_for):
    one, two = engine(server), engine(server)
    for each in (one, two):
        each.join("g")
    for number in range(512):
        (one if number % 2 else two).write("g", f"r{number}", [number, number + 1])
    wait_for(lambda: len(one.given) == len(two.given) == 256)
    assert all(one.text("g", f"r{number}") == [number, number + 1] for number in range(512))


def test_a_response_of_100_000_tokens_comes_in_slices(server, engine, wait_for):
    text = np.arange(100_000, dtype=np.int32)
    one, two = engine(server), engine(server)
    one.join("g")
    one.write("g", "r", text)
    two.join("g")
    wait_for(lambda: len(two.texts["g", "r"]) == 100_000)
    assert np.array_equal(two.texts["g", "r"], text)
    assert one.stat("updates") >= 2
    three = engine(server)
    three.join("g")
    wait_for(lambda: np.array_equal(three.texts["g", "r"], text))


def test_a_killed_server_is_missed_by_nobody_and_refilled_when_it_is_back(start_server, engine, wait_for):
    server = start_server()
    port = int(server.endpoint.rsplit(":", 1)[1])
    one, two = engine(server), engine(server)
    for each in (one, two):
        each.join("g")
    one.write("g", "finished", TEXT[:300])
    one.write("g", "r", TEXT[:10])
    wait_for(lambda: two.text("g", "r") == TEXT[:10])
    os.kill(server.pid, signal.SIGKILL)
    one.write("g", "r", TEXT[10:20])
    wait_for(lambda: one.stat("resets") >= 1, "the death was not noticed")
    assert two.text("g", "r") == TEXT[:10]
    again = start_server(port=port, token=server.token)
    one.write("g", "r", TEXT[20:30])
    three = engine(again)
    three.join("g")
    wait_for(lambda: two.text("g", "r") == three.text("g", "r") == TEXT[:30])
    wait_for(lambda: three.text("g", "finished") == TEXT[:300])
    assert two.given["g", "finished"] == 300


def test_a_stopped_server_keeps_nobody_waiting_and_goes_on_where_it_was(start_server, engine, wait_for):
    server = start_server()
    one, two = engine(server), engine(server)
    for each in (one, two):
        each.join("g")
    one.write("g", "r", TEXT[:10])
    wait_for(lambda: two.text("g", "r") == TEXT[:10])
    os.kill(server.pid, signal.SIGSTOP)
    for number in range(10, 700):
        one.write("g", "r", [number])  # all these return, though nobody answers
    one.join("h")
    wait_for(lambda: one.stat("resets") >= 1 and one.stat("unsent_age_s") > 0)
    assert one.stat("fetch_age_s") >= 1.0
    assert two.text("g", "r") == TEXT[:10]
    os.kill(server.pid, signal.SIGCONT)
    wait_for(lambda: two.text("g", "r") == TEXT[:700])
    wait_for(lambda: one.stat("unsent_age_s") == 0)


def test_a_killed_client_leaves_nothing_but_its_text(server, engine, wait_for, raw):
    script = (
        "import sys, time, numpy as np; from seer_grouped_spec.client import DraftClient\n"
        "server, token = sys.argv[1:]\n"
        "client = DraftClient([server], deliver=print, text=print, token=token, flush_s=0.01)\n"
        "client.start()\n"
        "client.register_group('g', 3600)\n"
        "client.appended('g', 'r', 0, np.arange(7, dtype=np.int32)); time.sleep(60)"
    )
    one, figures = engine(server), raw(server)
    one.join("g")
    with subprocess.Popen([sys.executable, "-c", script, server.endpoint, server.token]) as victim:
        wait_for(lambda: one.text("g", "r") == TEXT[:7])
        victim.kill()
    one.write("g", "s", [1])
    wait_for(lambda: figures.figures()["tokens_in"] == 8)
    one.client.unregister_group("g")
    wait_for(lambda: figures.figures()["groups"] == 0, "its part in the group outlived it")


def test_a_wrong_token_is_a_server_error_and_the_right_one_works(start_server, engine, wait_for):
    server = start_server(token="secret")
    wrong, right, other = (engine(server, token=token) for token in ("guess", "secret", "secret\n"))
    for each in (wrong, right, other):
        each.join("g")
    right.write("g", "r", TEXT[:5])
    wait_for(lambda: other.text("g", "r") == TEXT[:5])
    wait_for(lambda: wrong.stat("server_errors") == 1)
    assert wrong.text("g", "r") == []
    assert wrong.told == [f"draft server {server.endpoint}: the token is wrong or missing"]


class Impostor:
    """Something else on a draft server's port: ``answer`` says what it answers to each message."""

    def __init__(self, answer, *, token="", knows=True):
        self.token, self.handshake = token, lambda: Handshake((token if knows else "a guess").encode())
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(0.02)
        self.endpoint = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.answer, self.heard, self.over = answer, 0, False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        while not self.over:
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                continue
            with connection, suppress(OSError):
                self._serve(connection)

    def _serve(self, connection):
        frames, handshake, met = Frames(), self.handshake(), False
        connection.settimeout(5)
        connection.sendall(handshake.greeting())
        while not self.over:
            data = connection.recv(1 << 20)
            if not data:
                return
            frames.add(data)
            if not met and (hello := frames.cut(HELLO_BYTES)) is not None:
                met = True
                try:
                    connection.sendall(handshake.welcome(hello))
                except WireError:
                    connection.sendall(b"\1" + bytes(32))  # claims to know the token
            while met and frames.next() is not None:
                self.heard += 1
                connection.sendall(self.answer)

    def stop(self):
        self.over = True
        self.thread.join()
        self.listener.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"garbage, and much of it",
        (7).to_bytes(4, "big") + b"garbage",
        Codec.encode(Failure(0, "message", "what was that?")),
        Codec.encode(Done(1, [])) + (5 << 20).to_bytes(4, "big"),
    ],
)
def test_a_server_that_talks_garbage_is_counted_and_left_alone(reply, engine, wait_for):
    impostor = Impostor(reply)
    try:
        one = engine(impostor)
        one.join("g")
        one.write("g", "r", TEXT[:5])
        wait_for(lambda: one.stat("server_errors") == 1 and one.stat("resets") == 1)
        one.write("g", "r", TEXT[5:10])
        assert len(one.told) == 1
        one.client.stop()
        assert one.stat("server_errors") == 1
    finally:
        impostor.stop()


def test_what_never_answers_is_left_again_and_again(engine, wait_for):
    impostor = Impostor(b"")
    try:
        one = engine(impostor, reply_timeout_s=0.05)
        one.join("g")
        one.write("g", "r", TEXT[:5])
        wait_for(lambda: one.stat("resets") >= 3)
    finally:
        impostor.stop()


def test_who_took_the_port_of_a_server_is_told_no_text_and_learns_no_token(engine, wait_for):
    impostor = Impostor(b"", token="secret", knows=False)
    try:
        one = engine(impostor)
        one.join("g")
        one.write("g", "r", TEXT[:5])
        wait_for(lambda: one.told)
        assert "it does not know the token itself" in one.told[0]
        assert (impostor.heard, one.stat("tokens_sent")) == (0, 0)
    finally:
        impostor.stop()


def test_what_is_no_draft_server_at_all_harms_nobody(engine, wait_for):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one = engine(f"tcp://127.0.0.1:{silent.getsockname()[1]}", "tcp://127.0.0.1:1")
        for name in "ghijk":
            one.join(name)
            one.write(name, "r", TEXT[:5])
        wait_for(lambda: one.stat("cpu_s") > 0 and one.stat("unsent_age_s") > 0)
        wait_for(lambda: len(one.told) == 2, "an absence was not told")
        assert one.stat("tokens_sent") == 0
    assert {reason.split(": ", 1)[1] for reason in one.told} == {
        "it cannot be reached: Connection refused",
        "no answer in 1 s",
    }


def test_two_servers_share_the_groups_and_one_may_die(start_server, engine, wait_for, raw):
    servers = [start_server(token="secret"), start_server(token="secret")]
    names = [f"group-{number}" for number in range(20)]
    one, two = engine(*servers), engine(*servers)
    for each in (one, two):
        each.join(*names)
    for name in names:
        one.write(name, "r", TEXT[:5])
    wait_for(lambda: all(two.text(name, "r") == TEXT[:5] for name in names))
    held = [raw(server).figures()["groups"] for server in servers]
    assert held == [sum(server_of(name, 2) == number for name in names) for number in (0, 1)]
    os.kill(servers[0].pid, signal.SIGKILL)
    alive = [name for name in names if server_of(name, 2) == 1]
    for name in names:
        one.write(name, "r", TEXT[5:9])
    wait_for(lambda: all(two.text(name, "r") == TEXT[:9] for name in alive))
    wait_for(lambda: one.stat("unsent_age_s") > 0)


def test_two_servers_that_disagree_never_mix_a_text(start_server, engine, wait_for):
    first, second = start_server(token="secret"), start_server(token="secret")
    old, new = engine(first), engine(second)
    for each, text in ((old, [1, 2, 3, 4]), (new, [1, 2, 9])):
        each.join("g")
        each.write("g", "r", text)
        wait_for(lambda each=each: each.stat("tokens_sent") > 0)
    there = [first, second][server_of("g", 2)]
    expected = [1, 2, 3, 4] if there is first else [1, 2, 9]
    reader = engine(first, second)
    reader.join("g")
    wait_for(lambda: reader.text("g", "r") == expected)
    swapped = engine(second, first)
    swapped.join("g")
    wait_for(lambda: swapped.text("g", "r") != [] and swapped.text("g", "r") != expected)
    swapped.write("g", "r", [7])
    reader.write("g", "r", [8])
    wait_for(lambda: reader.stat("unsent_age_s") == 0 and reader.stat("tokens_sent") == 1)
    assert reader.text("g", "r") == [*expected, 8]


def test_a_delivery_that_fails_silences_that_request_only(server, engine, wait_for):
    one, two = engine(server), engine(server)
    deliver = two._deliver
    two.client._links[0]._deliver = lambda group, request, at, tokens: (
        1 / 0 if request == "bad" else deliver(group, request, at, tokens)
    )
    for each in (one, two):
        each.join("g")
    one.write("g", "bad", TEXT[:5])
    wait_for(lambda: two.stat("rejected") == 1)
    one.write("g", "bad", TEXT[5:9])
    one.write("g", "good", TEXT[:5])
    wait_for(lambda: two.text("g", "good") == TEXT[:5])
    assert two.stat("rejected") == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.appended("g", "r", 0, "no tokens"),
        lambda client: client.appended("g", "r", 0, np.array([2**40])),
        lambda client: client.appended("g", "r", 0, np.array([0.5])),
        lambda client: client.appended("g", "r", None, np.ones(2, np.int32)),
        lambda client: client.appended("g", "r", -1, np.ones(2, np.int32)),
        lambda client: client.appended("g", "", 0, np.ones(2, np.int32)),
        lambda client: client.appended("g", "r" * 513, 0, np.ones(2, np.int32)),
        lambda client: client.appended("g", 7, 0, np.ones(2, np.int32)),
        lambda client: client.appended(None, "r", 0, np.ones(2, np.int32)),
        lambda client: client.appended("never", "r", 0, np.ones(2, np.int32)),
        lambda client: client.register_group("", 5.0),
        lambda client: client.register_group("\udc80", 5.0),
        lambda client: client.register_group("h" * 513, 5.0),
        lambda client: client.register_group("h", -1.0),
        lambda client: client.register_group("h", float("nan")),
        lambda client: client.register_group(None, 5.0),
        lambda client: client.register_group("h", None),
    ],
)
def test_a_wrong_call_is_counted_and_never_raises(shared_server, engine, wait_for, call, request):
    one = engine(shared_server)
    one.join("g")
    call(one.client)
    one.client.unregister_group("never")
    wait_for(lambda: one.stat("bad_calls") == 1)
    one.write("g", request.node.name, TEXT[:5])
    wait_for(lambda: one.stat("tokens_sent") == 5)


def test_tokens_out_of_range_are_refused_by_the_server(server, engine, wait_for):
    one = engine(server)
    one.join("g")
    one.write("g", "r", [1, -5])
    wait_for(lambda: one.stat("refused") == 1)
    assert one.stat("gave_up") == 1


@pytest.mark.parametrize(
    "options", [{"flush_s": 0}, {"fetch_s": -1}, {"reply_timeout_s": 0}, {"queue_bytes": 0}]
)
def test_a_client_that_cannot_work_is_an_error_at_once(options):
    with pytest.raises(ValueError, match="must be positive"):
        DraftClient(["tcp://127.0.0.1:1"], deliver=print, text=print, **options)


def test_a_client_without_servers_is_an_error_at_once():
    with pytest.raises(ValueError, match="needs the endpoint"):
        DraftClient([], deliver=print, text=print)


def test_stop_is_idempotent_and_bounded_even_if_a_delivery_hangs(server, engine, wait_for):
    one, two, idle = engine(server), engine(server), engine(server)
    hanging, release = threading.Event(), threading.Event()
    two.client._links[0]._deliver = lambda *arguments: (hanging.set(), release.wait())
    for each in (one, two):
        each.join("g")
    one.write("g", "r", TEXT[:5])
    assert hanging.wait(10)
    began = time.monotonic()
    two.client.stop()
    assert time.monotonic() - began < 5 * STOP_S
    release.set()
    two.client._thread.join(10)
    idle.client.stop()
    idle.client.stop()
    assert not idle.client._thread.is_alive()
    DraftClient(["tcp://127.0.0.1:1"], deliver=print, text=print).stop()
