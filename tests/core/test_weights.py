"""Weights: kept as they were when they were loaded, and the same on every instance of a version."""

import asyncio
import math
import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from seer_host import weight_copies
from seer_host.weight_copies import WeightCopies

from seer_core.errors import EngineError, SeerError, WeightVersionError
from seer_core.ports.weights import WeightSpec, directory
from seer_core.runtime.restarts import RestartsTable
from tests.support.eventually import aeventually


@pytest.fixture
def checkpoint(tmp_path):
    """Return a function that writes a checkpoint, in place, and returns its directory."""

    def write(content=b"one", name="checkpoint"):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "a.safetensors").write_bytes(content)
        (directory / "b.safetensors").write_bytes(b"more")
        (directory / "model.safetensors.index.json").write_bytes(b"{}")
        (directory / "optimizer.pt").write_bytes(b"large")
        return str(directory)

    return write


@pytest.fixture
def adapter(tmp_path):
    """Return a function that writes an adapter, in place, and returns its directory."""

    def write(content=b"one"):
        directory = tmp_path / "adapter"
        directory.mkdir(exist_ok=True)
        (directory / "adapter_model.safetensors").write_bytes(content)
        (directory / "adapter_config.json").write_text('{"r": 8}')
        return str(directory)

    return write


@pytest.fixture
def place(tmp_path):
    return tmp_path / "kept"


@pytest.fixture
def store(place):
    return WeightCopies(str(place))


@pytest.fixture
def reader(hand):
    """An engine played by hand that reads what it is given, and finger-prints it by its content."""

    class Reader(hand):
        loses = False

        async def update_weights(self, source, version):
            await super().update_weights(source, version)
            name = "a" if source.adapter_config is None else "adapter_model"
            content = Path(source.directory, f"{name}.safetensors").read_bytes().decode()
            if content == "bad":
                raise EngineError("tensor 'x' is missing")
            if self.loses:
                self.loses = False
                self.sink.lost(self.id, "the test killed it")
                raise EngineError("lost")
            return self.odd or content

        odd = None

    return Reader


def copies(place):
    return sorted(path.name for root in place.glob("seer-weights-*") for path in root.glob("*"))


async def back(runtime, *names):
    """Wait until all these live, which takes threads and so more than turns of the loop."""
    await aeventually(lambda: set(names) <= set(runtime.alive))


# The store.


def test_a_copy_holds_the_tensors_and_a_number_used_once(store, checkpoint):
    weights = store.keep(directory(checkpoint()), 1)
    assert sorted(path.name for path in Path(weights.kept.directory).iterdir()) == [
        "a.safetensors",
        "b.safetensors",
        "model.safetensors.index.json",
        "seer-nonce",
    ]
    other = store.keep(directory(checkpoint()), 2)
    assert other.digest == weights.digest == weights.kept.settings["digest"]
    first, second = (Path(each.kept.directory, "seer-nonce").read_text() for each in (weights, other))
    assert first != second
    assert (weights.version, weights.source) == (1, directory(checkpoint()))
    store.check(weights)


def test_a_copy_does_not_change_with_the_original_nor_vanish_with_it(store, checkpoint):
    weights = store.keep(directory(checkpoint(b"one")), 1)
    assert store.keep(directory(checkpoint(b"two")), 2).digest != weights.digest
    store.check(weights)
    shutil.rmtree(checkpoint())
    store.check(weights)
    assert store.keep(directory(checkpoint(b"one")), 3).digest == weights.digest


def test_a_copy_that_is_not_what_was_loaded_is_refused_with_both_digests(store, checkpoint):
    weights = store.keep(directory(checkpoint(b"one")), 1)
    other = store.keep(directory(checkpoint(b"two")), 2)
    (Path(weights.kept.directory) / "a.safetensors").write_bytes(b"two")
    with pytest.raises(
        EngineError, match=f"have changed: their digest is {other.digest}, and was {weights.digest}"
    ):
        store.check(weights)
    shutil.rmtree(weights.kept.directory)
    with pytest.raises(EngineError, match=f"and was {weights.digest}"):
        store.check(weights)


def test_copies_are_deleted_one_by_one_and_together(store, checkpoint, place):
    store.keep(directory(checkpoint()), 1)
    current = store.keep(directory(checkpoint()), 2)
    assert copies(place) == ["1", "2"]
    store.drop(1)
    store.drop(7)
    assert copies(place) == ["2"]
    left = store.close(current)
    assert list(place.iterdir()) == []
    assert (left.kept, left.digest) == (left.source, current.digest)
    store.check(left)


def test_without_copies_the_checkpoint_must_stay_as_it_was(checkpoint, store):
    weights = WeightCopies("none").keep(directory(checkpoint(b"one")), 1)
    assert weights.kept == directory(checkpoint(b"one"), weights.digest)
    store.check(weights)
    checkpoint(b"two")
    with pytest.raises(EngineError, match="have changed"):
        store.check(weights)


def test_a_source_without_safetensors_is_the_engines_own_business(store, place, tmp_path):
    for source in (
        directory("hub:owner/something"),
        directory(tmp_path),
        WeightSpec("p.m:Shared", {"at": 7}),
    ):
        weights = store.keep(source, 1)
        assert (weights.source, weights.kept, weights.digest) == (source, source, "")
    assert not place.exists()


def test_what_a_killed_process_left_is_deleted_and_what_a_living_one_has_is_not(checkpoint, place):
    left, used = (WeightCopies(str(place)) for _ in range(2))
    for store in (left, used):
        store.keep(directory(checkpoint()), 1)
    roots = {store: store._scratch.path for store in (left, used)}
    os.close(left._scratch._lock)
    WeightCopies(str(place)).keep(directory(checkpoint()), 1)
    assert roots[left].exists()  # it may just be in the making
    for root in roots.values():
        os.utime(root, (0, 0))
    WeightCopies(str(place)).keep(directory(checkpoint()), 1)
    assert (roots[left].exists(), roots[used].exists()) == (False, True)


def test_no_room_for_a_copy_is_a_sentence_with_a_remedy_and_leaves_nothing(store, checkpoint, place):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    source = checkpoint(b"x" * 100_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(
            EngineError, match=r"cannot be copied to '.*': .*File too large.*\[seer\]\.weights_dir"
        ):
            store.keep(directory(source), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert copies(place) == []


@pytest.fixture
def meddler(monkeypatch):
    """Return a function: what it is given happens once a file of that name has been copied or read."""

    def meddle(name, act):
        left = [act]

        def after(original):
            def wrapped(path, *others):
                found = original(path, *others)
                if path.name == name and left:
                    left.pop()()
                return found

            return wrapped

        for function in ("_copy", "_checksum"):
            monkeypatch.setattr(weight_copies, function, after(getattr(weight_copies, function)))

    return meddle


@pytest.mark.parametrize("kept", ["", "none"])
@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_is_written_while_it_is_read_is_refused_and_no_copy_is_left(
    adapter, place, meddler, kept, file
):
    path = Path(adapter())
    (path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')

    def write():
        (path / "adapter_model.safetensors").write_bytes(b"two")
        (path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}')

    meddler(file, write)
    store = WeightCopies(kept or str(place))
    with pytest.raises(EngineError, match="changed while they were read; update once they are written"):
        store.keep(directory(path), 1)
    assert copies(place) == []
    weights = store.keep(directory(path), 1)
    assert weights.kept.adapter_config["lora_alpha"] == 32
    store.check(weights)


def test_an_adapter_that_is_written_within_a_tick_of_the_file_systems_clock_is_refused_too(
    adapter, store, meddler
):
    path = Path(adapter())
    file = path / "adapter_model.safetensors"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns

    def write():
        file.write_bytes(b"two")
        os.utime(file, ns=times)

    meddler(file.name, write)
    with pytest.raises(EngineError, match="changed while they were read"):
        store.keep(directory(path), 1)


def test_parts_of_two_checkpoints_are_not_taken_for_one(checkpoint, store, place, meddler):
    path = Path(checkpoint())
    meddler("b.safetensors", lambda: (path / "a.safetensors").write_bytes(b"another"))
    with pytest.raises(EngineError, match="changed while they were read"):
        store.keep(directory(path), 1)
    assert copies(place) == []


# The runtime.


def test_weights_from_elsewhere_are_named_to_every_instance_and_not_copied(by_hand, hand, place):
    x, y = hand("x"), hand("y")
    spec = WeightSpec("somewhere:Shared", {"at": 7})

    async def run():
        async with by_hand(x, y, weights_dir=str(place)) as runtime:
            assert await runtime.update_weights(spec, 3) == 3
            y.die()
            await back(runtime, "y")
        assert x.specs == [spec]
        assert y.specs == [spec, spec]
        assert not place.exists()

    asyncio.run(run())


def test_engines_load_the_copy_and_an_instance_lost_later_loads_the_same(by_hand, reader, checkpoint, place):
    x, y = reader("x"), reader("y")

    async def run():
        async with by_hand(x, y, weights_dir=str(place)) as runtime:
            assert await runtime.update_weights(checkpoint(b"one")) == 1
            checkpoint(b"two")
            x.die()
            await back(runtime, "x")
            shutil.rmtree(checkpoint())
            y.die()
            await back(runtime, "x", "y")
            assert copies(place) == ["1"]
            assert await runtime.update_weights(checkpoint(b"two")) == 2
            assert copies(place) == ["2"]
        assert list(place.iterdir()) == []

    asyncio.run(run())
    assert len({path for engine in (x, y) for path, version in engine.weights if version == 1}) == 1
    assert [version for _, version in x.weights] == [1, 1, 2]


def test_an_adapter_is_loaded_after_its_base_which_is_kept_until_other_whole_weights(
    by_hand, reader, checkpoint, adapter, place
):
    x, y = reader("x"), reader("y")
    runtime = by_hand(x, y, weights_dir=str(place))

    async def run():
        async with runtime:
            await runtime.update_weights(adapter())
            assert copies(place) == ["1"]
            y.die()
            await back(runtime, "y")
            await runtime.update_weights(checkpoint(b"two"))
            await runtime.update_weights(adapter(b"three"))
            await runtime.update_weights(adapter(b"four"))
            assert copies(place) == ["2", "4"]
            y.die()
            await back(runtime, "y")
        async with runtime:
            pass
        async with runtime:
            await runtime.update_weights(checkpoint(b"five"))
            assert copies(place) == ["5"]

    asyncio.run(run())
    assert [version for _, version in x.weights] == [1, 2, 3, 4, 2, 4, 2, 4, 5]
    assert [version for _, version in y.weights] == [1, 1, 2, 3, 4, 2, 4, 2, 4, 2, 4, 5]
    kinds = [spec.adapter_config is not None for spec in x.specs]
    assert kinds == [True, False, True, True, False, True, False, True, False]


@pytest.mark.parametrize(
    ("names", "fact"),
    [
        (["adapter_model.safetensors"], "holds adapter_model.safetensors and no adapter_config.json"),
        (["adapter_config.json", "adapter_model.bin", "other.safetensors"], "more safetensors than adapter"),
        (["adapter_config.json", "adapter_model.safetensors", "model.safetensors"], "more safetensors than"),
        (["adapter_config.json"], "and no safetensors"),
    ],
)
def test_what_is_no_whole_adapter_is_refused_before_it_is_copied(store, tmp_path, place, names, fact):
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(EngineError, match=fact):
        store.keep(directory(tmp_path), 1)
    assert copies(place) == []


@pytest.mark.parametrize("text", ['{"r": 8', "[]", "\xff"])
def test_a_config_that_was_not_written_to_its_end_is_refused(store, adapter, text):
    path = Path(adapter())
    (path / "adapter_config.json").write_text(text, "latin-1")
    with pytest.raises(EngineError, match=r"the adapter_config.json of .* (cannot be read|is no table)"):
        store.keep(directory(path), 1)


def test_an_instance_does_not_come_back_with_weights_that_are_not_the_versions(
    by_hand, reader, checkpoint, place
):
    x, y = reader("x"), reader("y")

    async def run():
        async with by_hand(x, y, weights_dir=str(place), restarts=RestartsTable(attempts=2)) as runtime:
            await runtime.update_weights(checkpoint(b"one"))
            [copy] = place.glob("seer-weights-*/1/a.safetensors")
            copy.write_bytes(b"two")
            x.die()
            await aeventually(lambda: x.starts == 3 and not runtime._fleet._restarts)
            assert set(runtime.alive) == {"y"}

    asyncio.run(run())
    assert [version for _, version in x.weights] == [1]


def test_a_stopped_runtime_starts_again_with_its_weights_if_they_are_still_there(
    by_hand, reader, checkpoint, place
):
    engine = reader("x")
    runtime = by_hand(engine, weights_dir=str(place))

    async def run():
        async with runtime:
            await runtime.update_weights(checkpoint(b"one"))
        async with runtime:
            assert engine.weights[-1] == (checkpoint(b"one"), 1)
        checkpoint(b"two")
        with pytest.raises(EngineError, match=r"the weights of version 1, from .* have changed"):
            await runtime.start()

    asyncio.run(run())


def test_weights_that_all_refuse_change_nothing_and_use_up_no_restart(by_hand, reader, checkpoint, place):
    x, y = reader("x"), reader("y")

    async def run():
        async with by_hand(x, y, weights_dir=str(place)) as runtime:
            await runtime.update_weights(checkpoint(b"one"))
            with pytest.raises(
                EngineError, match=r"no instance could load the weights in .*: tensor 'x' is missing"
            ):
                await runtime.update_weights(checkpoint(b"bad"))
            assert (runtime.weight_version, set(runtime.alive)) == (1, {"x", "y"})
            assert copies(place) == ["1"]
            assert await runtime.update_weights(checkpoint(b"two")) == 2

    asyncio.run(run())
    assert (x.starts, y.starts) == (1, 1)


def test_an_instance_that_dies_in_an_update_comes_back_with_the_new_weights_and_once(
    by_hand, reader, checkpoint, place
):
    x, y = reader("x"), reader("y")

    async def run():
        async with by_hand(x, y, weights_dir=str(place)) as runtime:
            await runtime.update_weights(checkpoint(b"one"))
            x.loses = True
            await runtime.update_weights(checkpoint(b"two"))
            await back(runtime, "x", "y")

    asyncio.run(run())
    assert x.starts == 2
    assert [version for _, version in x.weights] == [1, 2, 2]


def test_an_instance_whose_weights_are_not_the_others_does_not_serve(by_hand, reader, checkpoint, place):
    x, y, z = reader("x"), reader("y"), reader("z")

    async def run():
        async with by_hand(x, y, z, weights_dir=str(place)) as runtime:
            x.odd = "stale"
            await runtime.update_weights(checkpoint(b"one"))
            assert set(runtime.alive) == {"y", "z"}
            x.odd = None
            await back(runtime, "x", "y", "z")
            y.odd = "stale"
            y.die()
            await aeventually(lambda: not runtime._fleet._restarts)
            assert set(runtime.alive) == {"x", "z"}

    asyncio.run(run())


def test_instances_that_start_with_different_first_weights_do_not_start_at_all(by_hand, hand):
    x, y = hand("x"), hand("y")
    x.info = msgspec.structs.replace(x.info, fingerprint="one")
    y.info = msgspec.structs.replace(y.info, fingerprint="two")

    async def run():
        with pytest.raises(
            EngineError, match="fingerprint is two, not one; has the model's directory changed"
        ):
            await by_hand(x, y).start()

    asyncio.run(run())


def test_no_rollout_begins_while_weights_are_updated(by_hand, hand, some_groups):
    class Slow(hand):
        async def update_weights(self, source, version):
            self.loading.set()
            await self.go_on.wait()

    engine = Slow()

    async def run():
        engine.loading, engine.go_on = asyncio.Event(), asyncio.Event()
        async with by_hand(engine) as runtime:
            update = asyncio.ensure_future(runtime.update_weights("step 1"))
            await engine.loading.wait()
            with pytest.raises(
                SeerError, match="cannot start another rollout while weights are being updated"
            ):
                runtime.rollout(some_groups(1, 1))
            with pytest.raises(
                WeightVersionError, match="cannot update weights while weights are being updated"
            ):
                await runtime.update_weights("step 2")
            engine.go_on.set()
            assert await update == 1

    asyncio.run(run())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_chunk_with_log_probs_that_are_not_finite_is_tried_again_and_never_part_of_a_completion(
    by_hand, hand, some_groups, value
):
    class Odd(hand):
        def submit(self, job):
            super().submit(job)
            asyncio.get_running_loop().call_soon(self.answer)

        def answer(self):
            self.finish(tokens=2, logprob=next(self.values))

    async def run(values):
        engine = Odd()
        engine.values = iter(values)
        async with by_hand(engine) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            with suppress(EngineError):  # that everything failed
                await under_way.wait()
            return under_way.result.completions

    [completion] = asyncio.run(run([value, -0.5]))
    assert (completion.finish_reason, completion.logprobs) == ("stop", [-0.5, -0.5])
    [completion] = asyncio.run(run([value] * 4))
    assert (completion.finish_reason, completion.token_ids, completion.logprobs) == ("error", [], [])


def test_the_version_is_the_trainers_and_must_increase(by_hand, hand, some_groups):
    x, y = hand("x"), hand("y")

    async def run():
        async with by_hand(x) as runtime:
            assert await runtime.update_weights("step 7", 7) == runtime.weight_version == 7
            for version in (7, 3, 0, -1):
                with pytest.raises(WeightVersionError, match=f"to version {version}: version 7 is loaded"):
                    await runtime.update_weights("step 8", version)
            assert await runtime.update_weights("step 8") == 8
            await runtime.add(y)
            under_way = runtime.rollout(some_groups(1, 1))
            x.finish()
            return (await under_way.wait()).completions

    [completion] = asyncio.run(run())
    assert completion.weight_version == 8
    assert x.weights == [("step 7", 7), ("step 8", 8)]
    assert y.weights == [("step 8", 8)]
